"""A failing request ends with an error, and every other request keeps the bits of an undisturbed
run.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nano_inference import Delta, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.sampling.sampling_batch import SamplingTable, TokenCounts
from nano_inference.sampling.tensors import SamplingBatch
from tests.weights.weight_cases import Build

ODD = 0.777  # temperature that marks the failing request in a batch
LENGTH = 12
FAILS = 1  # index of the failing request in `REQUESTS`


class Broken(Exception):
    """Error raised by a fault. Callers must not see its message (/secret/path)."""


@dataclass
class Text:
    """Fake detokenizer, one letter per token, that may raise in one of its methods at some token."""

    breaks: str | None = None
    at: int = 0
    pieces: str = ""
    taken: int = 0

    @property
    def text(self) -> str:
        self._use("text")
        return self.pieces

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        self.pieces += chr(ord("a") + token_id % 26)
        self._use("append")
        return None

    def take(self) -> str:
        self._use("take")
        new, self.taken = self.pieces[self.taken :], len(self.pieces)
        return new

    def finish(self) -> str:
        self._use("finish")
        return self.take()

    def copy(self) -> "Text":
        if self.breaks == "copy":
            raise Broken("/secret/path")
        return copy.copy(self)

    def _use(self, method: str) -> None:
        if self.breaks == method and len(self.pieces) >= self.at:
            raise Broken("/secret/path")


REQUESTS: list[tuple[list[int], SamplingParams, int]] = [
    (
        [1, 2, 3, 4, 5, 6],
        SamplingParams(0.9, max_tokens=LENGTH, seed=1, ignore_eos=True, raw_logprobs=True),
        3,
    ),
    (
        [1, 2, 3, 4, 9],
        SamplingParams(ODD, max_tokens=LENGTH, seed=2, ignore_eos=True, frequency_penalty=0.5),
        2,
    ),
    (
        [7],
        SamplingParams(1.0, max_tokens=LENGTH, seed=3, ignore_eos=True, top_k=9, top_logprobs=2),
        1,
    ),
    (
        [1, 2, 3, 4, 9, 8, 8, 8],
        SamplingParams(0, max_tokens=LENGTH, repetition_penalty=1.3, ignore_eos=True),
        2,
    ),
]


@dataclass
class Run:
    """Outcome of all requests, keyed by (request index, sample index)."""

    samples: dict[tuple[int, int], TrainingSample]
    deltas: list[Delta]
    num_tokens: int  # tokens that the engine sampled

    def others(self) -> dict[tuple[int, int], str]:
        """Return every field of the unaffected requests for a bitwise comparison."""
        mine = {key: sample for key, sample in self.samples.items() if key[0] != FAILS}
        return {
            key: repr(replace(sample, cached_tokens=0, kv_versions=()))
            for key, sample in mine.items()
        }

    def failed(self) -> list[TrainingSample]:
        return [sample for key, sample in sorted(self.samples.items()) if key[0] == FAILS]

    def streams(self) -> dict[tuple[int, int], tuple[tuple[int, ...], str]]:
        """Return the streamed tokens and text of the unaffected requests."""
        texts: dict[tuple[int, int], tuple[tuple[int, ...], str]] = {}
        for delta in self.deltas:
            key = (delta.request_id, delta.sample_index)
            tokens, text = texts.get(key, ((), ""))
            texts[key] = (tokens + delta.token_ids, text + (delta.text or ""))
        return {key: value for key, value in texts.items() if key[0] != FAILS}


def run(
    engine: InferenceEngine, *, stream: bool, text: Text | None = None, sink: Any = None
) -> Run:
    """Run all requests, each entering two steps after the previous one. `text` replaces the failing
    request's detokenizer.
    """
    deltas: list[Delta] = []
    for index, (prompt, params, num_samples) in enumerate(REQUESTS):
        seq = engine.intake.sequence(prompt, params, num_samples, stream=stream)
        seq.output_text = text if index == FAILS and text is not None else Text()
        engine.shared.open([seq], sink if index == FAILS and sink is not None else deltas.append)
        assert engine.shared.enqueue(seq) == index
        for _ in range(2):
            engine.step()
            engine.loop.check()
    while engine.has_pending():
        assert engine.step() == []
        engine.loop.check()
    assert engine.cache.num_free_blocks() == engine.cache.num_blocks
    assert not engine.loop.sequences.by_id
    assert not engine.shared.delivery.open_requests()
    samples = [delta.finished for delta in deltas if delta.finished is not None]
    assert len({(s.request_id, s.sample_index) for s in samples}) == len(samples), (
        "a sample came twice"
    )
    by_sample = {(s.request_id, s.sample_index): s for s in samples}
    return Run(by_sample, deltas, engine.stats().completion_tokens)


def assert_failed(run: Run, what: str, *, kind: str = "Broken", num_samples: int = 2) -> None:
    failed = run.failed()
    assert [sample.sample_index for sample in failed] == list(range(num_samples))
    for sample in failed:
        assert (sample.finish_reason, sample.stop_reason) == (
            "abort",
            f"error: {what} raised {kind}",
        )
        length = len(sample.completion_tokens)
        assert length < LENGTH or what == "the text"
        assert (
            len(sample.logprobs)
            == len(sample.log_kept_mass or ())
            == len(sample.loss_mask)
            == length
        )
        assert not sample.weight_versions or sample.weight_versions[-1].end == length


OPTIONS: list[dict[str, Any]] = [
    {"lookahead": 0},
    {"lookahead": 1},
    {"lookahead": 1, "cache_type": "radix", "max_tokens_per_batch": 5, "max_chunk_tokens": 2},
    {"lookahead": 0, "backend": "reference"},
]


@pytest.fixture(params=OPTIONS, ids=str)
def make(request: pytest.FixtureRequest, build: Build) -> Callable[[], InferenceEngine]:
    return lambda: build(**request.param)


@pytest.fixture(scope="module")
def quiet_runs() -> dict[str, dict[bool, Run]]:
    return {}


@pytest.fixture
def quiet(
    request: pytest.FixtureRequest,
    make: Callable[[], InferenceEngine],
    quiet_runs: dict[str, dict[bool, Run]],
) -> dict[bool, Run]:
    """Runs without failures, keyed by streaming. Tests with equal options share them."""
    options = str(request.node.callspec.params["make"])
    if options not in quiet_runs:
        quiet_runs[options] = {stream: run(make(), stream=stream) for stream in (False, True)}
    return quiet_runs[options]


def assert_same_others(outcome: Run, quiet: Run) -> None:
    assert len(quiet.others()) == 6
    assert outcome.others() == quiet.others()
    assert outcome.streams() == quiet.streams()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 4, 9])
def test_sampler_error_fails_only_its_sample(
    make: Callable[[], InferenceEngine],
    quiet: dict[bool, Run],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    stream: bool,
) -> None:
    engine = make()
    draw = engine.runner.sample

    def sample(result: Any, batch: SamplingBatch) -> Any:
        if engine.loop.num_steps > steps and bool((batch.temperature == ODD).any()):
            raise Broken("/secret/path")
        return draw(result, batch)

    monkeypatch.setattr(engine.runner, "sample", sample)
    outcome = run(engine, stream=stream)
    assert_failed(outcome, "the draw")
    assert_same_others(outcome, quiet[stream])
    assert (
        outcome.failed()[0].completion_tokens
        == (
            quiet[stream]
            .failed()[0]
            .completion_tokens[: len(outcome.failed()[0].completion_tokens)]
        )
    )


def test_sampler_error_after_the_end_is_ignored(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lookahead, a step samples once more for a sample whose last token has just arrived."""
    requests = list(REQUESTS)
    monkeypatch.setattr(f"{__name__}.REQUESTS", requests)
    prompt, params, _ = requests[FAILS]
    last = run(build(), stream=False).failed()[0].completion_tokens[4]
    requests[FAILS] = prompt, replace(params, stop_token_ids=frozenset((last,))), 1
    quiet, engine = run(build(lookahead=1), stream=False), build(lookahead=1)
    draw, broken = engine.runner.sample, list[int]()

    def sample(result: Any, batch: SamplingBatch) -> Any:
        live = engine.loop.sequences.of_requests([FAILS])
        if not live and bool((batch.temperature == ODD).any()):
            broken.append(FAILS)
            raise Broken("/secret/path")
        return draw(result, batch)

    monkeypatch.setattr(engine.runner, "sample", sample)
    outcome = run(engine, stream=False)
    assert broken
    assert_same_others(outcome, quiet)
    ended = outcome.failed()[0]
    assert (ended.finish_reason, ended.completion_tokens[-1]) == ("stop", last)
    assert ended.logprobs == quiet.failed()[0].logprobs


