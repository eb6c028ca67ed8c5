"""Whole engines on the kernels in Triton's interpreter: graphs give the bits of eager steps."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nano_inference import Grammar, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.device import cuda_runner, graphs, trunk_graphs
from nano_inference.ops.cuda import few_rows
from nano_inference.rl import score
from tests.device.cuda_cases import CheckingQueue
from tests.device.test_cuda_runner import bare, runner
from tests.device.test_kv_cache_dtype import check_exchange
from tests.drafts.test_bits import set_drafts
from tests.invariance.scenario import same_bits
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer
from tests.weights.weight_cases import NEW, PROMPT, Build, bits, drain, greedy


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckingQueue, "warms_up", False)  # to save time
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
    # most batches are padded
    monkeypatch.setattr(graphs, "graph_sizes", lambda largest: (largest,))
    monkeypatch.setattr(trunk_graphs, "trunk_sizes", lambda largest: (12,))


def tiny(folder: Path, family: str) -> str:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    sizes |= {"head_dim": 16, "vocab_size": 60, "num_hidden_layers": 1}
    return str(tiny_model(folder, family, **sizes | SPECIAL.get(family, {})))


# windows are shorter than the requests
SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "gemma4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "sliding_window": 6,
        "vocab_size_per_layer_input": 60,
    },
    "deepseek-v3": {"num_hidden_layers": 2},
}


def run(engine: InferenceEngine) -> list[TrainingSample]:
    """Run a group and a filtered request that ends first: batches of 3 rows, 2 and 1."""
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=5, seed=1, ignore_eos=True), 2)
    engine.add_request([7, 8], SamplingParams(max_tokens=3, seed=2, ignore_eos=True, top_p=0.8))
    return drain(engine)


@pytest.mark.thorough
@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize(
    ("family", "batch_invariant"),
    [
        *(("llama", True), ("mistral", False)),
        *(("gemma4", True), ("gemma4", False), ("deepseek-v3", True), ("deepseek-v3", False)),
    ],
)
def test_graphs_equal_eager(
    build: Build, tmp_path: Path, family: str, batch_invariant: bool
) -> None:
    model = tiny(tmp_path / family, family)
    options: dict[str, Any] = {
        "model_path": model,
        "lookahead": 1,
        "max_batch_size": 3,
        "max_model_len": 16,
    }
    expected = run(build(backend="reference", **options))
    replaying = build(backend="cuda", batch_invariant=batch_invariant, **options)
    with patch.object(few_rows, "product", wraps=few_rows.product) as product:
        outcome = run(replaying)
    assert runner(replaying).num_replays >= 3
    assert runner(replaying).num_trunk_replays >= 1
    # of q, k and v in the only layer, or of more
    in_each = product.call_count / runner(replaying).num_replays
    assert in_each == int(in_each)
    assert in_each == 0 if batch_invariant else in_each >= 1
    assert batch_invariant or family != "mistral" or in_each == 1
    for mine, theirs in zip(outcome, expected, strict=True):
        assert mine.completion_tokens == theirs.completion_tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    if batch_invariant:
        eager = run(build(backend="cuda", batch_invariant=True, cuda_graphs=False, **options))
        assert [repr(bare(sample)) for sample in outcome] == [
            repr(bare(sample)) for sample in eager
        ]


@pytest.mark.thorough
@pytest.mark.usefixtures("checking")
def test_scores_under_a_grammar_equal_sampled_logprobs(build: Build, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "llama", "llama")
    with_tokenizer(Path(folder))
    options: dict[str, Any] = {"model_path": folder, "max_batch_size": 3, "max_model_len": 16}
    grammar = Grammar.regex("[0-4]{2,6}")
    params = SamplingParams(max_tokens=5, seed=1, temperature=0.7, grammar=grammar)
    results: dict[str, list[TrainingSample]] = {}
    for backend in ("reference", "cuda"):
        engine = build(backend=backend, batch_invariant=True, **options)
        results[backend] = engine.generate([[1, 2, 3, 4, 5], [7, 8]], params)
        for sample in results[backend]:
            (scores,) = score(
                engine,
                [[*sample.prompt_tokens, *sample.completion_tokens]],
                from_position=len(sample.prompt_tokens),
                temperature=0.7,
                grammar=grammar,
            )
            assert scores.tolist() == list(sample.logprobs)
            assert sum(map(abs, sample.logprobs)) > 1, "there was something to choose"
    for mine, theirs in zip(results["cuda"], results["reference"], strict=True):
        assert mine.completion_tokens == theirs.completion_tokens
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("checking")
def test_graphs_compute_drafts_like_eager_steps(build: Build, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model_path": tiny(tmp_path / "mistral", "mistral"),
        "backend": "cuda",
        "batch_invariant": True,
        "max_batch_size": 8,
        "max_model_len": 24,
    }
    prompt, params = [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    plain = build(cuda_graphs=False, **options)
    expected = plain.generate([prompt], params, 2)
    engine = build(**options)
    set_drafts(
        engine, "changing", {(0, each.sample_index): each.completion_tokens for each in expected}
    )
    samples = engine.generate([prompt], params, 2)
    assert [each.finish_reason for each in samples] == ["length"] * 2
    assert all(map(same_bits, samples, expected))
    assert runner(engine).num_trunk_replays == 1  # the prompt
    assert engine.stats().tokens_computed > plain.stats().tokens_computed  # so there were drafts


@pytest.mark.thorough
def test_block_exchange_and_prefix_hits_of_fp8_keys(build: Build) -> None:
    options = {"backend": "cuda", "dtype": "float32", "batch_invariant": True}
    check_exchange(build, "fp8", options)


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_quantized_weights_are_updated_and_sleep(
    build: Build, quantization: str, batch_invariant: bool
) -> None:
    """Logprobs are near those of the reference backend, and an updated engine equals a fresh one."""
    options: dict[str, Any] = {
        "backend": "cuda",
        "dtype": "float32",
        "batch_invariant": batch_invariant,
        "quantization": quantization,
        "kv_cache_dtype": "fp8",
    }
    engine, fresh = build(**options), build(NEW, **options)
    (before,) = engine.generate(PROMPT, greedy(4))
    engine.update_weights(NEW, blocking=True)
    engine.sleep(weights=True)
    engine.wake()
    (after,), (expected,) = (each.generate(PROMPT, greedy(4)) for each in (engine, fresh))
    assert bits(after) == bits(expected) != bits(before)
    assert after.numerics.endswith(f"/{quantization}/kv-fp8")
    if batch_invariant:
        assert runner(engine).num_replays >= 3
        eager = build(NEW, **options, cuda_graphs=False)
        assert bits(eager.generate(PROMPT, greedy(4))[0]) == bits(after)
    (wanted,) = build(NEW, **options | {"backend": "reference", "batch_invariant": None}).generate(
        PROMPT, greedy(4)
    )
    assert after.completion_tokens == wanted.completion_tokens
    assert after.logprobs == pytest.approx(wanted.logprobs, abs=0.02)
