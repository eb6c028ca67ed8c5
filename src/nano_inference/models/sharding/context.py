"""`SharedContext`: the decoder's interface to ranks that share every sequence's keys and values."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nano_inference.arrays import Tensor, namespace
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import AttentionArgs, Joint, KvcacheView, Ops, PartialAttention
from nano_inference.parallel.context import (
    MOST_NUMBERS,
    ContextSplit,
    ContextStep,
    Piece,
    Rejoining,
    own_rows,
)

if TYPE_CHECKING:
    from nano_inference.parallel.process_group import ProcessGroup


class SharedContext:
    """One rank of a context group.

    Args:
        group: The ranks, by context rank. All of them run the same steps.
        ops: Operations of the backend, including `partial`.
        spec: Description of the model part held here.

    Attributes:
        rows_computed: Number of rows that this rank has computed.
    """

    def __init__(self, group: "ProcessGroup", ops: Ops, spec: ModelSpec) -> None:
        if ops.partial is None:
            raise ValueError(f"the {ops.name} backend cannot split attention by keys.")
        self.rows_computed = 0
        self._group = group
        self._partial: PartialAttention = ops.partial
        self._windows = sorted(set(spec.windows))
        self._heads = (spec.num_heads, spec.head_dim)
        self._most_states = max(
            1, MOST_NUMBERS // (spec.num_heads * ops.partial.width(spec.head_dim))
        )
        self._step: ContextStep | None = None
        # plans of the current step for each piece, by window
        self._plans: dict[int, list[object]] = {}

    def own_rows(self, batch: ForwardBatch, block_size: int) -> ForwardBatch:
        """Return this rank's rows of a batch. `block_size` is that of the rank's storage."""
        split = ContextSplit(self._group.size, block_size * self._group.size)
        mine = own_rows(batch, split, self._group.rank, self._windows, self._most_states)
        self.rows_computed += len(mine.input_ids)
        return mine

    def rejoin(self, rejoining: Rejoining, values: Tensor) -> Tensor:
        """Merge values [n, ...] of all ranks' rows in the order of the batch.

        Every rank gets all of them.
        """
        size, cat = self._group.size, namespace(values).cat
        return cat(self._group.all_to_all([values] * size, rejoining.counts))[rejoining.order]

    def attention(
        self,
        view: KvcacheView,
        layer: int,
        window: int,
        scores: AttentionArgs,
    ) -> Joint:
        """Return a function for `Ops.call`: q [N, heads * D] of this rank's rows -> attention.

        The keys of all ranks take part. The rank that owns a row adds the sinks [heads], once.
        """

        def attend(batch: ForwardBatch, out: Tensor, q: Tensor) -> None:
            heads = q.reshape(len(q), *self._heads)
            plans = self._plans_of(batch, window, view.block_size)
            for piece, plan in zip(batch.context.pieces[window], plans, strict=True):

                def states(rows: Tensor, plan: object = plan) -> Tensor:
                    return self._partial.states(rows, view, layer, plan, scores)

                out[piece.own_rows] = self._merged(piece, heads, states, scores.sinks)

        return attend

    def _merged(
        self,
        piece: Piece,
        q: Tensor,
        states: Callable[[Tensor], Tensor],
        sinks: Tensor | None,
    ) -> Tensor:
        """Send queries to the ranks that hold keys for them, and merge the returned states."""
        cat = namespace(q).cat
        asked = cat(self._group.all_to_all([q[rows] for rows in piece.queries], piece.asked))
        computed = states(asked[piece.arrived])
        answers = cat(
            self._group.all_to_all([computed[rows] for rows in piece.answers], piece.answered)
        )
        return self._partial.merge(answers[piece.order], piece.counts, q.dtype, sinks)

    def _plans_of(self, batch: ForwardBatch, window: int, block_size: int) -> list[object]:
        """Return the plans of a step and window, which all layers share."""
        if self._step is not batch.context:
            self._step, self._plans = batch.context, {}
        if window not in self._plans:
            pieces = batch.context.pieces[window]
            self._plans[window] = [self._partial.plan(piece.rows, block_size) for piece in pieces]
        return self._plans[window]
