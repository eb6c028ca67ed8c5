"""Gradients of logprobs with respect to the head and the rows that it reads, by the kernels."""

import torch
from torch import Tensor

from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.gradients import LogitRule
from nano_inference.rl.backward.products import product, product_gradient
from nano_inference.rl.backward.weights import Totals, Weights
from nano_inference.rl.micro_batch import MicroBatch


def head_gradient(
    weights: Weights,
    spec: ModelSpec,
    name: str,
    hidden: Tensor,
    batch: MicroBatch,
    temperature: float,
    totals: Totals,
) -> Tensor:
    """Return the gradient of hidden rows, float32 [N, H], and add the one of the head.

    Args:
        weights: Weights of the decoder.
        spec: Description of the model.
        name: Name of the head's matrix.
        hidden: Rows after the last norm, in the dtype of products.
        batch: Rows and the gradients of their targets' logprobs.
        temperature: Temperature of the logprobs, above 0.
        totals: Receives the gradient of the head.
    """
    kernels = weights.kernels
    rule = LogitRule(spec.logits_divisor, spec.logits_cap, temperature)
    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    targets = _by_row(batch)
    at_once = max(16, kernels.most_logits // spec.vocab_size // 16 * 16)
    for first in range(0, len(batch.scored_rows), at_once):
        rows = slice(first, first + at_once)
        places = batch.scored_rows[rows]
        inputs = hidden[places]
        logits = product(weights, name, inputs)
        starts = targets[0][first : first + len(places) + 1].contiguous()
        masks = batch.mask_rows[rows].contiguous(), batch.mask_words
        kernels.logit_gradient(logits, (starts, *targets[1:]), masks, rule)
        d_inputs = product_gradient(weights, name, inputs, logits, totals)
        kernels.add_rows(d_inputs, places, d_hidden)  # a row may occur under several masks
    return d_hidden


def _by_row(batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets sorted by row and token: starts [U + 1], token ids, gradients."""
    order = torch.argsort(batch.targets, stable=True)
    order = order[torch.argsort(batch.owners[order], stable=True)]
    rows = torch.arange(len(batch.scored_rows) + 1, device=order.device)
    starts = torch.searchsorted(batch.owners[order], rows)
    return starts, batch.targets[order], batch.gradients[order]
