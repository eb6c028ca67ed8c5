"""`ModelShard`: the part of a model that one rank holds, as ranges of heads, columns, layers and
tokens.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache

from nano_inference.errors import ConfigError
from nano_inference.features import ENGINE_LIMITS, Setting, require
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.traits import traits_of
from nano_inference.parallel.bounds import SEGMENTS, row_segments, segment_unit
from nano_inference.parallel.mesh import Mesh, Place

# Units in which ranks divide the vocabulary: blocks of every backend's sums over it, or panels if
# there are too few blocks, or single tokens.
VOCAB_UNITS = (1536, 16, 1)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that a rank holds.

    Attributes:
        position: Position of the rank in the mesh.
        whole: Description of the whole model.
        heads: Query heads whose part of the output product this rank computes.
        kv_heads: Key-value heads that `heads` need. Other ranks may hold some of them too.
        inner: Columns of an MLP's inner side.
        vocab: Rows of embedding and head.
        layers: Layers of the pipeline stage.
        experts: Experts that this rank holds, each one whole, in every expert layer.
        head_segments, inner_segments: Bounds of the segments in which this rank's columns are
            summed, counted from its first column. None: there are more ranks than segments.
    """

    position: Place
    whole: ModelSpec
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    layers: range
    experts: range
    head_segments: tuple[int, ...] | None
    inner_segments: tuple[int, ...] | None

    @property
    def spec(self) -> ModelSpec:
        """The model as this rank runs it: only its layers, and the query heads of its KV heads."""
        group = self.whole.num_heads // self.whole.num_kv_heads
        first, last = self.layers.start, self.layers.stop
        moe = self.whole.moe
        return replace(
            self.whole,
            num_heads=len(self.kv_heads) * group,
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            num_layers=len(self.layers),
            ropes=self.whole.ropes[first:last],
            windows=self.whole.windows[first:last],
            moe=None if moe is None else replace(moe, layers=moe.layers[first:last]),
        )

    @property
    def own_columns(self) -> tuple[int, int]:
        """This rank's columns [start, stop) in the attention output of the heads it computes."""
        group, size = self.whole.num_heads // self.whole.num_kv_heads, self.whole.value_dim
        first = self.kv_heads.start * group
        return (self.heads.start - first) * size, (self.heads.stop - first) * size

    @property
    def head_columns(self) -> tuple[int, ...]:
        """Columns of the attention output whose sums each tensor rank computes."""
        peers = _tensor_peers(self.whole, self.position)
        return tuple(len(peer.heads) * self.whole.value_dim for peer in peers)

    @property
    def inner_columns(self) -> tuple[int, ...]:
        """Columns of an MLP's inner side of each tensor rank."""
        return tuple(len(peer.inner) for peer in _tensor_peers(self.whole, self.position))

    def kv_heads_of(self, layer: int) -> range:
        """Return the KV heads of a layer. Models with several kinds of layers are not divided."""
        count = self.whole.layer(layer).num_kv_heads
        return range(count) if self.whole.kinds else self.kv_heads

    def inner_of(self, layer: int) -> range:
        """Return the columns of the inner side of a layer's MLP."""
        return range(self.whole.layer(layer).intermediate_size) if self.whole.kinds else self.inner

    def head_segments_of(self, layer: int) -> tuple[int, ...] | None:
        """Return `head_segments` for a layer."""
        if not self.whole.kinds:
            return self.head_segments
        size = self.whole.layer(layer).head_dim
        return tuple(bound * size for bound in row_segments(self.whole.num_heads, 1))

    def inner_segments_of(self, layer: int) -> tuple[int, ...] | None:
        """Return `inner_segments` for a layer."""
        if not self.whole.kinds:
            return self.inner_segments
        size = self.whole.layer(layer).intermediate_size
        return row_segments(size, segment_unit(size))

    @property
    def has_embedding(self) -> bool:
        """True if the rank needs the embedding: as input or as a tied head."""
        return self.position.is_first_stage or (
            self.position.is_last_stage and self.whole.tie_word_embeddings
        )

    @property
    def has_head(self) -> bool:
        """True if the rank holds an untied head."""
        return self.position.is_last_stage and not self.whole.tie_word_embeddings

    @property
    def vocab_bounds(self) -> tuple[int, ...]:
        """Bounds of the tensor ranks' tokens: rank r holds [bounds[r], bounds[r + 1])."""
        return _vocab_bounds(self.whole.vocab_size, self.position.mesh.tensor)

    @property
    def is_whole(self) -> bool:
        """True if the rank holds the whole model."""
        every = self.whole.moe.num_experts if self.whole.moe is not None else 0
        return (
            self.position.mesh == Mesh(context=self.position.mesh.context)
            and len(self.experts) == every
        )


