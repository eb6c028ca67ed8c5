"""Checks of a request's values. Each function returns the value in its final form or raises an
`InvalidRequest` that names it.

The ranges follow from the storage: reals become float32, integers int64. No accepted value may turn
a finite logit into infinity or NaN.
"""

import math
import operator
import reprlib
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from nano_inference.errors import InvalidRequest
from nano_inference.fields.options import is_number, is_whole

PENALTIES = 0.01, 100.0  # range of repetition penalties, which scale logits up and down
_WHOLE = 2**63
MOST_BAD_WORDS = 1024
MOST_OF_WORD = 256  # characters
_MOST_DIGITS = 40  # digits of an integer that a message repeats in full


def real(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Require a finite number in [low, high], or in (low, high] with `open_low`."""
    try:
        fits = (
            is_number(value)
            and math.isfinite(value)
            and low <= value <= high
            and not (open_low and value == low)
        )
    except OverflowError:  # an integer that no float can hold
        fits = False
    if not fits:
        bounds = f"{'above' if open_low else 'at least'} {low:g}"
        if math.isfinite(high):
            bounds = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidRequest(f"{name}={shown(value)} must be a finite number {bounds}.")


def whole(name: str, value: Any, low: int, high: int = _WHOLE) -> None:
    """Require an integer in [low, high)."""
    if not is_whole(value, low) or value >= high:
        is_small = not is_whole(value, _WHOLE)
        bounds = f"at least {low}" if high == _WHOLE and is_small else f"in [{low}, {high})"
        raise InvalidRequest(f"{name}={shown(value)} must be an integer {bounds}.")


def shown(value: Any) -> str:
    """Return a value's text for a message. Integers too long to print are abbreviated."""
    if is_whole(value) and abs(value) >= 10**_MOST_DIGITS:
        return f"about {'-' if value < 0 else ''}10**{int(value.bit_length() * math.log10(2))}"
    return repr(value)


def token_id_set(name: str, ids: Any) -> frozenset[int]:
    """Return token ids as a set, after checking each."""
    try:
        kept = frozenset(ids)
    except TypeError:
        raise InvalidRequest(f"{name} must be a set of token ids, not {ids!r}.") from None
    for token_id in kept:
        whole(f"{name} entry", token_id, 0)
    return kept


def token_id_row(name: str, ids: Any) -> tuple[int, ...]:
    """Return token ids in their order, after checking that each occurs once."""
    try:
        row = tuple(map(operator.index, ids))
        if isinstance(ids, Mapping | Set) or bool in set(map(type, ids)):
            raise TypeError
    except TypeError:
        raise InvalidRequest(
            f"{name} must be a list of token ids, not {reprlib.repr(ids)}."
        ) from None
    if row and min(row) < 0:
        raise InvalidRequest(f"{name} holds {min(row)}; a token id must be at least 0.")
    if len(set(row)) < len(row):
        twice = Counter(row).most_common(1)[0][0]
        raise InvalidRequest(f"{name} holds {twice} more than once; name each id once.")
    return row


def token_id_rows(name: str, rows: Any) -> tuple[tuple[int, ...], ...]:
    """Return rows of token ids after checking each. A single row may be passed by itself."""
    try:
        many = list(rows)
    except TypeError:
        raise InvalidRequest(
            f"{name} must be a list of token ids or a list of such lists, not {reprlib.repr(rows)}."
        ) from None
    if many and not hasattr(many[0], "__iter__"):
        return (token_id_row(name, many),)
    checked = tuple(token_id_row(f"row {index} of {name}", row) for index, row in enumerate(many))
    if many and not any(checked):
        raise InvalidRequest(f"{name} has no ids; name at least one, or omit it.")
    return checked


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Return one stop string or several as a tuple, after checking each."""
    if not isinstance(stop, str | list | tuple):
        raise InvalidRequest(f"stop must be a list of strings, not {stop!r}.")
    strings: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)  # pyright: ignore
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(
                f"stop holds {string!r}; a stop string must be a non-empty string."
            )
    return strings


def bad_words(words: Any) -> tuple[str, ...]:
    """Return bad words as a tuple, after checking each."""
    if not isinstance(words, list | tuple):
        raise InvalidRequest(f"bad_words must be a list of strings, not {words!r}.")
    strings: tuple[Any, ...] = tuple(words)  # pyright: ignore[reportUnknownArgumentType]
    if len(strings) > MOST_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words holds {len(strings)} words; give at most {MOST_BAD_WORDS}."
        )
    for word in strings:
        if not isinstance(word, str) or not 0 < len(word) <= MOST_OF_WORD:
            raise InvalidRequest(
                f"bad_words holds {shown(word)[:80]}; a word must be a string of 1 to "
                f"{MOST_OF_WORD} characters."
            )
    return strings


def processor_names(names: Any) -> tuple[str, ...]:
    """Return names of logits processors as a tuple, after checking each."""
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):  # pyright: ignore
        raise InvalidRequest(f"logits_processors must be a list of names, not {names!r}.")
    return tuple(names)  # pyright: ignore[reportUnknownArgumentType]


def biases(bias: Any) -> dict[int, float]:
    """Return a checked copy of a map from token ids to logit biases."""
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, not {bias!r}.")
    entries: dict[Any, Any] = dict(bias)  # pyright: ignore[reportUnknownArgumentType]
    for token_id, value in entries.items():
        whole("logit_bias key", token_id, 0)
        real(f"logit_bias[{token_id}]", value, -100.0, 100.0)
    return {token_id: float(value) for token_id, value in entries.items()}
