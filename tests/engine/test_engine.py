"""The public engine API on tiny models: results, their order, and rejected requests."""

import gc
import logging
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import (
    ConfigError,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    ModelLoadError,
    RequestTooLarge,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from nano_inference.arrays import host
from nano_inference.checkpoints.loading import read_tensors, resolve_model
from nano_inference.config import CacheType
from nano_inference.device import memory
from nano_inference.kv_cache.caches import CACHES
from nano_inference.models.parameters.slots import Slot
from nano_inference.models.parameters.values import read, write
from nano_inference.ops.cpu import memory as memory_of_kernels
from nano_inference.ranks import parts
from nano_inference.system.machine import FreeMemory
from tests.depth import at_depth
from tests.models.tiny import llama_config, llama_weights, tiny_llama, write_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.weights.weight_cases import drain

Build = Callable[..., InferenceEngine]

TOKEN_BYTES = 512  # keys and values of one token of the tiny model
CALM = settings(
    deadline=None,
    max_examples=at_depth(20),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(model: Path) -> Iterator[Build]:
    """Build single-threaded engines on the tiny model."""
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(folder: Path = model, **options: Any) -> InferenceEngine:
        settled = {"num_threads": 1, "kv_cache_memory": 2**20, "seed": 0} | options
        engines.append(InferenceEngine(EngineConfig(model_path=str(folder), **settled)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def assert_all_blocks_free(engine: InferenceEngine) -> None:
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0


def assert_aligned(sample: TrainingSample) -> None:
    """Check that every per-token tuple has one entry per token and that the spans cover all tokens."""
    num = len(sample.completion_tokens)
    assert len(sample.logprobs) == num
    assert sample.log_kept_mass is not None
    assert len(sample.log_kept_mass) == num
    assert sample.raw_logprobs is None or len(sample.raw_logprobs) == num
    if sample.sampling_mask is not None:
        offsets, ids = sample.sampling_mask.offsets, sample.sampling_mask.token_ids
        assert len(offsets) == num + 1
        assert offsets[0] == 0
        assert offsets[-1] == len(ids)
        for i, token in enumerate(sample.completion_tokens):
            assert token in ids[offsets[i] : offsets[i + 1]]
    covered = [
        position for span in sample.weight_versions for position in range(span.start, span.end)
    ]
    assert covered == list(range(num))
    if sample.weight_versions:
        assert sample.weight_version == sample.weight_versions[-1].version
    assert all(type(token) is int for token in sample.completion_tokens)
    assert all(type(value) is float and math.isfinite(value) for value in sample.logprobs)


# -- generate --------------------------------------------------------------------------------------


USAGE = """
with InferenceEngine(EngineConfig(model_path="smollm2-135m", cache_type="radix", block_size=16)) as engine:
    params = SamplingParams(temperature=0.7, max_tokens=64)
    samples = engine.generate(prompts=[[1, 2, 3, 4], [5, 6, 7, 8]], sampling_params=params, num_samples_per_prompt=4)
    for s in samples:                                             # prompt-major order
        print(s.completion_tokens, s.logprobs, s.weight_version)
    engine.update_weights(new_state_dict, blocking=False)         # PipelineRL style: decoding goes on
    request = engine.add_request([1, 2, 3], params)               # mid level
    while engine.has_pending():
        finished = engine.step()
    engine.update_weights(new_state_dict, blocking=True)          # Miles style
    engine.flush_cache()
    version, free = engine.get_weight_version(), engine.cache.num_free_blocks() == engine.cache.num_blocks
"""


@pytest.mark.thorough
def test_documented_usage_runs_unchanged() -> None:
    threads = torch.get_num_threads()
    weights = dict(read_tensors(resolve_model("smollm2-135m")))
    new_state_dict = {"model.norm.weight": weights["model.norm.weight"] * 1.1}
    names: dict[str, Any] = {
        "InferenceEngine": InferenceEngine,
        "EngineConfig": EngineConfig,
        "SamplingParams": SamplingParams,
        "new_state_dict": new_state_dict,
    }
    exec(USAGE, names)
    torch.set_num_threads(threads)
    samples = names["samples"]
    assert [s.prompt_tokens for s in samples] == [(1, 2, 3, 4)] * 4 + [(5, 6, 7, 8)] * 4
    assert [s.sample_index for s in samples] == [0, 1, 2, 3] * 2
    for s in samples:
        assert_aligned(s)
        assert 1 <= len(s.completion_tokens) <= 64
        assert s.weight_version == 0
    assert [s.request_id for s in names["finished"]] == [names["request"]]
    assert names["finished"][0].weight_version == 1
    assert names["version"] == 2
    assert names["free"]


def test_results_keep_request_order(build: Build) -> None:
    lengths = [9, 1, 6, 3]
    prompts = [[10 + i] * (i + 1) for i in range(4)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    ended: list[int] = []
    samples = build(max_batch_size=5).generate(
        prompts, params, 2, progress=lambda done, *_: ended.append(done)
    )
    assert [s.prompt_tokens for s in samples] == [tuple(p) for p in prompts for _ in range(2)]
    assert [s.sample_index for s in samples] == [0, 1] * 4
    assert [len(s.completion_tokens) for s in samples] == [n for n in lengths for _ in range(2)]
    assert len(set(ended)) > 2, "all ended at once: the test shows nothing"


def test_progress_is_called_after_every_step(build: Build) -> None:
    engine, calls = build(), list[tuple[int, int, int]]()
    engine.generate(
        [[1, 2], [3]],
        greedy(5, ignore_eos=True),
        2,
        progress=lambda *numbers: calls.append(numbers),
    )
    assert calls[-1] == (4, 4, 20)
    assert calls == sorted(calls)
    assert len(calls) == engine.stats().num_steps


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        iter([5, 6, 7]),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.int32),
        torch.tensor([5, 6, 7]),
        [np.int64(5), 6, torch.tensor(7)],
    ],
)
def test_prompt_accepts_any_integer_sequence(build: Build, prompt: Any) -> None:
    engine = build()
    (sample,) = engine.generate(prompt, greedy(2))
    assert sample.prompt_tokens == (5, 6, 7)
    assert all(type(token) is int for token in sample.prompt_tokens)
    assert sample.completion_tokens == engine.generate([[5, 6, 7]], greedy(2))[0].completion_tokens


def test_params_apply_per_prompt_or_to_all(build: Build) -> None:
    engine = build()
    with pytest.raises(InvalidRequest, match="2 sampling_params for 3 prompts"):
        engine.generate([[1], [2], [3]], [greedy(), greedy()])
    lengths = [
        len(s.completion_tokens)
        for s in engine.generate([[1], [2]], [greedy(1), greedy(3, ignore_eos=True)])
    ]
    assert lengths == [1, 3]


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_group_computes_its_prompt_once(build: Build, chunk: int | None, lookahead: int) -> None:
    engine = build(max_chunk_tokens=chunk, lookahead=lookahead, kv_cache_memory=2**22)
    prompts = [[i, *range(100, 100 + 3 + 5 * i)] for i in range(8)]
    samples = engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), 8)
    assert len(samples) == 64
    assert engine.runner.prompt_tokens_computed == sum(len(prompt) for prompt in prompts)
    assert engine.stats().prompt_tokens_computed == engine.runner.prompt_tokens_computed
    assert engine.stats().completion_tokens == 64 * 6
    assert_all_blocks_free(engine)
    for start in range(0, 64, 8):
        group = samples[start : start + 8]
        assert len({s.completion_tokens for s in group}) > 4
        assert len({s.seed for s in group}) == 1


