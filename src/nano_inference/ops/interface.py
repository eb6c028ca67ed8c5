"""`Ops`: the operations of a backend, and its guarantees about their bits.

`Operations` are the calls of a trunk. Their type variable `X` stands for rows: tensors in `Ops`,
buffers in a recorder (`ops/cpu/recorder.py`), lazily computed values in `ops/cuda/few_rows.py`.
Each operation is a Protocol below that defines its signature and its meaning.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

from nano_inference.arrays import Device, Dtype, Tensor, namespace
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.formats import Format, Stack
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ops.lora import Adapted, Adapter, Place, placed
from nano_inference.ops.moe import Exchange, Experts, Note, record_experts
from nano_inference.ops.rowwise import Norm, normed_rows
from nano_inference.ops.settings import Latent
from nano_inference.ops.state import DeltaWeights, ShortConvWeights, StateView
from nano_inference.parallel.context import SegmentRows
from nano_inference.sampling.logit_scale import LogitScale
from nano_inference.sampling.parts import VocabPart
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import SamplingBatch

FEW_ROWS = 8  # most rows that `Ops.few_rows` accepts

X = TypeVar("X")  # rows
X_co = TypeVar("X_co", covariant=True)

# Fill `out` from the inputs in the middle of a trunk: (batch, out, *inputs). `Call` runs it.
Joint = Callable[Concatenate[ForwardBatch, Tensor, ...], None]
Segments = tuple[int, ...]  # bounds of column ranges that are summed separately


class Weight(Protocol):
    """A matrix made by `Ops.allocate`: a tensor, or a class of the backend that made it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in]."""
        ...

    @property
    def dtype(self) -> Dtype:
        """Dtype that products read."""
        ...


class TensorArena(Protocol):
    """Memory that tensors are allocated from."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Allocate an uninitialized tensor."""
        ...


class UnitRows(Protocol):
    """Mapping from blocks to the memory units that back them."""

    def units(self) -> Tensor:
        """Return the current units [units of a block, blocks]."""
        ...


