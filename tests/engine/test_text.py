"""String and chat prompts, text output, stop strings and streams."""

from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, InvalidRequest, SamplingParams

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(
        "smollm2-135m", dtype="float32", device="cpu", max_model_len=256, kv_cache_memory=2**27
    )
    with InferenceEngine(config) as engine:
        yield engine


@pytest.mark.thorough
def test_string_prompt_is_tokenized_and_samples_decoded(engine: InferenceEngine) -> None:
    (sample,) = engine.generate(PROMPT, GREEDY)
    assert list(sample.prompt_tokens) == engine.tokenizer.encode(PROMPT)
    assert sample.text == engine.tokenizer.decode(sample.completion_tokens)
    (by_ids,) = engine.generate(sample.prompt_tokens, GREEDY)
    assert by_ids.completion_tokens == sample.completion_tokens
    assert by_ids.text is None, "token ids ask for no text"


def test_invalid_unicode_prompt_is_rejected(engine: InferenceEngine) -> None:
    for prompts in ("a\ud800", ["a", "\ud800"]):
        with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
            engine.generate(prompts, GREEDY)


@pytest.mark.thorough
def test_chat_uses_the_template_of_the_model(engine: InferenceEngine) -> None:
    chat = [{"role": "user", "content": "Say hi."}]
    (sample,) = engine.generate(chat, GREEDY)
    rendered = engine.tokenizer.decode(sample.prompt_tokens, skip_special_tokens=False)
    assert rendered.endswith("<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n")
    many = engine.generate([chat, PROMPT, [5, 6]], GREEDY)
    assert many[0].completion_tokens == sample.completion_tokens
    assert [s.text is None for s in many] == [False, False, True]


@pytest.mark.thorough
def test_text_excludes_the_end_of_sequence(engine: InferenceEngine) -> None:
    (sample,) = engine.generate(
        [{"role": "user", "content": "Say hi."}], SamplingParams(0, max_tokens=100)
    )
    assert sample.finish_reason == "stop"
    assert sample.stop_reason == 2
    assert sample.text is not None
    assert "<|im_end|>" not in sample.text


def plain(engine: InferenceEngine) -> str:
    text = engine.generate(PROMPT, GREEDY)[0].text
    assert text is not None
    return text


