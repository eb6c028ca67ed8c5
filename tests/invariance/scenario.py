"""Requests under a schedule on a tiny real model, with NaN in all memory that must not be read."""

import random
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from unittest.mock import patch

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.config import Backend, CacheType, KVCacheDType, SchedulerConfig
from nano_inference.core.sequence import DRAFT, POLICY, Sequence, Sequences
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.drafter import Drafter, allowed, may_draft
from nano_inference.drafts.model import ModelDrafts
from nano_inference.drafts.sources import ForcedDrafts
from nano_inference.drafts.suffix import SuffixDrafts
from nano_inference.kv_cache.block_hash import NO_PREFIX
from tests.drafts.heads import random_eagle, random_medusa, with_heads

Drafts = Literal["none", "right", "wrong", "any", "changing", "real", "self", "medusa", "eagle"]
Known = Mapping[tuple[int, int], Listed[int]]  # completions by (request index, sample index)
Samples = Mapping[tuple[int, int], TrainingSample]  # by the same keys
MOST_STEPS = 5000  # a scenario takes a few hundred
PLENTY = 6000  # tokens in a cache without memory shortage, and at least
FEW_BLOCKS = 16  # this many blocks
CHECKED_AT_ONCE = 512  # blocks; with more, `check` is called in fewer steps


@dataclass(frozen=True)
class Request:
    """One request of a scenario."""

    prompt: tuple[int, ...]
    params: SamplingParams
    num_samples: int = 1
    arrives: int = 0  # step
    aborted: int | None = None  # step
    turn_of: int | None = None  # earlier request whose place in the queue it takes
    prefetched: bool = False  # its prompt's blocks, in the step before it arrives
    released: int | None = None  # step that lets its prompt's blocks go


@dataclass(frozen=True)
class Schedule:
    """Settings that must not change any bit."""

    block_size: int = 16
    max_batch_size: int = 256
    max_tokens_per_batch: int = 8192
    max_chunk_tokens: int | None = None
    enable_prefix_caching: bool = True
    lookahead: int = 0
    num_threads: int = 2
    num_blocks: int | None = None  # None: plenty
    cache_type: CacheType = "paged"
    drafts: Drafts = "none"
    max_drafts: int = 4
    # the only setting that changes bits: equal in all compared runs
    backend: Backend = "cpu"
    device: str = "cpu"  # and this
    kv_cache_dtype: KVCacheDType = "auto"  # and this

    def config(self, model: Path, dtype: str, bytes_per_token: int) -> EngineConfig:
        """Return the engine configuration of this schedule."""
        # tiny models, and filling memory takes time
        interpreted = self.backend == "cuda" and self.device == "cpu"
        tokens = max(PLENTY, FEW_BLOCKS * self.block_size)
        plenty = 2**20 if interpreted else min(4 * 2**20, tokens * bytes_per_token)
        memory = (
            plenty
            if self.num_blocks is None
            else self.num_blocks * self.block_size * bytes_per_token
        )
        return EngineConfig(
            model_path=str(model),
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            device=self.device,
            cache_type=self.cache_type,
            backend=self.backend,
            batch_invariant=True if self.backend == "cuda" else None,  # costs time there
            block_size=self.block_size,
            max_batch_size=self.max_batch_size,
            max_tokens_per_batch=self.max_tokens_per_batch,
            max_chunk_tokens=self.max_chunk_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            lookahead=self.lookahead,
            num_threads=self.num_threads,
            kv_cache_memory=memory,
            kv_cache_dtype=self.kv_cache_dtype,
        )


