"""Requests with grammars: waiting, ending, failing, and isolation from other requests."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_inference import (
    AsyncInferenceEngine,
    EngineConfig,
    EngineDead,
    Grammar,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from nano_inference.engine.intake import vocabulary_of
from nano_inference.structured import backend as backends
from nano_inference.structured.backend import GrammarError
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.grammar import BackendName
from nano_inference.structured.llguidance_backend import LlguidanceBackend, LlguidanceMatcher
from nano_inference.structured.matching import GrammarState
from tests.models.tiny import tiny_llama
from tests.structured.vocabularies import BACKENDS, EOS, byte_tokenizer
from tests.weights.weight_cases import NEW, PROMPT, Build, bits, drain, drawn

PATIENCE = 20.0  # seconds
DIGITS = SamplingParams(max_tokens=30, seed=3, grammar=Grammar.regex("[0-9]{4,8}"))
PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["word", "ok"],
    "additionalProperties": False,
}
OBJECT = SamplingParams(max_tokens=200, seed=5, grammar=Grammar.json_schema(PERSON))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("grammar"), seed=0)
    byte_tokenizer(folder)
    return folder


def text_of(engine: InferenceEngine, sample: TrainingSample) -> str:
    return engine.tokenizer.decode(sample.completion_tokens)


class Held:
    """Hold compilations until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        compile_now = LlguidanceBackend.compile

        def compile_later(*arguments: Any) -> Any:
            self.began.set()
            assert self.go.wait(PATIENCE)
            return compile_now(*arguments)

        monkeypatch.setattr(LlguidanceBackend, "compile", compile_later)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    queue = Held(monkeypatch)
    yield queue
    queue.go.set()


def test_sample_follows_its_grammar_and_ends_with_it(build: Build) -> None:
    engine = build()
    samples = engine.generate([PROMPT, PROMPT[:5]], [DIGITS, OBJECT], 4)
    for sample in samples:
        assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)
    for sample in samples[:4]:
        assert text_of(engine, sample).isdigit()
    for sample in samples[4:]:
        assert set(json.loads(text_of(engine, sample))) == {"age", "ok"}
    assert len({sample.completion_tokens for sample in samples[:4]}) > 1


