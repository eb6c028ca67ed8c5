"""Engines over ranks that are threads of this process: the real loop, and a `ModelRunner` per rank
that replays the steps.

`mesh_engine` returns an `InferenceEngine` whose runner is `ThreadRanks`. Every rank has its shard
of the weights, KV tensors filled with NaN, and a thread that runs steps in order, so stages really
overlap.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.core.apply import SampledTokens
from nano_inference.core.batch import Chunks
from nano_inference.core.sequence import POLICY, PREVIOUS
from nano_inference.device import backends
from nano_inference.device.backends import choose_ops
from nano_inference.device.kv_tensors import KVStorage, common_layout, storage_key
from nano_inference.device.runner import ModelRunner
from nano_inference.device.units import UnitMap
from nano_inference.engine import engine as engine_module
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read, write
from nano_inference.models.sharding.rank_exchange import RankClock, RankExchange
from nano_inference.models.sharding.shard import ModelShard, shard_of
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.batches import ForwardBatch
from nano_inference.parallel.mesh import AXES, Axis, Mesh, Place
from nano_inference.ranks.parts import Parts, assemble
from nano_inference.ranks.replay import Draw, Forward, StepReplay, StepSender
from nano_inference.sampling.sampling_batch import Masks
from nano_inference.sampling.tensors import SamplingBatch
from tests.invariance.scenario import spoil
from tests.parallel.thread_group import ThreadGroup

PATIENCE = 30.0  # seconds for any step

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Forward | Draw).decode


class OnTheirWay:
    """Samples of a step that a rank has not finished."""

    def __init__(self) -> None:
        self.future: Future[SampledTokens] = Future()

    def wait(self) -> SampledTokens:
        return self.future.result(PATIENCE)


class Rank:
    """One rank: its thread and its mirror of the loop's state."""

    def __init__(
        self, part: ModelShard, runner: ModelRunner, block_size: int, units: UnitPool | None
    ) -> None:
        self.part, self.runner = part, runner
        self.steps = StepReplay(block_size, units)
        self.commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.failed: BaseException | None = None
        self._result: Any = None
        self._newest: Any = None
        self._thread = threading.Thread(
            target=self._run, name=f"rank {part.position.rank}", daemon=True
        )
        self._thread.start()

    def forward(self, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, Forward)
        batches, copies = self.steps.forward(message)
        self._result = self.runner.forward(batches, copies, self._newest)

    def sample(self, frame: bytes, future: Future[SampledTokens] | None) -> None:
        message = decode(frame)
        assert isinstance(message, Draw)
        batch = self.steps.draw(message)
        if self.part.position.is_last_stage:
            self._newest = self.runner.sample(self._result, batch)
            tokens = self._newest.wait()
            if future is not None:
                future.set_result(tokens)

    def stop(self) -> None:
        self.commands.put(None)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (command := self.commands.get()) is not None:
            if self.failed is None:
                try:
                    command()
                except BaseException as problem:
                    self.failed = problem