class KvcacheView(Protocol):
    """The KV tensors that attention reads and writes. Slots are numbered by block, independently of
    the units that back it.

    Attributes:
        block_size: Tokens per block.
        format: Storage format of rows of keys and values.
        head_dim: Numbers per row that attention reads.
        keys, values: [layers of a unit, kv heads, units, block_size, numbers of a row]. If the
            model has several kinds of layers: [units, numbers of a unit].
        places: For each layer, its unit among the units of a block, and its index in that unit.
        states: `StateView` of a model that has layers with a state, otherwise None.
        unit_map: Mapping from blocks to units. None: block ids are unit ids.
    """

    block_size: int
    format: KvFormat
    head_dim: int
    keys: Tensor
    values: Tensor
    places: list[tuple[int, int]]

    @property
    def states(self) -> StateView | None: ...

    @property
    def unit_map(self) -> UnitRows | None: ...

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, num_kv_heads, head_dim] at slots [N]."""
        ...

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values at slots [...], float32, each [num_kv_heads, ..., head_dim]."""
        ...

    def lie(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return strided views of all keys and values of a layer, each [num_kv_heads, units,
        block_size, head_dim].
        """
        ...

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of all stored rows of a layer, undecoded: keys and values, each
        [num_kv_heads, slots, numbers of a row].
        """
        ...


class LatentWeights(NamedTuple):
    """Weights of attention over latents.

    Attributes:
        kv: [heads * (plain + value), rank]. For each head it holds the rows that make keys of a
            latent, then the rows that make values.
        norm: Norm of the latents.
        sizes: Sizes of latents and heads.
    """

    kv: Weight
    norm: Norm
    sizes: Latent


class HeadNorms(NamedTuple):
    """Norms of heads, applied before rotation. A norm with D weights applies to each head, a wider
    one to all heads of a row together. None: no norm.
    """

    queries: Norm | None = None
    keys: Norm | None = None
    values: Norm | None = None


class RopeArgs(NamedTuple):
    """Parameters of the rotary embedding of a layer, the same in every step.

    Attributes:
        cos, sin: float32 [positions, R / 2]. The first R <= D numbers of a head are rotated, the
            rest is unchanged.
        num_heads: Number of query heads.
        num_kv_heads: Number of KV heads. 0: the layer reads another layer's keys and stores none.
        norms: Norms applied to heads before rotation.
        interleaved: If True, rotated pairs are adjacent numbers; otherwise (i, i + R / 2).
        query_scales: float32 [positions]: factor for the queries at each position, applied before
            rounding. None: no factor.
        joint: If True, values are the unrotated keys, and input rows contain them once.
    """

    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    norms: HeadNorms = HeadNorms()
    interleaved: bool = False
    query_scales: Tensor | None = None
    joint: bool = False


class LatentStore(Protocol[X]):
    """Norm, rotary embedding and write of new latents, and the queries that attend to them."""

    def __call__(
        self,
        q: X,
        c: X,
        weights: LatentWeights,
        rope: RopeArgs,
        positions: Tensor,
        slot_mapping: Tensor,
        view: KvcacheView,
        layer: int,
        /,
    ) -> X:
        """Write a key for each row of c [N, rank + rotary] to its slot: the rotated numbers, then
        the normed latent. Return the queries [N, heads, key], made of q [N, heads * (plain +
        rotary)]: the rotated numbers, then the product of the plain ones and the head's key rows.
        """
        ...


class LatentOps(NamedTuple, Generic[X]):
    """Attention over latents: the operations between its products and the attention itself.

    The keys and values of all heads of a token are products of one latent (MLA, arXiv:2405.04434),
    and the cache stores the latent. Queries are projected into the latent space, and attended
    latents are projected to values: (q W_k) · c = q · (W_k c). Attention therefore has a single KV
    head, whose values are its keys.

    Attributes:
        store: See `LatentStore`.
        values: (attended [N, heads * key], weights) -> [N, heads * value]. The rotated numbers of
            `attended` are not read.
    """

    store: LatentStore[X]
    values: Callable[[X, LatentWeights], X]


class AttentionArgs(NamedTuple):
    """Parameters of the scores of a layer, the same in every step.

    Attributes:
        scale: Factor of the product of query and key.
        sinks: float32 [heads]: scores without a key, neither scaled nor capped, that form the last
            term of the softmax's sum. None: no sinks.
        cap: Soft cap: a scaled score s becomes cap * tanh(s / cap). 0: no cap.
        unread: First numbers of a head's output that nothing reads. They are undefined.
    """

    scale: float
    sinks: Tensor | None = None
    cap: float = 0.0
    unread: int = 0


# -- the operations of a trunk ---------------------------------------------------------------------


class Embed(Protocol[X_co]):
    """Lookup of scaled rows of the embedding [V, H], as the residual stream [N, H]."""

    def __call__(
        self,
        input_ids: Tensor,
        weight: Weight,
        scale: float = 1.0,
        part: tuple[int, int] | None = None,
        /,
    ) -> X_co:
        """Return the rows of `input_ids`.

        With a part (first, vocab_size) the weight only holds the tokens from `first` on. The rows
        of other tokens are negative zeros, so a sum over ranks changes no bit.
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

        Segments are bounds of 1, 2, 4 or 8 ranges of the input's columns. Each range is summed
        separately, and the sums are merged pairwise, neighbors first (`parallel.segments`), in
        float32. A segment is one rank's part of a sum over ranks.
        """
        ...


class RmsNorm(Protocol[X]):
    """Addition to the residual stream, and the stream's norm."""

    def __call__(self, x: X | None, residual: X, norm: Norm, scale: float = 1.0, /) -> tuple[X, X]:
        """Add scale * x [N, H] to the residual stream [N, H] in float32. Return the normed stream
        and the stream.
        """
        ...


class RopeAndStore(Protocol[X]):
    """Rotary embedding, and the write of new keys and values to the cache."""

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
        """Rotate queries, keys and values side by side, [N, (heads + 2 kv heads) * D], and write
        keys and values to their slots. Return the rotated queries [N, heads, D].
        """
        ...


class PlanAttention(Protocol):
    """Preparation of `Attention` for a batch."""

    def __call__(self, batch: ForwardBatch, block_size: int, window: int = 0, /) -> object:
        """Return a plan, made once per step for each window size of the model. A row at position p
        sees the keys at positions above p - window and up to p. Window 0: all keys up to p.
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
    """A layer of experts, as `ops.moe.mixture` defines it."""

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
    """A gated short convolution, specified in `ops.reference.state`."""

    def __call__(
        self,
        projected: X,
        weights: ShortConvWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
        /,
    ) -> X:
        """Map each row's projections b, c and x, [N, 3 * C], to c * conv(b * x), [N, C]. The view
        holds b * x of the sequence's earlier rows.
        """
        ...


class DeltaNet(Protocol[X]):
    """The gated delta rule, specified in `ops.reference.state`."""

    def __call__(
        self,
        projected: X,
        weights: DeltaWeights,
        batch: ForwardBatch,
        view: StateView,
        layer: int,
        /,
    ) -> X:
        """Compute [N, C + V + 2 * heads] -> [N, V], normalized per head and gated. The input holds
        the convolution's input, a gate, and two numbers per value head.
        """
        ...


class Lora(Protocol[X]):
    """Addition of adapters to a product, specified in `ops.lora`."""

    def __call__(self, y: X, x: X, name: str, rows: Adapted, /) -> X:
        """Return y [N, out] plus the contribution of each row's adapter, in the dtype of y. y is
        the product of x [N, in] and the weight `name`. Its memory may be overwritten.
        """
        ...


class Call(Protocol[X]):
    """A Python function in the middle of a trunk, such as an exchange between ranks."""

    def __call__(
        self,
        batch: ForwardBatch,
        function: Joint,
        inputs: Sequence[X],
        columns: int,
        dtype: Dtype,
        /,
    ) -> X:
        """Return rows [N, columns] filled by `function(batch, out, *inputs)`. The function is also
        called for a batch without rows.
        """
        ...


class Operations(Protocol[X]):
    """The calls of a trunk on N rows. Weights are [out, in]. The residual stream is float32, and
    products read the weights' dtype.
    """

    @property
    def embed(self) -> Embed[X]: ...

    @property
    def linear(self) -> Linear[X]: ...

    @property
    def rms_norm(self) -> RmsNorm[X]: ...

    @property
    def rope_and_store(self) -> RopeAndStore[X]: ...

    @property
    def plan_attention(self) -> PlanAttention: ...

    @property
    def attention(self) -> Attention[X]: ...

    @property
    def latent(self) -> LatentOps[X]: ...

    @property
    def gate(self) -> Callable[[X, str], X]:
        """Map gate and up [N, 2 * inner] and an activation's name to activation(gate) * up [N,
        inner].
        """
        ...

    @property
    def moe(self) -> Moe[X]: ...

    @property
    def short_conv(self) -> ShortConv[X]: ...

    @property
    def delta_net(self) -> DeltaNet[X]: ...

    @property
    def sigmoid_gate(self) -> Callable[[X, X], X]:
        """Map rows x and gates, [N, C] each, to x * sigmoid(gate)."""
        ...

    @property
    def lora(self) -> Lora[X]: ...

    @property
    def call(self) -> Call[X]: ...

    @property
    def columns(self) -> Callable[[X, int, int], X]:
        """Return the columns from start to stop of rows [N, C], not copied."""
        ...


class Trunk(Protocol):
    """A model without its head, expressed as calls of `ops` only."""

    def __call__(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView, /) -> X:
        """Compute the rows of a batch."""
        ...


# -- other operations ------------------------------------------------------------------------------


class States(Protocol):
    """Attention over the keys stored on this rank."""

    def __call__(
        self, q: Tensor, view: KvcacheView, layer: int, plan: object, scores: AttentionArgs, /
    ) -> Tensor:
        """Compute queries [M, heads, D] -> float32 [states, heads, width], row by row, each row's
        states in order of keys. Sinks are not included.
        """
        ...


class Merge(Protocol):
    """Attention from all states of each row."""

    def __call__(
        self, states: Tensor, counts: Tensor, dtype: Dtype, sinks: Tensor | None = None, /
    ) -> Tensor:
        """Return [N, heads * D] with the bits of undivided attention. `states` holds all states of
        each row in order of keys. `counts` [N] is the number of states per row.
        """
        ...


class PartialAttention(NamedTuple):
    """Attention cut at multiples of `SEGMENT` keys: the rank that holds the keys computes states,
    and the row's owner merges them.

    Attributes:
        plan: (rows, block_size) -> plan for `states`, made once per step for each window size.
        states: Computes the states of rows.
        merge: Merges the states of rows.
        width: (D) -> numbers per state.
    """

    plan: Callable[[SegmentRows, int], object]
    states: States
    merge: Merge
    width: Callable[[int], int]


class Allocate(Protocol):
    """Allocation of a weight's memory."""

    def __call__(
        self,
        shape: tuple[int, ...],
        dtype: Dtype,
        device: Device,
        latent: Latent | None = None,
        form: Format | Stack | None = None,
        segments: Segments | None = None,
    ) -> Weight:
        """Return an uninitialized weight [out, in] that products can read: a tensor, or a class
        with its own memory layout, such as `ops.cpu.weights.PackedWeight`.

        Args:
            shape: [out, in].
            dtype: Dtype of the weight. With a format, the dtype to which products first round their
                inputs.
            device: Device that holds the weight.
            latent: Sizes of attention over latents, if `LatentOps` reads the weight.
            form: Format of the weight's codes, or formats of its rows. Products have the bits of
                `ops.quantised.product`.
            segments: Segments with which `linear` will be called.
        """
        ...


