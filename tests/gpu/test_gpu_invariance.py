"""The law on a card: the bits of a token under any schedule are those of its request alone.

As `tests/invariance`, with batch_invariant=True: many more drawn schedules than an interpreter has
time for, graphs and updates included. Each test draws until its seconds are over, so that a slow
card checks less and a fast one more. The first example compiles kernels, and the clock starts when
it is done.

Building an engine takes longer than most examples. So few graph sizes are captured, schedules come
from a pool, and an engine stays for the next example of its schedule. Tiles and splits are small
(`small_tiles`): a tiny model has several of each, whose sums are merged. `test_gpu_law.py` has the
sizes of real models.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nano_inference import EngineConfig, InferenceEngine, TrainingSample
from nano_inference.checkpoints.loading import load_spec
from nano_inference.device import graphs
from tests.gpu.target import Target
from tests.invariance import test_update_invariance as updates
from tests.invariance.scenario import Request, Schedule, run, same_bits, small_tiles
from tests.invariance.test_schedule_invariance import requests, schedules
from tests.invariance.test_window_invariance import bytes_of_a_unit_token, fitted
from tests.models.tiny import tiny_llama, tiny_model
from tests.structured.vocabularies import with_tokenizer

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "gemma3", "mistral")  # windows in no layer, in some, in all
SECONDS = 22.0  # for each of the drawn tests, after its first example
POOL = 24  # schedules of a test
KEPT = 12  # engines that a test keeps
GRAPH_SIZES = frozenset({1, 4, 16, 64})  # that are captured, with the largest batch
HAS_GRAMMARS = all(find_spec(name) for name in ("llguidance", "msgspec"))
MANY = settings(
    max_examples=100_000,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}


class Over(Exception):
    """The time for drawing is over."""


class Clock:
    """Draws until the time is over; hypothesis by itself would go on to a number of examples."""

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most, self.drawn, self.failed = seconds, most, 0, False
        self._end: float | None = None  # once the first example has compiled its kernels

    def check(self, run: Callable[[], None]) -> None:
        """One example. Raises `Over` instead, but not where a failure is run again to be
        reported.
        """
        over = self._end is not None and time.monotonic() > self._end
        if not self.failed and (self.drawn >= self.most or over):
            raise Over
        self.drawn += 1
        try:
            run()
        except BaseException:
            self.failed = True
            raise
        if self._end is None:
            self._end = time.monotonic() + self.seconds

    def draw(self, test: Callable[[], None]) -> None:
        """All examples of a test that checks them by this clock."""
        with contextlib.suppress(Over):
            test()
        print(f"{self.drawn} drawn")
        assert self.drawn


class Engines:
    """Engines kept by what they were built from; those with a cache of a request's own size are
    not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[EngineConfig, tuple[InferenceEngine, contextlib.ExitStack]] = {}

    @contextlib.contextmanager
    def open(self, config: EngineConfig) -> Iterator[InferenceEngine]:
        """An engine without requests, and with an empty prefix cache."""
        engine, closing = self._kept.pop(config, None) or self._build(config)
        try:
            yield engine
            engine.flush_cache()
        except BaseException:
            closing.close()
            raise
        self._kept[config] = engine, closing  # the newest is last
        if len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)))[1].close()

    def _build(self, config: EngineConfig) -> tuple[InferenceEngine, contextlib.ExitStack]:
        closing = contextlib.ExitStack()
        return closing.enter_context(InferenceEngine(config)), closing

    def opener(
        self, schedule: Schedule
    ) -> Callable[[EngineConfig], AbstractContextManager[InferenceEngine]]:
        """How a scenario gets its engine. Drafts change one for good, and a tight cache fits one
        example only.
        """
        keeps = schedule.num_blocks is None and schedule.drafts == "none"
        return self.open if keeps else InferenceEngine

    def close(self) -> None:
        """Close all of them."""
        for _, closing in self._kept.values():
            closing.close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    kept = Engines(KEPT)
    yield kept
    kept.close()


