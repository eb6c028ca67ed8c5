"""Drafts that a grammar forces: text that has to follow, split as the tokenizer would split it."""

from collections.abc import Sequence as Listed

from nano_inference.core.sequence import Sequence
from nano_inference.drafts.source import NO_GUESS, Guess


class ForcedDrafts:
    """See `DraftSource`. The text is certain; another split of it may be drawn."""

    name = "grammar"

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        forced = () if seq.grammar is None else seq.grammar.forced()[:most]
        return Guess(forced, (0,) * len(forced)) if forced else NO_GUESS
