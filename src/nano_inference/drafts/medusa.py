"""Drafts by Medusa heads. Each guesses a different one of the next tokens from the same row."""

import time
from collections.abc import Sequence as Listed
from typing import Any

from nano_inference.arrays import Tensor, namespace, on_device, without_gradients
from nano_inference.core.batch import Chunks
from nano_inference.core.sequence import Sequence
from nano_inference.drafts.drawn_rows import DrawnRows
from nano_inference.drafts.heads import HeadWeights, MedusaSpec
from nano_inference.drafts.model import (
    Drafting,
    DraftTimes,
    draws_of,
    guesses_of,
    take_drawn,
)
from nano_inference.drafts.source import Guess
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import Ops
from nano_inference.sampling.logit_scale import UNSCALED
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch

NEVER = -1e30  # logit of tokens that heads cannot guess


class MedusaDrafts:
    """A `TimedSource` that runs Medusa heads.

    Head i guesses the token at offset i + 2 from the row that it reads, because the token at offset
    1 is already drawn. Like a draft model, it draws with the noise of the guessed positions.

    Args:
        policy: Model whose hidden rows the heads read.
        weights: Weights of the heads.
    """

    name = "medusa"

    def __init__(self, policy: Decoder, weights: HeadWeights) -> None:
        assert isinstance(weights.spec, MedusaSpec)
        self.policy, self.weights, self.spec = policy, weights, weights.spec
        self._rows = DrawnRows()
        self._times = DraftTimes()

    def see(self, chunks: Chunks, batches: Listed[ForwardBatch], result: Any) -> None:
        """Watch a step of the loop, and keep the rows that tokens are drawn from."""
        drawn = [hidden for _, hidden, _ in result.drawn]
        if drawn:
            joined = drawn[0].clone() if len(drawn) == 1 else namespace(drawn[0]).cat(drawn)
            self._rows.keep(chunks, joined)

    def seconds(self, num_seqs: int) -> float:
        return self._times.of(num_seqs)

    @without_gradients
    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        wanted = min(most, self.spec.num_heads)
        rows = [self._rows.of(seq, len(seq.token_ids) - 1) for seq in seqs]
        pairs = [(seq, row) for seq, row in zip(seqs, rows, strict=True) if row is not None]
        drafting = [Drafting(seq, 0, [], wanted) for seq, _ in pairs]
        if drafting:
            xp = namespace(self.policy.device)
            with on_device(self.policy.device):
                self._draw_all(drafting, xp.stack([row for _, row in pairs]), wanted)
        return guesses_of(seqs, drafting)

    def _draw_all(self, drafting: Listed[Drafting], hidden: Tensor, wanted: int) -> None:
        for head in range(wanted):
            began = time.perf_counter()
            places = [place for place, each in enumerate(drafting) if each.is_open]
            if not places:
                break
            live = [drafting[place] for place in places]
            rows = hidden if len(places) == len(drafting) else hidden[places]
            batch = draws_of(live, self.policy.device)
            draw = self._draw(self._blocks(head, rows), head, batch)
            take_drawn(live, draw, self.spec.vocab_size)
            self._times.note(len(live), time.perf_counter() - began)

    def _blocks(self, head: int, hidden: Tensor) -> Tensor:
        """Apply the residual blocks of a head: rows [S, H] -> [S, H]."""
        params = self.weights.params
        for block in range(self.spec.num_blocks):
            name = f"blocks.{head}.layers.{block}"
            product = self.policy.ops.linear(
                hidden, params[f"{name}.weight"], params.get(f"{name}.bias")
            )
            added = hidden.float() + _silu(product.float())
            hidden = added.to(hidden.dtype)
        return hidden

    def _draw(self, hidden: Tensor, head: int, batch: SamplingBatch) -> Draw:
        policy, spec = self.policy, self.spec
        if not spec.projections:
            return policy.draw(hidden, batch)
        projection = self.weights.params[f"lm_heads.{min(head, spec.projections - 1)}.weight"]
        return draw_known(
            policy.ops, hidden, projection, self.weights.targets, spec.vocab_size, batch
        )


def draw_known(
    ops: Ops,
    hidden: Tensor,
    projection: Any,
    targets: Tensor | None,
    vocab_size: int,
    batch: SamplingBatch,
) -> Draw:
    """Draw among the tokens that heads can guess, with the noise of these tokens.

    Args:
        ops: Operations of the policy.
        hidden: Rows [S, H].
        projection: Weight [known tokens, H].
        targets: The policy's ids of the known tokens. None if the ids are equal.
        vocab_size: Vocabulary size of the policy.
        batch: Sampling parameters of each row.
    """
    if targets is None:
        return ops.sample(hidden, projection, UNSCALED, batch)
    logits = namespace(hidden).full((len(hidden), vocab_size), NEVER, device=hidden.device)
    logits[:, targets] = ops.logits(hidden, projection, UNSCALED)
    return ops.sample_logits(logits, batch)


def _silu(x: Tensor) -> Tensor:
    # larger powers would overflow, and the result is 0 in any case
    return x / (1 + (-x).clamp(max=88.0).exp())
