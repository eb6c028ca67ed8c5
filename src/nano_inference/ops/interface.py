"""`Ops`: the operations of a backend, and what it promises about their bits.

`Operations` are those of a trunk. They work on `X`, which stands for rows: tensors in `Ops`,
buffers in a recorder (`ops/cpu/recorder.py`), values that are computed later in
`ops/cuda/few_rows.py`. Each operation is a Protocol below, with its signature and its meaning.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.formats import Format
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ops.lora import Place, placed
from nano_inference.ops.moe import Exchange, Experts, Note
from nano_inference.ops.settings import Latent
from nano_inference.ops.state import DeltaWeights, ShortConvWeights, StateView
from nano_inference.parallel.context import SegmentRows
from nano_inference.sampling.logit_scale import LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch

FEW_ROWS = 8  # what `Ops.few_rows` may be given at most

X = TypeVar("X")  # rows
X_co = TypeVar("X_co", covariant=True)

# Fills `out` from the inputs, in the middle of a trunk: (batch, out, *inputs); see `Call`.
Joint = Callable[Concatenate[ForwardBatch, Tensor, ...], None]
Segments = tuple[int, ...]  # bounds of columns that are added up by themselves


class Weight(Protocol):
    """A matrix that `Ops.allocate` made: a tensor, or a class of the backend that made it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what products read."""
        ...


class UnitRows(Protocol):
    """Which units stand behind which blocks."""

    def units(self) -> Tensor:
        """Units [units of a block, blocks] as they are now."""
        ...


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
    places: list[tuple[int, int]]

    @property
    def states(self) -> StateView | None:
        """See the attributes."""
        ...

    @property
    def unit_map(self) -> UnitRows | None:
        """See the attributes."""
        ...

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


class LatentOps(NamedTuple, Generic[X]):
    """Attention over latents: what lies between its products and the attention itself.

    A token's keys and values of all heads are products of one latent (MLA, arXiv:2405.04434), and
    the cache holds the latent. A head's queries are brought to where the latents are, and the
    attended latents to the head's values: (q W_k) · c = q · (W_k c). So attention is that of one KV
    head, whose values are its keys. `kv` is a weight [heads * (plain + value), rank]: of each head
    the rows that make its keys of a latent, then those that make its values.

    Attributes:
        meet: (q [N, heads * (plain + rotary)], c [N, rank + rotary], kv, norm, sizes) -> [N, (heads
            + 2) * key]: queries, then the key, which holds the normed latent, twice: what
            `Ops.rope_and_store` takes of one KV head.
        values: (attended [N, heads * key], kv, sizes) -> [N, heads * value].
    """

    meet: Callable[[X, X, Weight, Norm, Latent], X]
    values: Callable[[X, Weight, Latent], X]


class HeadNorms(NamedTuple):
    """Norms of heads before they turn. A norm of D weights is of each head, a wider one of all
    heads of a row; None: they stay as they are.
    """

    queries: Norm | None = None
    keys: Norm | None = None
    values: Norm | None = None


class RopeArgs(NamedTuple):
    """How a layer's queries and keys turn; the same in every step.

    Attributes:
        cos, sin: float32 [positions, R / 2]. The first R <= D numbers of a head turn, the rest
            stays as it is.
        num_heads: of queries.
        num_kv_heads: of keys and values; 0: the layer reads another layer's keys and stores none.
        norms: of heads, before they turn.
        interleaved: pairs that turn together are neighbours; else they are (i, i + R / 2).
        query_scales: float32 [positions]: queries are multiplied by that of their position before
            they are rounded; None: they are not.
        joint: values are the keys as they come, and the rows have them once.
    """

    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    norms: HeadNorms = HeadNorms()
    interleaved: bool = False
    query_scales: Tensor | None = None
    joint: bool = False


class AttentionArgs(NamedTuple):
    """How a layer scores keys; the same in every step.

    Attributes:
        scale: multiplies queries times keys.
        sinks: float32 [heads]: scores, neither scaled nor capped, that belong to no key and are the
            last term of the softmax's sum; None: there are none.
        cap: makes of a scaled score s cap * tanh(s / cap); 0: it does not.
    """

    scale: float
    sinks: Tensor | None = None
    cap: float = 0.0


# -- the operations of a trunk ---------------------------------------------------------------------


class Embed(Protocol[X_co]):
    """Rows of the embedding [V, H], scaled, as the residual stream [N, H]."""

    def __call__(
        self,
        input_ids: Tensor,
        weight: Weight,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
        /,
    ) -> X_co:
        """With a part (first, vocab_size) the weight holds the tokens from `first` on only; the
        rows of others are zeros, negative ones: a sum over ranks changes no bit.
        """
        ...


class Linear(Protocol[X]):
    """A product x @ weight.T + bias."""

    def __call__(
        self,
        x: X,
        weight: Weight,
        bias: Tensor | None = None,
        segments: Segments | None = None,
        /,
    ) -> X:
        """Compute [N, in] -> [N, out], in the weight's dtype or in float32.

        Segments are bounds of 1, 2, 4 or 8 pieces of the input's columns. Each is added up by
        itself and they are merged neighbours first (`parallel.segments`), in float32: a rank's
        part of a sum over ranks.
        """
        ...


class RmsNorm(Protocol[X]):
    """An addition to the residual stream, and its norm."""

    def __call__(self, x: X | None, residual: X, norm: Norm, scale: float = 1.0, /) -> tuple[X, X]:
        """Add scale * x [N, H] to the residual stream [N, H], in float32; return both, the stream
        normed first.
        """
        ...


class RopeAndStore(Protocol[X]):
    """Rotary embedding, and the keys and values of rows into the cache."""

    def __call__(
        self,
        qkv: X,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
        /,
    ) -> X:
        """Compute queries, keys and values side by side, [N, (heads + 2 kv heads) * D] -> queries
        [N, heads, D] rotated; keys and values are written to their slots.
        """
        ...


class PlanAttention(Protocol):
    """What `Attention` wants to know of a batch."""

    def __call__(self, batch: ForwardBatch, block_size: int, window: int = 0, /) -> object:
        """Return a plan, made once a step for each window of the model. A row at position p sees
        the keys above p - window; 0: all before it.
        """
        ...


class Attention(Protocol[X]):
    """Causal attention of rows over their own contexts."""

    def __call__(
        self, q: X, view: KvcacheView, layer: int, plan: object, scores: AttentionArgs, /
    ) -> X:
        """Compute queries [N, heads, D] -> [N, heads * D]."""
        ...


class Moe(Protocol[X]):
    """A layer of experts; see `ops.moe.mixture`."""

    def __call__(
        self,
        x: X,
        experts: Experts,
        exchange: Exchange | None = None,
        note: Note | None = None,
        routed: X | None = None,
        /,
    ) -> X:
        """Compute rows [N, H] -> float32 [N, H]."""
        ...


class ShortConv(Protocol[X]):
    """A gated short convolution; see `ops.reference.state`."""

    def __call__(
        self,
        projected: X,
        weights: ShortConvWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
        /,
    ) -> X:
        """Compute three projections b, c and x of each row, [N, 3 * C] -> c * conv(b * x) [N, C],
        where b * x of the rows before it in its sequence is read from the view.
        """
        ...


class DeltaNet(Protocol[X]):
    """The gated delta rule; see `ops.reference.state`."""

    def __call__(
        self,
        projected: X,
        weights: DeltaWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
        /,
    ) -> X:
        """Compute the inputs of a convolution, a gate, and two numbers a value head, [N, C + V + 2
        * heads] -> [N, V], normalised by head and gated.
        """
        ...


class Lora(Protocol[X]):
    """What adapters add to a product; see `ops.lora`."""

    def __call__(self, y: X, x: X, name: str, batch: ForwardBatch, /) -> X:
        """Return the product y [N, out] of x [N, in] and the weight `name` with what the adapter of
        each row adds, in the dtype of y, which may be written.
        """
        ...


class Call(Protocol[X]):
    """A Python function in the middle of a trunk, such as what ranks exchange."""

    def __call__(
        self,
        batch: ForwardBatch,
        function: Joint,
        inputs: Sequence[X],
        columns: int,
        dtype: torch.dtype,
        /,
    ) -> X:
        """Return rows [N, columns] that `function(batch, out, *inputs)` fills. It is called also
        for a batch without rows.
        """
        ...


class Operations(Protocol[X]):
    """The calls of a trunk. N rows; weights are [out, in]; the residual stream is float32, products
    read the weights' dtype.
    """

    @property
    def embed(self) -> Embed[X]:
        """See `Embed`."""
        ...

    @property
    def linear(self) -> Linear[X]:
        """See `Linear`."""
        ...

    @property
    def rms_norm(self) -> RmsNorm[X]:
        """See `RmsNorm`."""
        ...

    @property
    def rope_and_store(self) -> RopeAndStore[X]:
        """See `RopeAndStore`."""
        ...

    @property
    def plan_attention(self) -> PlanAttention:
        """See `PlanAttention`."""
        ...

    @property
    def attention(self) -> Attention[X]:
        """See `Attention`."""
        ...

    @property
    def latent(self) -> LatentOps[X]:
        """See `LatentOps`."""
        ...

    @property
    def gate(self) -> Callable[[X, str], X]:
        """Gate and up [N, 2 * inner] and an activation -> activation(gate) * up [N, inner]."""
        ...

    @property
    def moe(self) -> Moe[X]:
        """See `Moe`."""
        ...

    @property
    def short_conv(self) -> ShortConv[X]:
        """See `ShortConv`."""
        ...

    @property
    def delta_net(self) -> DeltaNet[X]:
        """See `DeltaNet`."""
        ...

    @property
    def sigmoid_gate(self) -> Callable[[X, X], X]:
        """Rows x and gates, [N, C] each -> x * sigmoid(gate)."""
        ...

    @property
    def lora(self) -> Lora[X]:
        """See `Lora`."""
        ...

    @property
    def call(self) -> Call[X]:
        """See `Call`."""
        ...

    @property
    def columns(self) -> Callable[[X, int, int], X]:
        """Rows [N, C], start, stop -> some of the columns, not copied."""
        ...


class Trunk(Protocol):
    """Everything of a model but its head, by calls of `ops` only."""

    def __call__(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView, /) -> X:
        """Compute the rows of a batch."""
        ...


# -- other operations ------------------------------------------------------------------------------


class States(Protocol):
    """Attention over the keys that are here."""

    def __call__(
        self, q: Tensor, view: KvcacheView, layer: int, plan: object, scores: AttentionArgs, /
    ) -> Tensor:
        """Compute queries [M, heads, D] -> float32 [states, heads, width], row by row, each row's
        in order of keys. Sinks do not count yet.
        """
        ...


class Merge(Protocol):
    """Attention from all states of rows."""

    def __call__(
        self, states: Tensor, counts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return [N, heads * D] with the bits of undivided attention, from all states of each row
        in order of keys, `counts` [N] of them, and its heads' sinks.
        """
        ...


