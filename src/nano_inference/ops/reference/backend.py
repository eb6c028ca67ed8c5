"""The reference backend: plain torch on CPU and CUDA tensors. It is the specification and prefers
clarity to speed.

Its law (docs/design.md, "Invariance"): the order in which a row's numbers are added depends neither
on the number of other rows nor on the row's index. Products run on tiles of exactly 16 rows,
because a vendor's product may choose another order for another number of rows. All other operations
work along single rows.
"""

import functools
from collections.abc import Generator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.ops.formats import Format, Stack
from nano_inference.ops.interface import (
    HeadParts,
    KvcacheView,
    LatentOps,
    LatentWeights,
    Ops,
    PartialAttention,
    RopeArgs,
    Weight,
    call,
    columns,
    embed_part,
)
from nano_inference.ops.lora import Adapted
from nano_inference.ops.lora import lora as add_lora
from nano_inference.ops.moe import Exchange, Experts, MoeSteps, Note, mixture
from nano_inference.ops.reference.attention import (
    attention,
    attention_states,
    merge_states,
    plan_attention,
    plan_states,
)
from nano_inference.ops.reference.quantised import QuantisedWeight, quantised_linear
from nano_inference.ops.reference.state import delta_net, short_conv, sigmoid, sigmoid_gate
from nano_inference.ops.rowwise import Norm, gate, normed_rows
from nano_inference.ops.settings import Latent, Routing
from nano_inference.ops.stacked import StackedWeight
from nano_inference.parallel.bounds import check_segments
from nano_inference.parallel.segments import tree_sum
from nano_inference.sampling.logit_scale import UNSCALED, LogitScale
from nano_inference.sampling.logprobs import VOCAB_BLOCK, gather_logprobs
from nano_inference.sampling.parts import VocabPart, sample_part, score_part
from nano_inference.sampling.pipeline import divide
from nano_inference.sampling.sample import Draw, sample
from nano_inference.sampling.scaling import scaled
from nano_inference.sampling.tensors import SamplingBatch

ROW_TILE = 16
VOCAB_TILE = 4096  # rows of the head that are cast to float32 together
SCORE_TILE = 256  # rows whose logits are in memory together if only one logprob per row is needed

EXPERT_TILE = 512  # rows whose products with all of their experts are in memory together


def embed(
    input_ids: Tensor, weight: Weight, scale: float = 1.0, part: tuple[int, int] | None = None
) -> Tensor:
    """Return rows of the embedding, scaled, as the float32 residual stream."""
    if part is not None:
        return embed_part(embed, input_ids, weight, scale, part)
    if isinstance(weight, QuantisedWeight):
        rows = weight.part(input_ids).codes().numbers()
    else:
        assert isinstance(weight, Tensor)
        rows = functional.embedding(input_ids, weight).float()
    return rows if scale == 1 else rows * scale


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, segments: tuple[int, ...] | None = None
) -> Tensor:
    """Compute x @ weight.T (+ bias) in tiles of exactly 16 rows, the last one padded."""
    if isinstance(weight, StackedWeight):
        sums = torch.cat([quantised_linear(x, part, None) for part in weight.parts], dim=1)
        return sums if bias is None else sums + bias.to(weight.dtype).float()
    if isinstance(weight, QuantisedWeight):
        if not weight.form.floats:
            return quantised_linear(x, weight, bias)
        codes = weight.codes()
        sums = linear(x.to(weight.dtype).float(), codes.values()) * codes.scales.T
        return sums if bias is None else sums + bias.to(weight.dtype).float()
    assert isinstance(weight, Tensor)
    if segments is not None:
        return _linear_of_segments(x, weight, bias, segments)
    whole = _whole_vectors(weight)
    padded = functional.pad(x, (0, whole.shape[1] - x.shape[1], 0, -len(x) % ROW_TILE))
    out = torch.empty((len(padded), len(whole)), dtype=x.dtype, device=x.device)
    for start in range(0, len(padded), ROW_TILE):
        out[start : start + ROW_TILE] = functional.linear(padded[start : start + ROW_TILE], whole)
    out = out[: len(x), : len(weight)]
    return out if bias is None else out + bias