@pytest.mark.parametrize("index", [0, 1])
def test_sampler_error_fails_one_sample_of_a_group(
    make: Callable[[], InferenceEngine],
    quiet: dict[bool, Run],
    monkeypatch: pytest.MonkeyPatch,
    index: int,
) -> None:
    """The other samples of the group continue, also in the step that forks it."""
    engine = make()
    put = SamplingTable.put

    def fail(
        table: Any, slot: int, params: SamplingParams, seed: int, sample_index: int, prompt: Any
    ) -> None:
        if params.temperature == ODD and sample_index == index:
            raise Broken("/secret/path")
        put(table, slot, params, seed, sample_index, prompt)

    monkeypatch.setattr(SamplingTable, "put", fail)
    outcome = run(engine, stream=False)
    assert_same_others(outcome, quiet[False])
    sick, well = outcome.failed()[index], outcome.failed()[1 - index]
    assert (sick.stop_reason, sick.completion_tokens) == ("error: the draw raised Broken", ())
    assert well.completion_tokens == quiet[False].failed()[1 - index].completion_tokens


@pytest.mark.parametrize("length", [0, 1, 5])
def test_penalty_error_fails_only_its_sample(
    make: Callable[[], InferenceEngine],
    quiet: dict[bool, Run],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
) -> None:
    engine = make()
    put, add, chosen = SamplingTable.put, TokenCounts.add, list[TokenCounts]()

    def remember(table: Any, slot: int, params: SamplingParams, *more: Any) -> None:
        put(table, slot, params, *more)
        if params.temperature == ODD:
            chosen.append(table._counts[slot])

    def count(counts: TokenCounts, token_ids: Any) -> None:
        if counts.length >= length and any(counts is each for each in chosen):
            raise Broken("/secret/path")
        add(counts, token_ids)

    monkeypatch.setattr(SamplingTable, "put", remember)
    monkeypatch.setattr(TokenCounts, "add", count)
    outcome = run(engine, stream=True)
    assert_failed(outcome, "the draw")
    assert_same_others(outcome, quiet[True])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 4, LENGTH])