class StepAdapters(NamedTuple):
    """Adapters in the form that kernels read without the host.

    Attributes:
        group: (batch) -> the batch with its rows grouped by adapter, for the products of one step.
        addresses: (adapters) -> a NumPy array, int64 [len(adapters)], by which the rows of a
            captured step name their adapters. 0 means none.
    """

    group: Callable[[ForwardBatch], ForwardBatch]
    addresses: Callable[[Sequence[Adapter]], Any]


class Packing(NamedTuple):
    """Allocation of weights in the pieces of an arena, which can be written to a file and mapped.

    Attributes:
        layout: Version of the memory layout. It is raised whenever the bytes of a weight change.
        allocate: (arena of `ops.cpu.memory`) -> `Allocate` that takes all memory from it.
    """

    layout: int
    allocate: Callable[[Any], Allocate]


class Compile(Protocol):
    """Conversion of a trunk to a function of a batch."""

    def __call__(
        self, trunk: Trunk, batch: ForwardBatch, view: KvcacheView, dtype: Dtype, /
    ) -> Callable[[ForwardBatch], Tensor]:
        """Return a function with the results of `trunk(ops, batch, view)`."""
        ...


class Lacking:
    """An operation that a backend does not implement. Models that need it are rejected before they
    are built.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> NoReturn:
        raise NotImplementedError(f"this backend does not support {self.name}; use backend='cpu'.")


_NO_CONVOLUTIONS = Lacking("short convolutions")
_NO_DELTA_RULE = Lacking("gated delta rule")
_NO_GATES = Lacking("gates of attention")
_NO_LATENTS = LatentOps[Tensor](Lacking("latents"), Lacking("latents"))
_NO_ADAPTERS = Lacking("adapters")


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend: `Operations` on tensors, heads, and the allocation of weights.

    Attributes:
        name: Name of the backend, part of the numerics fingerprint.
        version: Number that is raised whenever any bit of the results may change.
        schedule_invariant: True if a row's bits depend only on the weights and on its sequence's
            tokens up to its own.
        in_segments: True if `linear` adds up in the segments it receives, so that 1, 2, 4 and 8
            ranks agree bit for bit. Otherwise a rank sums its columns in one piece, and the number
            of ranks is part of the fingerprint.
        gate: Gated activation. `"clamped_swiglu"` clamps gate and up and adds 1 to up
            (`ops.reference.backend.gate`).
        logits: (hidden [L, H], weight [V, H], `LogitScale`) -> float32 [L, V].
        sample: (hidden [L, H], weight, scale, batch) -> `Draw` from these logits.
        sample_logits: (logits [L, V], batch) -> the same `Draw`, from computed logits.
        gather_logprobs: (hidden [L, H], weight, scale, token_ids [L], temperatures [L]) -> float32
            [L], the tokens' logprobs under softmax(logits / temperature), for temperatures above 0.
            The bits equal those that `sample` reports for the token.
        score_logits: (logits [L, V], token_ids [L], temperatures [L]) -> the same, from computed
            logits.
        compile: Compiler of trunks. None: the trunk is called in every step.
        record_experts: (record int16 [slots + 1, K], slots int64 [N], ids int64 [N, K]) -> writes
            the experts of each row to its slot. Rows with a negative slot are padding, and may be
            written to the last slot.
        normed_rows: (x [..., width], norm) -> the norm of each row, for functions in the middle of
            a trunk (`call`).
        has_adapters: True if the backend implements `lora`.
        step_adapters: Adapters as `lora` reads them. None: `lora` reads `ForwardBatch.adapters`.
        few_rows: (trunk, batch, view) -> the result of `trunk(ops, batch, view)`, for at most
            `FEW_ROWS` rows and in fewer kernels: up to rounding, or with the same bits if
            `schedule_invariant`. Captured steps use it. None: not implemented.
        partial: Attention over some of the keys. None: not implemented.
        head_parts: Draws and scores with a head that is sharded over ranks. None: ranks gather the
            logits.
        placed: (places, each `ops.lora.Place`) -> a function that copies one matrix to each place.
            It returns the index of the first matrix with a non-finite number, -1 if there is none.
        packing: Allocation for files of packed weights, or None if weights are not packed.
        sums: Order in which products of bfloat16 are added up, `"pairs"` or `"tiles"`, if the
            backend has a choice (`EngineConfig.cpu_sums`).
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
    record_experts: Callable[[Tensor, Tensor, Tensor], None] = record_experts
    normed_rows: Callable[[Tensor, Norm], Tensor] = normed_rows
    has_adapters: bool = False
    step_adapters: StepAdapters | None = None
    few_rows: Callable[[Trunk, ForwardBatch, KvcacheView], Tensor] | None = None
    partial: PartialAttention | None = None
    head_parts: "HeadParts | None" = None
    placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]] = placed
    packing: Packing | None = None
    sums: Literal["pairs", "tiles"] | None = None


class HeadParts(NamedTuple):
    """`sample` and `gather_logprobs` with a sharded head: all ranks have the hidden rows, and each
    has some rows of the weight.

    Both take the rank's rows of the weight, and a `VocabPart` that names these rows. They are
    generators as described in `sampling.parts`. Their results have the bits of one rank with the
    whole weight. Batches with filters or best tokens are not supported.

    Attributes:
        block: Each rank's first token must be a multiple of this number.
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
    batch: ForwardBatch, function: Joint, inputs: Sequence[Tensor], columns: int, dtype: Dtype
) -> Tensor:
    """Implement `Ops.call` for a backend that computes immediately."""
    ids = batch.input_ids
    out = namespace(dtype).empty((len(ids), columns), dtype=dtype, device=ids.device)
    function(batch, out, *inputs)
    return out


