"""Token ids to text as they come: what was said never changes, and all of it together is the text
of all the ids.

The text of a token depends on its neighbours: a character's bytes may lie in several tokens, the
first token may lose its space, one bad byte turns the bytes around it into U+FFFD. Decoding a
window of the last tokens therefore guesses. Here the tokenizer's own decoder is taken apart into
its steps, and each step runs incrementally with a state of a few bytes. A step that this module
does not know, or that needs the whole text, holds everything back until the end: late, but right.
"""

import copy
import secrets
from collections.abc import Sequence
from typing import Self

from nano_inference.errors import InvalidRequest
from nano_inference.text.decoding_steps import leaves, plan_of, to_spec
from nano_inference.text.tokenizer import Tokenizer

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
        plan = plan_of(tokenizer)
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
    return [] if decoder is None else [spec["type"] for spec in leaves(to_spec(decoder))]


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