@pytest.mark.parametrize("breaks", ["append", "take", "finish", "text"])
def test_detokenizer_error_fails_only_its_sample(
    make: Callable[[], InferenceEngine],
    quiet: dict[bool, Run],
    breaks: str,
    at: int,
    stream: bool,
) -> None:
    if breaks == "take" and not stream:
        at = LENGTH  # unused until then
    outcome = run(make(), stream=stream, text=Text(breaks, at))
    assert_failed(outcome, "the text")
    assert_same_others(outcome, quiet[stream])
    early = breaks == "append" or (breaks == "take" and stream)
    for sample in outcome.failed():
        assert len(sample.completion_tokens) == (at if early else LENGTH)
        assert sample.text is None
        streamed = [
            d
            for d in outcome.deltas
            if (d.request_id, d.sample_index) == (FAILS, sample.sample_index)
        ]
        if stream:
            assert tuple(t for d in streamed for t in d.token_ids) == sample.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_detokenizer_copy_error_fails_only_its_sample(
    make: Callable[[], InferenceEngine], quiet: dict[bool, Run], stream: bool
) -> None:
    """The sample that keeps the original detokenizer continues. The other sample of its group ends
    with its first token.
    """
    outcome = run(make(), stream=stream, text=Text("copy"))
    assert_same_others(outcome, quiet[stream])
    well, sick = outcome.failed()
    assert (well.completion_tokens, well.text) == (
        quiet[stream].failed()[0].completion_tokens,
        quiet[stream].failed()[0].text,
    )
    assert (sick.finish_reason, sick.stop_reason) == ("abort", "error: the text raised Broken")
    assert sick.completion_tokens == quiet[stream].failed()[1].completion_tokens[:1]
    assert sick.text is None


