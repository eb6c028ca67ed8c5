"""`Ops`: one signature for each operation, and what a backend promises about its bits."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from nano_inference.core.batch import ForwardBatch
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ops.latent import LatentOps
from nano_inference.ops.lora import Place, placed
from nano_inference.ops.moe import Moe
from nano_inference.parallel.context import SegmentRows
from nano_inference.sampling.logit_scale import LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch

FEW_ROWS = 8  # what `Ops.few_rows` may be given at most


Joint = Callable[..., None]  # (batch, out, *inputs); see `Ops.call`


class KvcacheView(Protocol):
    """The KV tensors, which attention reads and writes. Slots are of blocks, whatever stands behind
    them.

    Attributes:
        block_size: tokens of a block.
        format: how rows of keys and values are kept.
        head_dim: numbers of a row that are attended.
        keys, values: [layers of a unit, kv heads, units, block_size, numbers of a row]; of layers
            of several kinds [units, numbers of a unit].
        places: of each layer: which of a block's units it lies in, and where in there.
        states: a `StateView`, where the model has layers with a state; else None.
        unit_map: tells which units stand behind which block; None: a block is its unit.
    """

    block_size: int
    format: KvFormat
    head_dim: int
    keys: Tensor
    values: Tensor
    states: Any
    places: list[tuple[int, int]]
    unit_map: Any

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, num_kv_heads, head_dim] at slots [N]."""
        ...

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [...], float32, each [num_kv_heads, ..., head_dim]."""
        ...

    def lie(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer where they lie, each [num_kv_heads, units, block_size,
        head_dim] with strides of its own.
        """
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer as they are kept, not copied, each [num_kv_heads, slots,
        numbers of a row].
        """
        ...


class Norm(NamedTuple):
    """One RMS norm: x / rms(x) * (offset + weight), rounded to dtype once, at the end. No weight:
    only rounded.
    """

    weight: Tensor | None  # [width]
    eps: float
    offset: float
    dtype: torch.dtype


# of queries, of keys and of values; those that come last may be left out
HeadNorms = Sequence[Norm | None] | None


class PartialAttention(NamedTuple):
    """Attention cut at multiples of `SEGMENT` keys: who holds the keys computes states, the row's
    owner merges them.

    Attributes:
        plan: (rows, block_size) -> whatever `states` wants to know; once a step for each window.
        states: (q [M, heads, D], view, layer, plan, scale, cap) -> float32 [states, heads, width],
            row by row, each row's in order of keys.
        merge: (states, counts [N], dtype, sinks) -> [N, heads * D]: all states of each row in
            order of keys, and its heads' sinks, become the bits of undivided attention.
        width: (D) -> numbers of a state.
    """

    plan: Callable[[SegmentRows, int], Any]
    states: Callable[..., Tensor]  # the cap may be left out
    merge: Callable[..., Tensor]  # sinks may be left out
    width: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend. N rows; weights are [out, in]; the residual stream is float32, products read the
    weights' dtype.

    Attributes:
        name: of the backend; part of the numerics fingerprint.
        version: counted up whenever any bit of its results may change.
        schedule_invariant: whether a row's bits depend only on the weights and on the tokens before
            it.
        in_segments: whether `linear` adds up in the segments that it is given, so that 1, 2, 4 and
            8 ranks agree to the bit. Else a rank adds up its columns in one piece, and the number
            of ranks is part of the fingerprint.
        sums: the order in which products of bfloat16 are added up, `"pairs"` or `"tiles"`, where
            there is a choice (`EngineConfig.cpu_sums`).
        embed: (input_ids [N], weight [V, H], scale, part) -> scaled rows as the residual [N, H].
            With a part (first, vocab_size) the weight holds the tokens from `first` on alone; of
            others the row is zeros, negative ones: a sum over ranks changes no bit.
        linear: (x [N, in], weight, bias [out] or None, segments) -> [N, out], in the weights' dtype
            or in float32. Where segments are given, bounds of 1, 2, 4 or 8 pieces of the input's
            columns, each is added up by itself and they are merged neighbours first
            (`parallel.segments`), in float32: a rank's part of a sum over ranks.
        rms_norm: (x [N, H] to be added or None, residual [N, H], norm, scale) -> (normed [N, H],
            residual). scale * x is added, in float32.
        rope_and_store: (qkv [N, (heads + 2 kv heads) * D], cos, sin [positions, R / 2], positions
            [N], view, layer, slot_mapping [N], heads, kv heads, norms, interleaved, query scales,
            joint) -> q [N, heads, D] rotated; k and v are written to their slots. With joint v is
            k as it comes, and qkv has it once. With 0 kv heads qkv are queries and nothing is
            written: the layer reads another's keys. A norm of D weights is of each head, a wider
            one of all heads of a row. The first R <= D numbers of a head turn, the rest is as it
            was; a pair is (i, i + R / 2), or neighbours where they are interleaved. Queries are
            multiplied by the scale of their position, where there are scales [positions], before
            they are rounded.
        plan_attention: (batch, block_size, window) -> whatever `attention` wants to know; once a
            step for each window that the model has (0: none). A row at position p sees the keys
            above p - window.
        attention: (q [N, heads, D], view, layer, plan, scale, sinks, cap) -> [N, heads * D]. Sinks
            are None, or float32 [heads]: scores, neither scaled nor capped, that belong to no key
            and are the last term of the softmax's sum. A cap that is not 0 makes of a scaled score
            s cap * tanh(s / cap).
        short_conv: (projected [N, 3 * C], weights, batch, state view, layer) -> [N, C]: of three
            projections b, c and x of a row, c * conv(b * x), where b * x of the rows before it in
            its sequence is read from the view. See `ops.reference.state`. None: the backend has no
            such layers.
        delta_net: (projected [N, C + V + 2 * heads], weights, batch, state view, layer) -> [N, V]:
            of the inputs of a convolution, a gate, and two numbers a value head, what the gated
            delta rule gives, normalised by head and gated. See `ops.reference.state`.
        sigmoid_gate: (x [N, C], gate [N, C]) -> x * sigmoid(gate) [N, C].
        gate: (gate and up [N, 2 * inner], activation) -> activation(gate) * up [N, inner]; with
            `"clamped_swiglu"` both are bounded and up has 1 added: see `ops.reference.gate`.
        moe: (x [N, H], experts, exchange or None, note or None, routed or None) -> float32 [N, H]:
            a layer of experts; see `ops.moe.mixture`.
        logits: (hidden [L, H], weight [V, H], `LogitScale`) -> float32 [L, V].
        sample: (hidden [L, H], weight, scale, batch) -> `Draw` from these logits.
        sample_logits: (logits [L, V], batch) -> the same `Draw`, from logits that are there
            already.
        gather_logprobs: (hidden [L, H], weight, scale, token_ids [L], temperatures [L]) ->
            float32 [L], under softmax of these logits over the temperature (above 0): the same bits
            as `sample` reports of that token.
        score_logits: (logits [L, V], token_ids [L], temperatures [L]) -> the same, from logits that
            are there already.
        allocate: ([out, in], dtype, device, latent, form, segments) -> a weight as the products
            read it, not initialised: a tensor, or what keeps the numbers in an order of its own,
            like `ops.cpu.weights.PackedWeight`. With the sizes of attention over latents it is the
            one that `LatentOps` reads. With a format (`ops.quantised`) it keeps codes, like
            `ops.reference.quantised.QuantisedWeight`: products have the bits of
            `quantised.product`, in the segments that `linear` will be given; `dtype` is then what
            they round their inputs to first.
        compile: (trunk, batch, view, dtype) -> a function of a batch that gives what `trunk(ops,
            batch, view)` gives; None: the trunk is called in every step.
        call: (batch, function, inputs, columns, dtype) -> [N, columns]: a Python function in the
            middle of a trunk, such as what ranks tell each other. It is called as `function(batch,
            out, *inputs)` and fills `out`; also where a batch has no rows.
        columns: (x [N, C], start, stop) -> some of the columns, not copied.
        few_rows: (trunk, batch, view) -> what `trunk(ops, batch, view)` gives but for roundings, of
            at most `FEW_ROWS` rows, in fewer kernels; for steps that are captured. None: there is
            no other way.
        partial: attention over a part of the keys. None: the backend computes it whole.
        head_parts: draws and scores where each rank holds a part of the head. None: ranks gather
            the logits.
        latent: what attention over latents needs beside the others. None: the backend lacks it.
        lora: (y [N, out], x [N, in], name of the weight, batch) -> the products y of x with what
            the adapter of each row adds (`ops.lora`), in the dtype of y, which may be written.
            None: the backend has no adapters.
        placed: (places, each `ops.lora.Place`) -> a function of as many matrices, which copies each
            to its place, and returns the first that has a number that is not finite, -1 if none
            has.
    """

    name: str
    version: int
    schedule_invariant: bool
    in_segments: bool
    embed: Callable[..., Tensor]  # part may be left out
    linear: Callable[..., Tensor]  # segments may be left out
    rms_norm: Callable[[Tensor | None, Tensor, Norm, float], tuple[Tensor, Tensor]]
    rope_and_store: Callable[..., Tensor]  # norms and what follows may be left out
    plan_attention: Callable[[ForwardBatch, int, int], Any]
    attention: Callable[..., Tensor]  # sinks and cap may be left out
    gate: Callable[[Tensor, str], Tensor]
    moe: Moe  # exchange and what follows may be left out
    logits: Callable[[Tensor, Any, LogitScale], Tensor]
    sample: Callable[[Tensor, Any, LogitScale, SamplingBatch], Draw]
    sample_logits: Callable[[Tensor, SamplingBatch], Draw]
    gather_logprobs: Callable[[Tensor, Any, LogitScale, Tensor, Tensor], Tensor]
    score_logits: Callable[[Tensor, Tensor, Tensor], Tensor]
    allocate: Callable[..., Any]  # latent and what follows may be left out
    compile: (
        Callable[
            [Callable[..., Tensor], ForwardBatch, KvcacheView, torch.dtype],
            Callable[[ForwardBatch], Tensor],
        ]
        | None
    )
    call: Callable[[ForwardBatch, Joint, Sequence[Tensor], int, torch.dtype], Tensor]
    columns: Callable[[Tensor, int, int], Tensor]
    short_conv: Callable[..., Tensor] | None = None
    delta_net: Callable[..., Tensor] | None = None
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] | None = None
    few_rows: Callable[[Callable[..., Any], ForwardBatch, KvcacheView], Tensor] | None = None
    partial: PartialAttention | None = None
    head_parts: "HeadParts | None" = None
    latent: LatentOps | None = None
    lora: Callable[[Any, Any, str, Any], Any] | None = None
    placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]] = placed
    sums: Literal["pairs", "tiles"] | None = None


