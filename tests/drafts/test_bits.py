"""Drafts change no token and no bit of a sample, for a small model, every kind of draft and every
per-row option.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, Grammar, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.core import loop
from nano_inference.types import KvPolicy
from tests.invariance.scenario import Drafts, Known, TriedDrafts, real_drafts, same_bits
from tests.models.tiny import tiny_llama, tiny_model
from tests.structured.vocabularies import with_tokenizer
from tests.weights.weight_cases import NEW

KINDS: tuple[Drafts, ...] = ("right", "wrong", "any", "changing", "real", "self", "medusa", "eagle")
PlainRuns = dict[str, tuple[list[TrainingSample], int]]
PROMPT = [5, 9, 4, 33, 9, 4, 70, 11]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "sampling_mask": True},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.2},
    "bans": {"min_tokens": 20, "allowed_token_ids": [2, *range(3, 60)], "logit_bias": {7: 2.0}},
    "logprobs": {"top_logprobs": 4, "prompt_logprobs": True, "prompt_top_logprobs": 2},
    "grammar": {"grammar": Grammar.regex("(ab|ba|abc){3,9}[0-9]{2,8}")},
    "json": {"grammar": Grammar.json_schema({"type": "array", "items": {"type": "integer"}})},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceEngine]:
    folder = with_tokenizer(tiny_model(tmp_path_factory.mktemp("model"), request.param))
    config = EngineConfig(
        str(folder), dtype="float32", block_size=4, num_threads=1, kv_cache_memory=2**20
    )
    with InferenceEngine(config) as built:
        yield built


def set_drafts(engine: InferenceEngine, kind: Drafts, known: Known) -> None:
    """Use drafts of this kind for all requests from now on."""
    vocab_size = engine.spec.vocab_size
    tried = real_drafts(engine, kind, 4) or TriedDrafts(kind, known, defaultdict(int), vocab_size)
    engine.loop.drafter = None if kind == "none" else tried
    engine.loop.config = replace(engine.loop.config, max_drafts=0 if kind == "none" else 4)


def begin(
    engine: InferenceEngine, params: SamplingParams, kind: Drafts, known: Known, samples: int = 1
) -> int:
    set_drafts(engine, kind, known)
    request_id = engine.add_request(PROMPT, params, samples)
    engine.loop.handle()
    return request_id


def drawn(
    engine: InferenceEngine, params: SamplingParams, kind: Drafts, known: Any = None
) -> list[TrainingSample]:
    """Return three samples computed with drafts of a kind."""
    begin(engine, params, kind, known or {}, 3)
    samples: list[TrainingSample] = []
    while engine.has_pending():
        free = [b.block_id for b in engine.cache.blocks if b.ref_count == 0]
        if engine.cache.units is None:
            engine.cache.flush()
            engine.runner.storage.keys[:, :, free] = torch.nan
        samples += engine.step()
        engine.loop.check()
    return sorted(samples, key=lambda sample: sample.sample_index)


def params_of(case: str) -> SamplingParams:
    options = {"max_tokens": 40, "raw_logprobs": True, "seed": len(case)} | CASES[case]
    return SamplingParams(**options)


@pytest.fixture(scope="module")
def plain_runs(engine: InferenceEngine) -> PlainRuns:
    """Runs without drafts: samples and step counts of each case."""
    runs: PlainRuns = {}
    for case in CASES:
        steps = engine.loop.num_steps
        runs[case] = drawn(engine, params_of(case), "none"), engine.loop.num_steps - steps
    return runs


# The quick tier has all draft kinds for a Llama, and one kind per case for a Gemma.
@pytest.mark.thorough(
    cases=[
        f"gemma3-{case}-{kind}"
        for place, case in enumerate(CASES)
        for kind in KINDS
        if kind != KINDS[place % len(KINDS)]
    ]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_drafts_change_no_bit(
    engine: InferenceEngine, plain_runs: PlainRuns, case: str, kind: Drafts
) -> None:
    params = params_of(case)
    plain, before = plain_runs[case]
    steps = engine.loop.num_steps
    known = {(0, sample.sample_index): sample.completion_tokens for sample in plain}
    for one, other in zip(plain, drawn(engine, params, kind, known), strict=True):
        assert same_bits(one, other)
        assert one.sampling_mask == other.sampling_mask
        assert one.finish_reason == other.finish_reason
    if kind == "right":
        assert engine.loop.num_steps - steps < before


@pytest.mark.thorough(cases=["gemma3"])
def test_rows_after_a_wrong_draft_may_hold_anything(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of these rows are not finite here, which ends no sample."""
    params = SamplingParams(max_tokens=20, seed=3)
    plain = drawn(engine, params, "none")
    commit, spoilt = loop.commit, 0

    def spoil(owners: Any, sampled: Any, sequences: Any, cache: Any, drafts: Any) -> Any:
        nonlocal spoilt
        for row in drafts:
            drafted = drafts[row]
            first = row - len(drafted)
            if list(drafted) != list(sampled.token_ids[first:row]):
                sampled.logprobs[row] = float("nan")
                spoilt += 1
        return commit(owners, sampled, sequences, cache, drafts)

    monkeypatch.setattr(loop, "commit", spoil)
    known = {(0, sample.sample_index): sample.completion_tokens for sample in plain}
    assert all(map(same_bits, plain, drawn(engine, params, "changing", known)))
    assert spoilt > 5


