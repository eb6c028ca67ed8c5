"""Gradients of logprobs with respect to the head and the rows that it reads."""

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.models.spec.model import ModelSpec
from nano_inference.rl.micro_batch import MicroBatch
from nano_inference.sampling.pipeline import allowed
from nano_inference.sampling.scaling import scaled

HEAD_ROWS = 256  # rows whose logits are in memory simultaneously


def head_gradients(
    spec: ModelSpec,
    hidden: Tensor,
    weight: Tensor,
    weight32: Tensor,
    batch: MicroBatch,
    temperature: float,
    wanted: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden rows [N, H], in their dtype, and of the head, float32 [V, H].

    The gradient of the head is empty unless it is `wanted`.

    With z = hidden @ weight.T, scaled, and -inf for masked tokens, the gradient with respect to z
    is (one-hot - softmax(z / temperature)) / temperature. The logits are always float32, because
    rounded logits would give other probabilities.
    """
    d_hidden = torch.zeros_like(hidden)
    d_head = torch.zeros_like(weight32) if wanted else torch.empty(0)
    scale, cap = spec.logit_scale, spec.logits_cap
    divisor = scale.divisor * temperature
    sums = torch.zeros(len(batch.scored_rows), device=hidden.device).index_add_(
        0, batch.owners, batch.gradients
    )
    for first in range(0, len(batch.scored_rows), HEAD_ROWS):
        rows = batch.scored_rows[first : first + HEAD_ROWS]
        inputs = hidden[rows]
        logits = functional.linear(inputs.float(), weight32)
        # the slope of a cap is 1 - (z / cap)^2
        slope = 1 - (scaled(logits, scale) / cap).square() if cap else None
        logits = scaled(logits, scale).div_(temperature) if cap else logits.div_(divisor)
        if len(batch.mask_words):
            mask_rows = batch.mask_rows[first : first + HEAD_ROWS]
            may = allowed(mask_rows, batch.mask_words, logits.shape[1])
            logits.masked_fill_(~may, -torch.inf)
        d_logits = torch.softmax(logits, dim=-1)
        d_logits.mul_(-sums[first : first + HEAD_ROWS, None])
        here = (batch.owners >= first) & (batch.owners < first + HEAD_ROWS)
        d_logits[batch.owners[here] - first, batch.targets[here]] += batch.gradients[here]
        d_logits = d_logits.div_(divisor)
        d_logits = (d_logits if slope is None else d_logits.mul_(slope)).to(hidden.dtype)
        d_hidden.index_add_(0, rows, d_logits @ weight)  # a row may occur under several masks
        if wanted:
            d_head += d_logits.T @ inputs
    return d_hidden, d_head