def _linear_of_segments(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: tuple[int, ...]
) -> Tensor:
    """Multiply the columns of each segment separately in float32, and add the sums in pairs."""
    check_segments(segments, weight.shape[1])
    columns, bounds = _whole_segments(segments)
    x, whole = x.float(), weight.float()
    if columns is not None:
        places = columns.to(x.device)
        x, whole = (
            each.new_zeros((len(each), bounds[-1])).index_copy_(1, places, each)
            for each in (x, whole)
        )
    whole = _whole_vectors(whole)
    padded = functional.pad(x, (0, 0, 0, -len(x) % ROW_TILE))
    out = torch.empty((len(padded), len(whole)), device=x.device)
    for start in range(0, len(padded), ROW_TILE):
        out[start : start + ROW_TILE] = tree_sum(
            _products(padded[start : start + ROW_TILE], whole, bounds)
        )
    out = out[: len(x), : len(weight)]
    return out if bias is None else out + bias.float()


def _products(rows: Tensor, weight: Tensor, bounds: tuple[int, ...]) -> Sequence[Tensor] | Tensor:
    """Return the products of 16 rows, one per segment. Segments of equal width take a single call,
    with the bits of separate calls.
    """
    count, width = len(bounds) - 1, bounds[1]
    if all(end - first == width for first, end in pairwise(bounds)):
        segments = rows.view(ROW_TILE, count, width).transpose(0, 1)
        return torch.bmm(segments, weight.view(len(weight), count, width).permute(1, 2, 0))
    return [
        functional.linear(rows[:, first:end], weight[:, first:end])
        for first, end in pairwise(bounds)
    ]


