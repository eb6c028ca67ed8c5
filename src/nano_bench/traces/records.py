"""Objects of a trace's file, whose fields are checked as they are read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_bench.traces.model import Blocks, TraceError, is_count, is_time


@dataclass(frozen=True)
class Record:
    """One object. Each method returns a field or raises `TraceError`.

    Attributes:
        line: Line of the file on which it begins.
        fields: Content.
        path: Place inside the line's object, such as `requests[3]`.
    """

    line: int
    fields: Mapping[str, Any]
    path: str = ""

    def error(self, what: str) -> TraceError:
        return TraceError(self.line, f"{self.path}: {what}" if self.path else what)

    def require(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"{name} is missing.")
        return self.fields[name]

    def known(self, *names: str) -> None:
        """Reject other fields than these."""
        for name in self.fields:
            if name not in names:
                raise self.error(f"unknown field {name!r}; known fields: {', '.join(names)}.")

    def count(self, name: str, least: int = 0, default: int | None = None) -> int:
        value = self.require(name) if default is None else self.fields.get(name, default)
        if not is_count(value) or value < least:
            raise self.error(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        return value

    def time(self, name: str) -> float:
        """Return a time, which may not be negative."""
        value = self.require(name)
        if not is_time(value) or value < 0:
            raise self.error(f"{name} is {value!r}; a time must be a number of at least 0.")
        return float(value)

    def maybe_time(self, name: str) -> float | None:
        return None if self.fields.get(name) is None else self.time(name)

    def text(self, name: str) -> str:
        value = self.require(name)
        if not isinstance(value, str) or not value:
            raise self.error(f"{name} is {value!r}; it must be a text.")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value: Any = self.fields.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.error(f"{name} must be a list of texts.")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value: Any = self.fields.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object.")
        return value

    def messages(self, name: str = "messages") -> tuple[Mapping[str, Any], ...]:
        value: Any = self.require(name)
        if not isinstance(value, list) or not value:
            raise self.error(f"{name} must be a list of at least one message.")
        for index, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.error(f"{name}[{index}] has no role.")
        return tuple(value)

    def records(self, name: str) -> "list[Record]":
        value: Any = self.require(name)
        if not isinstance(value, list) or not value:
            raise self.error(f"{name} must be a list with at least one entry.")
        records: list[Record] = []
        for index, entry in enumerate(value):
            path = f"{self.path}.{name}[{index}]".lstrip(".")
            if not isinstance(entry, dict):
                raise TraceError(self.line, f"{path} must be an object.")
            records.append(Record(self.line, entry, path))
        return records

    def blocks(self, scope: str, length: int, size: int, *, exact: bool) -> Blocks:
        """Return the blocks of `hash_ids`. Tokens after the last one are unlike any others.

        Args:
            scope: Namespace of the ids.
            length: Tokens of the prompt.
            size: Tokens per block.
            exact: Reject fewer ids than the length needs.
        """
        ids: Any = self.fields.get("hash_ids") or []
        if not isinstance(ids, list) or not all(is_count(each) and each >= 0 for each in ids):
            raise self.error("hash_ids must be a list of whole numbers of at least 0.")
        needed = -(-length // size)
        if len(ids) > needed or (exact and ids and len(ids) != needed):
            raise self.error(
                f"{len(ids)} hash_ids do not fit {length} tokens, which are {needed} blocks of "
                f"{size}."
            )
        rest = (f"{self.line}.{self.path}.{index}" for index in range(len(ids), needed))
        return Blocks(scope, (*ids, *rest), length, size)


def records_of(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON-lines file, or of a file with one JSON object. Raises
    `TraceError`, and `ConfigError` if the file cannot be read.
    """
    text = path.read_text("utf-8")
    lines: Sequence[str] = text.splitlines()
    whole = _whole(text) if len(lines) > 1 else None
    if whole is not None:
        yield Record(1, whole)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except ValueError as problem:
            raise TraceError(number, f"invalid JSON: {problem}.") from None
        if not isinstance(value, dict):
            raise TraceError(number, "is not a JSON object.")
        yield Record(number, value)


def _whole(text: str) -> dict[str, Any] | None:
    """Return the only object of a file that spans several lines, or None."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