def test_group_sample_equals_the_sample_of_a_single_request(build: Build) -> None:
    params = SamplingParams(max_tokens=12, seed=77, raw_logprobs=True)
    prompt = list(range(20, 41))
    group = build().generate(prompt, params, 5)
    assert build().generate(prompt, params)[0] == group[0]
    assert build(enable_prefix_caching=False, block_size=4).generate(prompt, params, 3) == group[:3]


def test_group_larger_than_a_batch_takes_turns(build: Build) -> None:
    engine = build(max_batch_size=2)
    samples = engine.generate([1, 2, 3], SamplingParams(max_tokens=5, seed=3, ignore_eos=True), 7)
    assert [s.sample_index for s in samples] == list(range(7))
    assert samples == build().generate(
        [1, 2, 3], SamplingParams(max_tokens=5, seed=3, ignore_eos=True), 7
    )


@pytest.mark.parametrize("cache_type", CACHES)
def test_repeated_prompt_is_read_from_the_cache(build: Build, cache_type: CacheType) -> None:
    engine = build(block_size=4, cache_type=cache_type)
    prompt = list(range(30, 41))
    (first,) = engine.generate(prompt, greedy())
    (second,) = engine.generate(prompt, greedy())
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert engine.runner.prompt_tokens_computed == 11 + 3
    assert engine.stats().prompt_tokens_cached == 8
    assert second.completion_tokens == first.completion_tokens
    assert second.logprobs == first.logprobs
    engine.flush_cache()
    assert engine.generate(prompt, greedy())[0].cached_tokens == 0


@pytest.mark.parametrize("cache_type", CACHES)
def test_salt_separates_prefixes(build: Build, cache_type: CacheType) -> None:
    engine = build(block_size=4, cache_type=cache_type)
    prompt = list(range(30, 41))
    seen: list[int] = []
    for salt in (None, "", "a", "a", "", None):
        seen.append(engine.generate(prompt, greedy(2, cache_salt=salt))[0].cached_tokens)
    assert seen == [0, 0, 0, 8, 8, 8]


@pytest.mark.parametrize("num_blocks", [12, 200])
def test_cache_kind_changes_no_bit(build: Build, num_blocks: int) -> None:
    """Cover multi-turn conversations, repeated prompts, groups and an update. The small cache must
    evict.
    """
    stem = list(range(20, 36))
    results: list[list[TrainingSample]] = []
    for cache_type, cls in CACHES.items():
        engine = build(
            block_size=4, cache_type=cache_type, kv_cache_memory=num_blocks * 4 * TOKEN_BYTES
        )
        assert type(engine.cache) is cls
        samples: list[TrainingSample] = []
        for turn in range(4):
            params = SamplingParams(max_tokens=8, seed=turn, ignore_eos=True, raw_logprobs=True)
            prompts = [stem, [*stem[:8], 50 + turn], stem[:12], stem[:12]]
            samples += engine.generate(prompts, params, 2)
            stem = [*stem[:16], *samples[-1].completion_tokens]
            if turn == 2:
                engine.update_weights(llama_weights(llama_config(), seed=1))
            engine.loop.check()
        assert_all_blocks_free(engine)
        results.append(samples)
        stem = list(range(20, 36))
    paged, radix = results
    assert [replace(sample, cached_tokens=0) for sample in paged] == [
        replace(s, cached_tokens=0) for s in radix
    ]
    assert sum(sample.cached_tokens for sample in radix) > 0


@pytest.mark.parametrize("cache_type", CACHES)
def test_disabled_prefix_caching_reuses_nothing(build: Build, cache_type: CacheType) -> None:
    engine = build(block_size=4, enable_prefix_caching=False, cache_type=cache_type)
    for _ in range(2):
        assert engine.generate(list(range(30, 41)), greedy())[0].cached_tokens == 0
    assert engine.runner.prompt_tokens_computed == 22


