"""Token ids to text as they come: what was said never changes, and all of it together is the text
of all the ids.

The text of a token depends on its neighbours: a character's bytes may lie in several tokens, the
first token may lose its space, one bad byte turns the bytes around it into U+FFFD. Decoding a
window of the last tokens therefore guesses. Here the tokenizer's own decoder is taken apart into
its steps, and each step runs incrementally with a state of a few bytes. A step that this module
does not know, or that needs the whole text, holds everything back until the end: late, but right.
"""

import codecs
import copy
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models

from nano_inference.errors import InvalidRequest
from nano_inference.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Stands before special tokens in text that is going to be parsed. It is random and secret, so no
# text of ordinary tokens holds it, and no stop string matches a part of it.
SPECIAL_MARK = "\ufdd0" + "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(8))


class Detokenizer:
    """The text of one sequence of token ids, in pieces.

    All that `push` returned and then `finish`, joined, is `tokenizer.decode(ids,
    skip_special_tokens)` of all ids, for any ids in any portions. `push` never returns text that a
    later token could change: the bytes of an incomplete character wait, and so does a run of byte
    tokens (`<0xE2>` …) of a SentencePiece vocabulary, of which one bad byte makes U+FFFD of every
    byte. Ids without a token have no text.

    Args:
        tokenizer: its decoder says how tokens become text. Tokens added to it later are not seen.
        skip_special_tokens: special tokens have no text.
        mark: stands before the text of each special token.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, mark: str = ""
    ) -> None:
        plan = _plan(tokenizer)
        self._backend = tokenizer.backend
        self._added = plan.added
        self._skipped = plan.special if skip_special_tokens else frozenset[str]()
        self._marked, self._mark = plan.special if mark else frozenset[str](), mark
        self._steps = [copy.copy(step) for step in plan.steps]

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids. Returns the text that is final now and was not returned yet."""
        tokens = [
            token
            for token in map(self._token, token_ids)
            if token is not None and token not in self._skipped
        ]
        if self._mark:
            tokens = [self._mark + each if each in self._marked else each for each in tokens]
        for step in self._steps:
            tokens = step.push(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        """The sequence ends: the text that was held back, incomplete characters as U+FFFD. Push
        nothing afterwards.
        """
        tokens: list[str] = []
        for step in self._steps:
            tokens = step.push(tokens) + step.finish()
        return "".join(tokens)

    def copy(self) -> Self:
        """A detokenizer of the same past and an own future."""
        twin = copy.copy(self)
        twin._steps = [copy.copy(step) for step in self._steps]
        return twin

    def _token(self, token_id: int) -> str | None:
        token = self._added.get(token_id)
        if token is None and 0 <= token_id < 2**32:  # the library raises beyond
            token = self._backend.id_to_token(token_id)
        return token


def decoder_types(tokenizer: Tokenizer) -> list[str]:
    """The kinds of decoder that the tokenizer's is made of, as `tokenizer.json` names them."""
    decoder = tokenizer.backend.decoder
    return [] if decoder is None else [spec["type"] for spec in _leaves(_to_spec(decoder))]


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:  # an added token, in plain text
        return token.encode()


class OutputText:
    """Text of the tokens appended so far, searched for stop strings.

    Between `append`s the text has two parts: one that may be shown, and a suffix that is held back
    because it begins a stop string. A match can begin nowhere else than in that suffix or in new
    text, so neither the search nor the hold ever looks further back than the longest stop string.
    All that `take` returned and then `finish`, joined, is the text of all tokens, or what stands in
    it before the stop string.

    Text counts once it is final (`Detokenizer`): a stop string whose last character still waits for
    its bytes, or stands in a run of byte tokens that goes on, is complete with the token that ends
    the wait.

    Args:
        tokenizer: of the tokens.
        stop: stop strings; none may be empty.
        skip_special_tokens: special tokens have no text.
        mark: stands before the text of each special token.

    Raises:
        InvalidRequest: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        mark: str = "",
    ) -> None:
        if "" in stop:
            raise InvalidRequest(
                f"stop={stop!r} holds an empty string, which would end every sample; leave it out."
            )
        self._stop = stop
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, mark)
        self._shown: list[str] = []  # all text that may be shown, in pieces
        self._num_taken = 0  # pieces of it that `take` has returned
        self._held = ""  # final text, but a proper prefix of some stop string
        self._matched: str | None = None
        self._finished = False

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Take the next token.

        Args:
            token_id: any id; one without a token has no text.
            may_stop: False: nothing matches at this token, and what is complete with it never
                matches later.

        Returns:
            The stop string that this token completes, or None. Of several the one that begins first
            in the text, of those the longest. The text ends before it: tokens appended afterwards
            do not count.
        """
        if self._matched is not None or self._finished:
            return None
        new = self._detokenizer.push((token_id,))
        if not new:
            return None
        text = self._held + new
        if may_stop and (match := self._find(text)):
            begin, self._matched = match
            self._shown.append(text[:begin])
            self._held = ""
            return self._matched
        cut = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._shown.append(text[:cut])
        self._held = text[cut:]
        return None

    def take(self) -> str:
        """The text that may be shown and was not returned yet: no stop string can reach into it any
        more.
        """
        text = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return text

    def finish(self) -> str:
        """The sample ended: the rest of the text. Without a match that is also what was held back.

        Incomplete characters come out as U+FFFD, in which no stop string is looked for.
        """
        if self._matched is None and not self._finished:
            self._shown.append(self._held + self._detokenizer.finish())
            self._held = ""
        self._finished = True
        return self.take()

    @property
    def text(self) -> str:
        """All text that may be shown, taken or not. After `finish` the text of the sample."""
        return "".join(self._shown)

    def copy(self) -> Self:
        """An output of the same past and an own future."""
        twin = copy.copy(self)
        twin._detokenizer = self._detokenizer.copy()
        twin._shown = [*self._shown]
        return twin

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where a stop string begins that ends in the new text, and which."""
        # What ends in the held part was complete before this token, when it might not stop.
        found = [
            (text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stop
        ]
        return min(
            (hit for hit in found if hit[0] >= 0),
            key=lambda hit: (hit[0], -len(hit[1])),
            default=None,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0


class _Step:
    """One decoder of the chain: tokens in, tokens out, as soon as they are final."""

    def push(self, tokens: list[str]) -> list[str]:
        raise NotImplementedError

    def finish(self) -> list[str]:
        """What is held back, at the end."""
        return []


@dataclass(frozen=True)
class _Plan:
    added: Mapping[int, str]  # id -> the text that an added token enters the decoder with
    special: frozenset[str]
    steps: tuple[_Step, ...]  # in their first state; to be copied


@lru_cache(maxsize=8)
def _plan(tokenizer: Tokenizer) -> _Plan:
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    # Newer releases of the library decode an added token to its normalised text, which
    # `id_to_token` does not give. A tokenizer of these tokens alone, without a decoder, does.
    words = tokenizers.Tokenizer(models.BPE())
    if backend.normalizer is not None:
        words.normalizer = backend.normalizer
    words.add_tokens(list(added.values()))
    new_ids = {token_id: words.token_to_id(token.content) for token_id, token in added.items()}
    return _Plan(
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
    specs = _leaves(_to_spec(decoder))
    steps: list[_Step] = []
    fused = False  # whether all text is one token here, and what flows are its parts
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


def _to_spec(decoder: decoders.Decoder) -> dict[str, Any]:
    """The decoder as `tokenizer.json` describes it."""
    bare = tokenizers.Tokenizer(models.BPE())
    bare.decoder = decoder
    return json.loads(bare.to_str())["decoder"]


def _from_spec(spec: Mapping[str, Any]) -> decoders.Decoder:
    bare = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(bare | {"decoder": spec})).decoder


def _leaves(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [leaf for inner in spec["decoders"] for leaf in _leaves(inner)]


def _token_step(spec: Mapping[str, Any]) -> _Step | None:
    """The step of a decoder that sees tokens one by one. None: not known here."""
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
    """The step of a decoder that sees the whole text as one token. None: needs all of it, or is not
    known here.
    """
    match spec["type"]:
        case "Fuse":
            return _EachToken(first=str, later=str)
        case "Strip":
            return _Strip(spec["content"], spec["start"], spec["stop"])
        case _:
            return None


def _library_step(decoder: decoders.Decoder) -> _Step:
    """For decoders that treat each token by itself and ask only whether it is the first."""
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
    """Byte-level tokens write a byte as a character: Latin-1's visible ones as they are, others
    from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


@dataclass
class _ByteLevel(_Step):
    """All tokens are one string of bytes, decoded as UTF-8."""

    pending: bytes = b""  # the start of a character

    def push(self, tokens: list[str]) -> list[str]:
        data = self.pending + b"".join(map(byte_level_bytes, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return [text]

    def finish(self) -> list[str]:
        return [self.pending.decode("utf-8", "replace")]


# the library's parser of numbers takes a plus sign
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


@dataclass
class _ByteFallback(_Step):
    """A run of byte tokens is UTF-8 as a whole, or one U+FFFD a byte."""

    run: bytearray = field(default_factory=bytearray)  # what may still become text
    pending: bytes = b""  # the incomplete character at its end
    invalid: bool = False  # the run that goes on is beyond repair; its bytes have been given out

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
    """A suffix marks the end of a word: a space, but nothing in the last token, which therefore
    waits.
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
    """Up to `start` times the character `content` goes at the start of the text, up to `stop` times
    at its end.
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
        """A text of its own. The library panics where nothing is left to strip at the end; here
        that is nothing.
        """
        return copy.copy(self).push([text])[0]


@dataclass
class _AtTheEnd(_Step):
    """The rest of the chain in the library, once all tokens are there."""

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
