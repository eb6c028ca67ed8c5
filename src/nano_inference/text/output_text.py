"""The text of one sample as it grows: it ends before the first stop string, and nothing is shown
too early.
"""

import copy
from typing import Self

from nano_inference.errors import InvalidRequest
from nano_inference.text.detokenize import Detokenizer
from nano_inference.text.tokenizer import Tokenizer


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

    Raises:
        InvalidRequest: a stop string is empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), skip_special_tokens: bool = True
    ) -> None:
        if "" in stop:
            raise InvalidRequest(
                f"stop={stop!r} holds an empty string, which would end every sample; leave it out."
            )
        self._stop = stop
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
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
