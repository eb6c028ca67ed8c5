"""Invariance: a token's bits depend on the weights and the tokens before it, never on the schedule.

Each generated scenario runs its requests together under a random schedule, and each request by
itself under the default one. Tokens, logprobs and masses must be equal bit for bit. Memory that
must not be read is NaN.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_inference import Grammar, SamplingParams, TrainingSample
from nano_inference.config import Backend, KVCacheDType
from tests.depth import at_depth
from tests.invariance.scenario import Request, Schedule, require_same_samples, run
from tests.models.tiny import tiny_llama
from tests.structured.vocabularies import byte_tokenizer, with_tokenizer

DTYPES = {"float32": 4, "bfloat16": 2}
BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
HEAD_DIM, ROWS = 16, 2 * 2 * 2  # tiny model: keys and values, layers, KV heads
VALUES_PER_TOKEN = ROWS * HEAD_DIM

GRAMMARS = (
    Grammar.regex("[a-f]{2,20}"),
    Grammar.json_schema({"type": "array", "items": {"type": "integer"}}),
    Grammar.choice(["yes", "no", "perhaps"]),
)

OPENS, CLOSES = "<think>", "</think>"
# letters that the grammars can do without
BAD_WORDS = ((), (), ("c", "ab"), ("12", "f", "<"))


def sampling_params(num_best: int, budget: int | None, **options: Any) -> SamplingParams:
    """Return parameters with room for the marker. A grammar begins after the thought."""
    if budget is not None:
        options["max_tokens"] += budget + len(CLOSES) + 1
        if options["grammar"] is not None:
            options["grammar"] = replace(options["grammar"], after=CLOSES)
    scored = options["prompt_logprobs"]
    return SamplingParams(
        prompt_top_logprobs=num_best if scored else 0, thinking_token_budget=budget, **options
    )


params = st.builds(
    sampling_params,
    budget=st.sampled_from([None, None, 0, 1, 3]),
    bad_words=st.sampled_from(BAD_WORDS),
    num_best=st.sampled_from([0, 1, 4]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    max_tokens=st.integers(1, 12),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    min_tokens=st.just(0),
    seed=st.integers(0, 3),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logit_bias=st.sampled_from([{}, {}, {5: 4.0, 9: -3.0}]),
    top_logprobs=st.sampled_from([0, 3]),
    prompt_logprobs=st.sampled_from([False, False, True]),
    raw_logprobs=st.just(True),
    cache_salt=st.sampled_from([None, None, "salt"]),
    priority=st.sampled_from([0, 0, 0, 1]),
    grammar=st.sampled_from([None, None, *GRAMMARS]),
    logprob_token_ids=st.sampled_from([(), (), (7,), (299, 3, 40)]),
    prompt_logprob_token_ids=st.sampled_from([(), (), ((5, 298),)]),
)


@cache
def opening_ids() -> list[int]:
    """Return the ids of the opening marker, one for each byte."""
    with TemporaryDirectory() as folder:
        return byte_tokenizer(Path(folder)).encode(OPENS)


@st.composite
def requests(draw: Any) -> list[Request]:
    """Generate up to six requests. Many share a stem, some fork an earlier request's prompt, and
    some span several key tiles.
    """
    stem = draw(st.lists(st.integers(3, 299), min_size=40, max_size=40)) * 4
    work: list[Request] = []
    for _ in range(draw(st.integers(2, 6))):
        head = stem[: draw(st.sampled_from([0, 1, 16, 33, 64, 70, 130, 160]))]
        if work and draw(st.sampled_from([False, False, True])):
            head = list(draw(st.sampled_from(work)).prompt)  # a fork
        tail = draw(st.lists(st.integers(3, 299), min_size=1, max_size=20))
        wanted = draw(params)
        if wanted.thinking_token_budget is not None and draw(st.sampled_from([True, True, False])):
            tail += opening_ids()
        prompt = tuple(head + tail)
        if len(prompt) == 1:  # no position follows a first token
            wanted = replace(wanted, prompt_logprob_token_ids=())
        work.append(
            Request(
                prompt=prompt,
                params=wanted,
                num_samples=draw(st.sampled_from([1, 1, 2, 4])),
                arrives=draw(st.sampled_from([0, 0, 1, 4])),
                aborted=draw(st.sampled_from([None, None, None, None, 5])),
                turn_of=draw(st.sampled_from([None, None, 0, 1])),
                prefetched=draw(st.sampled_from([False, False, True])),
                released=draw(st.sampled_from([None, None, None, 2, 6])),
            )
        )
    return work


schedules = st.builds(
    Schedule,
    block_size=st.sampled_from([1, 4, 16, 24, 64]),
    max_batch_size=st.sampled_from([1, 2, 8, 256]),
    max_tokens_per_batch=st.sampled_from([3, 17, 64, 8192]),
    max_chunk_tokens=st.sampled_from([None, 1, 7, 33, 64]),
    enable_prefix_caching=st.booleans(),
    lookahead=st.sampled_from([0, 1]),
    num_threads=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([None, 1]),  # 1: see fitted
    cache_type=st.sampled_from(["paged", "radix"]),
    drafts=st.sampled_from(["none", "none", "right", "wrong", "any", "changing", "real", "self"]),
    max_drafts=st.sampled_from([1, 3, 5]),
)
# some of them quantize keys and values: other bits, in all compared runs
schedules_and_codes = st.builds(
    lambda schedule, kept: replace(schedule, kv_cache_dtype=kept),
    schedule=schedules,
    kept=st.sampled_from(["auto", "int8", "fp8"]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # the head's threads share it in blocks of 384
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=900)
    return with_tokenizer(folder)


def fitted(schedule: Schedule, work: list[Request]) -> Schedule:
    """Shrink the cache to little more than the longest request: preemption and eviction are
    certain.
    """
    if schedule.num_blocks is None:
        return schedule
    longest = max(len(request.prompt) + request.params.max_tokens for request in work)
    return replace(schedule, num_blocks=-(-longest // schedule.block_size) + 2)


def on(backend: Backend, schedule: Schedule) -> Schedule:
    """Return the schedule on a backend. The CPU kernels have no FP8."""
    kept: KVCacheDType = schedule.kv_cache_dtype
    if (backend, kept) == ("cpu", "fp8"):
        kept = "int8"
    return replace(schedule, backend=backend, kv_cache_dtype=kept)


def bytes_per_token(dtype: str, schedule: Schedule) -> int:
    """Return the bytes per token of the KV cache."""
    coded = schedule.kv_cache_dtype != "auto"  # each with a scale
    return ROWS * (HEAD_DIM + 4) if coded else VALUES_PER_TOKEN * DTYPES[dtype]


@cache
def alone(
    model: Path, dtype: str, request: Request, schedule: Schedule
) -> dict[tuple[int, int], TrainingSample]:
    lonely = Request(request.prompt, request.params, request.num_samples)
    samples, _ = run(model, dtype, [lonely], schedule, bytes_per_token(dtype, schedule))
    assert all(sample.finish_reason != "abort" for sample in samples.values()), (
        "even alone it reads what it may not"
    )
    return samples


def check(model: Path, dtype: str, work: list[Request], schedule: Schedule) -> int:
    quiet = Schedule(backend=schedule.backend, kv_cache_dtype=schedule.kv_cache_dtype)
    expected = {
        (place, index): sample
        for place, request in enumerate(work)
        for (_, index), sample in alone(model, dtype, request, quiet).items()
    }
    known = {key: sample.completion_tokens for key, sample in expected.items()}
    size = bytes_per_token(dtype, schedule)
    together, preemptions = run(model, dtype, work, fitted(schedule, work), size, known=known)
    require_same_samples(work, together, expected)
    return preemptions


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(
    max_examples=at_depth(18),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(work=requests(), schedule=schedules_and_codes)
def test_same_bits_under_any_schedule(
    model: Path, dtype: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(model, dtype, work, on(backend, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=at_depth(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(work=requests(), schedule=schedules_and_codes)
def test_same_bits_under_many_schedules(
    model: Path, dtype: str, backend: Backend, work: list[Request], schedule: Schedule
) -> None:
    check(model, dtype, work, on(backend, schedule))


def test_tight_cache_causes_preemption(model: Path) -> None:
    work = [
        Request(tuple(range(3, 40 + i)), SamplingParams(max_tokens=12, seed=i), 4) for i in range(4)
    ]
    assert check(model, "float32", work, Schedule(block_size=4, num_blocks=1)) > 0