@pytest.mark.thorough
def test_stop_string_over_several_tokens_cuts_only_the_text(
    engine: InferenceEngine,
) -> None:
    whole = plain(engine)
    stop = whole[9:16]
    (sample,) = engine.generate(PROMPT, SamplingParams(0, max_tokens=24, stop=[stop, "never this"]))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == whole[: whole.index(stop)]
    decoded = engine.tokenizer.decode(sample.completion_tokens)
    assert stop in decoded
    assert stop not in engine.tokenizer.decode(sample.completion_tokens[:-1]), (
        "a token too many was kept"
    )
    assert len(sample.logprobs) == len(sample.completion_tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("lookahead", [0, 1])
def test_stop_strings_do_not_depend_on_lookahead_or_neighbours(
    engine: InferenceEngine, lookahead: int
) -> None:
    stop = plain(engine)[9:16]
    params = SamplingParams(0, max_tokens=24, stop=stop)
    expected = engine.generate(PROMPT, params)[0]
    config = EngineConfig(
        "smollm2-135m",
        dtype="float32",
        device="cpu",
        max_model_len=256,
        lookahead=lookahead,
        kv_cache_memory=2**27,
    )
    with InferenceEngine(config) as other:
        samples = other.generate([PROMPT, "Once upon"], [params, GREEDY], 2)
        assert other.cache.num_free_blocks() == other.cache.num_blocks
    assert (
        samples[0].completion_tokens == samples[1].completion_tokens == expected.completion_tokens
    )
    assert samples[0].text == expected.text


@pytest.mark.thorough
def test_stop_string_waits_for_min_tokens(engine: InferenceEngine) -> None:
    whole = plain(engine)
    first = whole.strip().split()[0]
    (early,) = engine.generate(PROMPT, SamplingParams(0, max_tokens=24, stop=first))
    (late,) = engine.generate(PROMPT, SamplingParams(0, max_tokens=24, stop=first, min_tokens=12))
    assert early.finish_reason == "stop"
    assert len(late.completion_tokens) > 12


@pytest.mark.thorough
def test_stop_strings_work_on_token_prompts(engine: InferenceEngine) -> None:
    stop = plain(engine)[9:16]
    ids = engine.tokenizer.encode(PROMPT)
    assert engine.generate(ids, SamplingParams(0, max_tokens=24, stop=stop))[0].stop_reason == stop


@pytest.mark.thorough
def test_pieces_of_a_stream_join_to_the_text(engine: InferenceEngine) -> None:
    stop = plain(engine)[9:16]
    for params in (
        GREEDY,
        SamplingParams(0, max_tokens=24, stop=stop),
        SamplingParams(max_tokens=24, seed=4),
    ):
        deltas = list(engine.generate([PROMPT, "Emoji: 🙂"], params, 2, stream=True))
        samples = [d.finished for d in deltas if d.finished is not None]
        assert len(samples) == 4
        for sample in samples:
            mine = [
                d
                for d in deltas
                if (d.request_id, d.sample_index) == (sample.request_id, sample.sample_index)
            ]
            assert "".join(d.text or "" for d in mine) == sample.text
            assert tuple(t for d in mine for t in d.token_ids) == sample.completion_tokens
            assert not any(
                stop.startswith(d.text) and d.text for d in mine[:-2]
            ) or params.stop != (stop,)


@pytest.mark.thorough
def test_closing_a_stream_aborts_its_requests(engine: InferenceEngine) -> None:
    stream = engine.generate(
        [PROMPT, PROMPT + " not"], SamplingParams(max_tokens=100), 2, stream=True
    )
    next(stream)
    assert engine.loop.sequences.by_id
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not engine.has_pending()
    assert not engine.shared.delivery.open_requests()


def test_stream_rejects_bad_requests_before_it_is_read(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate([[]], GREEDY, stream=True)


@pytest.mark.thorough
def test_generate_text_returns_the_shape_of_its_input(engine: InferenceEngine) -> None:
    one = engine.generate_text(PROMPT, GREEDY)
    assert one == plain(engine)
    assert engine.generate_text([PROMPT, PROMPT], GREEDY) == [one, one]
    assert "".join(engine.generate_text(PROMPT, GREEDY, stream=True)) == one
    parts = list(engine.generate_text([PROMPT, "Two and two"], GREEDY, stream=True))
    assert "".join(text for place, text in parts if place == 0) == one
    assert {place for place, _ in parts} == {0, 1}


@pytest.mark.thorough
def test_broken_template_ends_its_request_only(engine: InferenceEngine) -> None:
    running = engine.add_request(PROMPT, GREEDY)
    with pytest.raises(InvalidRequest, match="a chat message contains a value of type object"):
        engine.generate([{"role": "user", "content": object()}], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate([PROMPT, ""], GREEDY)
    samples = []
    while engine.has_pending():
        samples += engine.step()
    assert [s.request_id for s in samples] == [running]


@pytest.mark.thorough
def test_progress_accepts_a_bar(
    engine: InferenceEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate([PROMPT] * 3, GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s, KV" in shown
    engine.generate([PROMPT], GREEDY, progress=False)
    assert not capsys.readouterr().err


def test_generate_text_rejects_other_types(engine: InferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match="a list of messages"):
        engine.generate({"role": "user", "content": "Say hi."}, GREEDY)
    with pytest.raises(InvalidRequest, match="not dict"):
        engine.add_request({"role": "user", "content": "Say hi."}, GREEDY)
    with pytest.raises(InvalidRequest, match="string or a list of strings"):
        engine.generate_text([1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequest, match="string or a list of strings"):
        engine.generate_text([PROMPT, [1]], GREEDY, stream=True)


@pytest.mark.thorough
def test_pieces_carry_the_index_of_their_prompt(engine: InferenceEngine) -> None:
    """Most of the first prompt's text is held back, so text of the second prompt arrives first."""
    whole = plain(engine)
    held = SamplingParams(0, max_tokens=24, stop=whole[:20] + "never")
    parts = list(engine.generate_text([PROMPT, "Two and two"], held, stream=True))
    assert parts[0][0] == 1
    assert "".join(text for place, text in parts if place == 0) == whole


def test_broken_stream_repeats_no_token(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.generate(PROMPT, GREEDY, stream=True)
    first = next(stream)
    forward = engine.runner.forward

    def broken(*arguments: Any) -> Any:
        result = forward(*arguments)
        return result._replace(
            drawn=[(model, hidden * float("nan"), rows) for model, hidden, rows in result.drawn]
        )

    monkeypatch.setattr(engine.runner, "forward", broken)
    rest = list(stream)
    sample = rest[-1].finished
    assert sample is not None
    assert sample.finish_reason == "abort"
    assert (
        tuple(token for delta in [first, *rest] for token in delta.token_ids)
        == sample.completion_tokens
    )
    assert tuple(value for delta in [first, *rest] for value in delta.logprobs) == sample.logprobs
    assert "".join(delta.text or "" for delta in [first, *rest]) == sample.text
