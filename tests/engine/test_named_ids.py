"""Logprobs of named ids in process: values against scores of the same tokens, columns of samples,
replay, resumption and files.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    InvalidRequest,
    LogprobMatrix,
    RequestTooLarge,
    SamplingParams,
    TrainingSample,
)
from nano_inference.data import from_columns, read_jsonl, to_columns, write_jsonl
from nano_inference.rl import PolicyModel, differences, replay, score, top_tokens
from tests.depth import at_depth
from tests.models.tiny import tiny_llama

VOCAB = 300
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    folder = tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_memory=2**22)
    with InferenceEngine(config) as engine:
        yield engine


def sample_of(engine: InferenceEngine, **fields: Any) -> TrainingSample:
    fields = {"max_tokens": 6, "seed": 1, "ignore_eos": True, **fields}
    (sample,) = engine.generate([PROMPT], SamplingParams(**fields))
    return sample


def same(matrix: LogprobMatrix | None, scores: torch.Tensor) -> bool:
    return matrix is not None and np.array_equal(np.asarray(matrix), scores.numpy(), equal_nan=True)


ids_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9, unique=True)


@settings(deadline=None, max_examples=at_depth(15))
@given(ids=ids_of, temperature=st.sampled_from([0.0, 0.6, 1.0]))
def test_named_ids_equal_scores_bit_for_bit(
    engine: InferenceEngine, ids: list[int], temperature: float
) -> None:
    sample = sample_of(
        engine,
        temperature=temperature,
        raw_logprobs=True,
        logprob_token_ids=ids,
        prompt_logprob_token_ids=ids,
        prompt_logprob_start=1,
    )
    sequence = [*sample.prompt_tokens, *sample.completion_tokens]
    for start, at, matrix in (
        (5, temperature, sample.token_id_logprobs),
        (5, 1.0, sample.raw_token_id_logprobs),
        (2, 1.0, sample.prompt_token_id_logprobs),
    ):
        end = len(sequence) if start == 5 else 5
        targets = [[ids] * (end - start)]
        (scores,) = score(
            engine, [sequence[:end]], from_position=start, temperature=at, targets=targets
        )
        assert same(matrix, scores)


def test_policy_has_the_same_bits_with_gradients(engine: InferenceEngine) -> None:
    ids = [7, 2, 250]
    sample = sample_of(engine, temperature=0.7, logprob_token_ids=ids)
    policy = PolicyModel(engine)
    (logprobs,) = policy.logprobs(
        [sample.prompt_tokens + sample.completion_tokens],
        from_position=5,
        temperature=0.7,
        targets=[[ids] * 6],
    )
    assert same(sample.token_id_logprobs, logprobs.detach())
    logprobs.exp().sum().backward()
    assert any(bool(each.grad.any()) for each in policy.parameters() if each.grad is not None)
    policy.close()


def test_rows_of_prompt_ids_may_differ_in_length(engine: InferenceEngine) -> None:
    rows = [[3], [4, 5, 6], [7, 8]]
    sample = sample_of(
        engine, prompt_logprob_token_ids=rows, prompt_logprob_start=1, prompt_logprobs=True
    )
    every = sample_of(engine, prompt_logprob_token_ids=list(range(VOCAB)))
    matrix, whole = (np.asarray(each.prompt_token_id_logprobs) for each in (sample, every))
    for index, ids in enumerate(rows):
        assert matrix[index, : len(ids)].tolist() == whole[1 + index, ids].tolist()
        assert matrix[index, len(ids) :].tolist() == [-math.inf] * (3 - len(ids))
    expected = [whole[index, token] for index, token in enumerate(PROMPT[1:])]
    assert sample.prompt_logprobs is not None
    assert list(sample.prompt_logprobs[1:]) == expected


def test_named_ids_do_not_change_the_sample(engine: InferenceEngine) -> None:
    plain = sample_of(engine, top_p=0.8, raw_logprobs=True)
    named = sample_of(engine, top_p=0.8, raw_logprobs=True, logprob_token_ids=range(VOCAB))
    assert plain.completion_tokens == named.completion_tokens
    assert plain.logprobs == named.logprobs
    matrix = np.asarray(named.token_id_logprobs)
    assert matrix.shape == (6, VOCAB)
    assert [matrix[i, token] for i, token in enumerate(named.completion_tokens)] == list(
        named.logprobs
    )
    assert np.exp(matrix).sum(axis=1) == pytest.approx(np.ones(6), abs=1e-5)
    assert np.isinf(matrix).any(), "top_p cuts some"


def named_sample(engine: InferenceEngine, **fields: Any) -> TrainingSample:
    return sample_of(
        engine,
        raw_logprobs=True,
        logprob_token_ids=[4, 5],
        prompt_logprob_token_ids=[6, 7, 8],
        prompt_logprob_start=2,
        **fields,
    )


def test_replay_repeats_named_ids(engine: InferenceEngine) -> None:
    sample = named_sample(engine)
    assert differences(sample, replay(engine, sample)) == ()


def test_resumed_sample_continues_its_named_ids(engine: InferenceEngine) -> None:
    whole = named_sample(engine)
    part = named_sample(engine, max_tokens=3)
    engine.resume_from(part, max_new_tokens=3)
    resumed: list[TrainingSample] = []
    while engine.has_pending():
        resumed += engine.step()
    for name in ("token_id_logprobs", "raw_token_id_logprobs", "prompt_token_id_logprobs"):
        assert getattr(resumed[0], name) == getattr(whole, name)
    engine.resume_from(part, append=[11, 12], max_new_tokens=1)
    while engine.has_pending():
        resumed += engine.step()
    matrix = np.asarray(resumed[1].token_id_logprobs)
    assert np.isnan(matrix).all(axis=1).tolist() == [False] * 3 + [True] * 2 + [False]


def test_files_keep_named_ids(engine: InferenceEngine, tmp_path: Path) -> None:
    sample = named_sample(engine)
    write_jsonl([sample], tmp_path / "samples.jsonl")
    for (again,) in (read_jsonl(tmp_path / "samples.jsonl"), from_columns(to_columns([sample]))):
        for name in ("token_id_logprobs", "raw_token_id_logprobs", "prompt_token_id_logprobs"):
            assert getattr(again, name) == getattr(sample, name)


def test_streamed_rows_join_to_the_sample(engine: InferenceEngine) -> None:
    params = SamplingParams(
        max_tokens=5, seed=1, logprob_token_ids=[4, 5], raw_logprobs=True, ignore_eos=True
    )
    deltas = list(engine.generate([PROMPT], params, stream=True))
    sample = deltas[-1].finished
    assert sample is not None
    for name in ("token_id_logprobs", "raw_token_id_logprobs"):
        parts = [getattr(delta, name) for delta in deltas]
        assert LogprobMatrix.joined(parts) == getattr(sample, name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_tokens_are_the_best_of_all_scores(engine: InferenceEngine, temperature: float) -> None:
    sequences = [[5, 6, 7, 8], [5, 6, 9], [4]]
    best_tokens = top_tokens(engine, sequences, 4, from_position=[1, 2, 1], temperature=temperature)
    for ids, start, best in zip(sequences, [1, 2, 1], best_tokens, strict=True):
        rows = len(ids) - start
        every = [list(range(VOCAB))] * rows
        (scores,) = (
            score(engine, [ids], from_position=start, temperature=temperature, targets=[every])
            if rows
            else (torch.empty(0, VOCAB),)
        )
        values, places = scores.topk(4, dim=-1)
        assert torch.equal(best.token_ids, places)
        assert torch.equal(best.logprobs, values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprob_token_ids": [3, 4, 3]}, "holds 3 more than once"),
        ({"logprob_token_ids": [-1]}, "holds -1"),
        ({"logprob_token_ids": [VOCAB]}, "outside the vocabulary"),
        ({"logprob_token_ids": [1.5]}, "must be a list of token ids"),
        ({"logprob_token_ids": [True]}, "must be a list of token ids"),
        ({"logprob_token_ids": {3, 4}}, "must be a list of token ids"),
        ({"logprob_token_ids": 3}, "must be a list of token ids"),
        ({"prompt_logprob_token_ids": 3}, "must be a list of token ids or"),
        ({"prompt_logprob_token_ids": [[3], [4]]}, "2 rows for 4 positions"),
        ({"prompt_logprob_token_ids": [[], [], [], []]}, "has no ids"),
        ({"prompt_logprob_token_ids": [[3], [4, 4], [], []]}, "row 1 of prompt"),
        ({"prompt_logprob_token_ids": [VOCAB]}, "outside the vocabulary"),
        ({"prompt_logprob_token_ids": [3], "prompt_logprob_start": 4}, "leaves no position"),
        ({"prompt_logprob_start": 1}, "needs prompt_logprob_token_ids"),
    ],
)
def test_bad_named_ids_are_rejected_at_once(
    engine: InferenceEngine, fields: dict[str, Any], message: str
) -> None:
    steps = engine.stats().num_steps
    with pytest.raises(InvalidRequest, match=message):
        sample_of(engine, **fields)
    assert engine.stats().num_steps == steps


def test_cost_of_named_ids_is_limited(engine: InferenceEngine) -> None:
    params = SamplingParams(max_tokens=50, logprob_token_ids=range(200), raw_logprobs=True)
    with pytest.raises(RequestTooLarge, match=r"logprob_token_ids from 200 to \d+"):
        engine.intake.sequence(PROMPT, params, 1, stream=False, max_entries=10_000)
    rows = SamplingParams(max_tokens=1, prompt_logprob_token_ids=range(200))
    with pytest.raises(RequestTooLarge, match="prompt_logprob_token_ids"):
        engine.intake.sequence(PROMPT, rows, 1, stream=False, max_entries=500)


def test_matrix_must_match_its_data() -> None:
    with pytest.raises(InvalidRequest, match="do not match 4 bytes"):
        LogprobMatrix((1, 2), b"0000")