class PartialAttention(NamedTuple):
    """Attention cut at multiples of `SEGMENT` keys: who holds the keys computes states, the row's
    owner merges them.

    Attributes:
        plan: (rows, block_size) -> what `states` wants to know; once a step for each window.
        states, merge: see `States` and `Merge`.
        width: (D) -> numbers of a state.
    """

    plan: Callable[[SegmentRows, int], object]
    states: States
    merge: Merge
    width: Callable[[int], int]


class Allocate(Protocol):
    """Memory of a weight."""

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        latent: Latent | None = None,
        form: Format | None = None,
        segments: Segments | None = None,
    ) -> Weight:
        """Return a weight [out, in] as the products read it, not initialised: a tensor, or what
        keeps the numbers in an order of its own, like `ops.cpu.weights.PackedWeight`.

        Args:
            shape: [out, in].
            dtype: of its numbers; with a format, what products round their inputs to first.
            device: where it lies.
            latent: sizes of attention over latents, if it is the weight that `LatentOps` reads.
            form: format of its codes (`ops.quantised`), like `ops.reference.quantised`: products
                have the bits of `quantised.product`.
            segments: those that `linear` will be given.
        """
        ...


class Compile(Protocol):
    """A trunk as a function of a batch."""

    def __call__(
        self, trunk: Trunk, batch: ForwardBatch, view: KvcacheView, dtype: torch.dtype, /
    ) -> Callable[[ForwardBatch], Tensor]:
        """Return a function that gives what `trunk(ops, batch, view)` gives."""
        ...