class HeadParts(NamedTuple):
    """`sample` and `gather_logprobs` of hidden rows that all ranks have, by a weight of which each
    has some rows.

    Both take the rank's rows of the weight and say in `VocabPart` which these are. They are
    generators as `sampling.parts` describes them; what they return has the bits of one rank with
    the whole weight. Batches that are sampled so have no filters and no best tokens.

    Attributes:
        block: every rank's tokens must begin with a multiple of this.
        sample: (hidden [L, H], weight [v, H], scale, batch, part) -> `Draw`.
        score: (hidden [L, H], weight [v, H], scale, token_ids [L], temperatures [L], part) ->
            float32 [L].
    """

    block: int
    sample: Callable[
        [Tensor, Any, LogitScale, SamplingBatch, VocabPart], Generator[Tensor, list[Tensor], Draw]
    ]
    score: Callable[
        [Tensor, Any, LogitScale, Tensor, Tensor, VocabPart],
        Generator[Tensor, list[Tensor], Tensor],
    ]


def call(
    batch: ForwardBatch, function: Joint, inputs: Sequence[Tensor], columns: int, dtype: torch.dtype
) -> Tensor:
    """`Ops.call` of a backend that computes at once."""
    out = torch.empty((len(batch.input_ids), columns), dtype=dtype, device=batch.input_ids.device)
    function(batch, out, *inputs)
    return out