# -- sharing the engine ----------------------------------------------------------------------------


def test_generate_keeps_samples_of_other_callers(build: Build) -> None:
    engine = build()
    short, long = (
        engine.add_request([9, 8], greedy(2)),
        engine.add_request([7, 6], greedy(30, ignore_eos=True)),
    )
    mine = engine.generate([[1, 2], [3, 4]], greedy(5, ignore_eos=True), 2)
    assert [s.prompt_tokens for s in mine] == [(1, 2), (1, 2), (3, 4), (3, 4)]
    assert not {short, long} & {s.request_id for s in mine}
    assert engine.has_pending()
    kept = engine.step()
    assert [s.request_id for s in kept] == [short]
    assert [s.request_id for s in drain(engine)] == [long]
    assert not engine.has_pending()
    assert engine.step() == []


def test_kept_sample_counts_as_pending(build: Build) -> None:
    engine = build()
    other = engine.add_request([9, 8], greedy(2))
    engine.generate([1, 2], greedy(10, ignore_eos=True))
    assert engine.has_pending()
    assert [s.request_id for s in engine.step()] == [other]
    assert not engine.has_pending()


def test_requests_are_served_in_order_of_priority(build: Build) -> None:
    engine = build(max_batch_size=1)
    late = engine.add_request([1, 2], greedy(3, priority=5))
    first = engine.add_request([3, 4], greedy(3, priority=-5))
    second = engine.add_request([5, 6], greedy(3, priority=-5))
    ended: list[int] = []
    while engine.has_pending():
        ended += [s.request_id for s in engine.step()]
    assert ended == [first, second, late]
    assert engine.stats().num_preemptions == 0, "a request was admitted out of order"


def test_failing_progress_ends_only_the_requests_of_generate(build: Build) -> None:
    engine = build()
    other = engine.add_request([9, 8], greedy(12, seed=1, ignore_eos=True))

    def give_up(_done: int, _total: int, tokens: int) -> None:
        if tokens > 6:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        engine.generate([[1, 2], [3]], greedy(20, ignore_eos=True), progress=give_up)
    (sample,) = drain(engine)
    assert sample.request_id == other
    assert sample.finish_reason == "length"
    assert_all_blocks_free(engine)


def test_abort_from_progress_ends_generate(build: Build) -> None:
    """`generate` must not wait for samples that the abort returned to its caller."""
    engine, calls, aborted = build(), list[int](), list[TrainingSample]()

    def stop(_done: int, _total: int, tokens: int) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            aborted.extend(engine.abort())
        if len(calls) > 60:
            pytest.fail("generate continues without work")

    returned = engine.generate([[1, 2], [3]], greedy(20, ignore_eos=True), progress=stop)
    reasons = {(s.request_id, s.finish_reason) for s in [*returned, *aborted]}
    assert reasons == {(0, "abort"), (1, "abort")}


# -- abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_abort_returns_partial_samples(build: Build, lookahead: int) -> None:
    params = SamplingParams(
        max_tokens=20, seed=5, ignore_eos=True, raw_logprobs=True, top_k=9, sampling_mask=True
    )
    whole = build().generate([[1, 2, 3], [4, 5]], params, 3)
    engine = build(lookahead=lookahead)
    ids = [engine.add_request(prompt, params, 3) for prompt in ([1, 2, 3], [4, 5])]
    for _ in range(7):
        assert engine.step() == []
    partial = engine.abort()
    assert [(s.request_id, s.sample_index) for s in partial] == [
        (i, n) for i in ids for n in range(3)
    ]
    for part, full in zip(partial, whole, strict=True):
        assert_aligned(part)
        assert part.finish_reason == "abort"
        assert part.stop_reason is None
        assert part.sampling_mask is not None
        num = len(part.completion_tokens)
        assert 6 <= num <= 7
        assert part.completion_tokens == full.completion_tokens[:num]
        assert part.logprobs == full.logprobs[:num]
        assert part.raw_logprobs == (full.raw_logprobs or ())[:num]
    assert not engine.has_pending() or drain(engine) == []
    assert_all_blocks_free(engine)


def test_abort_changes_no_bit_of_other_requests(build: Build) -> None:
    params = SamplingParams(max_tokens=15, seed=5, ignore_eos=True)
    alone = build().generate([4, 5], params)[0]
    engine = build()
    first = engine.add_request([1, 2, 3], params, 2)
    second = engine.add_request([4, 5], params)
    for _ in range(4):
        engine.step()
    assert {s.request_id for s in engine.abort(first)} == {first}
    (sample,) = drain(engine)
    assert sample.request_id == second
    assert (sample.completion_tokens, sample.logprobs) == (alone.completion_tokens, alone.logprobs)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_of_an_unforked_group_returns_all_samples(build: Build, steps: int) -> None:
    engine = build(max_chunk_tokens=4)
    request = engine.add_request(list(range(50, 70)), SamplingParams(seed=8, raw_logprobs=True), 4)
    for _ in range(steps):
        engine.step()
    samples = engine.abort([request])
    assert [s.sample_index for s in samples] == [0, 1, 2, 3]
    for sample in samples:
        assert_aligned(sample)
        assert (
            sample.completion_tokens
            == sample.logprobs
            == sample.raw_logprobs
            == sample.weight_versions
            == ()
        )
        assert (sample.finish_reason, sample.request_id, sample.seed) == ("abort", request, 8)
        assert sample.prompt_tokens == tuple(range(50, 70))
    assert not engine.has_pending()
    assert_all_blocks_free(engine)


