"""`replay` reproduces every sample bit for bit under any schedule and any weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import (
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
    VersionSpan,
    WeightUpdateError,
)
from nano_inference.rl.comparison import differences
from nano_inference.rl.replayer import MOST_ROWS, Replayer, replay
from nano_inference.types import ContextVersions, TopLogprobs
from tests.depth import at_depth
from tests.models.tiny import llama_config, llama_weights, tiny_llama, tiny_model, write_model
from tests.ops.compiler import NEEDS_COMPILER

Build = Callable[..., InferenceEngine]
OLD, NEW, NEWER = (llama_weights(llama_config(), seed=seed) for seed in (0, 1, 2))
BY_VERSION = {0: OLD, 1: NEW, 2: NEWER}
PROMPT = list(range(40, 61))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def build(folder: Path) -> Iterator[Build]:
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(**options: Any) -> InferenceEngine:
        settled = {
            "model_path": str(folder),
            "num_threads": 1,
            "kv_cache_memory": 2**21,
            "seed": 0,
            "block_size": 4,
        }
        engines.append(InferenceEngine(EngineConfig(**(settled | options))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


def of_spans(sample: TrainingSample, keep: Sequence[bool]) -> TrainingSample:
    """Return a sample with the `kv_versions` of updates that kept or recomputed the context."""
    prompt, spans = len(sample.prompt_tokens), sample.weight_versions
    entries: list[ContextVersions] = []
    context: list[VersionSpan] = []
    for index, span in enumerate(spans):
        start = prompt + span.start - 1 if index and keep[index - 1] else 0
        context = [] if start == 0 else context
        context.append(VersionSpan(span.version, start, prompt + span.end - 1))
        entries.append(ContextVersions(span.start, span.end, tuple(context)))
    return replace(sample, kv_versions=tuple(entries))


def assert_replays(
    engine: InferenceEngine, samples: Sequence[TrainingSample], weights: Any = None
) -> None:
    replayer = Replayer(engine, weights)
    for sample in samples:
        again = replayer.replay(sample)
        assert differences(sample, again) == ()
        assert repr(replace(again, kv_versions=sample.kv_versions)) == repr(sample)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    temperature = draw(st.sampled_from([0.0, 0.7, 1.0, 1.5]))
    filters = draw(
        st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 30}])
    )
    ids = list(range(0, 300, 3))
    return SamplingParams(
        temperature=temperature,
        max_tokens=draw(st.integers(1, 24)),
        min_tokens=draw(st.sampled_from([0, 1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=draw(st.sampled_from([{}, {5: 3.0, 9: -100.0}])),
        allowed_token_ids=draw(st.sampled_from([None, frozenset([2, *ids])])),
        stop_token_ids=draw(st.sampled_from([frozenset[int](), frozenset(ids[:40])])) - {5}
        & {2, *ids},
        ignore_eos=draw(st.booleans()),
        seed=draw(st.sampled_from([None, 3, 2**64 - 1])),
        top_logprobs=draw(st.sampled_from([0, 3])),
        prompt_logprobs=(scored := draw(st.booleans())),
        prompt_top_logprobs=draw(st.integers(0, 3)) if scored else 0,
        raw_logprobs=draw(st.booleans()),
        sampling_mask=bool(filters) and temperature > 0 and draw(st.booleans()),
        **filters,
    )


@pytest.fixture(scope="module", params=["reference", pytest.param("cpu", marks=NEEDS_COMPILER)])
def engine(request: pytest.FixtureRequest, build: Build) -> InferenceEngine:
    return build(backend=request.param, max_chunk_tokens=7, num_threads=2)


@pytest.mark.thorough
@settings(
    max_examples=at_depth(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), parameters(), st.integers(1, 3)), min_size=1, max_size=3
    ),
)
def test_replay_reproduces_samples_next_to_live_requests(
    engine: InferenceEngine, requests: list[tuple[int, SamplingParams, int]]
) -> None:
    live = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    alone = engine.generate(PROMPT, live)[0]
    for length, params, num_samples in requests:
        engine.add_request([(7 * i + length) % 300 for i in range(length)], params, num_samples)
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    engine.add_request(PROMPT, live)
    for _ in range(6):
        engine.step()
    before = engine.stats()
    assert_replays(engine, samples)
    assert engine.stats() == before, "no block was taken, no step was made"
    while engine.has_pending():
        samples = engine.step()
    assert samples[0].completion_tokens == alone.completion_tokens
    assert samples[0].logprobs == alone.logprobs
    engine.loop.check()


@pytest.mark.parametrize("family", ["gemma3", "olmo2", "qwen3", "mistral"])
@NEEDS_COMPILER
def test_replay_covers_families_and_bfloat16(tmp_path: Path, build: Build, family: str) -> None:
    tiny_model(tmp_path, family, max_position_embeddings=300)
    engine = build(model_path=str(tmp_path), dtype="bfloat16", backend="cpu", block_size=16)
    long = MOST_ROWS + 20  # more than one chunk, longer than any window
    samples = engine.generate(
        list(range(9)), SamplingParams(max_tokens=long, ignore_eos=True, raw_logprobs=True), 2
    )
    assert_replays(engine, samples)
    assert len({sample.completion_tokens for sample in samples}) == 2


@pytest.mark.thorough
@settings(
    max_examples=at_depth(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    at=st.tuples(st.integers(1, 7)) | st.tuples(st.integers(1, 7), st.integers(10, 15)),
    keep=st.lists(st.booleans(), min_size=2, max_size=2),
)
def test_replay_reproduces_mixed_versions(
    build: Build, at: tuple[int, ...], keep: list[bool]
) -> None:
    engine = build(backend="reference")
    engine.add_request(
        PROMPT, SamplingParams(max_tokens=18, seed=1, ignore_eos=True, raw_logprobs=True), 2
    )
    samples: list[TrainingSample] = []
    for step in range(100):
        if step in at:
            index = at.index(step)
            engine.update_weights([NEW, NEWER][index], blocking=not keep[index])
        samples += engine.step()
        if not engine.has_pending():
            break
    assert {len(sample.weight_versions) for sample in samples} == {len(at) + 1}
    mixed = [of_spans(sample, keep) for sample in samples]
    assert_replays(engine, mixed, BY_VERSION)
    if len(set(keep[: len(at)])) == 1:
        other = [of_spans(sample, [not each for each in keep]) for sample in samples]
        again = [replay(engine, sample, weights=BY_VERSION) for sample in other]
        differing = [differences(*pair)[0] for pair in zip(other, again, strict=True)]
        assert all(each.token is not None and each.token >= at[0] for each in differing), (
            "another context, other bits"
        )


def test_replay_accepts_state_dicts_folders_and_functions(build: Build, tmp_path: Path) -> None:
    first = build(backend="reference")
    samples = first.generate([PROMPT] * 2, SamplingParams(max_tokens=6))
    first.update_weights(NEW, version=7)
    samples += first.generate([PROMPT] * 2, SamplingParams(max_tokens=6))
    folder = write_model(tmp_path / "new", llama_config(), NEW)
    ways: list[Any] = [
        {7: NEW},
        {7: folder},
        {7: str(folder)},
        {7: NEW, 0: OLD},
        {0: OLD, 7: NEW}.__getitem__,
    ]
    for weights in ways:
        assert_replays(build(backend="reference"), samples, weights)
    assert_replays(first, samples, {0: OLD})
    with pytest.raises(AssertionError):
        # passed weights take precedence over live weights
        assert_replays(first, samples, {0: OLD, 7: NEWER})
    many = build(backend="reference")
    for version, weights in enumerate([NEW, NEWER], start=1):
        many.update_weights(weights, version=version)
    replayer = Replayer(many, {0: OLD, 7: NEW, 9: NEWER})
    for sample in [*samples, *samples]:
        assert differences(sample, replayer.replay(sample)) == ()
        assert len(replayer.decoders._loaded) <= 2


def test_missing_versions_are_all_named(build: Build) -> None:
    engine = build(backend="reference")
    sample = engine.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))[0]
    mixed = replace(
        sample,
        weight_versions=(VersionSpan(3, 0, 2), VersionSpan(5, 2, 5)),
        weight_version=5,
        kv_versions=(
            ContextVersions(0, 2, (VersionSpan(3, 0, 22),)),
            ContextVersions(2, 5, (VersionSpan(3, 0, 22), VersionSpan(5, 22, 25))),
        ),
    )
    with pytest.raises(InvalidRequest, match=r"versions 3, 5 are missing, .* serves version 0"):
        replay(engine, mixed)
    with pytest.raises(InvalidRequest, match="of version 5 are missing"):
        replay(engine, mixed, weights={3: OLD})
    with pytest.raises(InvalidRequest, match="of version 5 are missing"):
        replay(engine, mixed, weights={3: OLD}.__getitem__)
    with pytest.raises(InvalidRequest, match="no kv_versions"):
        replay(engine, replace(mixed, kv_versions=()), weights={3: OLD, 5: NEW})
    for weights, problem in (
        ({name: OLD[name] for name in list(OLD)[1:]}, "is missing"),
        (OLD | {"model.x": OLD["model.norm.weight"]}, "'model.x' is not a tensor"),
        (
            OLD | {"model.norm.weight": torch.zeros(3)},
            r"'model.norm.weight' has shape \(3,\), expected",
        ),
        (5, "are a int"),
    ):
        with pytest.raises(WeightUpdateError, match=problem):
            replay(engine, mixed, weights={3: weights, 5: NEW})


def test_replay_rejects_incomplete_samples(build: Build) -> None:
    engine = build(backend="reference")
    sample = engine.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))[0]
    span = VersionSpan(0, 0, 24)
    spoiled: list[tuple[dict[str, Any], str]] = [
        ({"sampling_params": None}, "no sampling_params"),
        (
            {"numerics": "cuda-1/float32/cuda/torch-9"},
            "numerics are 'cuda-1/float32/cuda/torch-9'",
        ),
        ({"prompt_tokens": ()}, "empty"),
        ({"prompt_tokens": (300,)}, "outside the vocabulary"),
        ({"completion_tokens": (1, 2, 3, 400)}, "outside the vocabulary"),
        ({"prompt_tokens": tuple(PROMPT) * 30}, "max_model_len"),
        ({"loss_mask": (True,)}, "loss_mask has 1 entries for 4"),
        (
            {"kv_versions": (ContextVersions(0, 4, (replace(span, end=23),)),)},
            "must tile the 24 rows",
        ),
        (
            {"kv_versions": (ContextVersions(0, 4, (replace(span, end=25),)),)},
            "must tile the 24 rows",
        ),
        (
            {"kv_versions": (ContextVersions(0, 4, (replace(span, end=2**62),)),)},
            "must tile the 24 rows",
        ),
        (
            {"kv_versions": (ContextVersions(0, 4, (replace(span, start=1),)),)},
            "must tile the 24 rows",
        ),
        ({"kv_versions": (ContextVersions(0, 3, (replace(span, end=23),)),)}, "completion token 3"),
        ({"kv_versions": (ContextVersions(0, 5, (replace(span, end=25),)),)}, "must be in order"),
        ({"kv_versions": (ContextVersions(2, 2, (span,)),)}, "must be in order"),
    ]
    for changes, problem in spoiled:
        with pytest.raises(InvalidRequest, match=problem):
            replay(engine, replace(sample, **changes))
    engine.shutdown()
    with pytest.raises(EngineDead):
        replay(engine, sample)


def test_appended_tokens_are_replayed_verbatim(build: Build) -> None:
    """The second turn equals a new request for the whole conversation."""
    engine = build(backend="reference")
    params = SamplingParams(
        max_tokens=5, seed=9, ignore_eos=True, top_logprobs=2, raw_logprobs=True
    )
    first = engine.generate(PROMPT, params)[0]
    tool = (7, 8, 9)
    longer = engine.generate([*PROMPT, *first.completion_tokens, *tool], params)[0]
    blank = (TopLogprobs((), ()),) * 3
    whole = replace(
        first,
        completion_tokens=first.completion_tokens + tool + longer.completion_tokens,
        logprobs=first.logprobs + (0.0,) * 3 + longer.logprobs,
        raw_logprobs=(first.raw_logprobs or ()) + (0.0,) * 3 + (longer.raw_logprobs or ()),
        log_kept_mass=(0.0,) * 13,
        top_logprobs=(first.top_logprobs or ()) + blank + (longer.top_logprobs or ()),
        loss_mask=(True,) * 5 + (False,) * 3 + (True,) * 5,
        weight_versions=(VersionSpan(0, 0, 13),),
        kv_versions=(
            ContextVersions(0, 5, (VersionSpan(0, 0, 25),)),
            ContextVersions(8, 13, (VersionSpan(0, 0, 33),)),
        ),
    )
    assert_replays(engine, [whole, replace(whole, kv_versions=())])
    other = replace(
        whole, completion_tokens=(*whole.completion_tokens[:6], 99, *whole.completion_tokens[7:])
    )
    assert differences(other, replay(engine, other))[0].token == 8, (
        "the first token that saw what was appended"
    )


def test_replay_reproduces_aborted_and_stopped_samples(build: Build, folder: Path) -> None:
    engine = build(backend="reference")
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    for _ in range(5):
        engine.step()
    samples = engine.abort(request)
    assert samples[0].finish_reason == "abort"
    stop = samples[0].completion_tokens[2]
    params = SamplingParams(max_tokens=30, seed=1, stop_token_ids=frozenset([stop]))
    samples += engine.generate([PROMPT, PROMPT], [params, replace(params, min_tokens=4)])
    assert samples[1].stop_reason == stop
    assert_replays(engine, samples)
    empty = engine.abort(engine.add_request(PROMPT, SamplingParams(prompt_logprobs=True)))
    assert_replays(engine, empty)
    cut = replace(
        samples[1],
        completion_tokens=samples[1].completion_tokens[:2],
        logprobs=samples[1].logprobs[:2],
        loss_mask=(),
    )
    cut = replace(
        cut, log_kept_mass=(0.0, 0.0), weight_versions=(VersionSpan(0, 0, 2),), kv_versions=()
    )
    assert [each.field for each in differences(cut, replay(engine, cut))] == [
        "finish_reason",
        "stop_reason",
    ]


def test_reference_logprobs_are_replayed(build: Build, folder: Path, tmp_path: Path) -> None:
    other = write_model(
        tmp_path / "other", llama_config(layers=3), llama_weights(llama_config(layers=3), seed=4)
    )
    engine = build(backend="reference", ref_model_path=str(other))
    samples = engine.generate([PROMPT, [5]], SamplingParams(max_tokens=6), 2)
    assert_replays(engine, samples)
    changed = replace(samples[0], ref_logprobs=(*(samples[0].ref_logprobs or ())[:-1], -1.0))
    assert str(differences(changed, replay(engine, changed))[0]).startswith(
        f"completion token {len(changed.logprobs) - 1}: ref_logprobs is -1.0, replayed "
    )


def test_changed_token_of_a_sample_is_located(build: Build) -> None:
    engine = build(backend="reference")
    params = SamplingParams(
        max_tokens=8, top_k=20, raw_logprobs=True, sampling_mask=True, top_logprobs=2, prompt_logprobs=True,
        prompt_top_logprobs=2, ignore_eos=True,
    )  # fmt: skip
    sample = engine.generate(PROMPT, params)[0]
    fields = ("completion_tokens", "logprobs", "raw_logprobs", "log_kept_mass", "top_logprobs")
    for field in (*fields, "prompt_logprobs", "prompt_top_logprobs"):
        values = list(getattr(sample, field))
        values[3] = {
            "completion_tokens": (values[3] + 1) % 300 if field == "completion_tokens" else 0
        }.get(
            field,
            values[2]
            if field.endswith("top_logprobs")
            else torch.tensor(values[3]).nextafter(torch.tensor(1.0)).item(),
        )
        changed = replace(sample, **{field: tuple(values)})
        first = differences(changed, replay(engine, changed))[0]
        assert (first.field, first.token) == (field, 3)
    assert sample.sampling_mask is not None
    ids = list(sample.sampling_mask.token_ids)
    ids[3 * 20] += 1
    changed = replace(sample, sampling_mask=replace(sample.sampling_mask, token_ids=tuple(ids)))
    assert differences(changed, replay(engine, changed))[0][:2] == ("sampling_mask", 3)
    for field in ("seed", "sample_index"):
        changed = replace(sample, **{field: getattr(sample, field) + 1})
        assert differences(changed, replay(engine, changed))[0].field == "completion_tokens"
    changed = replace(
        sample, weight_versions=(VersionSpan(0, 0, 2), VersionSpan(1, 2, 8)), weight_version=1
    )
    changed = replace(changed, kv_versions=(ContextVersions(0, 8, (VersionSpan(0, 0, 28),)),))
    assert [each.field for each in differences(changed, replay(engine, changed))] == [
        "weight_versions",
        "weight_version",
    ]
    # After a differing draw the replay continues with its own tokens, as the engine would have.
    other = engine.generate(PROMPT, replace(params, seed=sample.seed + 1))[0]
    again = replay(engine, replace(sample, seed=sample.seed + 1))
    assert again.completion_tokens == other.completion_tokens
    assert differences(other, again) == ()