class ThreadRanks(ModelRunner):
    """The loop's `Runner` over ranks. `whole` has all weights: updates are written there and
    distributed before a step.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, parts: Parts) -> None:
        self.whole, self.mesh = parts.runner, mesh
        # of the whole model; run nothing
        self.models, self.storages = self.whole.models, self.whole.storages
        self.device = self.whole.device
        self.version_of: Callable[[], int] = lambda: 0
        self._version = 0
        self._pool = parts.cache.units
        self._steps = StepSender(config.block_size, self._pool)
        self._frame = b""
        # stages or tensor ranks at the same other coordinates
        self._groups: list[ThreadGroup] = []
        groups = {axis: self._meet(mesh, axis) for axis in AXES}
        self.rank_exchange: dict[tuple[int, str], RankExchange] = {}
        self.ranks: list[Rank] = []
        for index in range(mesh.world_size):
            rank_groups = {axis: each.get(index) for axis, each in groups.items()}
            self.ranks.append(self._rank(config, Place(mesh, index), parts, rank_groups))
        self._teller = mesh.rank(mesh.pipeline - 1, 0, 0)

    @property
    def storage(self) -> KVStorage:
        return self.storages[POLICY]

    @property
    def tokens_computed(self) -> int:  # pyright: ignore
        return self.ranks[0].runner.tokens_computed

    @property
    def prompt_tokens_computed(self) -> int:  # pyright: ignore
        return self.ranks[0].runner.prompt_tokens_computed

    def rank_times(self) -> list[tuple[int, int]]:
        return [(rank.runner.clock.busy, rank.runner.clock.waiting) for rank in self.ranks]

    def announce(self, *step: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._frame = encode(self._steps.forward(*step))
        if self._pool is not None:
            self._pool.changed.clear()

    def announce_draw(self, chunks: Chunks, masks: Masks) -> None:
        self._frame = encode(self._steps.draw(chunks, masks))

    def forward(
        self,
        batches: tuple[ForwardBatch, ...],
        block_copies: tuple[tuple[int, int], ...],
        previous: Any,
    ) -> Any:
        if self.version_of() != self._version:
            self._version = self.version_of()
            self._spread()
        frame = self._frame
        for rank in self.ranks:
            rank.commands.put(lambda rank=rank: rank.forward(frame))

    def sample(self, result: Any, batch: SamplingBatch) -> OnTheirWay:
        self._raise_what_failed()
        frame = self._frame
        arriving = OnTheirWay()
        for index, rank in enumerate(self.ranks):
            future = arriving.future if index == self._teller else None
            rank.commands.put(lambda rank=rank, future=future: self._answer(rank, frame, future))
        return arriving

    def set_aside(self, weight_set: str, name: str, changing: Any) -> None:
        self.whole.set_aside(weight_set, name, changing)
        for rank in self.ranks:
            rank.runner.set_aside(weight_set, name, list(rank.runner.models[weight_set].params))

    def drop(self, weight_set: str) -> None:
        self.whole.drop(weight_set)
        for rank in self.ranks:
            rank.commands.put(lambda rank=rank: rank.runner.drop(weight_set))

    def poison(self, free: list[int]) -> None:
        """Fill dead units (or blocks) with NaN after the earlier steps are done."""
        for rank in self.ranks:
            rank.commands.put(lambda rank=rank: _poison(rank.runner, free))

    def close(self) -> None:
        for group in self._groups:
            group.close()
        for rank in self.ranks:
            rank.stop()
        self.whole.close()

    def _meet(self, mesh: Mesh, axis: Axis) -> dict[int, ThreadGroup]:
        """Return each rank's group of one kind, without groups of a single rank."""
        groups: dict[int, ThreadGroup] = {}
        for every in {Place(mesh, index).peers(axis) for index in range(mesh.world_size)}:
            if len(every) > 1:
                members = ThreadGroup.make(len(every), PATIENCE)
                self._groups += members
                groups |= dict(zip(every, members, strict=True))
        return groups

    def _rank(
        self,
        config: EngineConfig,
        index: Place,
        parts: Parts,
        groups: dict[str, ThreadGroup | None],
    ) -> Rank:
        models: dict[str, Decoder] = {}
        clock = RankClock()
        storages: dict[str, KVStorage] = {}
        by_key: dict[Any, KVStorage] = {}
        budget, units = parts.memory_budget, None
        if self._pool is not None:
            units = UnitPool(self._pool.num_units, self._pool.num_blocks, self._pool.layout)
        unit_map = UnitMap(units, self.device) if units is not None else None
        for name, model in self.whole.models.items():
            if name == PREVIOUS:
                continue
            part = shard_of(model.spec, index)
            ops = choose_ops(config, {name: model.spec}, model.dtype, self.device)(
                budget.num_blocks
            )
            params = allocate(
                *(param_table(model.spec, part), model.dtype, self.device, ops.allocate),
                config.quantization,
            )
            _load(params, part, model)
            models[name] = Decoder(
                part.spec,
                params,
                ops,
                budget.max_model_len,
                RankExchange(part, **groups, clock=clock),
            )
            key = storage_key(part.spec, budget.layout)
            if key not in by_key:
                size = config.block_size // index.mesh.context
                by_key[key] = KVStorage(
                    part.spec,
                    budget.num_blocks,
                    size,
                    model.dtype,
                    self.device,
                    unit_map,
                    config.kv_cache_dtype,
                )
                spoil(by_key[key], slice(None))
            storages[name] = by_key[key]
        return Rank(models[POLICY].part, ModelRunner(models, storages), config.block_size, units)

    def _spread(self) -> None:
        """Send an update of the whole model to every rank. No step may be in flight."""
        for rank in self.ranks:
            model = rank.runner.models[POLICY]
            rank.commands.put(
                lambda model=model: _load(model.params, model.part, self.models[POLICY])
            )
        self._settle()

    def _settle(self) -> None:
        done = [threading.Event() for _ in self.ranks]
        for rank, event in zip(self.ranks, done, strict=True):
            rank.commands.put(event.set)
        for event in done:
            while not event.wait(0.1):
                self._raise_what_failed()

    def _answer(self, rank: Rank, frame: bytes, future: "Future[SampledTokens] | None") -> None:
        try:
            rank.sample(frame, future)
        except BaseException as problem:
            if future is not None:
                future.set_exception(problem)
            raise

    def _raise_what_failed(self) -> None:
        for rank in self.ranks:
            if rank.failed is not None:
                raise rank.failed