def test_abort_skips_ids_of_finished_requests(build: Build) -> None:
    engine = build()
    done = engine.generate([1], greedy(1))[0].request_id
    live = engine.add_request([2], greedy(4))
    assert engine.abort([done]) == []
    for never in (999, -1, "1"):
        with pytest.raises(InvalidRequest, match="does not exist; valid ids are 0 to 1"):
            engine.abort([live, never])
    assert engine.has_pending(), "a rejected call ended a request"
    assert engine.abort([]) == []
    assert [s.request_id for s in engine.abort({live, done})] == [live]
    assert engine.abort() == []


# -- bad requests ----------------------------------------------------------------------------------

LONGEST = 512
BAD_REQUESTS: list[tuple[Any, Any, Any, type[InvalidRequest], str]] = [
    ([], greedy(), 1, InvalidRequest, "empty"),
    (np.array([], dtype=np.int64), greedy(), 1, InvalidRequest, "empty"),
    ([1, 300], greedy(), 1, InvalidRequest, r"300 is outside the vocabulary \(0 to 299\)"),
    ([-1], greedy(), 1, InvalidRequest, r"-1 is outside the vocabulary \(0 to 299\)"),
    ([2**70], greedy(), 1, InvalidRequest, "outside the vocabulary"),
    ([1.0], greedy(), 1, InvalidRequest, "token id 1.0 must be an integer"),
    ([1, "2"], greedy(), 1, InvalidRequest, "token id '2' must be an integer"),
    ([1, None], greedy(), 1, InvalidRequest, "token id None"),
    ([True], greedy(), 1, InvalidRequest, "token id True"),
    ([[1, 2]], greedy(), 1, InvalidRequest, "token id"),
    (np.array([1.5]), greedy(), 1, InvalidRequest, "must be an integer"),
    (torch.tensor([1.0]), greedy(), 1, InvalidRequest, "must be an integer"),
    (torch.tensor([[1, 2]]), greedy(), 1, InvalidRequest, "must be an integer"),
    ("text", greedy(), 1, InvalidRequest, "needs a tokenizer.*tokenizer_path"),
    (b"text", greedy(), 1, InvalidRequest, "token ids.*not bytes"),
    (None, greedy(), 1, InvalidRequest, "token ids.*not NoneType"),
    (5, greedy(), 1, InvalidRequest, "token ids.*not int"),
    ([1], None, 1, InvalidRequest, "SamplingParams, not NoneType"),
    ([1], {"temperature": 1.0}, 1, InvalidRequest, "SamplingParams, not dict"),
    ([1], greedy(), 0, InvalidRequest, "num_samples=0 must be a positive integer"),
    ([1], greedy(), -1, InvalidRequest, "num_samples=-1"),
    ([1], greedy(), 1.0, InvalidRequest, "num_samples=1.0"),
    ([1], greedy(), True, InvalidRequest, "num_samples=True"),
    (
        [1],
        greedy(stop_token_ids=frozenset({300, 5})),
        1,
        InvalidRequest,
        r"stop token id 300 .* \(0 to 299\)",
    ),
    (
        [1],
        greedy(stop_token_ids=frozenset(range(300)), min_tokens=1),
        1,
        InvalidRequest,
        "whole vocabulary",
    ),
    (
        [1],
        greedy(logit_bias={300: 1.0}),
        1,
        InvalidRequest,
        r"logit_bias key 300 is outside the vocabulary \(0 to 299\)",
    ),
    ([1], greedy(allowed_token_ids=[5, 300]), 1, InvalidRequest, "allowed token id 300 is outside"),
    (
        [1],
        greedy(allowed_token_ids=[2], min_tokens=1),
        1,
        InvalidRequest,
        "allowed set would end.*min_tokens",
    ),
    (
        [1],
        greedy(top_logprobs=301),
        1,
        InvalidRequest,
        r"top_logprobs=301 exceeds the vocabulary size \(300\)",
    ),
    (
        [1],
        greedy(prompt_logprobs=True, prompt_top_logprobs=301),
        1,
        InvalidRequest,
        r"prompt_top_logprobs=301 exceeds the vocabulary size \(300\)",
    ),
    ([1], greedy(stop=["a"]), 1, InvalidRequest, "a stop string needs a tokenizer.*tokenizer_path"),
    ([{"role": "user", "content": "a"}], greedy(), 1, InvalidRequest, "a chat needs a tokenizer"),
    (
        [1] * LONGEST,
        greedy(1),
        1,
        RequestTooLarge,
        "512 tokens .*max_model_len=512; shorten it to 511",
    ),
    (
        [1] * 500,
        greedy(13),
        1,
        RequestTooLarge,
        r"prompt \(500\) and max_tokens=13 .*=512; max_tokens=12 would fit",
    ),
]


@pytest.mark.parametrize(("prompt", "params", "num", "error", "message"), BAD_REQUESTS)
def test_bad_request_is_rejected_by_name(
    build: Build, prompt: Any, params: Any, num: Any, error: type[InvalidRequest], message: str
) -> None:
    engine = build()
    with pytest.raises(error, match=message):
        engine.add_request(prompt, params, num)
    assert not engine.has_pending()


