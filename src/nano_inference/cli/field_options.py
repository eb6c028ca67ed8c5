"""Command options made from the fields of a configuration."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any

import typer

from nano_inference.fields.durations import parse_duration
from nano_inference.fields.options import choices, is_optional

_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as `512MiB` or `1.5 GB`. Raises `typer.BadParameter`."""
    parts = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if parts is None or parts[2] not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB."
        )
    return int(float(parts[1]) * _UNITS[parts[2]])


# -- options made from fields ----------------------------------------------------------------------

Values = dict[str, Any]  # names of fields -> their values
Flags = Mapping[str, tuple[str, str | None]]  # fields -> flags that turn them on and off


@dataclass(frozen=True)
class FieldOptions:
    """Mark for a command's parameter of type `Values`: expands it to one option per field.

    Attributes:
        config: Dataclass with fields made by `nano_inference.fields.options.option`.
        names: Field names in the order of `--help`. Empty: every field that is an option.
        defaults: Defaults of the command that differ from the fields'.
        shown: Texts that `--help` shows in place of default values.
    """

    config: type
    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shown: Mapping[str, str] = field(default_factory=dict[str, str])

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter per option, as typer reads them."""
        return [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if "each" in each.metadata else self._default(each),
                annotation=Annotated[
                    _type(each, self._default(each)), _option(each, self.shown.get(each.name))
                ],
            )
            for each in self._fields()
        ]

    def flags(self) -> "Flags":
        """Return the flags of each field: the one that sets it, and the one that turns it off."""
        return {each.name: _on_and_off(each) for each in self._fields()}

    def take(self, arguments: Values) -> Values:
        """Remove the fields' values from a command's arguments and return them."""
        values = {each.name: (each, arguments.pop(each.name)) for each in self._fields()}
        return {
            name: (tuple(value) if value else each.default) if "each" in each.metadata else value
            for name, (each, value) in values.items()
        }

    def _fields(self) -> "list[Field[Any]]":
        known = {each.name: each for each in fields(self.config) if "help" in each.metadata}
        return [known[name] for name in self.names or known]

    def _default(self, field: "Field[Any]") -> Any:
        return self.defaults.get(field.name, field.default)


def _type(field: "Field[Any]", default: Any) -> Any:
    if "each" in field.metadata:
        item: Any = field.metadata["each"]
        return list[item] | None
    kind: Any = field.type
    return kind | None if default is None and not is_optional(field) else kind


def _option(field: "Field[Any]", shown: str | None) -> Any:
    settings = dict(field.metadata)
    if shown is not None:
        settings["show_default"] = shown
    panel, _ = settings.pop("panel"), settings.pop("flags")
    for name in ("least", "unset", "each"):
        settings.pop(name, None)
    if settings.pop("size", False):
        settings |= {"parser": parse_size, "metavar": "SIZE"}
    if settings.pop("duration", False):
        settings |= {"parser": _duration, "metavar": "TIME"}
    if aliases := settings.pop("aliases", None):
        names = [str(choice) for choice in choices(field) if choice is not None]
        settings |= {
            "parser": _choice_of(names, aliases),
            "metavar": "|".join(names),
            "autocompletion": lambda: [*names, *aliases],
        }
    return typer.Option(*_flags(field), rich_help_panel=panel, **settings)


def _flags(field: "Field[Any]") -> tuple[str, ...]:
    """Return a field's flags as typer writes them. A switch may have the form `--x/--no-x`."""
    name = field.name.replace("_", "-")
    has_opposite = field.default is True or field.type == bool | None
    usual = f"--{name}/--no-{name}" if has_opposite else f"--{name}"
    return field.metadata["flags"] or (usual,)


def _on_and_off(field: "Field[Any]") -> tuple[str, str | None]:
    on, _, off = _flags(field)[0].partition("/")
    return on, off or None


def with_flags(text: str, flags: "Flags") -> str:
    """Return a message with options in place of fields: `--top-p 3.0` for `top_p=3.0`, and
    `--kv-cache-memory` for `kv_cache_memory`.
    """
    if not flags:
        return text
    names = "|".join(sorted(flags, key=len, reverse=True))

    def as_option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        on, off = flags[name]
        if value is None:
            return on if "_" in name else match[0]  # `seed` is also a word
        if value == "False":
            return off or match[0]
        return match[0] if value == "None" else on if value == "True" else f"{on} {value}"

    return re.sub(
        rf"(?<![\w/.=-])(?:[A-Z]\w+\.)?({names})"
        r"(?:='?([^\s,;']+?)'?(?=[\s,;:.]*(?:\s|$))|(?![\w/=(-]))",
        as_option,
        text,
    )


def _duration(text: str | float) -> float:
    try:
        return parse_duration(text)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem


def _choice_of(names: list[str], aliases: Mapping[str, str]) -> Callable[[str], str]:
    """Return a parser of a text that names a choice, directly or by an alias."""

    def choice(text: str) -> str:  # typer 0.20 needs the name of a parser: no `partial`
        name = aliases.get(text.lower(), text)
        if name not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, names))}.")
        return name

    return choice
