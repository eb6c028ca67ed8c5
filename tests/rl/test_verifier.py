"""Receipts are true exactly for samples that the engine computes. No forgery is accepted, also if
its chain is computed again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
    VersionSpan,
)
from nano_inference.data import sealed
from nano_inference.device import backends
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.rl.verifier import Verdict, Verifier, misplaced, verify
from nano_inference.structured.grammar import Grammar
from nano_inference.types import ContextVersions
from tests.engine.test_adapters import matrices
from tests.models.tiny import llama_config, llama_weights, tiny_llama, write_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available
from tests.rl.forgeries import (
    KINDS,
    Material,
    forged,
    params_of,
    rechained,
    reordered,
    truncated,
)

pytestmark = NEEDS_COMPILER
Build = Callable[..., InferenceEngine]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, receipt=True)
GROUP, LENGTH = 4, 12  # samples share two blocks of their prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_llama(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def build(models: list[Path]) -> Iterator[Build]:
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(model: int = 0, **options: Any) -> InferenceEngine:
        fixed = {
            "model_path": str(models[model]),
            "num_threads": 1,
            "kv_cache_memory": 2**21,
            "block_size": 4,
        }
        engines.append(InferenceEngine(EngineConfig(**(fixed | {"backend": "cpu"} | options))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(build: Build) -> InferenceEngine:
    return build()


@pytest.fixture(scope="module")
def material(build: Build, engine: InferenceEngine) -> Material:
    return material_of(engine, build(1), 8)


def prompts_of(number: int, rng: Random) -> list[list[int]]:
    return [[rng.randrange(3, 300) for _ in range(LENGTH)] for _ in range(number)]


def material_of(engine: InferenceEngine, other: InferenceEngine, prompts: int) -> Material:
    asked = prompts_of(prompts, Random(0))
    params = [replace(PARAMS, seed=seed if seed % 2 else None) for seed in range(prompts)]
    return Material(*(each.generate(asked, params, GROUP) for each in (engine, other)))


def outcomes(verdicts: list[Verdict]) -> dict[str, int]:
    return dict(Counter(verdict.outcome for verdict in verdicts))


def test_true_samples_are_true(engine: InferenceEngine, material: Material) -> None:
    before = engine.stats()
    assert outcomes(verify(engine, material.true)) == {"true": len(material.true)}
    assert engine.stats() == before, "no step was made"
    mixed = material.true[:]
    Random(0).shuffle(mixed)
    assert outcomes(verify(engine, mixed)) == {"true": len(mixed)}


@pytest.mark.parametrize("smart", [False, True], ids=["naive", "smart"])
@pytest.mark.parametrize("kind", KINDS)
def test_forgery_is_found(
    engine: InferenceEngine, material: Material, kind: str, smart: bool
) -> None:
    rng = Random(7)
    forgeries = [forged(kind, smart, rng, material, index) for index in range(len(material.true))]
    verdicts = verify(engine, forgeries)
    assert outcomes(verdicts) == {"forged": len(forgeries)}
    fields = {verdict.field for verdict in verdicts}
    if not smart:
        named = {"prompt": "prompt_tokens", "parameter": "sampling_params"}
        named |= {"tokens": "tokens", "logprob": "tokens"}
        assert fields == {named.get(kind, kind)}
    elif kind == "logprob":
        assert fields == {"logprobs"}
    assert all(verdict.reason for verdict in verdicts)


def test_first_bad_token_is_named(engine: InferenceEngine, material: Material) -> None:
    """A true sample in the same group stays true."""
    sample = material.true[1]
    tokens = list(sample.completion_tokens)
    tokens[5] = (tokens[5] + 1) % 300
    tokens[9] = (tokens[9] + 1) % 300
    forgery = replace(sample, completion_tokens=tuple(tokens))
    naive, smart, true = verify(engine, [forgery, rechained(forgery), material.true[2]])
    assert naive[:3] == ("forged", "tokens", 5)
    assert smart[:3] == ("forged", "completion_tokens", 5)
    assert true.outcome == "true"


def test_lost_and_moved_lines_are_found(material: Material) -> None:
    lines, rng = sealed(material.true), Random(1)
    assert misplaced(lines) is None
    for _ in range(30):
        assert misplaced(truncated(rng, lines)) is not None
        assert misplaced(reordered(rng, lines)) is not None


def test_equal_statement_is_true(engine: InferenceEngine, material: Material) -> None:
    """Parameters without effect on a sample may change, if the chain is computed again."""
    sample = material.true[0]
    params = params_of(sample, priority=5, cache_salt="a", stop_token_ids=frozenset([1]))
    if 1 in sample.completion_tokens:
        params = replace(params, stop_token_ids=frozenset())
    changed = replace(sample, sampling_params=params, request_id=7)
    assert verify(engine, [rechained(changed)])[0].outcome == "true"
    assert verify(engine, [changed])[0].field == "sampling_params"


def test_prefix_that_claims_an_abort_is_true(engine: InferenceEngine, material: Material) -> None:
    """A receipt does not show that nobody cut the sample."""
    sample = material.true[0]
    cut = replace(
        sample,
        completion_tokens=sample.completion_tokens[:3],
        logprobs=sample.logprobs[:3],
        log_kept_mass=(0.0,) * 3,
        loss_mask=(True,) * 3,
        weight_versions=(VersionSpan(0, 0, 3),),
        kv_versions=(ContextVersions(0, 3, (VersionSpan(0, 0, LENGTH + 2),)),),
    )
    as_length, as_abort = (
        rechained(replace(cut, finish_reason=reason)) for reason in ("length", "abort")
    )
    assert [verdict.field for verdict in verify(engine, [as_length])] == ["finish_reason"]
    assert verify(engine, [as_abort])[0].outcome == "true"


def test_updates_have_receipts_of_all_their_weights(build: Build, models: list[Path]) -> None:
    engine = build()
    new = llama_weights(llama_config(), seed=1)
    engine.add_request([5, 6, 7], replace(PARAMS, seed=3), 2)
    samples: list[TrainingSample] = []
    for step in range(60):
        if step == 6:
            engine.update_weights(new, blocking=False)  # keeps the context
        samples += engine.step()
    assert len(samples) == 2
    receipt = samples[0].receipt
    assert receipt is not None
    assert [version for version, _ in receipt.weights] == [0, 1]
    assert all(len(sha256) == 64 for _, sha256 in receipt.weights)
    fresh = build()
    missing = verify(fresh, samples)
    assert outcomes(missing) == {"not verifiable here": 2}
    assert "version 1 are missing" in missing[0].reason
    assert outcomes(verify(fresh, samples, weights={1: new})) == {"true": 2}
    assert outcomes(verify(engine, samples, weights={0: models[0]})) == {"true": 2}
    other = verify(fresh, samples, weights={1: models[0]})
    assert {verdict.field for verdict in other} == {"weights"}
    assert "other weights" in other[0].reason


def test_grammars_stops_and_results_are_verified(build: Build, tmp_path: Path) -> None:
    from tests.cli.running import write_tokenizer

    config = llama_config(vocab_size=259)
    folder = write_model(tmp_path, config, llama_weights(config, seed=3))
    write_tokenizer(folder, None)
    engine = build(model_path=str(folder))
    rich: list[dict[str, Any]] = [
        {"grammar": Grammar.regex("[a-f]{2,9}")},
        {"grammar": Grammar.regex("[ab]+c"), "temperature": 0.7},
        {"stop": ("a", "e"), "min_tokens": 2},
        {"top_k": 9, "sampling_mask": True, "top_logprobs": 2, "raw_logprobs": True},
        {"prompt_logprobs": True, "prompt_top_logprobs": 2},
        {"logprob_token_ids": (5, 9), "bad_words": ("ab",)},
        {"prompt_logprob_token_ids": ((5, 9, 11),), "prompt_logprob_start": 1},
    ]
    params = [replace(PARAMS, seed=i, **each) for i, each in enumerate(rich)]
    samples = engine.generate(["ab cd"] * len(params), params, 3)
    verdicts = verify(engine, samples)
    assert outcomes(verdicts) == {"true": len(samples)}, verdicts
    text = rechained(replace(samples[0], text="forged"))
    assert verify(engine, [text])[0].field == "text"
    stopped = next(s for s in samples if isinstance(s.stop_reason, str))
    claimed = rechained(replace(stopped, stop_reason="z"))
    assert verify(engine, [claimed])[0].field == "stop_reason"
    breaks = list(samples[0].completion_tokens)
    breaks[0] = 200  # not in the grammar
    outside = rechained(replace(samples[0], completion_tokens=tuple(breaks)))
    inside, true = verify(engine, [outside, samples[1]])
    assert inside[:3] == ("forged", "completion_tokens", 0)
    assert true.outcome == "true"


def test_adapters_are_verified(build: Build, models: list[Path]) -> None:
    engines = [build(max_loras=2) for _ in range(2)]
    for seed, engine in enumerate(engines):
        engine.load_adapter("a", matrices(models[0], seed))
    params = replace(PARAMS, adapter="a", seed=1)
    prompts = prompts_of(1, Random(0))
    samples = engines[0].generate(prompts, params, 3)
    plain = engines[0].generate(prompts, replace(params, adapter=None), 3)
    assert samples[0].logprobs != plain[0].logprobs
    assert outcomes(verify(engines[0], [*samples, *plain])) == {"true": 6}
    other = verify(engines[1], samples)
    assert {verdict.field for verdict in other} == {"adapters"}
    assert "another adapter" in other[0].reason
    unloaded = verify(build(), samples)
    assert outcomes(unloaded) == {"not verifiable here": 3}


def test_undecidable_samples_have_reasons(
    build: Build, engine: InferenceEngine, material: Material
) -> None:
    sample = material.true[0]
    receipt = sample.receipt
    assert receipt is not None
    bare = build(1, dtype="bfloat16")
    with_reference = rechained(replace(sample, ref_logprobs=(0.0,) * len(sample.logprobs)))
    nothing = replace(sample, completion_tokens=(), logprobs=(), log_kept_mass=(), kv_versions=())
    nothing = replace(nothing, loss_mask=(), weight_versions=(), finish_reason="abort")
    appended = replace(sample, loss_mask=(False,) * len(sample.logprobs))
    cases = (
        (engine, replace(sample, receipt=None), "no receipt"),
        (engine, replace(sample, receipt=replace(receipt, format=2)), "format 2"),
        (bare, sample, "numerics"),
        (engine, with_reference, "ref_logprobs"),
        (engine, rechained(replace(nothing, receipt=replace(receipt, weights=()))), "no tokens"),
        (engine, rechained(appended), "every token was appended"),
        (engine, rechained(replace(sample, sampling_params=None)), "no sampling_params"),
        (
            engine,
            rechained(replace(sample, sampling_params=params_of(sample, logits_processors=("x",)))),
            "logits processor",
        ),
        (
            engine,
            rechained(replace(sample, completion_tokens=(10**30, *sample.completion_tokens[1:]))),
            "outside the vocabulary",
        ),
    )
    for here, changed, words in cases:
        verdict = verify(here, [changed])[0]
        assert verdict.outcome == "not verifiable here", verdict
        assert words in verdict.reason


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_versions": (ContextVersions(0, 20, (VersionSpan(0, 0, 2**62),)),)}, "kv_versions"),
        ({"logprobs": (0.0,)}, "logprobs"),
        ({"log_kept_mass": None}, "log_kept_mass"),
        ({"adapter_versions": (VersionSpan(1, 0, 20),)}, "adapters"),
        ({"weight_version": 4}, "weight_version"),
        ({"weight_versions": (VersionSpan(4, 0, 20),)}, "weight_versions"),
        ({"finish_reason": "stop", "stop_reason": "x"}, "finish_reason"),
        ({"raw_logprobs": (0.0,) * 20}, "raw_logprobs"),
    ],
)
def test_contradictions_are_forged(
    engine: InferenceEngine, material: Material, changes: dict[str, Any], field: str
) -> None:
    changed = rechained(replace(material.true[1], **changes))
    assert verify(engine, [changed])[0][:2] == ("forged", field)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_of_any_processor_are_true(
    build: Build, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[TrainingSample] = []
    engines: list[InferenceEngine] = []
    for name in available():
        monkeypatch.setattr(
            backends, "cpu_ops", lambda num_threads, name=name, **_: cpu_ops(num_threads, name)
        )
        engines.append(build(dtype=dtype, cpu_sums="pairs" if dtype == "bfloat16" else "auto"))
        samples += engines[-1].generate(prompts_of(3, Random(2)), replace(PARAMS, seed=5), GROUP)
    for engine in engines:
        assert outcomes(verify(engine, samples)) == {"true": len(samples)}


FORGERIES, TRUE = 1000, 10_000  # of each kind


@pytest.mark.slow
@pytest.mark.parametrize("smart", [False, True], ids=["naive", "smart"])
@pytest.mark.parametrize("kind", [*KINDS, "truncated", "reordered"])
def test_thousand_forgeries_are_found(
    engine: InferenceEngine, material: Material, kind: str, smart: bool
) -> None:
    rng = Random(11)
    if kind in ("truncated", "reordered"):
        if not smart:  # a file that is sealed again is a true file of fewer or other lines
            make, lines = {"truncated": truncated, "reordered": reordered}[kind], material.true
            for _ in range(FORGERIES):
                assert misplaced(make(rng, sealed(lines))) is not None
        return
    verifier, count = Verifier(engine), len(material.true)
    forgeries = [forged(kind, smart, rng, material, i % count) for i in range(FORGERIES)]
    assert outcomes(verifier.verify(forgeries)) == {"forged": FORGERIES}


@pytest.mark.slow
@pytest.mark.parametrize("name", available())
def test_ten_thousand_samples_are_true(
    build: Build, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of this processor, under the kernels of the others."""
    engines: dict[str, InferenceEngine] = {}
    for each in available():
        monkeypatch.setattr(
            backends, "cpu_ops", lambda num_threads, each=each, **_: cpu_ops(num_threads, each)
        )
        engines[each] = build(dtype="bfloat16", cpu_sums="pairs")
    made = engines[name]
    others = [engine for each, engine in engines.items() if each != name] or [made]
    for seed in range(TRUE // 1000):
        prompts = prompts_of(1000 // GROUP, Random(seed))
        samples = made.generate(prompts, replace(PARAMS, seed=seed), GROUP)
        for engine in others:
            assert outcomes(verify(engine, samples)) == {"true": 1000}