@pytest.mark.parametrize(
    ("prompts", "params", "num"),
    [
        ("text", greedy(), 1),
        (["text"], greedy(), 1),
        (None, greedy(), 1),
        ([], greedy(), 1),
        ([[1], []], greedy(), 1),
        ([[1], [300]], greedy(), 1),
        ([[1], "text"], greedy(), 1),
        ([1, "2"], greedy(), 1),
        ([[1], [2]], [greedy(), None], 1),
        ([[1], [2]], None, 1),
        ([[1], [2]], 5, 1),
        ([[1], [2]], greedy(), 0),
        ([[1], [2] * LONGEST], greedy(), 1),
    ],
)
def test_generate_adds_all_requests_or_none(
    build: Build, prompts: Any, params: Any, num: Any
) -> None:
    engine = build()
    with pytest.raises(InvalidRequest):
        engine.generate(prompts, params, num)
    assert not engine.has_pending()
    assert engine.stats().num_steps == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_bad_requests_do_not_disturb_running_requests(build: Build, lookahead: int) -> None:
    """Neither the tokens nor the seeds of later requests change."""

    def run(disturb: bool) -> list[TrainingSample]:
        engine, samples = build(lookahead=lookahead), list[TrainingSample]()
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True), 2)
        engine.add_request([4, 5], SamplingParams(max_tokens=5, ignore_eos=True))
        for step in range(5):
            samples += engine.step()
            if disturb:
                for prompt, params, num, error, _ in BAD_REQUESTS:
                    if not hasattr(prompt, "__next__"):
                        with pytest.raises(error):
                            engine.add_request(prompt, params, num)
                with pytest.raises(InvalidRequest):
                    SamplingParams(temperature=math.nan)
            if step == 2:
                engine.add_request([6], SamplingParams(max_tokens=4, ignore_eos=True))
        return samples + drain(engine)

    assert run(disturb=True) == run(disturb=False)


def test_params_reject_stop_ids_that_mask_every_token(build: Build) -> None:
    """The model's end token counts: with `min_tokens` every one of these ids would be masked."""
    everything_else = frozenset(range(300)) - {2}
    engine = build()
    with pytest.raises(InvalidRequest, match="leaves no token to draw"):
        engine.add_request([1], SamplingParams(stop_token_ids=everything_else, min_tokens=1))
    (sample,) = engine.generate(
        [1], SamplingParams(stop_token_ids=everything_else, min_tokens=1, ignore_eos=True)
    )
    assert sample.completion_tokens[0] == 2


def test_oversized_request_error_names_the_size_that_fits(build: Build) -> None:
    engine = build(kv_cache_memory=3 * 16 * TOKEN_BYTES)
    assert engine.max_model_len == 48
    with pytest.raises(
        RequestTooLarge,
        match=r"prompt \(40\) and max_tokens=9 exceed max_model_len=48; max_tokens=8",
    ):
        engine.add_request([7] * 40, greedy(9))
    assert len(engine.generate([7] * 40, greedy(8, ignore_eos=True))[0].completion_tokens) == 8
    with pytest.raises(RequestTooLarge, match=r"prompt of 48 tokens .* shorten it to 47"):
        engine.add_request([7] * 48, greedy(1))
    assert len(engine.generate([7] * 47, greedy(1))[0].completion_tokens) == 1


def test_request_must_fit_a_step_without_chunked_prefill(build: Build) -> None:
    engine = build(enable_chunked_prefill=False, max_tokens_per_batch=20)
    with pytest.raises(
        RequestTooLarge,
        match=r"max_tokens_per_batch=20.*enable chunked prefill, or set max_tokens_per_batch=21",
    ):
        engine.add_request([7] * 15, greedy(6))
    assert len(engine.generate([7] * 15, greedy(5, ignore_eos=True))[0].completion_tokens) == 5


def test_work_that_exceeds_memory_runs_in_turns(build: Build) -> None:
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    prompts = [[i] * (3 + i) for i in range(6)]
    tight = build(kv_cache_memory=8 * 4 * TOKEN_BYTES, block_size=4)
    samples = tight.generate(prompts, params, 2)
    assert tight.stats().num_preemptions > 0
    assert [s.completion_tokens for s in samples] == [
        s.completion_tokens for s in build().generate(prompts, params, 2)
    ]
    assert_all_blocks_free(tight)


# -- failures --------------------------------------------------------------------------------------