@contextmanager
def small_tiles() -> Iterator[None]:
    """Use tiles, key splits and product segments on CUDA so small that a tiny model has several of
    each.
    """
    from nano_inference.ops.cuda import lora, matmul
    from nano_inference.ops.cuda.attention import Attention

    keys = patch.dict(Attention.__init__.__kwdefaults__, {"key_tile": 16, "split": 32})
    segments = patch.object(matmul, "SEGMENTED", ((4, 32),))
    ranks = patch.multiple(lora, LEAST_SEGMENT=16, DEPTH=16, SPLIT_ROWS=16, BLOCK=16)
    with keys, segments, ranks, patch.object(matmul, "MOST_SPLIT_TILES", 4):
        yield


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore torch's process-wide thread count."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poison(engine: InferenceEngine) -> None:
    """Fill every unheld, unmatchable block and all memory outside of blocks with NaN."""
    free = [b.block_id for b in engine.cache.blocks if b.ref_count == 0 and b.hash == NO_PREFIX]
    units = free if engine.cache.units is None else engine.cache.units.free
    storage = engine.runner.storage
    if storage.states is not None:  # units belong to states
        for tensor in storage.states.tensors.values():
            tensor[:, units] = torch.nan
    else:
        free = units
    spoil(storage, free)


def spoil(storage: KVStorage, units: Listed[int] | slice) -> None:
    """Fill units with NaN, or for quantized values their scales."""
    number = -1 if storage.format.coded else torch.nan
    for cache in (storage.keys, storage.values):
        by_unit = cache if cache.dim() == 2 else cache.movedim(2, 0)  # layers of several kinds
        by_unit[units] = number


class TriedDrafts:
    """Drafts of one kind.

    Args:
        kind: Kind of the drafts.
        known: Right completions.
        places: Request id -> index in the scenario.
        vocab_size: Vocabulary size of the policy.
    """

    def __init__(
        self, kind: Drafts, known: Known, places: Mapping[int, int], vocab_size: int
    ) -> None:
        self._kind, self._known, self._places = kind, known, places
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(
        self, live: Sequences, pending: Container[int], config: SchedulerConfig
    ) -> dict[int, tuple[int, ...]]:
        """Propose drafts of the kind."""
        drafts: dict[int, tuple[int, ...]] = {}
        for seq in live.running:
            if seq.seq_id not in pending and may_draft(seq):
                drafts[seq.seq_id] = tuple(allowed(seq, self._drafts(seq)))
        return drafts

    def learn(self, seqs: Listed[Sequence], drafts: Mapping[int, tuple[int, ...]]) -> int:
        """Ignore the accepted tokens."""
        return 0

    def _drafts(self, seq: Sequence) -> list[int]:
        r = self._random
        kind = r.choice(["right", "wrong", "any"]) if self._kind == "changing" else self._kind
        whole = self._known.get((self._places[seq.request_id], seq.sample_index), ())
        right = list(whole[seq.num_completion_tokens :][: r.randrange(6)])
        if kind == "wrong":
            return [(token + 1) % self._vocab_size for token in right]
        if kind == "any":
            return [r.randrange(self._vocab_size) for _ in range(r.randrange(6))]
        return right


def set_drafts(
    engine: InferenceEngine, schedule: Schedule, known: Known, places: dict[int, int]
) -> None:
    """Make the engine compute drafts from now on."""
    if schedule.drafts == "none":
        return
    engine.loop.config = replace(engine.loop.config, max_drafts=schedule.max_drafts)
    tried = TriedDrafts(schedule.drafts, known, places, engine.spec.vocab_size)
    engine.loop.drafter = real_drafts(engine, schedule.drafts, schedule.max_drafts) or tried


def real_drafts(engine: InferenceEngine, kind: Drafts, most: int) -> Drafter | None:
    """Return a user-visible draft source, or None for another kind."""
    engine.loop.watches, engine.runner.models[POLICY].taps = (), None
    engine.runner.models[POLICY].forget_recorded()
    engine.runner.storages.pop(DRAFT, None)
    if kind == "eagle":
        return with_heads(engine, random_eagle(engine), most)
    if kind == "medusa":
        return with_heads(engine, random_medusa(engine), most)
    if kind == "real":
        return Drafter([ForcedDrafts(), SuffixDrafts()], most=most)
    if kind == "self":  # with only its first layer
        model, storage = engine.runner.models[POLICY], engine.runner.storage
        source = ModelDrafts("self", model.twin(layers=(0,)), storage, (), has_own_cache=False)
        return Drafter([ForcedDrafts(), SuffixDrafts()], most=most, model=source)
    return None


