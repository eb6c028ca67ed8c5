"""The law on a card: the bits of a token under any schedule are those of its request alone.

As `tests/invariance`, with batch_invariant=True: many more drawn schedules than an interpreter has
time for, graphs and updates included. Each test draws until its seconds are over, so that a slow
card checks less and a fast one more.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nano_inference import InferenceEngine, TrainingSample
from nano_inference.models.loading import load_spec
from tests.gpu.target import Target
from tests.invariance import test_update_invariance as updates
from tests.invariance.scenario import Request, Schedule, run, same_bits
from tests.invariance.test_schedule_invariance import requests, schedules
from tests.invariance.test_window_invariance import bytes_of_a_unit_token, fitted
from tests.models.tiny import tiny_llama, tiny_model
from tests.structured.vocabularies import with_tokenizer

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "gemma3", "mistral")  # windows in no layer, in some, in all
SECONDS = 22.0  # for each of the drawn tests
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
        self.end, self.most, self.drawn, self.failed = time.monotonic() + seconds, most, 0, False

    def check(self, run: Callable[[], None]) -> None:
        """One example. Raises `Over` instead, but not where a failure is run again to be
        reported.
        """
        if not self.failed and (self.drawn >= self.most or time.monotonic() > self.end):
            raise Over
        self.drawn += 1
        try:
            run()
        except BaseException:
            self.failed = True
            raise

    def draw(self, test: Callable[[], None]) -> None:
        """All examples of a test that checks them by this clock."""
        with contextlib.suppress(Over):
            test()
        print(f"{self.drawn} drawn")
        assert self.drawn


@pytest.fixture
def clock(target: Target) -> Clock:
    return Clock(SECONDS, 1 if target.dry else 10**9)


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


def compare(model: Path, dtype: str, work: list[Request], schedule: Schedule, alone: Alone) -> None:
    spec = load_spec(model)
    bytes_per_token = bytes_of_a_unit_token(spec) * getattr(torch, dtype).itemsize // 4
    together, _ = run(model, dtype, work, fitted(schedule, work, spec), bytes_per_token)
    for place, request in enumerate(work):
        for expected in alone.samples(request):
            got = together.get((place, expected.sample_index))
            assert got is not None, "a sample is lost"
            assert same_bits(got, expected), (
                f"request {place}, sample {expected.sample_index}: other bits"
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
    models: dict[str, Path], family: str, dtype: str, target: Target, clock: Clock
) -> None:
    if target.dry and (dtype, family) != ("float32", "gemma3"):
        pytest.skip("a dry run has one model")
    alone = Alone(models[family], dtype, target)

    @MANY
    @given(work=requests(), schedule=schedules)
    def drawn(work: list[Request], schedule: Schedule) -> None:
        mine = smaller(work) if target.dry else work
        clock.check(lambda: compare(models[family], dtype, mine, target.on(schedule), alone))

    clock.draw(drawn)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_sample_is_made_again_after_updates(
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