def shard_of(
    spec: ModelSpec,
    position: Place = Place(),  # noqa: B008 (frozen)
    engines: tuple[int, int] = (0, 1),
) -> ModelShard:
    """Return a rank's part of a model. Raises `ConfigError` if it cannot be divided that way.

    Args:
        spec: Description of the whole model.
        position: Position of the rank in the mesh.
        engines: Index of this engine, and the number of engines that share the experts. Each of
            them has one tensor rank.
    """
    ranks, index = position.mesh.tensor, position.tensor_rank
    mesh = position.mesh
    require(
        ENGINE_LIMITS,
        Setting(
            tensor_parallel=mesh.tensor,
            pipeline_parallel=mesh.pipeline,
            context_parallel=mesh.context,
            expert_parallel=engines[1],
            **traits_of(spec),
        ),
    )
    _require_divisible(spec, mesh)
    if ranks <= SEGMENTS:
        heads = row_segments(spec.num_heads, 1)
        inner = row_segments(spec.intermediate_size, segment_unit(spec.intermediate_size))
        first, last = SEGMENTS // ranks * index, SEGMENTS // ranks * (index + 1)
        own_heads, own_inner = range(heads[first], heads[last]), range(inner[first], inner[last])
        head_segments = tuple(
            (bound - heads[first]) * spec.value_dim for bound in heads[first : last + 1]
        )
        inner_segments = tuple(bound - inner[first] for bound in inner[first : last + 1])
    else:
        own_heads, own_inner = (
            _share(spec.num_heads, ranks, index),
            _share(spec.intermediate_size, ranks, index),
        )
        head_segments = inner_segments = None
    group = spec.num_heads // spec.num_kv_heads
    vocab = _vocab_bounds(spec.vocab_size, ranks)
    return ModelShard(
        position=position,
        whole=spec,
        heads=own_heads,
        kv_heads=range(own_heads.start // group, -(-own_heads.stop // group)),
        inner=own_inner,
        vocab=range(vocab[index], vocab[index + 1]),
        layers=split_layers(spec, position.mesh.pipeline)[position.stage],
        experts=_experts(spec, (index, ranks) if ranks > 1 else engines),
        head_segments=head_segments,
        inner_segments=inner_segments,
    )


@cache
def _tensor_peers(spec: ModelSpec, position: Place) -> tuple[ModelShard, ...]:
    """Return the parts of all ranks that share the layers of a rank."""
    ranks = position.peers("tensor")
    return tuple(shard_of(spec, Place(position.mesh, rank)) for rank in ranks)


def expert_bounds(spec: ModelSpec, ranks: int) -> tuple[int, ...]:
    """Return the first expert of each rank, and the number of experts."""
    assert spec.moe is not None
    return tuple(spec.moe.num_experts * rank // ranks for rank in range(ranks + 1))


def _experts(spec: ModelSpec, rank: tuple[int, int]) -> range:
    if spec.moe is None:
        return range(0)
    index, ranks = rank
    if ranks > spec.moe.num_experts:
        raise ConfigError(
            f"{ranks} ranks exceed the model's {spec.moe.num_experts} experts; use at most "
            f"{spec.moe.num_experts}."
        )
    bounds = expert_bounds(spec, ranks)
    return range(bounds[index], bounds[index + 1])


@cache
def split_layers(spec: ModelSpec, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage, so that stages hold similar numbers of weights.

    The first stage holds the embedding, the last one the head. Raises `ConfigError` if there are
    more stages than layers.
    """
    if stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel={stages} exceeds the model's {spec.num_layers} layers; use at "
            f"most {spec.num_layers}."
        )
    if stages == 1:
        return (range(spec.num_layers),)
    # size of an embedding or a head
    most, ends = spec.num_layers, spec.vocab_size * spec.hidden_size
    up_to = list(
        itertools.accumulate((_layer_size(spec, layer) for layer in range(most)), initial=0)
    )

    def cost(stage: int, start: int, stop: int) -> int:
        size = up_to[stop] - up_to[start] + ends * ((stage == 0) + (stage == stages - 1))
        return size * size  # the least sum of squares is the most even

    # Number of layers in the stages so far -> least cost, and the first layer of each stage.
    best = {stop: (cost(0, 0, stop), (0,)) for stop in range(1, most)}
    for stage in range(1, stages):
        left = stages - 1 - stage
        best = {
            stop: min(
                (spent + cost(stage, start, stop), (*starts, start))
                for start, (spent, starts) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, most - left + 1)
        }
    starts = best[most][1]
    return tuple(range(*bounds) for bounds in zip(starts, (*starts[1:], most), strict=True))


def _layer_size(spec: ModelSpec, layer: int) -> int:
    """Return how many numbers a layer's matrices hold."""
    heads, moe = 2 * spec.num_heads + 2 * spec.num_kv_heads, spec.moe
    mlp = 3 * spec.intermediate_size
    if moe is not None and moe.layers[layer]:
        mlp = moe.num_experts * (3 * moe.intermediate_size + 1)
        mlp += 3 * moe.shared.intermediate_size if moe.shared is not None else 0
    return spec.hidden_size * (heads * spec.head_dim + mlp)


def _vocab_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Return the first token of each rank, and the number of tokens."""
    unit = next(unit for unit in VOCAB_UNITS if size >= unit * ranks or unit == 1)
    units = -(-size // unit)
    return tuple(min(units * index // ranks * unit, size) for index in range(ranks + 1))


def _share(count: int, ranks: int, index: int) -> range:
    return range(count * index // ranks, count * (index + 1) // ranks)


def _require_divisible(spec: ModelSpec, mesh: Mesh) -> None:
    for count, what in (
        (spec.num_heads, "attention heads"),
        (spec.intermediate_size, "inner columns"),
    ):
        if mesh.tensor > count:
            most = 1 << count.bit_length() - 1  # a power of two
            raise ConfigError(
                f"tensor_parallel={mesh.tensor} exceeds the model's {count} {what}; use at most "
                f"{most}."
            )