@pytest.fixture
def clock(target: Target) -> Clock:
    return Clock(SECONDS, 1 if target.dry else 10**9)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing all sizes takes seconds."""
    sizes = graphs.graph_sizes
    monkeypatch.setattr(
        graphs,
        "graph_sizes",
        lambda largest: tuple(size for size in sizes(largest) if size in {*GRAPH_SIZES, largest}),
    )


def pool_of(size: int) -> list[Schedule]:
    """Some schedules: half of them with engines that can be kept."""
    draw = random.Random(0)
    pool: list[Schedule] = []
    for index in range(size):
        tight = index % 4 == 1
        drafts = ("none", "none", "none", "right", "none", "changing", "none", "self")[index % 8]
        pool.append(
            Schedule(
                block_size=draw.choice((1, 4, 16, 24, 64)),
                max_batch_size=draw.choice((1, 2, 8, 64, 256)),
                max_tokens_per_batch=draw.choice((3, 17, 64, 8192)),
                max_chunk_tokens=draw.choice((None, 1, 7, 33, 64)),
                enable_prefix_caching=draw.random() < 0.5,
                lookahead=draw.choice((0, 1)),
                num_blocks=1 if tight else None,
                cache_type=draw.choice(("paged", "radix")),
                drafts=drafts,
                max_drafts=draw.choice((1, 3, 5)),
            )
        )
    return pool


def without_grammars(work: list[Request]) -> list[Request]:
    """The same requests where what compiles grammars is not installed."""
    return [replace(each, params=replace(each.params, grammar=None)) for each in work]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, target: Target) -> dict[str, Path]:
    small = SMALL if target.dry else {}
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if target.dry else {}
    return {
        family: with_tokenizer(
            tiny_model(
                tmp_path_factory.mktemp(family),
                family,
                **small,
                **(layers if family == "gemma3" else {}),
            )
        )
        for family in FAMILIES
    }


class Alone:
    """Samples of requests that ran alone, one after the other on one engine from an empty cache."""

    def __init__(self, model: Path, dtype: str, target: Target) -> None:
        schedule = target.on(Schedule(enable_prefix_caching=False))
        self._engine = InferenceEngine(schedule.config(model, dtype, 0))
        self._found: dict[Request, list[TrainingSample]] = {}

    def samples(self, request: Request) -> list[TrainingSample]:
        """All samples of a request."""
        key = replace(request, arrives=0, aborted=None)
        if key not in self._found:
            self._engine.add_request(request.prompt, request.params, request.num_samples)
            samples: list[TrainingSample] = []
            while self._engine.has_pending():
                samples += self._engine.step()
            self._found[key] = samples
        return self._found[key]


def compare(
    model: Path,
    dtype: str,
    work: list[Request],
    schedule: Schedule,
    alone: Alone,
    engines: Engines,
) -> None:
    spec = load_spec(model)
    bytes_per_token = bytes_of_a_unit_token(spec) * getattr(torch, dtype).itemsize // 4
    fitting = fitted(schedule, work, spec)
    together, _ = run(model, dtype, work, fitting, bytes_per_token, make=engines.opener(schedule))
    for index, request in enumerate(work):
        for expected in alone.samples(request):
            got = together.get((index, expected.sample_index))
            assert got is not None, "a sample is lost"
            assert same_bits(got, expected), (
                f"request {index}, sample {expected.sample_index}: other bits"
            )


def smaller(work: list[Request]) -> list[Request]:
    """Of a dry run, in which a token takes seconds."""
    return [
        replace(
            request,
            prompt=request.prompt[-9:],
            num_samples=1,
            params=replace(
                request.params, max_tokens=2, prompt_logprobs=False, prompt_top_logprobs=0
            ),
        )
        for request in work[:2]
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_under_any_schedule(
    models: dict[str, Path],
    family: str,
    dtype: str,
    target: Target,
    clock: Clock,
    engines: Engines,
) -> None:
    if target.dry and (dtype, family) != ("float32", "gemma3"):
        pytest.skip("a dry run has one model")

    @MANY
    @given(work=requests(), schedule=st.sampled_from(pool_of(POOL)))
    def drawn(work: list[Request], schedule: Schedule) -> None:
        mine = smaller(work) if target.dry else work
        mine = mine if HAS_GRAMMARS else without_grammars(mine)
        clock.check(
            lambda: compare(models[family], dtype, mine, target.on(schedule), alone, engines)
        )

    with small_tiles():
        alone = Alone(models[family], dtype, target)
        clock.draw(drawn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_after_updates_are_reproduced(
    tmp_path: Path, dtype: str, target: Target, clock: Clock
) -> None:
    """Updates of every policy, pauses, sleeps, aborts, under graphs and lookahead;
    `tests/invariance` says more.
    """
    if target.dry:
        pytest.skip("too slow in the interpreter")
    model = tiny_llama(tmp_path, vocab_size=updates.VOCAB)
    events = st.lists(
        st.one_of(updates.updates, updates.updates, updates.pauses, updates.others),
        min_size=1,
        max_size=6,
    )

    @MANY
    @given(work=st.lists(updates.asks, min_size=1, max_size=5), events=events, schedule=schedules)
    def drawn(work: list[updates.Ask], events: list[updates.Event], schedule: Schedule) -> None:
        clock.check(lambda: updates.check(model, dtype, work, events, target.on(schedule)))

    clock.draw(drawn)