def assert_dead(engine: InferenceEngine, why: str) -> None:
    calls: list[Callable[[], Any]] = [
        engine.step,
        lambda: engine.generate([1], greedy()),
        lambda: engine.add_request([1], greedy()),
        engine.abort,
        lambda: engine.abort(0),
        lambda: engine.update_weights({"model.norm.weight": torch.ones(64)}),
        lambda: engine.update_weights({"model.norm.weight": torch.ones(64)}, blocking=True),
        engine.flush_cache,
    ]
    for call in calls:
        with pytest.raises(EngineDead, match=why):
            call()


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_failed_step_ends_the_engine(
    build: Build, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = build()
    engine.add_request([1, 2], greedy(5))
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("device on fire")

    monkeypatch.setattr(engine.runner, part, fail)
    with pytest.raises(EngineDead, match="device on fire") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_dead(engine, "device on fire")
    engine.shutdown()


def test_failed_step_inside_generate_raises_engine_dead(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    monkeypatch.setattr(engine.runner, "forward", lambda *_: 1 / 0)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        engine.generate([1], greedy())
    assert_dead(engine, "ZeroDivisionError")


def test_calls_after_shutdown_raise(build: Build) -> None:
    engine = build()
    engine.add_request([1], greedy())
    engine.shutdown()
    engine.shutdown()
    assert_dead(engine, "shut down")


@NEEDS_COMPILER
def test_shutdown_releases_memory_at_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []

    def recorded(size: int) -> mmap.mmap:
        made = mmap.mmap(-1, size)
        mappings.append(weakref.ref(made))
        return made

    monkeypatch.setattr(memory_of_kernels, "_map", recorded)
    engine = build(backend="cpu")
    engine.generate([[1, 2, 3]], greedy())
    assert mappings
    gc.disable()  # nothing may wait for a collection of cycles
    try:
        engine.shutdown()
        assert [each() for each in mappings if each() is not None] == []
    finally:
        gc.enable()


def test_context_manager_shuts_down_on_exit(build: Build) -> None:
    with build() as engine:
        engine.generate([1], greedy(1))
    assert_dead(engine, "shut down")


def poison(engine: InferenceEngine, token: int) -> None:
    """Make the embedding row of a token NaN."""
    write(
        engine.model.params,
        Slot("", (1, 64), param="embed", start=token),
        torch.full((1, 64), math.nan),
    )


@pytest.mark.parametrize("way", ["params", "update"])
def test_non_finite_logits_end_only_their_request(build: Build, way: str) -> None:
    params = SamplingParams(max_tokens=10, seed=6, ignore_eos=True)
    healthy = [[1, 2, 3], [4, 5]]
    expected = build().generate(healthy, params)
    assert not any(77 in s.completion_tokens for s in expected), (
        "a healthy request samples the poison"
    )
    engine = build()
    if way == "params":
        poison(engine, 77)
    else:
        poisoned = read(engine.model.params, Slot("", (300, 64), param="embed", start=0)).clone()
        poisoned[77] = math.nan
        engine.update_weights({"model.embed_tokens.weight": poisoned})
    first, sick, second = (
        engine.add_request(healthy[0], params),
        engine.add_request([8, 77, 9], params, 3),
        engine.add_request(healthy[1], params),
    )
    samples = drain(engine)
    assert [s.request_id for s in samples] == [first, sick, sick, sick, second]
    for sample in samples[1:4]:
        assert sample.finish_reason == "abort"
        assert sample.stop_reason == "error: the model's logits are not finite"
        assert sample.completion_tokens == ()
        assert_aligned(sample)
    for sample, alone in zip([samples[0], samples[4]], expected, strict=True):
        assert (sample.completion_tokens, sample.logprobs) == (
            alone.completion_tokens,
            alone.logprobs,
        )
    assert_all_blocks_free(engine)


def test_non_finite_logits_keep_tokens_sampled_before(build: Build) -> None:
    (whole,) = build().generate([1, 2, 3], greedy(10, ignore_eos=True))
    position = 4
    token = whole.completion_tokens[position]
    assert token not in (1, 2, 3, *whole.completion_tokens[:position])
    engine = build()
    poison(engine, token)
    (sample,) = engine.generate([1, 2, 3], greedy(10, ignore_eos=True))
    assert sample.finish_reason == "abort"
    assert sample.completion_tokens == whole.completion_tokens[: position + 1]
    assert_aligned(sample)


# -- building --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"max_model_len": 10_000}, LONGEST),
        ({"max_model_len": 100, "kv_cache_memory": 4 * 16 * TOKEN_BYTES}, 64),
        ({"max_model_len": 10_000, "kv_cache_memory": 4 * 16 * TOKEN_BYTES}, 64),
    ],
)
def test_max_model_len_is_lowered_to_fit_and_logged(
    build: Build, caplog: pytest.LogCaptureFixture, options: dict[str, int], longest: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="nano_inference"):
        engine = build(**options)
    assert engine.max_model_len == longest
    assert f"max_model_len={options['max_model_len']} is lowered to {longest}" in caplog.text


def test_memory_table_lists_every_use_of_memory(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="nano_inference"):
        budget = build(kv_cache_memory=100_000).memory_budget
    assert budget.bytes_per_token == TOKEN_BYTES
    assert budget.num_blocks == 100_000 // (16 * TOKEN_BYTES)
    assert budget.kv_cache == budget.num_blocks * 16 * TOKEN_BYTES <= 100_000
    assert budget.max_model_len == budget.num_tokens == budget.num_blocks * 16
    for line in (
        "weights",
        "KV cache",
        f"{budget.num_blocks} blocks of 16 tokens",
        f"{TOKEN_BYTES} bytes",
        "lowered",
    ):
        assert (line in caplog.text) == (line != "lowered")


def test_cache_is_capped_at_its_usable_size(build: Build) -> None:
    engine = build(kv_cache_memory=2**40, max_batch_size=3, max_model_len=50)
    assert engine.memory_budget.num_blocks == 3 * 4
    assert engine.max_model_len == 50


