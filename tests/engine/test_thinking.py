"""A budget of thought and bad words in the engine: forced tokens, their logprobs, and errors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nano_inference import (
    EngineConfig,
    Grammar,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from nano_inference.drafts.costs import StepCosts
from nano_inference.rl import differences, replay
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

FREE = StepCosts((1, 64), (1.0, 1.0))  # for as many drafts as possible
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
CLOSES = b"</think>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("thinking"), seed=0)
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(str(model), max_batch_size=8)) as engine:
        yield engine


def ids_of(engine: InferenceEngine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def thinking(**fields: object) -> SamplingParams:
    options = {"max_tokens": 24, "seed": 1, "thinking_token_budget": 5, "raw_logprobs": True}
    return SamplingParams(**{**options, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budget_closes_the_thought(
    engine: InferenceEngine, budget: int, temperature: float
) -> None:
    prompt, closes = ids_of(engine, "1+1<think>"), ids_of(engine, "</think>")
    params = thinking(thinking_token_budget=budget, temperature=temperature)
    free = replace(params, thinking_token_budget=None)
    (sample,), (unlimited,) = engine.generate(prompt, params), engine.generate(prompt, free)
    forced = slice(budget, budget + len(closes))
    assert list(sample.completion_tokens[forced]) == closes
    assert sample.completion_tokens[:budget] == unlimited.completion_tokens[:budget]
    assert unlimited.completion_tokens[forced] != tuple(closes)
    raw, mass = sample.raw_logprobs or (), sample.log_kept_mass or ()
    if temperature:
        assert sample.logprobs[forced] == (0.0,) * len(closes)
        assert mass[:budget] == (0.0,) * budget
        assert mass[forced] == pytest.approx(raw[forced], abs=1e-5)  # all that was left
    else:
        assert sample.logprobs == raw


def test_budget_counts_from_the_marker_of_the_prompt(engine: InferenceEngine) -> None:
    closes = tuple(ids_of(engine, "</think>"))
    for begun in range(7):  # the prompt holds tokens of the thought
        prompt = ids_of(engine, "<think>" + "a" * begun)
        (sample,) = engine.generate(prompt, thinking())
        start = max(5 - begun, 0)
        assert sample.completion_tokens[start : start + len(closes)] == closes


def test_partial_marker_is_completed(engine: InferenceEngine) -> None:
    prompt, closes = ids_of(engine, "<think>aaa</th"), ids_of(engine, "</think>")
    (sample,) = engine.generate(prompt, thinking())
    assert list(sample.completion_tokens[:4]) == closes[4:]


@pytest.mark.parametrize(
    "text", ["1+1", "<think>a</think>", "<think>a</s>", "<think>abc</s><think></think>"]
)
def test_budget_leaves_other_text_alone(engine: InferenceEngine, text: str) -> None:
    prompt = ids_of(engine, text)
    params = thinking(thinking_token_budget=0)
    free = replace(params, thinking_token_budget=None)
    (sample,), (unlimited,) = engine.generate(prompt, params), engine.generate(prompt, free)
    assert sample.completion_tokens == unlimited.completion_tokens
    assert sample.logprobs == unlimited.logprobs


def test_thought_that_the_model_opens_has_a_budget(engine: InferenceEngine) -> None:
    opens, closes = ids_of(engine, "<think>"), ids_of(engine, "</think>")
    prompt = ids_of(engine, "1+1")
    params = thinking(grammar=Grammar.regex("<think>[a-z</>]{30}"), max_tokens=60)
    (sample,) = engine.generate(prompt, params)
    assert list(sample.completion_tokens[: len(opens)]) == opens
    start = len(opens) + 5
    assert list(sample.completion_tokens[start : start + len(closes)]) == closes


def test_marker_waits_until_the_grammar_allows_it(engine: InferenceEngine) -> None:
    closes = ids_of(engine, "</think>")
    grammar = Grammar.regex("[a-z]{9}(</think>[0-9]|[a-z])*")
    (sample,) = engine.generate(ids_of(engine, "<think>"), thinking(grammar=grammar))
    assert list(sample.completion_tokens[9 : 9 + len(closes)]) == closes


def test_grammar_begins_after_the_closed_thought(engine: InferenceEngine) -> None:
    grammar = replace(Grammar.regex("[0-9]{4}"), after="</think>")
    prompt = [{"role": "user", "content": "1+1"}]
    (sample,) = engine.generate(prompt, thinking(grammar=grammar))
    thought, _, answer = str(sample.text).partition("</think>")
    assert answer.isdigit()
    assert len(answer) == 4
    assert len(sample.completion_tokens) == 5 + len(CLOSES) + 4 + 1
    assert thought


def test_resumed_and_replayed_samples_have_the_same_bits(engine: InferenceEngine) -> None:
    prompt = ids_of(engine, "1+1<think>")
    for params in (
        thinking(top_k=20, sampling_mask=True, bad_words=("a", "th", "nk")),
        thinking(grammar=replace(Grammar.regex("[0-9]{4}"), after="</think>")),
    ):
        (sample,) = engine.generate(prompt, params)
        assert not differences(sample, replay(engine, sample))
        for length in range(0, len(sample.completion_tokens), 3):
            again = finished(engine, engine.resume_from(cut(sample, length)))
            assert again.completion_tokens == sample.completion_tokens
            assert again.logprobs == sample.logprobs
            assert again.log_kept_mass == sample.log_kept_mass
            assert again.sampling_mask == sample.sampling_mask


def cut(sample: TrainingSample, length: int) -> TrainingSample:
    """Return the sample as if it had been aborted after some tokens."""

    def short(name: str) -> dict[str, object]:
        value = getattr(sample, name)
        return {} if value is None else {name: value[:length]}

    masks = sample.sampling_mask
    return replace(
        sample,
        finish_reason="abort",
        stop_reason=None,
        **short("completion_tokens"),
        **short("logprobs"),
        **short("raw_logprobs"),
        **short("log_kept_mass"),
        **short("loss_mask"),
        weight_versions=tuple(
            replace(span, end=length) for span in sample.weight_versions if length
        ),
        kv_versions=tuple(each._replace(token_end=length) for each in sample.kv_versions if length),
        sampling_mask=None if masks is None else type(masks).of(masks.rows()[:length]),
    )  # pyright: ignore[reportArgumentType]


def finished(engine: InferenceEngine, request_id: int) -> TrainingSample:
    while engine.has_pending():
        for sample in engine.step():
            if sample.request_id == request_id:
                return sample
    raise AssertionError("it did not finish")


def test_forced_ids_are_the_only_ones_in_the_sampling_mask(engine: InferenceEngine) -> None:
    closes = ids_of(engine, "</think>")
    params = thinking(top_k=20, sampling_mask=True, top_logprobs=3)
    (sample,) = engine.generate(ids_of(engine, "<think>"), params)
    assert sample.sampling_mask is not None
    assert sample.top_logprobs is not None
    forced = slice(5, 5 + len(closes))
    assert sample.sampling_mask.rows()[forced] == [(each,) for each in closes]
    assert [each.token_ids for each in sample.top_logprobs[forced]] == [(i,) for i in closes]


@pytest.mark.parametrize("drafts", ["suffix", "ngram", "auto"])
def test_drafts_change_nothing(
    model: Path, engine: InferenceEngine, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.engine.engine.measure_costs", lambda *_: FREE)
    prompt = ids_of(engine, "ababab<think>ababababab")
    params = thinking(max_tokens=60, thinking_token_budget=20, bad_words=("b", "ca"))
    (plain,) = engine.generate(prompt, params)
    with InferenceEngine(EngineConfig(str(model), speculation=drafts)) as other:  # pyright: ignore
        (drafted,) = other.generate(prompt, params)
        assert drafted.completion_tokens == plain.completion_tokens
        assert drafted.logprobs == plain.logprobs
        speculation = other.stats().speculation
        assert speculation is not None
        assert sum(speculation.accepted["grammar"]) > 0  # the marker was certain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_written(engine: InferenceEngine, temperature: float) -> None:
    prompt, words = ids_of(engine, "ab"), ["a", "xy", "Ã"]
    grammar = Grammar.regex("[abxy]{12}")
    for seed in range(5):
        params = thinking(
            bad_words=words,
            grammar=grammar,
            temperature=temperature,
            seed=seed,
            thinking_token_budget=None,
        )
        (sample,) = engine.generate(prompt, params)
        text = engine.tokenizer.decode(sample.completion_tokens)
        assert "a" not in text
        assert "xy" not in text
        assert text.strip("bxy") == ""


def test_bad_words_mask_the_distribution(engine: InferenceEngine) -> None:
    prompt = ids_of(engine, "ab")
    free = thinking(max_tokens=8, thinking_token_budget=None, top_logprobs=40)
    ascii_ids = [each for each in range(3, 259) if engine.tokenizer.decode([each]).isascii()]
    free = replace(free, allowed_token_ids=ascii_ids)
    (sample,) = engine.generate(prompt, free)
    first = sample.completion_tokens[0]
    allowed = frozenset(ascii_ids) - {first}
    word = engine.tokenizer.decode([first])
    (masked,) = engine.generate(prompt, replace(free, bad_words=(word,)))
    (other,) = engine.generate(prompt, replace(free, allowed_token_ids=allowed))
    assert masked.completion_tokens[0] == other.completion_tokens[0] != first
    assert masked.logprobs[0] == other.logprobs[0]
    assert (masked.log_kept_mass or (1.0,))[0] == (other.log_kept_mass or (2.0,))[0]


def test_words_that_leave_no_token_end_only_their_sample(engine: InferenceEngine) -> None:
    prompt = ids_of(engine, "ab")
    good = SamplingParams(max_tokens=8, seed=3)
    bad = SamplingParams(
        max_tokens=8, seed=3, bad_words=("ab",), allowed_token_ids=ids_of(engine, "ab")[1:]
    )
    stuck = replace(bad, allowed_token_ids=None, grammar=Grammar.regex("abc"))
    (alone,) = engine.generate(prompt, good)
    first, second, third = engine.generate([prompt] * 3, [good, stuck, bad])
    assert first.logprobs == alone.logprobs
    assert second.stop_reason == "error: bad_words left no token to draw"
    assert second.finish_reason == "abort"
    assert len(second.completion_tokens) == 1
    assert third.finish_reason == "length"


def test_bad_values_are_rejected(engine: InferenceEngine, tmp_path: Path) -> None:
    for budget in (-1, 1.5, True, "5"):
        with pytest.raises(InvalidRequest, match="thinking_token_budget="):
            SamplingParams(thinking_token_budget=budget)  # pyright: ignore
    for words in ("ab", [""], [3], ["a" * 257], ["a"] * 1025):
        with pytest.raises(InvalidRequest, match="bad_words"):
            SamplingParams(bad_words=words)  # pyright: ignore
    prompt = ids_of(engine, "<think>")
    with pytest.raises(InvalidRequest, match=r"at most 7, or raise max_tokens to at least 17"):
        engine.generate(prompt, SamplingParams(max_tokens=16, thinking_token_budget=8))
    with pytest.raises(InvalidRequest, match="not among allowed_token_ids"):
        engine.generate(prompt, thinking(allowed_token_ids=[40, 41]))
    only = SamplingParams(allowed_token_ids=ids_of(engine, "a"), bad_words=("a",))
    with pytest.raises(InvalidRequest, match="bans every allowed token"):
        engine.generate(prompt, only)
    plain = tiny_llama(tmp_path)
    write_tokenizer(plain, "{{ messages }}")
    with InferenceEngine(EngineConfig(str(plain))) as other:
        with pytest.raises(InvalidRequest, match="chat template has thoughts; omit it"):
            other.generate(prompt, thinking())
        assert not other.has_pending()
