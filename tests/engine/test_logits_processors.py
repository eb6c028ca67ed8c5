"""Functions of the caller that change logits: their place, their errors, and other requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import EngineConfig, Grammar, InferenceEngine, InvalidRequest, SamplingParams
from nano_inference.drafts.costs import StepCosts
from nano_inference.rl import replay, score
from tests.depth import at_depth
from tests.models.tiny import tiny_llama
from tests.structured.vocabularies import with_tokenizer

FREE = StepCosts((1, 64), (1.0, 1.0))  # for as many drafts as possible
PROMPT = [40, 41, 42]
PARAMS = SamplingParams(max_tokens=8, seed=3, raw_logprobs=True)


def unchanged(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    return logits


def colder(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    return logits * np.float32(3)


def without_repeats(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    logits[list(ids)] = -np.inf
    return logits


def raised(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    logits[7] += len(ids) / 4
    return logits


def sevens(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    logits[7] += 100
    if len(ids) > 20:
        raise KeyError("no such word")
    return logits


def failing(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    if len(ids) > 5:
        raise KeyError("no such word")
    return logits


BROKEN: dict[str, tuple[Callable[..., np.ndarray], str]] = {
    "fails": (failing, "raised KeyError: 'no such word'"),
    "narrow": (lambda ids, logits: logits[:-1], "returned float32 [299], not float32 [300]"),
    "wide": (lambda ids, logits: logits.astype(np.float64), "returned float64"),
    "infinite": (lambda ids, logits: logits + np.inf, "a value that is not finite"),
    "empty": (lambda ids, logits: logits - np.inf, "left no token to draw"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("processors"), seed=0))


def made(model: Path, **options: object) -> InferenceEngine:
    engine = InferenceEngine(EngineConfig(str(model), **options))  # pyright: ignore
    for processor in (unchanged, colder, without_repeats, raised, sevens):
        engine.register_logits_processor(processor.__name__, processor)
    for name, (function, _) in BROKEN.items():
        engine.register_logits_processor(name, function)
    return engine


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[InferenceEngine]:
    with made(model) as engine:
        yield engine


def test_unchanged_logits_have_the_same_bits(engine: InferenceEngine) -> None:
    (plain,) = engine.generate(PROMPT, PARAMS)
    (sample,) = engine.generate(PROMPT, replace(PARAMS, logits_processors=("unchanged",)))
    assert sample.completion_tokens == plain.completion_tokens
    assert sample.logprobs == plain.logprobs
    assert sample.numerics == f"{plain.numerics}+unchanged"


def test_processor_acts_before_bias_and_temperature(engine: InferenceEngine) -> None:
    params = replace(PARAMS, logit_bias={7: 2.0}, temperature=0.7, max_tokens=1)
    biased = replace(params, logit_bias={7: 2.0 + len(PROMPT) / 4})  # the same at this position
    (expected,) = engine.generate(PROMPT, biased)
    (sample,) = engine.generate(PROMPT, replace(params, logits_processors=("raised",)))
    assert sample.completion_tokens == expected.completion_tokens
    assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    (warm,) = engine.generate(PROMPT, replace(PARAMS, temperature=1 / 3, max_tokens=1))
    (cold,) = engine.generate(PROMPT, replace(PARAMS, logits_processors=("colder",), max_tokens=1))
    assert cold.completion_tokens == warm.completion_tokens
    assert cold.logprobs == pytest.approx(warm.logprobs, abs=1e-4)
    assert cold.raw_logprobs == warm.raw_logprobs  # the model's own


def test_cut_tokens_are_masked(engine: InferenceEngine) -> None:
    params = replace(PARAMS, logits_processors=("without_repeats",), max_tokens=40)
    (sample,) = engine.generate(PROMPT, params)
    ids = [*sample.prompt_tokens, *sample.completion_tokens]
    assert len(set(ids)) == len(ids)
    assert all(mass < 0 for mass in sample.log_kept_mass or ())
    digits = replace(params, grammar=Grammar.regex("[0-9]{10}"))
    (sample,) = engine.generate(PROMPT, digits)
    text = engine.tokenizer.decode(sample.completion_tokens)
    assert "".join(sorted(text)) == "0123456789"


@settings(max_examples=at_depth(12), deadline=None)
@given(data=st.data())
def test_processors_change_no_bit_of_others(
    model: Path, engine: InferenceEngine, data: st.DataObject
) -> None:
    names = st.sampled_from(["unchanged", "colder", "without_repeats", "raised", "fails"])
    work = [
        replace(PARAMS, seed=seed, logits_processors=data.draw(st.lists(names, max_size=2)))
        for seed in range(data.draw(st.integers(1, 5)))
    ]
    prompts = [list(range(30, 33 + 4 * index)) for index in range(len(work))]
    alone = [engine.generate(prompt, each, 2) for prompt, each in zip(prompts, work, strict=True)]
    options = {"block_size": 4, "max_chunk_tokens": 5, "max_tokens_per_batch": 16}
    speculation = data.draw(st.sampled_from(["none", "suffix"]))
    with made(model, speculation=speculation, **options) as other:
        together = other.generate(prompts, work, 2)
    for one, sample in zip([each for pair in alone for each in pair], together, strict=True):
        assert sample.completion_tokens == one.completion_tokens
        assert sample.logprobs == one.logprobs
        assert sample.log_kept_mass == one.log_kept_mass
        assert sample.stop_reason == one.stop_reason


def test_processors_see_drafts(
    model: Path, engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor makes one token ever more likely, so drafts of it are drawn."""
    monkeypatch.setattr("nano_inference.engine.engine.measure_costs", lambda *_: FREE)
    params = replace(PARAMS, logits_processors=("raised",), max_tokens=60)
    (alone,) = engine.generate(PROMPT, params)
    with made(model, speculation="ngram") as other:
        (drafted,) = other.generate(PROMPT, params)
        speculation = other.stats().speculation
        assert speculation is not None
        assert speculation.num_accepted > 0
    assert drafted.completion_tokens == alone.completion_tokens
    assert drafted.logprobs == alone.logprobs