@functools.cache
def _whole_segments(segments: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, ...]]:
    """Pad all segments to whole vectors. Return the new index of each column, and the new bounds.
    None instead of indices: no column moves.

    Empty segments become as wide as the widest one.
    """
    wide = [-(-(end - first) // ROW_TILE) * ROW_TILE for first, end in pairwise(segments)]
    bounds = (0, *accumulate(width or max(*wide, ROW_TILE) for width in wide))
    starts = zip(bounds, pairwise(segments), strict=False)
    places = [start + column for start, (first, end) in starts for column in range(end - first)]
    return None if bounds == segments else torch.tensor(places, dtype=torch.int64), bounds


def rms_norm(
    x: Tensor | None, residual: Tensor, norm: Norm, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add scale * x to the residual stream, then normalize it to unit root mean square
    (arXiv:1910.07467), in float32.
    """
    if x is not None:
        residual = residual + (x.float() if scale == 1 else x.float() * scale)
    return normed_rows(residual, norm), residual


def rope_and_store(
    qkv: Tensor,
    rope: RopeArgs,
    positions: Tensor,
    slot_mapping: Tensor,
    view: KvcacheView,
    layer: int,
) -> Tensor:
    """Rotate queries and keys, store keys and values, return queries in the dtype of keys."""
    dtype = view.format.dtype  # qkv of a quantized weight is float32
    num_heads, num_kv_heads = rope.num_heads, rope.num_kv_heads
    count = num_heads + (1 if rope.joint else 2) * num_kv_heads
    heads = qkv.unflatten(1, (count, -1))  # also works for zero rows
    turning, values = heads[:, : num_heads + num_kv_heads], heads[:, count - num_kv_heads :]
    of_queries, of_keys, of_values = rope.norms
    if of_queries is not None or of_keys is not None:
        parts = turning.split([num_heads, num_kv_heads], dim=1)
        of_parts = zip(parts, (of_queries, of_keys), strict=True)
        turning = torch.cat([_normed_heads(*each) for each in of_parts], dim=1)
    turned = rotate(turning.float(), rope.cos[positions], rope.sin[positions], rope.interleaved)
    queries, keys = turned[:, :num_heads], turned[:, num_heads:]
    if rope.query_scales is not None:
        queries = queries * rope.query_scales[positions][:, None, None]
    if num_kv_heads:
        view.write(layer, slot_mapping, keys.to(dtype), _normed_heads(values, of_values))
    return queries.to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of numbers in [N, heads, D] by angles [N, R / 2]. The numbers after the first R
    are unchanged (arXiv:2104.09864).
    """
    cos, sin = cos[:, None, :], sin[:, None, :]
    turning, rest = heads.split([2 * cos.shape[-1], heads.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _normed_heads(heads: Tensor, norm: Norm | None) -> Tensor:
    """Normalize [N, heads, D] over D, or over all heads of a row if the norm is that wide."""
    if norm is None or not heads.shape[1]:
        return heads
    width = heads.shape[-1] if norm.weight is None else len(norm.weight)
    return normed_rows(heads.float().flatten(1).unflatten(1, (-1, width)), norm).view(heads.shape)


def logits(hidden: Tensor, weight: Weight, scale: LogitScale = UNSCALED) -> Tensor:
    """Compute hidden @ weight.T, scaled, in float32 for any dtype of the weights: a rounded logit
    would make the logprob wrong.
    """
    starts = range(0, weight.shape[0], VOCAB_TILE)
    if isinstance(weight, QuantisedWeight):
        parts = (weight.part(slice(first, first + VOCAB_TILE)) for first in starts)
        tiles = [linear(hidden, part) for part in parts]
    else:
        assert isinstance(weight, Tensor)
        tiles = [
            linear(hidden.float(), weight[first : first + VOCAB_TILE].float()) for first in starts
        ]
    whole = torch.cat(tiles, dim=1)
    return scaled(whole, scale)


def draw(hidden: Tensor, weight: Weight, scale: LogitScale, batch: SamplingBatch) -> Draw:
    """Draw the samples of a step from the logits of its rows."""
    return sample(logits(hidden, weight, scale), batch)


def score(
    hidden: Tensor, weight: Weight, scale: LogitScale, token_ids: Tensor, temperatures: Tensor
) -> Tensor:
    """Compute logprobs of the given tokens in tiles of rows, which bounds the memory of logits."""
    scores = [
        score_logits(logits(rows, weight, scale), targets, own)
        for rows, targets, own in zip(
            *(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True
        )
    ]
    return torch.cat(scores)


def score_logits(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """Compute logprobs of the given tokens [L] from logits [L, V]."""
    return gather_logprobs(divide(logits, temperatures), token_ids)


def draw_part(
    hidden: Tensor, weight: Weight, scale: LogitScale, batch: SamplingBatch, part: VocabPart
) -> Generator[Tensor, list[Tensor], Draw]:
    """Implement `HeadParts.sample` in torch."""
    return sample_part(logits(hidden, weight, scale), batch, part)


def score_of_part(
    hidden: Tensor,
    weight: Weight,
    scale: LogitScale,
    token_ids: Tensor,
    temperatures: Tensor,
    part: VocabPart,
) -> Generator[Tensor, list[Tensor], Tensor]:
    """Implement `HeadParts.score` in torch."""
    scores = []
    for rows, targets, row_temperatures in zip(
        *(t.split(SCORE_TILE) for t in (hidden, token_ids, temperatures)), strict=True
    ):
        scores.append(
            (yield from score_part(logits(rows, weight, scale), targets, row_temperatures, part))
        )
    return torch.cat(scores)


def allocate(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    latent: Latent | None = None,
    form: Format | Stack | None = None,
    segments: tuple[int, ...] | None = None,
) -> Weight:
    """Allocate a weight: a plain tensor, or a `QuantisedWeight` if it has a format."""
    if isinstance(form, Stack):
        sizes = [((rows, shape[1]), each) for rows, each in form.parts]
        return StackedWeight(
            form, [QuantisedWeight(size, dtype, device, each, segments) for size, each in sizes]
        )
    if form is not None:
        return QuantisedWeight(shape, dtype, device, form, segments)
    return torch.empty(shape, dtype=dtype, device=device)


def _whole_vectors(weight: Tensor) -> Tensor:
    """Pad both sizes of a weight to multiples of 16. Real models need no padding. For other sizes,
    a vendor's product treats the remainder differently depending on the number of threads.
    """
    missing = (0, -weight.shape[1] % ROW_TILE, 0, -weight.shape[0] % ROW_TILE)
    return functional.pad(weight, missing) if any(missing) else weight


def route(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Implement `MoeSteps.route` in float32."""
    routing, shared = experts.routing, experts.shared
    logits = linear(x.float(), experts.router.float())
    if routing.logit_scale != 1:
        logits = logits * routing.logit_scale
    if experts.biases is not None:
        logits = logits + experts.biases.router
    logits, gates = logits[:, : experts.num_experts], logits[:, experts.num_experts :]
    if routing.scores == "softmax":
        sizes = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        whole = sizes.sum(dim=-1, keepdim=True)
    else:
        sizes, whole = sigmoid(logits), torch.ones((len(x), 1), device=x.device)
    keys = logits if experts.bias is None else sizes / whole + experts.bias
    if routing.groups > 1:
        keys = keys.masked_fill(~_in_best_groups(keys, routing), -torch.inf)
    ids = _best(keys, routing.per_token).sort(dim=-1).values
    chosen = sizes.gather(1, ids)
    total = chosen.sum(dim=-1, keepdim=True) if routing.renormalized else whole
    weights = chosen / torch.maximum(total, routing.floor * whole) * routing.scale
    if shared is None:
        return ids, weights
    of_shared = sigmoid(gates) if shared.gated else torch.ones_like(whole)
    return ids, torch.cat((weights, of_shared), dim=1)


def _best(keys: Tensor, count: int) -> Tensor:
    """Return the columns with the highest keys [N, C], highest first. The first of several equal
    keys wins.
    """
    return keys.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(keys: Tensor, routing: Routing) -> Tensor:
    """Return a mask [N, E] of the experts in groups that the row may select from."""
    groups = keys.unflatten(1, (routing.groups, -1))
    best = groups.sort(dim=-1, descending=True).values[:, :, : routing.group_best].sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept = kept.scatter(1, _best(best, routing.groups_kept), True)
    return kept[:, :, None].expand(groups.shape).flatten(1)


def products(x: Tensor, rows: Tensor, held: Tensor, experts: Experts) -> Tensor:
    """Implement `MoeSteps.products`. The rows of each expert are a separate product, in which a
    row's bits depend on that row only.
    """
    dtype = torch.float32 if isinstance(experts.down, QuantisedWeight) else x.dtype
    out = torch.empty((len(rows), x.shape[1]), dtype=dtype, device=x.device)
    gate_ups, downs = experts.gate_up.chunk(experts.num_held), experts.down.chunk(experts.num_held)
    nothing = (None,) * experts.num_held
    up_biases, down_biases = (nothing, nothing)
    if experts.biases is not None:
        up_biases = experts.biases.gate_up.chunk(experts.num_held)
        down_biases = experts.biases.down.chunk(experts.num_held)
    for expert in held.unique().tolist():
        members = (held == expert).nonzero()[:, 0]
        product = linear(x[rows[members]], gate_ups[expert], up_biases[expert])
        inner = gate(product, experts.activation)
        out[members] = linear(inner, downs[expert], down_biases[expert])
    return out


def combine(products: Tensor, weights: Tensor) -> Tensor:
    """Implement `MoeSteps.combine` in rising order."""
    total = torch.zeros((len(products), products.shape[2]), device=products.device)
    for k in range(products.shape[1]):
        total += weights[:, k, None] * products[:, k].float()
    return total


MOE = MoeSteps(route, products, combine)


def moe(
    x: Tensor,
    experts: Experts,
    exchange: Exchange | None = None,
    note: Note | None = None,
    routed: Tensor | None = None,
) -> Tensor:
    """Compute a layer of experts as `ops/moe.py` defines it."""
    return mixture(MOE, x, experts, exchange, EXPERT_TILE, note, routed)


def store_latents(
    q: Tensor,
    c: Tensor,
    weights: LatentWeights,
    rope: RopeArgs,
    positions: Tensor,
    slot_mapping: Tensor,
    view: KvcacheView,
    layer: int,
) -> Tensor:
    """Implement `LatentOps.store` in torch."""
    met = meet(q, c, weights)
    return rope_and_store(met, rope, positions, slot_mapping, view, layer)


def meet(q: Tensor, c: Tensor, weights: LatentWeights) -> Tensor:
    """Compute q [N, heads * (plain + rotary)] and c [N, rank + rotary] -> the queries and, twice,
    the key, [N, (heads + 2) * key], with a separate product for each head.

    `rope_and_store` takes the result as the input of one KV head.
    """
    kv, norm, sizes = weights
    assert isinstance(kv, Tensor)
    q = q.to(kv.dtype)  # q of a quantized weight is float32
    of_heads = q.unflatten(1, (-1, sizes.plain + sizes.rotary))
    num_heads = of_heads.shape[1]
    out = q.new_empty((len(q), num_heads + 2, sizes.key))
    out[:, :num_heads, : sizes.rotary] = of_heads[:, :, sizes.plain :]
    for head, rows in enumerate(kv.unflatten(0, (num_heads, -1))):
        keys = rows[: sizes.plain].T.contiguous()
        out[:, head, sizes.rotary :] = linear(of_heads[:, head, : sizes.plain], keys)
    out[:, num_heads:, : sizes.rotary] = c[:, None, sizes.rank :]
    out[:, num_heads:, sizes.rotary :] = normed_rows(c[:, : sizes.rank], norm)[:, None]
    return out.flatten(1)


def latent_values(attended: Tensor, weights: LatentWeights) -> Tensor:
    """Implement `LatentOps.values` with a separate product for each head."""
    kv, _, sizes = weights
    assert isinstance(kv, Tensor)
    of_heads = attended.unflatten(1, (-1, sizes.key))[:, :, sizes.rotary :]
    by_head = kv.unflatten(0, (of_heads.shape[1], -1))
    values = [linear(of_heads[:, head], rows[sizes.plain :]) for head, rows in enumerate(by_head)]
    return torch.cat(values, dim=1)


def lora(y: Tensor, x: Tensor, name: str, rows: Adapted) -> Tensor:
    """Implement `Ops.lora` with the products of this backend."""
    return add_lora(y, x, name, rows, linear)


def reference_ops() -> Ops:
    """Return the reference backend as `Ops`."""
    return Ops(
        name="reference",
        version=7,
        schedule_invariant=True,
        in_segments=True,
        embed=embed,
        linear=linear,
        rms_norm=rms_norm,
        rope_and_store=rope_and_store,
        plan_attention=plan_attention,
        attention=attention,
        gate=gate,
        short_conv=short_conv,
        delta_net=delta_net,
        sigmoid_gate=sigmoid_gate,
        moe=moe,
        logits=logits,
        sample=draw,
        sample_logits=sample,
        gather_logprobs=score,
        score_logits=score_logits,
        allocate=allocate,
        compile=None,
        partial=PartialAttention(
            plan_states, attention_states, merge_states, lambda head_dim: 2 + head_dim
        ),
        call=call,
        columns=columns,
        head_parts=HeadParts(VOCAB_BLOCK, draw_part, score_of_part),
        latent=LatentOps(store_latents, latent_values),
        lora=lora,
        has_adapters=True,
    )