@contextmanager
def mesh_engine(
    config: EngineConfig, mesh: Mesh, groups: int | None = None
) -> Iterator[InferenceEngine]:
    """Build an engine whose ranks are threads. `config` describes one rank, and its memory is the
    number of blocks per rank.

        Args:
            config: Engine config without parallel options.
            mesh: Mesh of the ranks.
            groups: Number of sequence groups in flight. None: the number of stages.
    """

    def assemble_ranks(rank_config: EngineConfig, *_: Any) -> Parts:
        parts = assemble(rank_config)
        specs: list[ModelSpec] = [model.spec for model in parts.runner.models.values()]
        budget = parts.memory_budget
        layout = common_layout(specs, budget.max_model_len, mesh.pipeline)
        if layout != budget.layout:  # stages share blocks differently: use the same number
            num_units = budget.num_units // budget.layout.num_units * layout.num_units
            budget = replace(budget, layout=layout, num_units=num_units)
            kind = type(parts.cache)
            cache = kind(
                budget.num_blocks, rank_config.block_size, layout=layout, num_units=num_units
            )
            parts = replace(parts, cache=cache, memory_budget=budget)
        return replace(parts, runner=ThreadRanks(rank_config, mesh, parts))

    original, before = engine_module.assemble_all, torch.get_num_threads()
    engine_module.assemble_all = assemble_ranks  # pyright: ignore[reportAttributeAccessIssue]
    try:  # several ranks compute with tensors
        with patch.object(backends, "_runs_on_host", lambda _: False):
            engine = InferenceEngine(config)
    finally:
        engine_module.assemble_all = original
    groups = groups if groups is not None else mesh.pipeline
    if groups > 1:
        engine.loop.config = replace(engine.loop.config, groups=groups)
        engine.loop.lookahead = groups - 1
    ranks: Any = engine.runner
    ranks.version_of = lambda: engine.weight_sync.version
    try:
        with engine:
            yield engine
    finally:
        torch.set_num_threads(before)


def poison(engine: InferenceEngine) -> None:
    """Fill unheld, unmatchable blocks with NaN on every rank."""
    cache: PagedKVCache | Any = engine.cache
    free = [block.block_id for block in cache.blocks if block.ref_count == 0 and not block.hash]
    if cache.units is not None:
        free = list(cache.units.free)
    runner: Any = engine.runner
    runner.poison(free)


def _load(params: dict[str, Any], part: ModelShard, model: Decoder) -> None:
    """Load a shard of the whole model's current weights."""
    whole = slots(param_table(part.whole))
    for name, slot in slots(param_table(part.whole, part)).items():
        write(params, slot, slot.take(read(model.params, whole[name])))


def _poison(runner: ModelRunner, free: list[int]) -> None:
    for storage in set(runner.storages.values()):
        spoil(storage, free)
