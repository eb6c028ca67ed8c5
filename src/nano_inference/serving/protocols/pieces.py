"""JSON in pieces: what a large answer says is made while it is written, and never there as a
whole.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec


class Told:
    """The items of an array, which are made when they are written, once.

    Args:
        items: they.
        at_once: so many are made and written together; with 1 an item may itself hold what is made
            when it is written.
    """

    def __init__(self, items: Iterable[Any], at_once: int = 1) -> None:
        self._items, self._at_once = items, at_once

    def pieces(self) -> Iterator[bytes]:
        """JSON of the array."""
        before, items = b"[", iter(self._items)
        while batch := list(itertools.islice(items, self._at_once)):
            yield before
            if self._at_once == 1:
                yield from json_pieces(batch[0])
            else:
                yield encode(batch)[1:-1]
            before = b","
        yield b"[]" if before == b"[" else b"]"


def json_pieces(value: object) -> Iterator[bytes]:
    """JSON of a value. Looks for `Told` in it, in objects in it, and so on, but in no list."""
    if isinstance(value, Told):
        yield from value.pieces()
    elif type(value) is dict and any(isinstance(each, Told | dict) for each in value.values()):
        before = b"{"
        for name, each in value.items():
            yield before + encode(name) + b":"
            yield from json_pieces(each)
            before = b","
        yield b"}"
    else:
        yield encode(value)


def _told(value: object) -> msgspec.Raw:
    if isinstance(value, Told):
        return msgspec.Raw(b"".join(value.pieces()))
    raise NotImplementedError(f"{type(value).__name__} cannot be said in JSON.")


encode = msgspec.json.Encoder(enc_hook=_told).encode