def test_cache_too_small_for_a_block_names_the_needed_size(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory of 8,191 bytes.*at least 8,192 bytes"):
        build(kv_cache_memory=8191)
    assert build(kv_cache_memory=8192).max_model_len == 16


@pytest.mark.parametrize("asked", [500 * 2**30, 10**12, 2**62])
def test_oversized_cache_is_rejected_before_weights_are_read(
    build: Build, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setattr(parts, "load_params", None)
    monkeypatch.setattr(parts, "load_packed", None)
    with pytest.raises(
        ConfigError,
        match=rf"kv_cache_memory of {asked / 2**30:,.1f} GiB does not fit in memory: .* are free; "
        r"give at most [0-9,]+ bytes",
    ):
        build(kv_cache_memory=asked, max_batch_size=2**53)


def test_cache_size_respects_the_container_limit(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "memory.max of the control group"
    monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(10 * 2**20, limit))
    num_bytes = build(kv_cache_memory=None).memory_budget.kv_cache
    assert 2 * 2**20 < num_bytes <= 10 * 2**20 // 4
    with pytest.raises(
        ConfigError, match=f"MiB does not fit in memory: 10.0 MiB are free under {limit}"
    ):
        build(kv_cache_memory=11 * 2**20)
    monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(2**15 - 1, limit))
    with pytest.raises(
        ConfigError,
        match=f"a quarter of the free memory under {limit}, .* is too small for one block",
    ):
        build(kv_cache_memory=None)


@pytest.mark.parametrize(("backend", "empty"), [("cpu", host.empty), ("reference", torch.empty)])
def test_failed_cache_allocation_is_a_config_error(
    build: Build, monkeypatch: pytest.MonkeyPatch, backend: str, empty: Any
) -> None:
    """The memory was free a moment ago, or the system counts differently."""
    monkeypatch.setattr(parts, "KVStorage", lambda *_: empty(2**60))
    with pytest.raises(ConfigError, match=r"the KV cache of 1\.0 MiB cannot be allocated: .* free"):
        build(backend=backend)


@pytest.mark.parametrize(
    ("backend", "load", "empty"),
    [("cpu", "load_packed", host.empty), ("reference", "load_params", torch.empty)],
)
def test_failed_weight_allocation_is_a_config_error(
    build: Build, monkeypatch: pytest.MonkeyPatch, backend: str, load: str, empty: Any
) -> None:
    monkeypatch.setattr(parts, load, lambda *_: empty(2**60))
    with pytest.raises(ConfigError, match=r"the weights \(.*\) cannot be allocated: .* are free"):
        build(backend=backend)


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "meta"])
def test_missing_device_is_a_config_error(build: Build, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"device='{device}' is not supported; use 'auto'"):
        build(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_missing_cuda_is_a_config_error(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda' is not available.*(CUDA|NVIDIA)"):
        build(device="cuda")


def test_summation_order_is_only_for_the_cpu_backend(build: Build) -> None:
    with pytest.raises(ConfigError, match="cpu_sums='tiles' is not possible with backend='ref"):
        build(backend="reference", cpu_sums="tiles")


def test_folder_without_a_model_is_a_load_error(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        build(tmp_path)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_carry_the_fingerprint_of_the_arithmetic(
    build: Build, dtype: str, backend: str
) -> None:
    engine = build(dtype=dtype, backend=backend)
    (sample,) = engine.generate([1, 2], greedy(2))
    assert sample.numerics == engine.numerics.fingerprint
    for part in (f"{backend}-", dtype, "cpu"):
        assert part in sample.numerics
    assert (torch.__version__ in sample.numerics) == (backend == "reference")
    assert engine.numerics.schedule_invariant


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("tie", [True, False])
def test_model_of_every_family_runs(build: Build, tmp_path: Path, rope: Any, tie: bool) -> None:
    folder = tiny_llama(
        tmp_path, rope=rope, tie=tie, num_heads=4, num_kv_heads=1, layers=1, dtype=torch.bfloat16
    )
    (sample,) = build(folder).generate(list(range(90)), greedy(4))
    assert_aligned(sample)


# -- seeds -----------------------------------------------------------------------------------------


def test_sample_is_reproduced_by_its_seed(build: Build) -> None:
    params = SamplingParams(max_tokens=12)
    samples = build(seed=None).generate([[1, 2], [1, 2], [3]], params, 2)
    assert samples[0].seed == samples[1].seed != samples[2].seed
    assert samples[0].completion_tokens != samples[2].completion_tokens
    for i in (0, 2, 4):
        again = build(seed=None).generate(
            list(samples[i].prompt_tokens), SamplingParams(max_tokens=12, seed=samples[i].seed), 2
        )
        for one, other in zip(again, samples[i : i + 2], strict=True):
            assert (one.completion_tokens, one.logprobs) == (
                other.completion_tokens,
                other.logprobs,
            )
            assert one.seed == other.seed


def test_seed_of_the_engine_reproduces_the_whole_run(build: Build) -> None:
    def run(seed: int | None) -> list[TrainingSample]:
        engine = build(seed=seed)
        first = engine.generate([[1, 2], [3]], SamplingParams(max_tokens=6), 2)
        engine.add_request([9], SamplingParams(max_tokens=6))
        return first + drain(engine)

    assert run(5) == run(5)
    assert [s.completion_tokens for s in run(5)] != [s.completion_tokens for s in run(6)]
    assert {s.seed for s in run(None)}.isdisjoint({s.seed for s in run(None)})


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seed_of_64_bits_is_kept(build: Build, seed: int) -> None:
    (sample,) = build(seed=None).generate([1], SamplingParams(max_tokens=1, seed=seed))
    assert sample.seed == seed


def test_fresh_seeds_are_distinct(build: Build) -> None:
    engine = build(seed=None)
    for _ in range(100):
        engine.add_request([1], SamplingParams())
    seeds = {sample.seed for sample in engine.abort()}
    assert len(seeds) == 100
    assert max(seeds) > 2**50


# -- when a sample ends ----------------------------------------------------------------------------

EVEN = frozenset(range(0, 300, 2))


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    """Model that ends at every even id, about every second token."""
    return write_model(
        tmp_path, llama_config() | {"eos_token_id": sorted(EVEN)}, llama_weights(llama_config())
    )


def test_stop_id_ends_the_sample_and_is_its_last_token(build: Build) -> None:
    (whole,) = build().generate([1, 2], SamplingParams(max_tokens=20, seed=9, ignore_eos=True))
    tokens = whole.completion_tokens
    assert (whole.finish_reason, whole.stop_reason, len(tokens)) == ("length", None, 20)
    for position in (0, 7, 19):
        stops = frozenset({tokens[position]})
        first = tokens.index(tokens[position])
        params = SamplingParams(max_tokens=20, seed=9, ignore_eos=True, stop_token_ids=stops)
        (sample,) = build().generate([1, 2], params)
        assert sample.completion_tokens == tokens[: first + 1]
        assert sample.logprobs == whole.logprobs[: first + 1]
        # the last allowed token may also be a stop id
        assert (sample.finish_reason, sample.stop_reason) == ("stop", tokens[position])


@CALM
@given(
    seed=st.integers(0, 2**32),
    min_tokens=st.integers(0, 6),
    by_eos=st.booleans(),
    lookahead=st.integers(0, 1),
)
def test_stops_wait_for_min_tokens(
    build: Build, eager: Path, model: Path, seed: int, min_tokens: int, by_eos: bool, lookahead: int
) -> None:
    """Both the model's end ids and the request's stop ids wait."""
    engine = build(eager if by_eos else model, lookahead=lookahead)
    stops = frozenset() if by_eos else EVEN
    params = SamplingParams(
        max_tokens=40, min_tokens=min_tokens, seed=seed, stop_token_ids=stops, ignore_eos=not by_eos
    )
    (sample,) = engine.generate([1, 2], params)
    engine.shutdown()
    tokens = sample.completion_tokens
    assert not EVEN & set(tokens[:-1])
    assert len(tokens) > min_tokens or tokens[-1] not in EVEN
    assert (sample.finish_reason == "stop") == (tokens[-1] in EVEN)
    assert sample.stop_reason == (tokens[-1] if tokens[-1] in EVEN else None)
    assert_aligned(sample)


def test_min_tokens_equal_to_max_tokens_ends_by_length(build: Build, eager: Path) -> None:
    (sample,) = build(eager).generate([1], SamplingParams(max_tokens=5, min_tokens=5))
    assert (len(sample.completion_tokens), sample.finish_reason) == (5, "length")
    assert not EVEN & set(sample.completion_tokens)


def test_logprobs_under_min_tokens_use_the_masked_distribution(build: Build, eager: Path) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=4, seed=1, raw_logprobs=True)
    (sample,) = build(eager).generate([1, 2], params)
    assert sample.raw_logprobs is not None
    assert all(own > raw for own, raw in zip(sample.logprobs, sample.raw_logprobs, strict=True))


def test_ignore_eos_continues_and_masks_nothing(build: Build, eager: Path) -> None:
    params = SamplingParams(max_tokens=30, min_tokens=10, ignore_eos=True, seed=4)
    (sample,) = build(eager).generate([1], params)
    assert (len(sample.completion_tokens), sample.finish_reason) == (30, "length")
    assert EVEN & set(sample.completion_tokens[:10])
    (plain,) = build().generate([1], params)
    assert sample.completion_tokens == plain.completion_tokens


def test_temperature_zero_returns_the_logprobs_of_the_model(build: Build) -> None:
    params = greedy(6, raw_logprobs=True, top_k=3, ignore_eos=True)
    (sample,) = build().generate([1, 2], params)
    assert sample.logprobs == sample.raw_logprobs
    assert sample.log_kept_mass == (0.0,) * 6


def test_optional_columns_are_absent_unless_requested(build: Build) -> None:
    (sample,) = build().generate([1, 2], SamplingParams(max_tokens=3, top_k=4))
    assert sample.raw_logprobs is None
    assert sample.sampling_mask is None
    assert sample.ref_logprobs is None
    assert sample.log_kept_mass is not None
    assert all(mass < 0 for mass in sample.log_kept_mass)
    (asked,) = build().generate(
        [1, 2], SamplingParams(max_tokens=3, top_k=4, sampling_mask=True, ignore_eos=True)
    )
    assert asked.sampling_mask is not None
    assert asked.sampling_mask.offsets == (0, 4, 8, 12)
    assert_aligned(asked)


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def restless() -> Iterator[None]:
    """Make Python switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Threads:
    """Threads that keep their exceptions; `join` raises them."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.problems: list[BaseException] = []

    def start(self, run: Callable[[], object]) -> None:
        def body() -> None:
            try:
                run()
            except BaseException as problem:
                self.problems.append(problem)

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not self.problems


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("lookahead", [0, 1])
def test_add_and_update_run_while_another_thread_steps(build: Build, lookahead: int) -> None:
    engine, samples, added, updates = (
        build(lookahead=lookahead),
        list[TrainingSample](),
        list[int](),
        list[Any](),
    )
    norm = {"model.norm.weight": torch.ones(64)}
    done = threading.Event()

    def add() -> None:
        for i in range(15):
            added.append(
                engine.add_request(
                    [1 + i, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), 1 + i % 2
                )
            )

    def update() -> None:
        for i in range(16):
            updates.append(engine.update_weights(norm, blocking=i % 4 == 3))

    def step() -> None:
        while not done.is_set() or engine.has_pending():
            samples.extend(engine.step())

    writers, stepper = Threads(), Threads()
    stepper.start(step)
    for target in (add, add, update):
        writers.start(target)
    writers.join()
    done.set()
    stepper.join()
    assert sorted({s.request_id for s in samples}) == sorted(added) == list(range(30))
    assert len(samples) == 2 * (8 + 7 * 2)
    assert [update.result(0) for update in updates] == list(range(1, 17))
    assert engine.get_weight_version() == 16
    for sample in samples:
        assert_aligned(sample)
        versions = [span.version for span in sample.weight_versions]
        assert versions == sorted(set(versions))
    assert_all_blocks_free(engine)


def test_add_request_runs_while_another_thread_generates(build: Build) -> None:
    engine = build()
    started, added = threading.Event(), list[int]()

    def add() -> None:
        started.wait(30)
        added.append(engine.add_request([5, 5], SamplingParams(max_tokens=2)))

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    engine.generate([1, 2], greedy(30, ignore_eos=True), progress=lambda *_: started.set())
    thread.join(30)
    assert [s.request_id for s in drain(engine)] == added
    assert engine.generate([1], greedy(1))[0].weight_versions == (VersionSpan(0, 0, 1),)
