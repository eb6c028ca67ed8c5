"""Steps of a decoder of the `tokenizers` library, applied to one token at a time."""

import codecs
import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models

from nano_inference.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:  # an added token, in plain text
        return token.encode()


class _Step:
    """Decoder of the chain. Takes tokens and returns tokens as soon as they are final."""

    def push(self, tokens: list[str]) -> list[str]:
        raise NotImplementedError

    def finish(self) -> list[str]:
        """Return the tokens that were held back."""
        return []


@dataclass(frozen=True)
class DecodingPlan:
    """Plan for decoding a tokenizer's tokens."""

    added: Mapping[int, str]  # id of an added token -> its text for the decoder
    special: frozenset[str]
    steps: tuple[_Step, ...]  # in their initial state; copy before use


@lru_cache(maxsize=8)
def plan_of(tokenizer: Tokenizer) -> DecodingPlan:
    """Build the plan of a tokenizer."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    # Newer releases of the library decode an added token to its normalized text, which
    # `id_to_token` does not return. A tokenizer with only these tokens and no decoder does.
    words = tokenizers.Tokenizer(models.BPE())
    if backend.normalizer is not None:
        words.normalizer = backend.normalizer
    words.add_tokens(list(added.values()))
    new_ids = {token_id: words.token_to_id(token.content) for token_id, token in added.items()}
    return DecodingPlan(
        added={
            token_id: added[token_id].content
            if new_id is None
            else words.decode([new_id], skip_special_tokens=False)
            for token_id, new_id in new_ids.items()
        },
        special=frozenset(token.content for token in added.values() if token.special),
        steps=_steps(backend.decoder),
    )


def _steps(decoder: decoders.Decoder | None) -> tuple[_Step, ...]:
    if decoder is None:
        return (_EachToken(first=str, later=lambda token: f" {token}"),)
    specs = leaves(to_spec(decoder))
    steps: list[_Step] = []
    fused = False  # True once the decoder sees all text as one token, which arrives in parts
    for index, spec in enumerate(specs):
        step = _text_step(spec) if fused else _token_step(spec)
        if step is None:
            steps.append(
                _AtTheEnd(_from_spec({"type": "Sequence", "decoders": specs[index:]}), fused)
            )
            break
        steps.append(step)
        fused = fused or spec["type"] in ("ByteLevel", "Fuse")
    return tuple(steps)


def to_spec(decoder: decoders.Decoder) -> dict[str, Any]:
    """Return the decoder in the form of `tokenizer.json`."""
    bare = tokenizers.Tokenizer(models.BPE())
    bare.decoder = decoder
    return json.loads(bare.to_str())["decoder"]


def _from_spec(spec: Mapping[str, Any]) -> decoders.Decoder:
    bare = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(bare | {"decoder": spec})).decoder


def leaves(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """List the decoders of a chain, in their order."""
    if spec["type"] != "Sequence":
        return [spec]
    return [leaf for inner in spec["decoders"] for leaf in leaves(inner)]


def _token_step(spec: Mapping[str, Any]) -> _Step | None:
    """Return the step of a decoder that sees single tokens, or None if it is unknown."""
    match spec["type"]:
        case "ByteLevel":
            return _ByteLevel()
        case "ByteFallback":
            return _ByteFallback()
        case "Fuse":
            return _EachToken(first=str, later=str)
        case "Replace" | "Metaspace" | "WordPiece":
            return _library_step(_from_spec(spec))
        case "BPEDecoder":
            return _WordEnds(spec["suffix"])
        case "Strip":
            strip = _Strip(spec["content"], spec["start"], spec["stop"])
            return _EachToken(first=strip.whole, later=strip.whole)
        case _:
            return None


def _text_step(spec: Mapping[str, Any]) -> _Step | None:
    """Return the step of a decoder that sees the whole text as one token. Return None if it is
    unknown or needs all of the text.
    """
    match spec["type"]:
        case "Fuse":
            return _EachToken(first=str, later=str)
        case "Strip":
            return _Strip(spec["content"], spec["start"], spec["stop"])
        case _:
            return None


def _library_step(decoder: decoders.Decoder) -> _Step:
    """Return the step of a decoder that treats each token alike, except for the first."""
    before = len(decoder.decode(["x"]))
    return _EachToken(
        first=lambda token: decoder.decode([token]),
        later=lambda token: decoder.decode(["x", token])[before:],
    )


@dataclass
class _EachToken(_Step):
    first: Callable[[str], str]
    later: Callable[[str], str]
    started: bool = False

    def push(self, tokens: list[str]) -> list[str]:
        done = [self.later(token) for token in tokens]
        if tokens and not self.started:
            done[0] = self.first(tokens[0])
            self.started = True
        return done


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character in byte-level tokens. Visible Latin-1 characters stand for
    themselves, others are numbered from U+0100.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


@dataclass
class _ByteLevel(_Step):
    """Step that decodes all tokens as one UTF-8 string."""

    pending: bytes = b""  # the start of a character

    def push(self, tokens: list[str]) -> list[str]:
        data = self.pending + b"".join(map(byte_level_bytes, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return [text]

    def finish(self) -> list[str]:
        return [self.pending.decode("utf-8", "replace")]


# the library's number parser accepts a plus sign
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


@dataclass
class _ByteFallback(_Step):
    """Step for byte tokens. A run is valid UTF-8 as a whole, or one U+FFFD per byte."""

    run: bytearray = field(default_factory=bytearray)  # bytes that may still be valid
    pending: bytes = b""  # the incomplete character at its end
    invalid: bool = False  # the current run is invalid, and its bytes were returned

    def push(self, tokens: list[str]) -> list[str]:
        done: list[str] = []
        for token in tokens:
            if byte := _BYTE_TOKEN.fullmatch(token):
                done += self._extend(int(byte[1], 16))
            else:
                done += self.finish()
                done.append(token)
        return done

    def finish(self) -> list[str]:
        done = (
            [REPLACEMENT] * len(self.run)
            if self.pending
            else [self.run.decode()]
            if self.run
            else []
        )
        self.run, self.pending, self.invalid = bytearray(), b"", False
        return done

    def _extend(self, byte: int) -> list[str]:
        if self.invalid:
            return [REPLACEMENT]
        self.run.append(byte)
        data = self.pending + bytes([byte])
        try:
            _, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            done = [REPLACEMENT] * len(self.run)
            self.run, self.pending, self.invalid = bytearray(), b"", True
            return done
        self.pending = data[used:]
        return []

    def __copy__(self) -> Self:
        return type(self)(bytearray(self.run), self.pending, self.invalid)


@dataclass
class _WordEnds(_Step):
    """Step for a suffix at the end of words. The suffix becomes a space, or nothing in the last
    token, which is therefore held back.
    """

    suffix: str
    held: list[str] = field(default_factory=list)  # one token at most

    def push(self, tokens: list[str]) -> list[str]:
        tokens = self.held + tokens
        self.held = tokens[-1:] if tokens and self.suffix in tokens[-1] else []
        return [token.replace(self.suffix, " ") for token in tokens[: len(tokens) - len(self.held)]]

    def finish(self) -> list[str]:
        return [token.replace(self.suffix, "") for token in self.held]


@dataclass
class _Strip(_Step):
    """Step that removes the character `content` up to `start` times at the start of the text and up
    to `stop` times at its end.
    """

    content: str
    start: int
    stop: int
    held: str = ""

    def push(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        while self.start and text:
            self.start, text = (self.start - 1, text[1:]) if text[0] == self.content else (0, text)
        text = self.held + text
        cut = len(text) - min(self.stop, len(text) - len(text.rstrip(self.content)))
        self.held = text[cut:]
        return [text[:cut]]

    def whole(self, text: str) -> str:
        """Return a single text, stripped. The library panics if nothing is left to strip at the
        end.
        """
        return copy.copy(self).push([text])[0]


@dataclass
class _AtTheEnd(_Step):
    """Step that runs the rest of the chain in the library, after the last token."""

    decoder: decoders.Decoder
    fused: bool
    tokens: list[str] = field(default_factory=list)

    def push(self, tokens: list[str]) -> list[str]:
        self.tokens += tokens
        return []

    def finish(self) -> list[str]:
        return [self.decoder.decode(["".join(self.tokens)] if self.fused else self.tokens)]

    def __copy__(self) -> Self:
        return type(self)(self.decoder, self.fused, [*self.tokens])