class Lacking:
    """An operation that a backend does not have. Models that need it are rejected before they are
    built.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> NoReturn:
        raise NotImplementedError(f"this backend has no {self.name}; use backend='cpu'.")


_NO_CONVOLUTIONS = Lacking("short convolutions")
_NO_DELTA_RULE = Lacking("gated delta rule")
_NO_GATES = Lacking("gates of attention")
_NO_LATENTS = LatentOps[Tensor](Lacking("latents"), Lacking("latents"))
_NO_ADAPTERS = Lacking("adapters")


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend: `Operations` on tensors, heads, and the memory of weights.

    Attributes:
        name: of the backend; part of the numerics fingerprint.
        version: counted up whenever any bit of its results may change.
        schedule_invariant: whether a row's bits depend only on the weights and on the tokens before
            it.
        in_segments: whether `linear` adds up in the segments that it is given, so that 1, 2, 4 and
            8 ranks agree to the bit. Else a rank adds up its columns in one piece, and the number
            of ranks is part of the fingerprint.
        gate: with `"clamped_swiglu"` gate and up are bounded and up has 1 added: see
            `ops.reference.backend.gate`.
        logits: (hidden [L, H], weight [V, H], `LogitScale`) -> float32 [L, V].
        sample: (hidden [L, H], weight, scale, batch) -> `Draw` from these logits.
        sample_logits: (logits [L, V], batch) -> the same `Draw`, from logits that are there
        already. gather_logprobs: (hidden [L, H], weight, scale, token_ids [L], temperatures [L]) ->
            float32 [L], under softmax of these logits over the temperature (above 0): the same bits
            as `sample` reports of that token.
        score_logits: (logits [L, V], token_ids [L], temperatures [L]) -> the same, from logits that
            are there already.
        compile: None: the trunk is called in every step.
        has_adapters: whether it has `lora`.
        few_rows: (trunk, batch, view) -> what `trunk(ops, batch, view)` gives but for roundings, of
            at most `FEW_ROWS` rows, in fewer kernels; for steps that are captured. None: there is
            no other way.
        partial: attention over a part of the keys. None: the backend computes it whole.
        head_parts: draws and scores where each rank holds a part of the head. None: ranks gather
            the logits.
        placed: (places, each `ops.lora.Place`) -> a function of as many matrices, which copies each
            to its place, and returns the first that has a number that is not finite, -1 if none
            has.
        sums: the order in which products of bfloat16 are added up, `"pairs"` or `"tiles"`, where
            there is a choice (`EngineConfig.cpu_sums`).
    """

    name: str
    version: int
    schedule_invariant: bool
    in_segments: bool
    embed: Embed[Tensor]
    linear: Linear[Tensor]
    rms_norm: RmsNorm[Tensor]
    rope_and_store: RopeAndStore[Tensor]
    plan_attention: PlanAttention
    attention: Attention[Tensor]
    gate: Callable[[Tensor, str], Tensor]
    moe: Moe[Tensor]
    logits: Callable[[Tensor, Weight, LogitScale], Tensor]
    sample: Callable[[Tensor, Weight, LogitScale, SamplingBatch], Draw]
    sample_logits: Callable[[Tensor, SamplingBatch], Draw]
    gather_logprobs: Callable[[Tensor, Weight, LogitScale, Tensor, Tensor], Tensor]
    score_logits: Callable[[Tensor, Tensor, Tensor], Tensor]
    allocate: Allocate
    compile: Compile | None
    call: Call[Tensor]
    columns: Callable[[Tensor, int, int], Tensor]
    short_conv: ShortConv[Tensor] = _NO_CONVOLUTIONS
    delta_net: DeltaNet[Tensor] = _NO_DELTA_RULE
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = _NO_GATES
    latent: LatentOps[Tensor] = _NO_LATENTS
    lora: Lora[Tensor] = _NO_ADAPTERS
    has_adapters: bool = False
    few_rows: Callable[[Trunk, ForwardBatch, KvcacheView], Tensor] | None = None
    partial: PartialAttention | None = None
    head_parts: "HeadParts | None" = None
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
        [Tensor, Weight, LogitScale, SamplingBatch, VocabPart],
        Generator[Tensor, list[Tensor], Draw],
    ]
    score: Callable[
        [Tensor, Weight, LogitScale, Tensor, Tensor, VocabPart],
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
    embed: Callable[[Tensor, Weight, float], Tensor],
    input_ids: Tensor,
    weight: Weight,
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