@pytest.mark.thorough(cases=["True-xgrammar", "False-xgrammar"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_request", [True, False])
def test_sample_follows_its_grammar_on_every_backend(
    build: Build, backend: BackendName, of_request: bool
) -> None:
    """Select the backend per request or per engine."""
    named = backend if of_request else None
    engine = build() if of_request else build(grammar_backend=backend)
    params = [
        replace(DIGITS, grammar=Grammar("regex", "[0-9]{4,8}", backend=named)),
        replace(OBJECT, grammar=Grammar("json", json.dumps(ANSWER), backend=named)),
        drawn(20),
    ]
    samples = engine.generate([PROMPT] * 3, params, 3)
    assert bits(samples[6]) == bits(build().generate(PROMPT, params[2], 3)[0])
    for sample in samples[:6]:
        assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)
    for sample in samples[:3]:
        assert re.fullmatch("[0-9]{4,8}", text_of(engine, sample))
    for sample in samples[3:6]:
        assert set(json.loads(text_of(engine, sample))) == {"word", "ok"}


@pytest.mark.thorough(cases=["xgrammar"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_no_bit_on_any_backend(build: Build, backend: BackendName) -> None:
    """Rejected drafts roll the matcher back."""
    params = [
        replace(DIGITS, grammar=Grammar("regex", "(12){4,9}[0-9]{9}", backend=backend)),
        replace(OBJECT, grammar=Grammar("json", json.dumps(ANSWER), backend=backend)),
    ]
    plain = build().generate([PROMPT] * 2, params, 3)
    drafted = build(speculation="suffix").generate([PROMPT] * 2, params, 3)
    assert list(map(bits, drafted)) == list(map(bits, plain))


def test_logprobs_and_mass_account_for_the_grammar_mask(build: Build) -> None:
    engine = build()
    params = replace(DIGITS, raw_logprobs=True)
    (sample,) = engine.generate(PROMPT, params)
    assert sample.log_kept_mass is not None
    assert sample.raw_logprobs is not None
    for logprob, mass, raw in zip(
        sample.logprobs, sample.log_kept_mass, sample.raw_logprobs, strict=True
    ):
        assert mass < -0.1
        assert logprob + mass == pytest.approx(raw, abs=1e-5), "at temperature 1"


@pytest.mark.thorough
def test_compilation_blocks_no_other_request(build: Build, held: Held) -> None:
    engine, alone = build(), bits(build().generate(PROMPT, drawn(20))[0])
    structured = engine.add_request(PROMPT, DIGITS)
    free = engine.add_request(PROMPT, drawn(20))
    assert held.began.wait(PATIENCE)
    (sample,) = [sample for _ in range(25) for sample in engine.step()]
    assert (sample.request_id, bits(sample)) == (free, alone)
    assert engine.has_pending(), "the other one is not forgotten"
    held.go.set()
    (sample,) = drain(engine)
    assert sample.request_id == structured
    assert text_of(engine, sample).isdigit()


def test_request_waiting_for_its_grammar_can_be_aborted(build: Build, held: Held) -> None:
    engine = build()
    request_id = engine.add_request(PROMPT, DIGITS)
    engine.step()
    (sample,) = engine.abort(request_id)
    assert (sample.finish_reason, sample.completion_tokens) == ("abort", ())
    assert not engine.has_pending()
    held.go.set()
    assert engine.generate(PROMPT, DIGITS)[0].finish_reason == "stop"


def test_compilation_is_shared_by_samples_and_requests(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    engine.generate([PROMPT] * 3, DIGITS, 4)
    engine.generate(PROMPT, DIGITS)
    stats = engine.stats()
    assert (stats.grammars_compiled, stats.grammars_failed) == (1, 0)
    assert stats.grammar_seconds > 0


def test_request_waiting_for_a_matcher_gets_a_result(build: Build, held: Held) -> None:
    """The engine or the matcher's timeout may end the wait."""
    engine, problems = build(), list[Exception]()
    grammars = engine.intake.grammars

    def wait(pattern: str) -> None:
        try:
            grammars.wait(GrammarState(Grammar.regex(pattern)))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=wait, args=(f"a{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    assert held.began.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while grammars.num_cached < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.shutdown()
    wait("late")
    for thread in threads:
        thread.join(PATIENCE)
    assert [type(problem) for problem in problems] == [EngineDead] * 4
    assert "shut down" in str(problems[0])


def test_matcher_wait_is_bounded(build: Build, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.structured.compiler.WAIT_LIMIT", 0.1)
    with pytest.raises(InvalidRequest, match=r"was not compiled within 0\.1 seconds"):
        build().intake.grammars.wait(GrammarState(Grammar.regex("a")))


def test_compilation_timeout_fails_its_request_and_is_not_cached(build: Build, held: Held) -> None:
    engine = build()
    grammars = engine.intake.grammars
    grammars.time_limit = 0.1
    (sample,) = engine.generate(PROMPT, DIGITS)
    assert sample.finish_reason == "abort"
    assert "took longer than 0.1 seconds" in str(sample.stop_reason)
    assert engine.stats().grammars_failed == 1
    held.go.set()
    grammars.time_limit = PATIENCE
    assert engine.generate(PROMPT, DIGITS)[0].finish_reason == "stop"


def test_stuck_thread_without_a_replacement_compiles_on(
    build: Build, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.structured.compiler.MOST_STUCK", 0)
    grammars = build().intake.grammars
    monkeypatch.setattr(grammars, "_most_threads", 1)
    grammars.time_limit = 0.1
    stuck = grammars.begin(Grammar.regex("a"))
    assert "took longer than" in str(stuck.exception(PATIENCE))
    grammars.time_limit = PATIENCE
    waiting = [grammars.begin(Grammar.regex(text)) for text in ("b", "c")]
    held.go.set()
    assert all(future.result(PATIENCE) for future in waiting)


def test_invalid_grammar_is_rejected_before_any_change(build: Build) -> None:
    engine = build()
    bad = replace(DIGITS, grammar=Grammar.json_schema({"uniqueItems": True}))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            engine.generate(PROMPT, bad)
    assert not engine.has_pending()
    engine.intake.checks_grammars = False  # as in a server, which validates separately
    (sample,) = engine.generate(PROMPT, bad)
    assert sample.finish_reason == "abort"
    assert "uniqueItems" in str(sample.stop_reason)


def test_compilation_error_reports_only_its_type(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("/home/somebody")

    monkeypatch.setattr(LlguidanceBackend, "compile", broken)
    (sample,) = build().generate(PROMPT, DIGITS)
    assert sample.finish_reason == "abort"
    assert sample.stop_reason == "error: compiling the grammar raised KeyError"


def test_grammar_limits_apply_per_sample(build: Build) -> None:
    """Copies of llguidance's matchers share one construction budget."""
    engine = build()
    greedy = SamplingParams(max_tokens=300, grammar=Grammar.regex("(x{1,1000}){1,1000}y"))
    allowed = frozenset(engine.tokenizer.encode("x"))
    (spent,) = engine.generate(PROMPT, replace(greedy, allowed_token_ids=allowed))
    assert spent.finish_reason == "abort"
    assert "too many expressions" in str(spent.stop_reason)
    (after,) = engine.generate(PROMPT, replace(greedy, max_tokens=8))
    assert after.finish_reason != "abort"
    assert engine.stats().grammars_compiled == 2


def test_matcher_error_ends_only_its_sample_as_an_error(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    fill, count = LlguidanceMatcher.fill, [0]

    def failing(self: LlguidanceMatcher, words: Any) -> None:
        count[0] += 1
        if count[0] == 4:
            raise GrammarError("a limit of lexer states is reached")
        fill(self, words)

    alone = bits(build().generate(PROMPT, drawn(20))[0])
    monkeypatch.setattr(LlguidanceMatcher, "fill", failing)
    broken, other = engine.generate([PROMPT, PROMPT], [OBJECT, drawn(20)])
    assert broken.finish_reason == "abort"
    assert broken.stop_reason == "error: a limit of lexer states is reached"
    assert len(broken.completion_tokens) == 3
    assert bits(other) == alone
    assert engine.loop.leaked_blocks() == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allowed_token_ids": [50, 51, EOS]}, "the grammar and allowed_token_ids left no token"),
        (
            {"grammar": Grammar.lark("start: /[0-9]+/ & /[a-z]+/")},
            "left no token|cannot be enforced",
        ),
    ],
)
def test_grammar_that_allows_no_token_ends_by_name(
    build: Build, options: dict[str, Any], reason: str
) -> None:
    engine = build()
    engine.intake.checks_grammars = False
    (sample,) = engine.generate(PROMPT, replace(DIGITS, **options))
    assert sample.finish_reason == "abort"
    assert re.search(reason, str(sample.stop_reason))


def test_grammar_end_overrides_min_tokens(build: Build) -> None:
    engine = build()
    params = SamplingParams(
        max_tokens=20, min_tokens=10, seed=1, grammar=Grammar.choice(["yes", "no"])
    )
    (sample,) = engine.generate(PROMPT, params)
    assert sample.finish_reason == "stop"
    assert text_of(engine, sample) in ("yes", "no")
    longer = replace(params, grammar=Grammar.regex("[0-9]{2,}"))
    (sample,) = engine.generate(PROMPT, longer)
    assert len(sample.completion_tokens) >= 10


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}, {}])
def test_grammar_can_end_with_the_last_allowed_token(build: Build, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=2, seed=1, grammar=Grammar.choice(["a"]), **options)
    (sample,) = build().generate(PROMPT, params)
    assert sample.completion_tokens[-1] == EOS
    assert sample.finish_reason == "stop", "it has all of its text"


def test_grammar_ends_a_sample_that_ignores_end_of_sequence(build: Build) -> None:
    (sample,) = build().generate(PROMPT, replace(DIGITS, ignore_eos=True))
    assert sample.finish_reason == "stop"
    assert sample.completion_tokens[-1] == EOS


def test_grammar_begins_after_the_reasoning(build: Build) -> None:
    engine = build()
    grammar = replace(Grammar.regex("[0-9]{3}"), after="t")
    (marker_id,) = engine.tokenizer.encode("t")
    params = SamplingParams(
        max_tokens=400, seed=2, grammar=grammar, logit_bias={marker_id: 3.0, EOS: 3.0}
    )
    samples = engine.generate(PROMPT, params, 4)
    for sample in samples:
        _, marker, rest = text_of(engine, sample).partition("t")
        assert marker, "it may not end before its grammar has begun"
        assert sample.finish_reason == "stop"
        assert re.fullmatch("[0-9]{3}", rest)
    assert any(len(sample.completion_tokens) > 10 for sample in samples)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_grammar_begins_immediately_without_reasoning(build: Build, backend: str) -> None:
    engine = build(backend=backend)
    grammar = replace(Grammar.regex("[0-9]{3}"), after="t", opened_by="ab")
    a, marker = engine.tokenizer.encode("at")
    bias = {a: 2.0, marker: 4.0, EOS: 3.0}
    params = SamplingParams(max_tokens=400, seed=2, grammar=grammar, logit_bias=bias)
    samples = engine.generate(PROMPT, params, 24)
    thoughts = 0
    for sample in samples:
        assert sample.finish_reason == "stop"
        text = text_of(engine, sample)
        if text.startswith("a"):
            assert text.startswith("ab"), "a marker that has begun is the only way on"
            thoughts += 1
            text = text[2:].partition("t")[2]
        assert re.fullmatch("[0-9]{3}", text)
    assert 0 < thoughts < len(samples)


def thoughtful(engine: InferenceEngine) -> SamplingParams:
    """Model whose samples think first."""
    grammar = replace(OBJECT.grammar or Grammar.json_object(), after="c", opened_by="ab")
    a, c = engine.tokenizer.encode("ac")
    return replace(OBJECT, grammar=grammar, logit_bias={a: 5.0, c: 4.0})


@pytest.mark.thorough
@pytest.mark.parametrize("thinks", [False, True])
def test_resumed_sample_continues_its_grammar(build: Build, thinks: bool) -> None:
    engine = build()
    params = thoughtful(engine) if thinks else OBJECT
    whole = build().generate(PROMPT, params)[0]
    assert text_of(engine, whole).startswith("ab") == thinks
    assert whole.finish_reason == "stop"
    for cut in range(1, len(whole.completion_tokens)):
        partial = replace(
            whole,
            completion_tokens=whole.completion_tokens[:cut],
            logprobs=whole.logprobs[:cut],
            log_kept_mass=(whole.log_kept_mass or ())[:cut],
            loss_mask=whole.loss_mask[:cut],
            finish_reason="abort",
            stop_reason=None,
            weight_versions=(),
            kv_versions=(),
        )
        engine.resume_from(partial)
        (sample,) = drain(engine)
        assert bits(sample) == bits(whole), cut


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_resume_from_rejects_a_sample_whose_grammar_ended(
    build: Build, options: dict[str, Any]
) -> None:
    engine = build()
    params = SamplingParams(max_tokens=9, seed=1, grammar=Grammar.choice(["a"]), **options)
    (whole,) = engine.generate(PROMPT, params)
    # the finish reason was lost
    relabeled = replace(whole, finish_reason="abort", stop_reason=None)
    again = engine.intake.new_request_id()
    with pytest.raises(InvalidRequest, match="may already have ended"):
        engine.resume_many([relabeled], lambda _: None, stream=False, request_id=again)


def test_grammar_restarts_after_appended_tokens(build: Build) -> None:
    engine = build()
    first = engine.generate(PROMPT, DIGITS)[0]
    engine.resume_from(first, append=[40, 41], max_new_tokens=20)
    (sample,) = drain(engine)
    appended = sample.completion_tokens[len(first.completion_tokens) + 2 :]
    assert engine.tokenizer.decode(appended).isdigit()
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize("kv_policy", ["recompute", "keep"])
def test_grammar_survives_an_update(build: Build, kv_policy: Any) -> None:
    engine = build()
    engine.add_request(PROMPT, OBJECT, 3)
    for _ in range(6):
        engine.step()
    engine.update_weights(NEW, kv_policy=kv_policy)
    samples = drain(engine)
    assert [sample.weight_version for sample in samples] == [1, 1, 1]
    for sample in samples:
        assert set(json.loads(text_of(engine, sample))) == {"age", "ok"}


@pytest.mark.parametrize("vocab_size", [258, 259, 300, 320])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_grammar_works_if_model_and_tokenizer_sizes_differ(
    tmp_path: Path, vocab_size: int, backend: Any
) -> None:
    folder = tiny_llama(tmp_path / "model", vocab_size=vocab_size)
    tokenizer = byte_tokenizer(folder)
    (marker_id,) = tokenizer.encode("t")
    structured = replace(DIGITS, grammar=Grammar.regex("[^a-y]{5}"), logit_bias={marker_id: 5.0})
    behind = replace(structured, grammar=replace(structured.grammar, after="t"), max_tokens=200)
    config = EngineConfig(str(folder), backend=backend, num_threads=1, kv_cache_memory=2**20)
    with InferenceEngine(config) as engine:
        for sample in engine.generate([PROMPT] * 2, [structured, behind], 3):
            assert sample.finish_reason == "stop", sample.stop_reason
            tokens = sample.completion_tokens
            last = tokens[tokens.index(marker_id) + 1 :] if marker_id in tokens else tokens
            assert max(last) < min(vocab_size, tokenizer.vocab_size)


def test_grammar_needs_an_end_of_sequence_token(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    checks = engine.intake.checks
    no_end = replace(checks, spec=replace(checks.spec, eos_token_ids=()))
    monkeypatch.setattr(engine.intake.grammars, "_read", lambda: vocabulary_of(no_end))
    (sample,) = engine.generate(PROMPT, DIGITS)
    assert "needs a model with an end-of-sequence token" in str(sample.stop_reason)


def test_async_engine_returns_structured_samples(build: Build) -> None:
    engine = build()
    expected = bits(build().generate(PROMPT, OBJECT)[0])

    async def main() -> list[TrainingSample]:
        async with AsyncInferenceEngine(engine) as a:
            return await asyncio.wait_for(a.generate([PROMPT, PROMPT], OBJECT), PATIENCE)

    assert [bits(sample) for sample in asyncio.run(main())] == [expected] * 2


def test_missing_backend_package_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "LlguidanceBackend", "no_such_module", "llguidance"
    monkeypatch.setitem(backends._CLASSES, "llguidance", missing)  # pyright: ignore
    monkeypatch.setattr(backends, "_loaded", {})
    with pytest.raises(InvalidRequest, match="needs the package llguidance"):
        build().generate(PROMPT, DIGITS)


def test_grammars_run_two_hundred_at_a_time(build: Build) -> None:
    engine = build()
    alone = bits(build().generate(PROMPT, drawn(20))[0])
    param_list = [replace(DIGITS, grammar=Grammar.regex(f"[0-9]{{{n}}}")) for n in range(1, 21)]
    many = [replace(DIGITS, grammar=Grammar.regex(f"a{n}")) for n in range(180)]
    samples = engine.generate([PROMPT] * 201, [*param_list, *many, drawn(20)])
    assert bits(samples[-1]) == alone
    assert [len(sample.completion_tokens) for sample in samples[:20]] == list(range(2, 22))
    assert [text_of(engine, sample) for sample in samples[20:200]] == [f"a{n}" for n in range(180)]


@pytest.mark.thorough(cases=["0"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_grammars_delay_no_step_of_other_samples(build: Build, lookahead: int) -> None:
    """Other samples get a token in every step, both while grammars compile and while they run."""
    engine = build(kv_cache_memory=2**24, max_batch_size=256, lookahead=lookahead)
    alone = bits(build().generate(PROMPT, drawn(60))[0])
    free = engine.add_request(PROMPT, drawn(60))
    while not any(seq.request.request_id == free for seq in engine.loop.sequences.running):
        engine.step()
    (seq,) = [seq for seq in engine.loop.sequences.running if seq.request.request_id == free]
    for _ in range(lookahead + 1):
        engine.step()
    for n in range(200):
        engine.add_request(PROMPT, replace(DIGITS, grammar=Grammar.regex(f"{n}[0-9]{{1,9}}")))
    ended = list[TrainingSample]()
    while not any(sample.request_id == free for sample in ended):
        before = len(seq.token_ids)
        ended += engine.step()
        assert len(seq.token_ids) == before + 1
    ended += drain(engine)
    by_id = {sample.request_id: sample for sample in ended}
    assert bits(by_id.pop(free)) == alone
    for n, (_, sample) in enumerate(sorted(by_id.items())):
        assert re.fullmatch(f"{n}[0-9]{{1,9}}", text_of(engine, sample))
    assert engine.stats().grammars_compiled == 200


@pytest.mark.parametrize(
    ("allowed", "min_tokens", "drawn_text", "reason"),
    [
        ("0123456789", 0, 4, "the grammar and allowed_token_ids left no token to draw"),
        ("abc", 0, 0, "the grammar and allowed_token_ids left no token to draw"),
        ("0123456789", 30, 4, "the grammar and allowed_token_ids left no token to draw"),
    ],
)
def test_grammar_that_contradicts_allowed_ids_ends_the_sample(
    build: Build, allowed: str, min_tokens: int, drawn_text: int, reason: str
) -> None:
    engine = build()
    params = replace(
        DIGITS,
        grammar=Grammar.regex("[0-9]{4}"),
        allowed_token_ids=frozenset(engine.tokenizer.encode(allowed)),
        min_tokens=min_tokens,
    )
    one, other = engine.generate([PROMPT, PROMPT], [params, drawn(20)])
    assert (one.finish_reason, one.stop_reason) == ("abort", f"error: {reason}")
    assert len(text_of(engine, one)) == drawn_text
    assert bits(other) == bits(build().generate(PROMPT, drawn(20))[0])


def test_grammar_end_overrides_min_tokens_and_stop_ids(build: Build) -> None:
    engine = build()
    (seven,) = engine.tokenizer.encode("7")
    params = replace(
        DIGITS, grammar=Grammar.regex("7{3}"), stop_token_ids=frozenset([seven]), min_tokens=30
    )
    (sample,) = engine.generate(PROMPT, params)
    assert text_of(engine, sample) == "777", "the grammar overrides the stop id"
    assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)
    (sample,) = engine.generate(PROMPT, replace(params, min_tokens=0))
    assert (text_of(engine, sample), sample.stop_reason) == ("7", seven)


def test_compiled_grammar_cache_is_bounded(build: Build, monkeypatch: Any) -> None:
    monkeypatch.setattr("nano_inference.structured.compiler.MOST_CACHED", 4)
    engine = build()
    for n in range(8):
        engine.generate(PROMPT, replace(DIGITS, grammar=Grammar.regex(f"a{n}")))
    compiler: GrammarCompiler = engine.intake.grammars
    assert compiler.num_cached <= 5
