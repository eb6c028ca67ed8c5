"""One file a protocol: how its requests are read and its answers are written."""
