"""`score` returns the bits reported by sampling under any schedule, and computes shared prefixes
once.
"""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import (
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    RequestAborted,
    RequestTooLarge,
    SamplingParams,
    TrainingSample,
)
from nano_inference.rl import score
from tests.depth import at_depth
from tests.models.tiny import tiny_llama, tiny_model

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 40)]
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"cache_type": "radix", "block_size": 4, "max_chunk_tokens": 5, "lookahead": 1},
    {"max_batch_size": 2, "max_tokens_per_batch": 7, "lookahead": 1},
    {
        "enable_prefix_caching": False,
        "block_size": 8,
        "kv_cache_memory": 16 * 8 * 1600,
        "max_chunk_tokens": 64,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def build(model: Path, **options: Any) -> InferenceEngine:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    return InferenceEngine(EngineConfig(model_path=str(model), **(defaults | options)))


def whole(sample: TrainingSample) -> list[int]:
    return [*sample.prompt_tokens, *sample.completion_tokens]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


@pytest.mark.thorough(cases=["schedule1-cpu-float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scores_equal_sampled_logprobs_bit_for_bit(
    folder: Path, schedule: dict[str, Any], backend: str, dtype: str
) -> None:
    with build(folder, dtype=dtype, backend=backend) as engine:
        drawn = {
            temperature: engine.generate(
                PROMPTS, SamplingParams(temperature=temperature, max_tokens=12, seed=5), 2
            )
            for temperature in (0.0, 0.6, 1.0, 1.7)
        }
    with build(folder, dtype=dtype, backend=backend, **schedule) as engine:
        for temperature, samples in drawn.items():
            starts = [len(sample.prompt_tokens) for sample in samples]
            scores = score(
                engine, map(whole, samples), from_position=starts, temperature=temperature
            )
            for sample, scored in zip(samples, scores, strict=True):
                assert scored.dtype == torch.float32
                assert bits(scored) == bits(torch.tensor(sample.logprobs)), temperature
        engine.loop.check()
        assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def test_scores_of_different_temperatures_may_share_a_step(folder: Path) -> None:
    """Several threads score simultaneously during sampling."""
    with build(folder) as engine:
        params = [SamplingParams(temperature=t, max_tokens=30, seed=3) for t in (0.5, 1.0, 2.0)]
        samples = [engine.generate(PROMPTS[2], each)[0] for each in params]
        results: dict[int, torch.Tensor] = {}

        def run(index: int) -> None:
            sample, temperature = samples[index], params[index].temperature
            (results[index],) = score(
                engine, [whole(sample)], from_position=40, temperature=temperature
            )

        threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        assert engine.generate(PROMPTS[2], params[0])[0].logprobs == samples[0].logprobs
        for thread in threads:
            thread.join(timeout=60)
    for index, sample in enumerate(samples):
        assert bits(results[index]) == bits(torch.tensor(sample.logprobs))


def test_whole_sequence_scores_begin_with_nan(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(folder)
    with build(folder, max_chunk_tokens=7) as engine:
        scores = score(engine, PROMPTS, temperature=0.7)
    for prompt, scored in zip(PROMPTS, scores, strict=True):
        assert math.isnan(scored[0])
        with torch.inference_mode():
            logprobs = (oracle.eval()(torch.tensor([prompt])).logits[0] / 0.7).log_softmax(dim=-1)
        expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[
            :, 0
        ]
        torch.testing.assert_close(scored[1:], expected, rtol=0, atol=1e-4)


TREES = st.lists(st.lists(st.integers(5, 6), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=at_depth(40), deadline=None)
@given(sequences=TREES, seed=st.integers(0, 999), one=st.booleans())
def test_shared_prefix_is_scored_once_and_copied(
    shared_engine: InferenceEngine, sequences: list[list[int]], seed: int, one: bool
) -> None:
    """With two ids every set of sequences is a tree: duplicates, prefixes of each other, forks."""
    engine, draw = shared_engine, torch.Generator().manual_seed(seed)
    starts = [int(torch.randint(0, len(ids) + 1, (), generator=draw)) for ids in sequences]
    if one:
        starts = [min(starts[0], *map(len, sequences))] * len(sequences)
    together = score(engine, sequences, from_position=starts[0] if one else starts)
    for ids, start, scored in zip(sequences, starts, together, strict=True):
        (alone,) = score(engine, [ids], from_position=start)
        assert len(scored) == len(ids) - start
        assert bits(scored) == bits(alone)


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Any:
    with build(folder, block_size=4) as engine:
        yield engine


def test_common_prefix_is_computed_once(folder: Path) -> None:
    prefix, tails = list(range(3, 259)), [[20 + i] * 16 for i in range(8)]
    with build(folder) as engine:
        score(engine, [prefix + tail for tail in tails])
        computed = engine.runner.tokens_computed
    assert computed <= 256 + 8 * 16 + 8 * 15  # and rows a block before the fork
    with build(folder, enable_prefix_caching=False) as engine:
        score(engine, [prefix + tail for tail in tails])
        assert engine.runner.tokens_computed == 8 * 271


def test_rows_before_the_position_come_from_the_cache(folder: Path) -> None:
    with build(folder) as engine:
        (sample,) = engine.generate(list(range(3, 131)), SamplingParams(max_tokens=4, seed=1))
        before = engine.runner.tokens_computed
        score(engine, [whole(sample)], from_position=128)
        assert engine.runner.tokens_computed - before <= 16 + 4


def test_score_accepts_the_maximum_length_and_rejects_more(folder: Path) -> None:
    with build(folder, kv_cache_memory=4 * 16 * 512, max_batch_size=1) as engine:
        most = engine.max_model_len
        (scored,) = score(engine, [[7] * most])
        assert len(scored) == most
        with pytest.raises(
            RequestTooLarge, match=f"sequence 1 of {most + 1} tokens exceeds max_model_len={most}"
        ):
            score(engine, [[7], [7] * (most + 1)])
    with build(folder, enable_chunked_prefill=False, max_tokens_per_batch=8) as engine:
        assert len(score(engine, [[7] * 9])[0]) == 9
        with pytest.raises(RequestTooLarge, match="max_tokens_per_batch=8"):
            score(engine, [[7] * 10])


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1], []], {}, "sequence 1 is empty"),
        ([[1, 300]], {}, r"token id 300 is outside the vocabulary \(0 to 299\)"),
        ([[1, -1]], {}, "token id -1"),
        ([[1, 2.5]], {}, "2.5 must be an integer"),
        (["text"], {}, "sequence 0 must be a list of token ids, not str"),
        ([7], {}, "sequence 0 must be a list of token ids, not int"),
        (
            [[1, 2]],
            {"from_position": 3},
            "from_position=3 is outside sequence 0; it must be from 0 to 2",
        ),
        ([[1, 2]], {"from_position": -1}, "from_position=-1"),
        ([[1, 2]], {"from_position": [0, 1]}, "2 positions for 1 sequences"),
        ([[1, 2]], {"from_position": 0.5}, "from_position=0.5 must be an integer"),
        ([[1, 2]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1, 2]], {"temperature": math.nan}, "temperature=nan"),
        ([[1, 2]], {"temperature": True}, "temperature=True"),
    ],
)
def test_bad_arguments_are_rejected_before_any_request_is_added(
    shared_engine: InferenceEngine, sequences: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        score(shared_engine, sequences, **options)
    assert not shared_engine.has_pending()


def test_score_of_no_sequences_runs_no_step(shared_engine: InferenceEngine) -> None:
    before = shared_engine.runner.tokens_computed
    assert score(shared_engine, []) == []
    (scored,) = score(shared_engine, [[5]])
    assert math.isnan(scored[0])
    assert len(scored) == 1
    assert [len(each) for each in score(shared_engine, [[5], [5, 6]], from_position=[1, 2])] == [
        0,
        0,
    ]
    assert shared_engine.runner.tokens_computed == before


def test_aborted_score_raises_and_leaves_no_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(folder, max_tokens_per_batch=4) as engine:
        forward, calls = engine.runner.forward, iter(range(100))

        def abort_in_the_third_step(*args: Any) -> Any:
            if next(calls) == 2:
                engine.abort_soon([seq.request_id for seq in engine.loop.sequences.running])
            return forward(*args)

        monkeypatch.setattr(engine.runner, "forward", abort_in_the_third_step)
        with pytest.raises(RequestAborted, match="aborted before it was scored"):
            score(engine, [PROMPTS[2], [9, *PROMPTS[2]]])
        assert not engine.has_pending()
        engine.loop.check()
        assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def test_update_during_a_score_restarts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and new scores must not mix."""
    weights = {"model.norm.weight": torch.full((64,), 0.5)}
    with build(folder) as engine:
        engine.update_weights(weights, blocking=True)
        (expected,) = score(engine, [PROMPTS[2]])
    with build(folder, max_tokens_per_batch=4) as engine:
        forward, calls = engine.runner.forward, iter(range(1000))

        def update_in_the_third_step(*args: Any) -> Any:
            if next(calls) == 2:
                threading.Thread(target=engine.update_weights, args=(weights,)).start()
                while not engine.loop.inbox:
                    pass
            return forward(*args)

        monkeypatch.setattr(engine.runner, "forward", update_in_the_third_step)
        (scored,) = score(engine, [PROMPTS[2]])
    assert bits(scored) == bits(expected)


def test_score_on_a_dead_engine_raises(folder: Path) -> None:
    engine = build(folder)
    engine.shutdown()
    with pytest.raises(EngineDead):
        score(engine, [[1, 2]])


@pytest.mark.thorough
def test_score_supports_windows_and_units(tmp_path: Path) -> None:
    """Cover sliding layers with a shared prefix that has left the window."""
    with build(tiny_model(tmp_path, "gemma3"), block_size=4, max_chunk_tokens=9) as engine:
        prompt = [3 + (7 * i) % 200 for i in range(60)]
        samples = engine.generate(
            prompt, SamplingParams(temperature=0.8, max_tokens=20, seed=2, ignore_eos=True), 3
        )
        scores = score(engine, map(whole, samples), from_position=60, temperature=0.8)
    for sample, scored in zip(samples, scores, strict=True):
        assert bits(scored) == bits(torch.tensor(sample.logprobs))
