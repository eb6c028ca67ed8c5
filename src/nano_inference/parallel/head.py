"""`ShardedHead`: draws and scores if each rank holds a part of the vocabulary, with the bits of one
rank.

All ranks have the same hidden rows and batch, and all get the whole result. Plain draws and scores
exchange maxima, block sums and each rank's best token. A row's logits are exchanged if filters,
sampling masks, top or named tokens need all of them, or if the backend does not support partial
heads.
"""

from collections.abc import Generator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nano_inference.arrays import Tensor, namespace, with_columns
from nano_inference.sampling.filters import any_is_on
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch, select

if TYPE_CHECKING:
    from nano_inference.parallel.process_group import ProcessGroup

T = TypeVar("T")
SCORE_TILE = 256  # rows per exchange of logits if only one number of each row is needed


class ShardedHead:
    """Draws, logits and scores with this rank's rows of the head.

    Args:
        ops: `Ops` of the backend.
        group: Ranks that share the head.
        bounds: Vocabulary bounds: rank r holds tokens [bounds[r], bounds[r + 1]).
    """

    def __init__(self, ops: Any, group: "ProcessGroup", bounds: Sequence[int]) -> None:
        self.part = VocabPart(tuple(bounds), group.rank)
        self._ops, self._group = ops, group
        parts = ops.head_parts
        self._parts = parts if parts is not None and self.part.is_of_blocks(parts.block) else None

    def sample(self, hidden: Tensor, weight: Any, scale: LogitScale, batch: SamplingBatch) -> Draw:
        """Draw samples like `Ops.sample`. `weight` is this rank's part."""
        all_read = batch.most_top or len(batch.named.ids) or (batch.any_filter and batch.any_kept)
        if self._parts is None or all_read:
            return self._ops.sample_logits(self.logits(hidden, weight, scale), batch)
        whole = _filtered(batch, self.part.vocab_size)
        if not bool(whole.any()):
            return self._together(self._parts.sample(hidden, weight, scale, batch, self.part))
        chosen = [mask.nonzero()[:, 0] for mask in (~whole, whole)]
        plain, gathered = (
            replace(select(batch, chosen[0]), any_filter=False),
            select(batch, chosen[1]),
        )
        rows, places = gathered.rows.unique(return_inverse=True)
        logits = self.logits(hidden[rows], weight, scale)
        drawn = (
            self._together(self._parts.sample(hidden, weight, scale, plain, self.part)),
            self._ops.sample_logits(logits, replace(gathered, rows=places)),
        )
        xp = namespace(hidden)
        order = xp.cat(chosen).argsort()
        pairs = {
            field.name: [getattr(draw, field.name) for draw in drawn]
            for field in fields(Draw)
            if field.name != "named_logprobs"
        }
        whole: Any = {
            name: None if pair[0] is None else xp.cat(pair)[order] for name, pair in pairs.items()
        }
        return Draw(**whole, named_logprobs=drawn[0].named_logprobs)  # empty

    def sample_logits(self, logits: Tensor, batch: SamplingBatch) -> Draw:
        """Draw samples from logits of the whole vocabulary, like `Ops.sample_logits`."""
        return self._ops.sample_logits(logits, batch)

    def logits(self, hidden: Tensor, weight: Any, scale: LogitScale = UNSCALED) -> Tensor:
        """Return logits of the whole vocabulary, like `Ops.logits`."""
        xp, sizes = namespace(hidden), self.part.sizes
        if not len(hidden):
            return hidden.new_zeros((0, self.part.vocab_size), dtype=xp.float32)
        local = (
            self._ops.logits(hidden, weight, scale)
            if self.part.size
            else hidden.new_zeros((len(hidden), 0), dtype=xp.float32)
        )
        gathered = self._group.all_gather(with_columns(local, max(sizes)))
        return xp.cat([each[:, :size] for each, size in zip(gathered, sizes, strict=True)], dim=1)

    def gather_logprobs(
        self,
        hidden: Tensor,
        weight: Any,
        scale: LogitScale,
        token_ids: Tensor,
        temperatures: Tensor,
    ) -> Tensor:
        """Return logprobs of given tokens, like `Ops.gather_logprobs`."""
        if self._parts is not None:
            return self._together(
                self._parts.score(hidden, weight, scale, token_ids, temperatures, self.part)
            )
        scores = [
            self._ops.score_logits(self.logits(rows, weight, scale), targets, own)
            for rows, targets, own in zip(
                *(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True
            )
        ]
        return namespace(hidden).cat(scores)

    def _together(self, steps: Generator[Tensor, list[Tensor], T]) -> T:
        """Run a generator. For each value that it yields, send it the values of all ranks."""
        try:
            mine = next(steps)
            while True:
                mine = steps.send(self._group.all_gather(mine))
        except StopIteration as done:
            return done.value


def _filtered(batch: SamplingBatch, vocab_size: int) -> Tensor:
    """Return a mask of the samples that need all logits of their row, bool [R]."""
    if not batch.any_filter:
        xp = namespace(batch.rows)
        return xp.zeros(len(batch), dtype=xp.bool, device=batch.rows.device)
    return any_is_on(batch, vocab_size)
