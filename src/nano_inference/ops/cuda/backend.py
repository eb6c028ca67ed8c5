"""The CUDA backend as `Ops`."""

from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from nano_inference.ops.cuda import matmul, sampling
from nano_inference.ops.cuda.attention import Attention
from nano_inference.ops.cuda.delta import delta_net
from nano_inference.ops.cuda.few_rows import few_rows, product
from nano_inference.ops.cuda.few_whole_rows import rounds_rows
from nano_inference.ops.cuda.latent import LATENT_OPS
from nano_inference.ops.cuda.lora import GroupedLora, placed
from nano_inference.ops.cuda.microscaling import MXFP4, MicroscaledWeight
from nano_inference.ops.cuda.moe import moe, record_experts
from nano_inference.ops.cuda.quantised import AlignedWeight, quantised_embedding, quantised_product
from nano_inference.ops.cuda.rows import embed, gate, normed_rows, rms_norm, rope_and_store
from nano_inference.ops.cuda.state import short_conv, sigmoid_gate
from nano_inference.ops.formats import Format, Stack
from nano_inference.ops.interface import (
    Ops,
    StepAdapters,
    TensorArena,
    Weight,
    call,
    columns,
    embed_part,
)
from nano_inference.ops.reference.quantised import QuantisedWeight
from nano_inference.ops.settings import Latent
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.scaling import scaled
from nano_inference.sampling.tensors import SamplingBatch

VERSION = 4  # raised whenever any bit of the results may change
# rows whose logits are in memory together if only one logprob per row is needed
SCORE_TILE = 1024


class CudaOps:
    """The operations of `Ops` on tensors.

    Args:
        batch_invariant: If True, a row's bits depend only on its own context.
        overlaps: If True, rotary embedding and attention start while their predecessor runs.
    """

    rms_norm = staticmethod(rms_norm)
    gate = staticmethod(gate)
    moe = staticmethod(moe)
    short_conv = staticmethod(short_conv)
    delta_net = staticmethod(delta_net)
    sigmoid_gate = staticmethod(sigmoid_gate)
    sample_logits = staticmethod(sampling.draw)
    score_logits = staticmethod(sampling.score)
    call = staticmethod(call)
    columns = staticmethod(columns)
    placed = staticmethod(placed)
    normed_rows = staticmethod(normed_rows)
    record_experts = staticmethod(record_experts)
    latent = LATENT_OPS
    has_adapters = True

    def __init__(self, *, batch_invariant: bool, overlaps: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self.rope_and_store = partial(rope_and_store, overlaps=overlaps)
        kernels = Attention(batch_invariant=batch_invariant, overlaps=overlaps)
        self.plan_attention, self.attention = kernels.plan, kernels.attend
        adapters = GroupedLora()
        self.lora = adapters.lora
        self.step_adapters = StepAdapters(adapters.group, adapters.addresses)

    def embed(
        self,
        input_ids: Tensor,
        weight: Weight,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
    ) -> Tensor:
        """Implement `Ops.embed` for plain and for quantized weights."""
        if part is not None:
            return embed_part(self.embed, input_ids, weight, scale, part)
        if isinstance(weight, QuantisedWeight):
            return quantised_embedding(input_ids, weight, scale)
        assert isinstance(weight, Tensor)
        return embed(input_ids, weight, scale)

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        latent: Latent | None = None,
        form: Format | Stack | None = None,
        segments: tuple[int, ...] | None = None,
        arena: TensorArena | None = None,
    ) -> Weight:
        """Implement `Ops.allocate` for the formats `"int8"`, `"fp8"` and MXFP4. Memory comes from
        `arena`, if there is one.
        """
        if isinstance(form, Format):
            kind = MicroscaledWeight if form == MXFP4 else AlignedWeight
            return kind(shape, dtype, device, form, segments, arena)
        if arena is not None:
            return arena.take(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Implement `Ops.linear`. Columns are added up in one piece even with segments
        (`Ops.in_segments` is False), unless the weight is quantized.
        """
        if isinstance(weight, QuantisedWeight):
            return _coded_product(x, weight, bias)
        assert isinstance(weight, Tensor)
        if self.batch_invariant:
            return matmul.invariant_product(
                x, weight, bias, weight.dtype if segments is None else torch.float32
            )
        if segments is not None:
            product = matmul.product_float32(x, weight)
            return product if bias is None else product + bias
        return matmul.product(x, weight, bias)

    def logits(self, hidden: Tensor, weight: Weight, scale: LogitScale = UNSCALED) -> Tensor:
        if isinstance(weight, QuantisedWeight):
            return scaled(_coded_product(hidden, weight), scale)
        assert isinstance(weight, Tensor)
        if self.batch_invariant:
            whole = matmul.invariant_product(hidden, weight, None, torch.float32)
        else:
            whole = matmul.product_float32(hidden, weight)
        return scaled(whole, scale)

    def sample(
        self, hidden: Tensor, weight: Weight, scale: LogitScale, batch: SamplingBatch
    ) -> Draw:
        return sampling.draw(self.logits(hidden, weight, scale), batch)

    def gather_logprobs(
        self,
        hidden: Tensor,
        weight: Weight,
        scale: LogitScale,
        token_ids: Tensor,
        temperatures: Tensor,
    ) -> Tensor:
        tiles = zip(*(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True)
        return torch.cat(
            [sampling.score(self.logits(rows, weight, scale), ids, own) for rows, ids, own in tiles]
        )


def _coded_product(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Multiply by a quantized weight, float32 [N, M]."""
    if rounds_rows(x, weight):
        return product(x, None, weight, bias)
    if not weight.form.floats:
        return quantised_product(x, weight, bias)
    added = None if bias is None else bias.to(weight.dtype)
    return matmul.invariant_product(x, weight, added, torch.float32)


def cuda_ops(*, batch_invariant: bool, overlaps: bool = False) -> Ops:
    """Return the backend as `Ops`.

    Args:
        batch_invariant: If True, a row's bits depend only on its own context. This is slower.
        overlaps: If True, rotary embedding, attention and products of a few rows start while
            their predecessor runs (sm_90 and later). Changes no bit.
    """
    ops = CudaOps(batch_invariant=batch_invariant, overlaps=overlaps)
    names = (field.name for field in fields(Ops))
    operations = {name: getattr(ops, name) for name in names if hasattr(ops, name)}
    plain = Ops("cuda", VERSION, batch_invariant, in_segments=False, compile=None, **operations)
    return replace(plain, few_rows=partial(few_rows, plain, overlaps=overlaps))