def test_stream_has_every_token_once(engine: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)
    (plain, *_) = drawn(engine, params, "none")
    set_drafts(engine, "right", {(0, 0): plain.completion_tokens})
    pieces = list(engine.generate([PROMPT], params, stream=True))
    tokens = [token_id for delta in pieces for token_id in delta.token_ids]
    logprobs = [logprob for delta in pieces for logprob in delta.logprobs]
    assert tokens == list(plain.completion_tokens)
    assert logprobs == list(plain.logprobs)
    assert max(len(delta.token_ids) for delta in pieces) > 1


def test_stop_string_within_drafts_ends_the_sample_there(engine: InferenceEngine) -> None:
    set_drafts(engine, "none", {})
    whole = engine.generate("hello", SamplingParams(max_tokens=30, seed=2, ignore_eos=True))[0]
    assert whole.text
    stop = whole.text[8:10]
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, stop=(stop,))
    expected = engine.generate("hello", params)[0]
    set_drafts(engine, "right", {(0, 0): whole.completion_tokens})
    sample = engine.generate("hello", params)[0]
    assert expected.stop_reason == stop
    assert (sample.text, sample.stop_reason) == (expected.text, expected.stop_reason)
    assert same_bits(sample, expected)


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
def test_update_between_drafts_changes_no_bit(tmp_path: Path, kv_policy: KvPolicy) -> None:
    params = SamplingParams(max_tokens=24, seed=9, ignore_eos=True)
    known: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(kind: Drafts, at: int) -> tuple[TrainingSample, int]:
        config = EngineConfig(
            str(tiny_llama(tmp_path)), dtype="float32", block_size=4, kv_cache_memory=2**20
        )
        with InferenceEngine(config) as engine:
            request_id = begin(engine, params, kind, known)
            (seq,) = engine.loop.sequences.of_requests(frozenset([request_id]))
            while seq.num_completion_tokens < at:
                engine.step()
            updated_at = seq.num_completion_tokens
            engine.update_weights(NEW, kv_policy=kv_policy)
            samples = engine.step()
            while engine.has_pending():
                samples += engine.step()
                engine.loop.check()
            return samples[0], updated_at

    plain, _ = run("none", 8)
    known[0, 0] = plain.completion_tokens
    drafted, at = run("changing", 8)
    expected, _ = run("none", at)
    assert same_bits(drafted, expected)
    assert drafted.kv_versions == expected.kv_versions
