"""Encode a conversation without encoding its earlier messages again.

An agent sends its whole conversation with every turn. The `tokenizers` library splits a text at
added tokens first and encodes the pieces between them on their own, so the ids of a text are those
of its pieces. `pieces` cuts a text before control tokens of the chat template for which this holds,
and the ids of each piece are kept.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

from tokenizers import AddedToken

from nano_inference.text.tokenizer import LONG, Tokenizer, encode_ids

MOST = 4 << 20  # characters of the kept texts of a tokenizer
_SHORT = 256  # characters of a piece
_ENTRY = 64  # characters that an entry costs in addition to its text

Value = TypeVar("Value")


@dataclass
class Memo(Generic[Value]):
    """Values of a pure function of texts. The texts used last are kept, up to `most` characters."""

    function: Callable[[str], Value]
    most: int = MOST
    kept: OrderedDict[str, Value] = field(default_factory=OrderedDict[str, Value])
    _size: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, text: str) -> Value:
        with self._lock:
            if text in self.kept:
                self.kept.move_to_end(text)
                return self.kept[text]
        value = self.function(text)
        with self._lock:
            if text not in self.kept and len(text) + _ENTRY <= self.most:
                self.kept[text] = value
                self._size += len(text) + _ENTRY
            while self._size > self.most:
                self._size -= len(self.kept.popitem(last=False)[0]) + _ENTRY
        return value


@dataclass(frozen=True)
class _Encoder:
    cuts: re.Pattern[str] | None
    ids: "Memo[array[int]]"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a rendered conversation, equal to `tokenizer.encode(text)`."""
    if len(text) <= LONG:
        return tokenizer.encode(text)
    encoder = _encoder(tokenizer)
    if encoder.cuts is None:
        return tokenizer.encode(text)
    ids: list[int] = []
    for piece in pieces(encoder.cuts, text):
        ids += encoder.ids(piece)
    return ids


def pieces(cuts: re.Pattern[str], text: str) -> Iterable[str]:
    """Cut a text before matches, so that a longer text with the same beginning has the same
    pieces, except for the last.
    """
    start = 0
    for match in cuts.finditer(text):
        if match.start() - start >= _SHORT:
            yield text[start : match.start()]
            start = match.start()
    yield text[start:]


@lru_cache(maxsize=8)
def _encoder(tokenizer: Tokenizer) -> _Encoder:
    backend = tokenizer.backend
    return _Encoder(
        cut_pattern(tokenizer), Memo(lambda text: array("I", encode_ids(backend, text)))
    )


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern of control tokens before which a text may be cut, or None.

    Such a token is matched before the text is normalized, wherever it is written: no other added
    token contains, overlaps or touches it.
    """
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if tokenizer.backend.encode_special_tokens or any(token.single_word for token in added):
        return None
    templates = f"{tokenizer.chat_template}{tokenizer.tool_template}"
    texts = {token.content for token in added}
    alone = [
        token.content
        for token in added
        if _is_plain(token) and token.content in templates and _is_alone(token.content, texts)
    ]
    return re.compile("|".join(map(re.escape, alone))) if alone else None


def _is_plain(token: AddedToken) -> bool:
    """Return True if the token is matched as written and leaves the text around it."""
    plain = token.special and not (token.normalized or token.lstrip or token.rstrip)
    return plain and len(token.content) > 1


def _is_alone(token: str, texts: Iterable[str]) -> bool:
    """Return True if no match of another text, or of the token itself, shares a character with a
    match of the token.
    """
    sizes = range(1, len(token))
    begins, ends = tuple(token[:size] for size in sizes), tuple(token[size:] for size in sizes)
    return not any(
        (text != token and (token in text or text in token))
        or text.endswith(begins)
        or text.startswith(ends)
        for text in texts
        if text
    )