def embed_part(
    embed: Callable[[Tensor, Weight, float], Tensor],
    input_ids: Tensor,
    weight: Weight,
    scale: float,
    part: tuple[int, int],
) -> Tensor:
    """Implement `Ops.embed` for a part of the vocabulary, given an `embed` without parts."""
    xp, places = namespace(input_ids), input_ids - part[0]
    here = (places >= 0) & (places < weight.shape[0])
    rows = embed(xp.where(here, places, 0), weight, scale)
    return xp.where(here[:, None], rows, -0.0)


def columns(x: Tensor, start: int, stop: int) -> Tensor:
    """Implement `Ops.columns` for tensors."""
    return x[:, start:stop]


@dataclass(frozen=True, slots=True)
class Numerics:
    """Everything that decides an engine's bits, except weights and tokens. Two engines with the
    same fingerprint agree bit for bit.

    Attributes:
        backend, version: Name and version of the operations. CUDA's batch-invariant kernels are a
            separate backend.
        dtype: Dtype of weights, activations and, unless `kv_cache` overrides it, KV cache.
        device: Kind of device, for a GPU with its generation. torch's own products have different
            bits on each.
        torch: Version of torch, which computes the products of the reference backend. None on the
            CPU kernels, where torch computes nothing.
        schedule_invariant: True if results do not depend on batching, chunking, caching and
            preemption.
        tensor_parallel: Number of ranks that share a layer if it decides bits (`Ops.in_segments`),
            otherwise 1.
        state_tokens: Tokens from one stored state to the next if this decides bits, otherwise 0.
        quantization: Quantization of the weights, as in `EngineConfig.quantization`. None: not
            quantized.
        kv_cache: Storage format of keys and values if it is not `dtype`, otherwise None.
        sums: `Ops.sums` if it decides bits and is not `"pairs"`, otherwise None.
    """

    backend: str
    version: int
    dtype: str
    device: str
    torch: str | None
    schedule_invariant: bool
    tensor_parallel: int = 1
    state_tokens: int = 0
    quantization: str | None = None
    kv_cache: str | None = None
    sums: str | None = None

    @property
    def fingerprint(self) -> str:
        """One-line fingerprint, attached to every sample."""
        ranks = "" if self.tensor_parallel == 1 else f"/tensor-parallel-{self.tensor_parallel}"
        states = f"/states-of-{self.state_tokens}" if self.state_tokens else ""
        codes = "" if self.quantization is None else f"/{self.quantization}"
        kept = "" if self.kv_cache is None else f"/kv-{self.kv_cache}"
        sums = "" if self.sums is None else f"/{self.sums}"
        torch = "" if self.torch is None else f"/torch-{self.torch}"
        base = f"{self.backend}-{self.version}/{self.dtype}/{self.device}"
        return base + torch + sums + ranks + states + codes + kept
