"""The law on a card: under any schedule, a token has the bits of its request alone.

These are the tests of `tests/invariance` with batch_invariant=True: many more drawn schedules than
an interpreter has time for, including graphs and updates. Each test draws until its time is over,
so a fast card checks more. The first example compiles kernels, and the clock starts after it.

Building an engine takes longer than most examples. Therefore few graph sizes are captured,
schedules come from a pool, and an engine is kept for the next example of its schedule. Tiles and
splits are small (`small_tiles`), so that a tiny model has several of each and merges their sums.
`test_gpu_law.py` has the sizes of real models.
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
from tests.invariance import test_state_invariance as states
from tests.invariance import test_update_invariance as updates
from tests.invariance.scenario import Request, Schedule, run, same_bits, small_tiles
from tests.invariance.test_schedule_invariance import requests, schedules
from tests.invariance.test_window_invariance import bytes_of_a_unit_token, fitted
from tests.models.tiny import tiny_llama, tiny_model
from tests.structured.vocabularies import with_tokenizer

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "gemma3", "mistral")  # windows in no layer, in some layers, in all layers
STATES = {"lfm2": "conv", "qwen3_5": "linear_attention"}
SECONDS = 22.0  # seconds per drawn test, after its first example
POOL = 24  # schedules per test
KEPT = 12  # engines kept per test
GRAPH_SIZES = frozenset({1, 4, 16, 64})  # captured graph sizes, including the largest batch
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
    """Raised when the time for drawing is over."""


class Clock:
    """Stops drawing when the time is over. Hypothesis alone would run a fixed number of
    examples.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds, self.most, self.drawn, self.failed = seconds, most, 0, False
        self._end: float | None = None  # set after the first example has compiled its kernels

    def check(self, run: Callable[[], None]) -> None:
        """Run one example. Raise `Over` if the time is over, unless a failure is being replayed for
        its report.
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
        """Draw all examples of a test that checks them by this clock."""
        with contextlib.suppress(Over):
            test()
        print(f"{self.drawn} drawn")
        assert self.drawn


class Engines:
    """Engines kept by their settings, except those with a cache sized for one request."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[EngineConfig, tuple[InferenceEngine, contextlib.ExitStack]] = {}

    @contextlib.contextmanager
    def open(self, config: EngineConfig) -> Iterator[InferenceEngine]:
        """Yield an engine without requests and with an empty prefix cache."""
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
        """Return the function that gives a scenario its engine. Engines with drafts or a tight
        cache are not reused.
        """
        keeps = schedule.num_blocks is None and schedule.drafts == "none"
        return self.open if keeps else InferenceEngine

    def close(self) -> None:
        """Close all engines."""
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
    """Capture few graph sizes, because all sizes take seconds."""
    sizes = graphs.graph_sizes
    monkeypatch.setattr(
        graphs,
        "graph_sizes",
        lambda largest: tuple(size for size in sizes(largest) if size in {*GRAPH_SIZES, largest}),
    )


def pool_of(size: int) -> list[Schedule]:
    """Draw some schedules. Half of them have reusable engines."""
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
    """Return the requests without grammars if no grammar compiler is installed."""
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
    """Samples of requests that ran alone, one after another, on one engine from an empty cache."""

    def __init__(self, model: Path, dtype: str, target: Target) -> None:
        schedule = target.on(Schedule(enable_prefix_caching=False))
        self._engine = InferenceEngine(schedule.config(model, dtype, 0))
        self._found: dict[Request, list[TrainingSample]] = {}

    def samples(self, request: Request) -> list[TrainingSample]:
        """Return all samples of a request."""
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
                f"request {index}, sample {expected.sample_index}: bits differ"
            )


def smaller(work: list[Request]) -> list[Request]:
    """Shrink a workload in a dry run, in which a token takes seconds."""
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


@pytest.mark.parametrize("family", STATES)
def test_states_have_the_same_bits_under_any_schedule(
    tmp_path: Path, family: str, target: Target, clock: Clock
) -> None:
    if target.dry and family != "lfm2":
        pytest.skip("a dry run has one model")
    layers = SMALL | {"layer_types": [STATES[family], "full_attention"]}
    model = with_tokenizer(tiny_model(tmp_path, family, **layers))

    @MANY
    @given(work=requests(), schedule=st.sampled_from(pool_of(POOL)))
    def drawn(work: list[Request], schedule: Schedule) -> None:
        mine = smaller(work) if target.dry else work
        mine = mine if HAS_GRAMMARS else without_grammars(mine)
        clock.check(lambda: states.check(model, "float32", mine, target.on(schedule)))

    with small_tiles():
        clock.draw(drawn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_after_updates_are_reproduced(
    tmp_path: Path, dtype: str, target: Target, clock: Clock
) -> None:
    """Cover updates of every policy, pauses, sleeps and aborts, under graphs and lookahead. See
    `tests/invariance` for details.
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