def test_failure_behind_a_draft_waits_for_its_turn(
    model: Path, engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step draws several tokens ahead, and the processor fails only at the last of them."""
    monkeypatch.setattr("nano_inference.engine.engine.measure_costs", lambda *_: FREE)
    params = replace(PARAMS, logits_processors=("sevens",), max_tokens=60)
    prompt = [7] * 6  # drafts repeat it
    (alone,) = engine.generate(prompt, params)
    with made(model, speculation="ngram") as other:
        (drafted,) = other.generate(prompt, params)
    assert alone.completion_tokens == drafted.completion_tokens == (7,) * 15
    assert drafted.stop_reason == alone.stop_reason
    assert "no such word" in str(alone.stop_reason)


@pytest.mark.parametrize("name", BROKEN)
def test_failure_ends_only_its_own_sample(engine: InferenceEngine, name: str) -> None:
    (alone,) = engine.generate(PROMPT, PARAMS)
    bad = replace(PARAMS, logits_processors=("unchanged", name))
    good, failed = engine.generate([PROMPT, PROMPT], [PARAMS, bad])
    assert good.logprobs == alone.logprobs
    assert failed.finish_reason == "abort"
    assert BROKEN[name][1] in str(failed.stop_reason)
    assert str(failed.stop_reason).startswith("error: ")


def test_wrong_names_are_rejected(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="'other', which is not registered"):
        engine.generate(PROMPT, replace(PARAMS, logits_processors=("other",)))
    with pytest.raises(InvalidRequest, match="registered already"):
        engine.register_logits_processor("raised", unchanged)
    with pytest.raises(InvalidRequest, match="must be an identifier"):
        engine.register_logits_processor("a+b", unchanged)
    with pytest.raises(InvalidRequest, match="must be a list of names"):
        SamplingParams(logits_processors="raised")  # pyright: ignore[reportArgumentType]
    (sample,) = engine.generate(PROMPT, replace(PARAMS, logits_processors=("raised",)))
    with pytest.raises(InvalidRequest, match="logits processor 'raised'"):
        replay(engine, sample)
    with pytest.raises(InvalidRequest, match="logits processor 'raised'"):
        score(engine, [PROMPT], grammar=sample.sampling_params)
