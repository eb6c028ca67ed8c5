"""Incremental detokenization. Returned text never changes, and all pieces together are the text of
all ids.

The text of a token depends on its neighbors. A character's bytes may span several tokens, the
first token may lose its space, and one bad byte turns the bytes around it into U+FFFD. Decoding a
window of the last tokens would only guess. This module splits the tokenizer's decoder into its
steps, and runs each step incrementally with a state of a few bytes. A step that is unknown, or that
needs the whole text, holds all text back until the end.
"""

import copy
import secrets
from collections.abc import Sequence
from typing import Self

from nano_inference.errors import InvalidRequest
from nano_inference.text.decoding_steps import leaves, plan_of, to_spec
from nano_inference.text.tokenizer import Tokenizer

# Mark before special tokens in text for parsers. It is random and secret, so ordinary tokens do not
# form it, and stop strings do not match a part of it.
SPECIAL_MARK = "\ufdd0" + "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(8))


class Detokenizer:
    """Detokenizer of one sequence of token ids.

    The results of all `push` calls and `finish`, joined, equal `tokenizer.decode(ids,
    skip_special_tokens)`, however the ids are split. `push` never returns text that a later token
    could change. It holds back incomplete characters, and runs of byte tokens (`<0xE2>` …) of a
    SentencePiece vocabulary, since one bad byte makes every byte of a run U+FFFD. Unknown ids have
    no text.

    Args:
        tokenizer: Tokenizer with the decoder. Tokens added to it later are ignored.
        skip_special_tokens: Give special tokens no text.
        mark: Text to insert before each special token.
        shown: Special tokens that have text in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        mark: str = "",
        shown: frozenset[str] = frozenset(),
    ) -> None:
        plan = plan_of(tokenizer)
        self._backend = tokenizer.backend
        self._added = plan.added
        self._skipped = plan.special - shown if skip_special_tokens else frozenset[str]()
        self._marked, self._mark = plan.special if mark else frozenset[str](), mark
        self._steps = [copy.copy(step) for step in plan.steps]

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next ids and return the text that is newly final."""
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
        """End the sequence and return the rest of the text, incomplete characters as U+FFFD. Do not
        call `push` afterwards.
        """
        tokens: list[str] = []
        for step in self._steps:
            tokens = step.push(tokens) + step.finish()
        return "".join(tokens)

    def copy(self) -> Self:
        """Return an independent copy in the same state."""
        twin = copy.copy(self)
        twin._steps = [copy.copy(step) for step in self._steps]
        return twin

    def _token(self, token_id: int) -> str | None:
        token = self._added.get(token_id)
        if token is None and 0 <= token_id < 2**32:  # the library raises beyond
            token = self._backend.id_to_token(token_id)
        return token


def special_among(tokens: frozenset[str], tokenizer: Tokenizer) -> frozenset[str]:
    """Return those of the tokens that are special."""
    return tokens & plan_of(tokenizer).special


def decoder_types(tokenizer: Tokenizer) -> list[str]:
    """Return the types of the tokenizer's decoders, as in `tokenizer.json`."""
    decoder = tokenizer.backend.decoder
    return [] if decoder is None else [spec["type"] for spec in leaves(to_spec(decoder))]


class OutputText:
    """Text of the tokens so far, with a search for stop strings.

    The text has two parts: one that may be shown, and a suffix that is held back since it begins a
    stop string. A match can begin only in that suffix or in new text, so the search never looks
    further back than the longest stop string. The results of all `take` calls and `finish`, joined,
    are the text of all tokens, up to the stop string.

    Only final text counts (`Detokenizer`). A stop string whose last character is incomplete matches
    at the token that completes it.

    Args:
        tokenizer: Tokenizer of the tokens.
        stop: Stop strings, none of them empty.
        skip_special_tokens: Give special tokens no text.
        mark: Text to insert before each special token.
        shown: Special tokens that have text in any case.

    Raises:
        InvalidRequest: A stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        mark: str = "",
        shown: frozenset[str] = frozenset(),
    ) -> None:
        if "" in stop:
            raise InvalidRequest(
                f"stop={stop!r} holds an empty string, which would end every sample; leave it out."
            )
        self._stop = stop
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, mark, shown)
        self._shown: list[str] = []  # all text that may be shown, in pieces
        self._num_taken = 0  # pieces of it that `take` has returned
        self._held = ""  # final text, but a proper prefix of some stop string
        self._matched: str | None = None
        self._finished = False

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add the next token.

        Args:
            token_id: Any id. Unknown ids have no text.
            may_stop: False to match nothing at this token. A stop string that it completes never
                matches later.

        Returns:
            The stop string that this token completes, or None. If there are several: the one that
            begins first, or the longest of those. The text ends before it, and later tokens are
            ignored.
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
        """Return text that may be shown and was not returned yet. No stop string can overlap it."""
        text = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return text

    def finish(self) -> str:
        """End the sample and return the rest of the text. It includes held-back text if no stop
        string matched.

        Incomplete characters become U+FFFD. Stop strings do not match there.
        """
        if self._matched is None and not self._finished:
            self._shown.append(self._held + self._detokenizer.finish())
            self._held = ""
        self._finished = True
        return self.take()

    @property
    def text(self) -> str:
        """All text that may be shown. After `finish`: the text of the sample."""
        return "".join(self._shown)

    def copy(self) -> Self:
        """Return an independent copy in the same state."""
        twin = copy.copy(self)
        twin._detokenizer = self._detokenizer.copy()
        twin._shown = [*self._shown]
        return twin

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the position and text of the stop string that ends in new text, or None."""
        # a match that ends in the held part was complete at an earlier token, with may_stop=False
        hits = [
            (text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stop
        ]
        return min(
            (hit for hit in hits if hit[0] >= 0),
            key=lambda hit: (hit[0], -len(hit[1])),
            default=None,
        )


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0
