"""One decoder, described by a `ModelSpec` and fed by a table of `ParamSpec`s."""