@pytest.mark.parametrize("steps", [0, 5])
def test_fetch_error_fails_only_its_samples(
    build: Build, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Without lookahead: otherwise the next step has already used the tokens."""
    quiet, engine = run(build(lookahead=0), stream=False), build(lookahead=0)
    draw = engine.runner.sample

    class Lost:
        def wait(self) -> Any:
            raise Broken("/secret/path")

    def sample(result: Any, batch: SamplingBatch) -> Any:
        lost = engine.loop.num_steps > steps and bool((batch.temperature == ODD).any())
        return Lost() if lost else draw(result, batch)

    monkeypatch.setattr(engine.runner, "sample", sample)
    outcome = run(engine, stream=False)
    assert_failed(outcome, "the draw")
    assert_same_others(outcome, quiet)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_sink_error_fails_only_its_request(
    make: Callable[[], InferenceEngine], quiet: dict[bool, Run], after: int, stream: bool
) -> None:
    engine = make()
    arrived: list[Delta] = []

    def sink(delta: Delta) -> None:
        arrived.append(delta)
        if len(arrived) > after:
            raise Broken("/secret/path")

    outcome = run(engine, stream=stream, sink=sink)
    assert_same_others(outcome, quiet[stream])
    assert len(arrived) == (min(after + 1, 2) if not stream else after + 1), (
        "it is not called again"
    )
    if stream:
        assert engine.stats().completion_tokens < quiet[stream].num_tokens, (
            "the request was not aborted"
        )


def test_unattributed_fault_ends_no_sample(
    make: Callable[[], InferenceEngine],
    quiet: dict[bool, Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draw of the whole batch raises once, but no draw of a single sample does."""
    engine = make()
    draw, raised = engine.runner.sample, list[int]()

    def sample(result: Any, batch: SamplingBatch) -> Any:
        if engine.loop.num_steps > 6 and not raised:
            raised.append(len(batch))
            raise MemoryError
        return draw(result, batch)

    monkeypatch.setattr(engine.runner, "sample", sample)
    outcome = run(engine, stream=False)
    assert raised
    assert_same_others(outcome, quiet[False])
    assert [s.completion_tokens for s in outcome.failed()] == [
        s.completion_tokens for s in quiet[False].failed()
    ]


def test_top_k_beyond_the_vocabulary_keeps_all(build: Build) -> None:
    engine = build()
    huge = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, top_k=2**63 - 1)
    (sample,) = engine.generate([1, 2], huge)
    plain = replace(huge, top_k=0)
    assert sample.completion_tokens == engine.generate([1, 2], plain)[0].completion_tokens
    assert sample.finish_reason == "length"


def test_log_has_the_details_hidden_from_the_caller(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(build(), stream=False, text=Text("append", 2))
    assert "/secret/path" not in repr([s.stop_reason for s in outcome.failed()])
    (first, *_) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "Request 1, sample 0: the text raised Broken" in first.message
    assert first.exc_info is not None
