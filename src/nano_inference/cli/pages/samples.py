"""Samples of a page: rows of JSON lines, stored compactly. `samples.js` shows them."""

import base64
import json
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nano_inference.cli.pages.pieces import Pieces

MOST_REASONS = 200
_NO_LOGPROB, _APPENDED = -32768, 32767
_NONE = float("nan")


class Unreadable(ValueError):
    """Reason for skipping a row."""


@dataclass
class SampleBlock:
    """Samples of a page that are shown together.

    Attributes:
        pieces: Function that returns the texts of token ids. None: ids are shown.
        trainer: Name of the column with the trainer's logprobs.
        count: Number of samples.
        refused: Number of skipped rows.
        reasons: Reasons for the first skipped rows.
    """

    pieces: Pieces | None = None
    trainer: str = "trainer_logprobs"
    count: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list[str])
    _samples: list[list[Any]] = field(default_factory=list[list[Any]])
    _groups: dict[str, int] = field(default_factory=dict[str, int])
    _prompts: list[str] = field(default_factory=list[str])
    _texts: dict[str, int] = field(default_factory=dict[str, int])
    _ids: "array[int]" = field(default_factory=partial(array, "I"))
    _logprobs: "array[int]" = field(default_factory=partial(array, "h"))
    _trainer: "array[float]" = field(default_factory=partial(array, "f"))
    _advantages: "array[float]" = field(default_factory=partial(array, "f"))

    def read(
        self, lines: Iterable[bytes], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Add rows. Unreadable rows are counted, with their reasons.

        Args:
            lines: A row each.
            columns: Values that replace those of the rows, one for each line, by the name of the
                column.
        """
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _parsed(line)
                for name, values in (columns or {}).items():
                    row[name] = values[number - 1]
                self._add(number, row)
            except Unreadable as problem:
                self.refused += 1
                if len(self.reasons) < MOST_REASONS:
                    self.reasons.append(f"line {number}: {problem}")

    def _add(self, number: int, row: dict[str, Any]) -> None:
        pieces, text = self._pieces_of(row)
        count = len(pieces)
        logprobs = _numbers(row, "logprobs", count)
        trained = _numbers(row, self.trainer, count)
        mask = row.get("loss_mask") or []
        if not isinstance(mask, list) or len(mask) not in (0, count):
            raise Unreadable(f"loss_mask must be a list of {count} booleans.")
        advantage = row.get("advantage")
        by_token = isinstance(advantage, list)
        advantages = _numbers(row, "advantage", count) if by_token else [_NONE] * count
        facts = [
            _whole(row, "sample_index"),
            _text(row, "finish_reason"),
            _whole(row, "weight_version"),
            _number(row, "reward"),
            None if by_token else _number(row, "advantage"),
            text,
            _spans(row),
        ]
        key, prompt = self._prompt_of(row)
        # all checks have passed, so the page may change
        group = self._groups.setdefault(key, len(self._groups))
        if group == len(self._prompts):
            self._prompts.append(prompt)
        begin = len(self._ids)
        self._ids.extend(self._texts.setdefault(each, len(self._texts)) for each in pieces)
        for index, logprob in enumerate(logprobs):
            self._logprobs.append(_APPENDED if mask and not mask[index] else _thousandths(logprob))
        # equal infinities have the difference 0
        differences = (0.0 if a == b else a - b for a, b in zip(logprobs, trained, strict=True))
        self._trainer.extend(differences)
        self._advantages.extend(advantages)
        self._samples.append([group, begin, begin + count, number, *facts])
        self.count += 1

    def _pieces_of(self, row: dict[str, Any]) -> tuple[list[str], str | None]:
        """Return a text per token, and the sample's text if these are only ids."""
        texts = row.get("token_texts")
        if texts is not None:
            if not _is_list_of(texts, str):
                raise Unreadable("token_texts must be a list of strings.")
            return texts, None
        ids: Any = row.get("completion_tokens")
        if not _is_list_of(ids, int):
            raise Unreadable(
                "completion_tokens (a list of token ids) and token_texts are both missing."
            )
        _require_ids(ids, "completion_tokens")
        if self.pieces is not None:
            return self.pieces(ids), None
        return [f"{each} " for each in ids], _text(row, "text")

    def _prompt_of(self, row: dict[str, Any]) -> tuple[str, str]:
        """Return the key of a row's group, and the prompt to show."""
        ids, prompt, messages = (row.get(name) for name in ("prompt_tokens", "prompt", "messages"))
        if ids is not None and not _is_list_of(ids, int):
            raise Unreadable("prompt_tokens must be a list of token ids.")
        if _is_list_of(prompt, int):
            ids, prompt = ids or prompt, None
        _require_ids(ids or [], "prompt_tokens")
        group = row.get("group")
        key = json.dumps(next((e for e in (group, ids, prompt, messages) if e is not None), None))
        return key, self._prompt_text(ids, prompt, messages)

    def _prompt_text(self, ids: Any, prompt: Any, messages: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if isinstance(messages, list):
            return "\n".join(
                f"{each.get('role')}: {each.get('content')}"
                if isinstance(each, dict)
                else str(each)
                for each in messages
            )
        if ids and self.pieces is not None:
            return "".join(self.pieces(ids))
        return " ".join(map(str, ids or ["(the rows have no prompt)"]))

    def content(self) -> dict[str, Any]:
        """Return the samples as `samples.js` reads them."""
        has = {name: any(x == x for x in column) for name, column in (  # not nan
            ("trainer", self._trainer), ("advantages", self._advantages))}  # fmt: skip
        return {
            "texts": list(self._texts),
            "groups": self._prompts,
            "samples": self._samples,
            "refused": {"count": self.refused, "reasons": self.reasons},
            "ids": _packed(self._ids),
            "logprobs": _packed(self._logprobs),
            "trainer": _packed(self._trainer) if has["trainer"] else "",
            "advantages": _packed(self._advantages) if has["advantages"] else "",
        }


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        cut = "" if line.endswith(b"\n") else " (the line is incomplete)"
        raise Unreadable(f"it is not JSON: {problem}{cut}.") from None
    if not isinstance(row, dict):
        raise Unreadable("it is not an object.")
    return row


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _require_ids(ids: list[int], name: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < 2**32:
        raise Unreadable(f"{name} must be token ids, from 0 to 4294967295.")


def _float(value: Any) -> float | None:
    """Convert a number from JSON: null is nan, and infinities are strings. None if invalid."""
    if value is None:
        return _NONE
    if value in ("Infinity", "-Infinity"):
        return float(value)
    return float(value) if type(value) in (int, float) else None


def _numbers(row: dict[str, Any], name: str, count: int) -> list[float]:
    """Return a column with one number per token, or nan if the row lacks it."""
    column = row.get(name)
    if column is None or column == []:
        return [_NONE] * count
    numbers = [_float(each) for each in column] if isinstance(column, list) else []
    if not isinstance(column, list) or len(numbers) != count or None in numbers:
        raise Unreadable(f"{name} must be a list of {count} numbers, one per token.")
    return [each for each in numbers if each is not None]


def _number(row: dict[str, Any], name: str) -> float | None:
    number = _float(row.get(name))
    if number is None:
        raise Unreadable(f"{name} must be a number.")
    return number if math.isfinite(number) else None


def _whole(row: dict[str, Any], name: str) -> int | None:
    number = row.get(name)
    if number is not None and (type(number) is not int or abs(number) >= 2**53):
        raise Unreadable(f"{name} must be a whole number.")
    return number


def _text(row: dict[str, Any], name: str) -> str | None:
    text = row.get(name)
    if text is not None and not isinstance(text, str):
        raise Unreadable(f"{name} must be a string.")
    return text


def _spans(row: dict[str, Any]) -> list[list[int]] | None:
    """Return version, start and end of each part, or None if there is only one version."""
    parts = row.get("weight_versions") or []
    try:
        spans = [[each["version"], each["start"], each["end"]] for each in parts]
    except (TypeError, KeyError):
        raise Unreadable("weight_versions must be a list of version, start and end.") from None
    if not all(_is_list_of(each, int) for each in spans):
        raise Unreadable("weight_versions must contain whole numbers.")
    return spans if len(spans) > 1 else None


def _thousandths(logprob: float) -> int:
    if math.isnan(logprob):
        return _NO_LOGPROB
    return round(max(-32.7, min(logprob, 32.7)) * 1000)


def _packed(numbers: "array[Any]") -> str:
    """Encode numbers as little-endian bytes in base64."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