def embed_part(
    embed: Callable[[Tensor, Any, float], Tensor],
    input_ids: Tensor,
    weight: Any,
    scale: float,
    part: tuple[int, int],
) -> Tensor:
    """`Ops.embed` of a part of the vocabulary, by what embeds tokens that are all there."""
    places = input_ids - part[0]
    here = (places >= 0) & (places < weight.shape[0])
    rows = embed(torch.where(here, places, 0), weight, scale)
    return torch.where(here[:, None], rows, -0.0)


def columns(x: Tensor, start: int, stop: int) -> Tensor:
    """`Ops.columns` of tensors."""
    return x[:, start:stop]


Operations = Any  # an `Ops`, or what takes the same calls and records them


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides the bits of this engine. Two engines with the same fingerprint agree to the bit.

    Attributes:
        backend, version: of the operations; the batch-invariant kernels of CUDA are another backend
            than the others.
        dtype: of weights, activations and, unless `kv_cache` says otherwise, KV cache.
        device: kind of device, of a GPU with its generation; torch's own products decide the bits
            on each.
        torch: version of torch, whose products the reference backend is made of.
        schedule_invariant: whether results are independent of batching, chunking, caching and
            preemption.
        tensor_parallel: how many ranks share a layer, where that decides bits; see
            `Ops.in_segments`.
        state_tokens: from one state to the next, where that decides bits; else 0.
        quantization: of the weights, one of `ops.quantised.QUANTIZATIONS`; None: there is none.
        kv_cache: how keys and values are kept, where that is not `dtype`; else None.
        sums: `Ops.sums`, where it decides bits and is not `"pairs"`; else None.
    """

    backend: str
    version: int
    dtype: str
    device: str
    torch: str
    schedule_invariant: bool
    tensor_parallel: int = 1
    state_tokens: int = 0
    quantization: str | None = None
    kv_cache: str | None = None
    sums: str | None = None

    @property
    def fingerprint(self) -> str:
        """One line that every sample carries."""
        ranks = "" if self.tensor_parallel == 1 else f"/tensor-parallel-{self.tensor_parallel}"
        states = f"/states-of-{self.state_tokens}" if self.state_tokens else ""
        codes = "" if self.quantization is None else f"/{self.quantization}"
        kept = "" if self.kv_cache is None else f"/kv-{self.kv_cache}"
        sums = "" if self.sums is None else f"/{self.sums}"
        own = f"{self.backend}-{self.version}/{self.dtype}/{self.device}/torch-{self.torch}"
        return own + sums + ranks + states + codes + kept