def keep(engine: InferenceEngine, request: Request, step: int) -> None:
    """Prefetch or release a request's prompt if it is time."""
    salt = request.params.cache_salt
    if request.prefetched and step == max(0, request.arrives - 1):
        engine.kept_prompts.prefetch(request.prompt, cache_salt=salt)
    if request.released == step:
        engine.kept_prompts.release(request.prompt, cache_salt=salt)


def run(
    model: Path,
    dtype: str,
    requests: list[Request],
    schedule: Schedule,
    bytes_per_token: int,
    make: Callable[[EngineConfig], AbstractContextManager[InferenceEngine]] = InferenceEngine,
    poison: Callable[[InferenceEngine], None] = poison,
    known: Known = MappingProxyType({}),
) -> tuple[dict[tuple[int, int], TrainingSample], int]:
    """Run requests under a schedule. Return samples by (request index, sample index), and
    preemptions. `known`: completions that right drafts propose.
    """
    with threads_restored(), make(schedule.config(model, dtype, bytes_per_token)) as engine:
        ids: dict[int, int] = {}
        set_drafts(engine, schedule, known, ids)
        samples: list[TrainingSample] = []
        last = max([0] + [max(r.arrives, r.aborted or 0, r.released or 0) for r in requests])
        for step in range(MOST_STEPS):
            if step > last and not engine.has_pending():
                break
            for index, request in enumerate(requests):
                keep(engine, request, step)
                if request.arrives == step:
                    options = {"turn_of": request.turn_of}
                    request_id = engine.add_request(
                        request.prompt, request.params, request.num_samples, **options
                    )
                    ids[request_id] = index
                if request.aborted == step:
                    samples += engine.abort([i for i, p in ids.items() if p == index])
            poison(engine)
            samples += engine.step()
            if step % (1 + len(engine.cache.blocks) // CHECKED_AT_ONCE) == 0:
                engine.loop.check()
        else:
            raise AssertionError("livelock: requests are left after many steps")
        engine.loop.check()
        return {
            (ids[s.request_id], s.sample_index): s for s in samples
        }, engine.stats().num_preemptions


def same_bits(one: TrainingSample, other: TrainingSample) -> bool:
    """Compare tokens and all numbers of a sample bitwise. An aborted sample is compared up to its
    end.
    """
    length = min(len(one.completion_tokens), len(other.completion_tokens))
    if "abort" not in (one.finish_reason, other.finish_reason) and (
        len(one.completion_tokens) != len(other.completion_tokens)
        or one.finish_reason != other.finish_reason
    ):
        return False
    if not _same_matrices(one, other, length):
        return False
    # the first is NaN
    scored = min(len(one.prompt_logprobs or ()), len(other.prompt_logprobs or ()))
    if (one.prompt_top_logprobs or ())[:scored] != (other.prompt_top_logprobs or ())[:scored]:
        return False
    return (one.prompt_logprobs or ())[1:scored] == (other.prompt_logprobs or ())[1:scored] and all(
        (getattr(one, name) or ())[:length] == (getattr(other, name) or ())[:length]
        for name in (
            "completion_tokens",
            "logprobs",
            "raw_logprobs",
            "log_kept_mass",
            "top_logprobs",
        )
    )


def _same_matrices(one: TrainingSample, other: TrainingSample, length: int) -> bool:
    """Compare the logprobs of named ids up to a number of completion tokens."""
    pairs = [
        (getattr(one, name), getattr(other, name), length)
        for name in ("token_id_logprobs", "raw_token_id_logprobs")
    ]
    mine, theirs = one.prompt_token_id_logprobs, other.prompt_token_id_logprobs
    pairs.append((mine, theirs, min(len(mine or ()), len(theirs or ()))))
    return all(
        a is b or (a is not None and b is not None and a.rows(0, end) == b.rows(0, end))
        for a, b, end in pairs
    )


def require_same_samples(work: Listed[Request], together: Samples, expected: Samples) -> None:
    """Check that every sample has the expected bits. A requested abort may cut a sample short."""
    for (request, index), sample in expected.items():
        got = together.get((request, index))
        assert got is not None, "a sample is lost"
        aborted = got.finish_reason == "abort"
        assert not aborted or (work[request].aborted is not None and got.stop_reason is None), (
            "it read what it may not"
        )
        assert same_bits(got, sample), f"request {request}, sample {index}: other bits"
