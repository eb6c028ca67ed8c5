"""The lifecycle of an engine: every state and every event."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from nano_inference.core.lifecycle import (
    AskSleep,
    Die,
    Drain,
    Event,
    FallAsleep,
    Lifecycle,
    Pause,
    Phase,
    Resume,
    Settle,
    Stop,
    UndoPause,
    WakeUp,
    Why,
    WithdrawSleep,
    after,
)
from nano_inference.types import Memory


class Caller:
    """Caller that never polls."""

    def is_calling(self) -> bool:
        return False


RUNNING, DRAINING, STOPPED, DRAINED = Phase
ONE, TWO = Caller(), Caller()
KV: frozenset[Memory] = frozenset({"kv_cache"})
WEIGHTS: frozenset[Memory] = frozenset({"weights"})
WHY, OTHER = Why("a step failed: secret", "a step failed"), Why("it was shut down", "")

STATES = {
    "running": Lifecycle(),
    "draining": Lifecycle(DRAINING),
    "stopped": Lifecycle(STOPPED),
    "drained": Lifecycle(DRAINED),
    "paused": Lifecycle(STOPPED, ONE),
    "paused, drained": Lifecycle(DRAINED, ONE),
    "asked to sleep": Lifecycle(STOPPED, sleep_asked=True),
    "asleep": Lifecycle(STOPPED, None, KV, ONE),
    "asleep, drained": Lifecycle(DRAINED, None, WEIGHTS, TWO),
    "asleep, paused": Lifecycle(STOPPED, ONE, KV | WEIGHTS, TWO),
    "awake, paused": Lifecycle(STOPPED, ONE, asleep_by=TWO),
    "dead": Lifecycle(dead=WHY),
    "dead, drained": Lifecycle(DRAINED, ONE, KV, TWO, dead=WHY),
}

STOPS = {
    name: {"phase": {RUNNING: STOPPED, DRAINING: DRAINED}.get(life.phase, life.phase)}
    for name, life in STATES.items()
}
# Changes of each event, by state. Unlisted states stay the same.
CHANGES: list[tuple[Event, dict[str, dict[str, Any]]]] = [
    (
        Drain(),
        {
            "running": {"phase": DRAINING},
            "stopped": {"phase": DRAINED},
            "paused": {"phase": DRAINED},
            "asked to sleep": {"phase": DRAINED},
            "asleep": {"phase": DRAINED},
            "asleep, paused": {"phase": DRAINED},
            "awake, paused": {"phase": DRAINED},
            "dead": {"phase": DRAINING},
        },
    ),
    (Stop(), STOPS),
    (Pause(TWO), {name: each | {"paused_by": TWO} for name, each in STOPS.items()}),
    (
        UndoPause(ONE, TWO),
        {
            name: {"paused_by": TWO}
            for name in (
                "paused",
                "paused, drained",
                "asleep, paused",
                "awake, paused",
                "dead, drained",
            )
        },
    ),
    (UndoPause(TWO, None), {}),
    (Resume(), {name: {"paused_by": None} for name in STATES}),
    (AskSleep(), {name: each | {"sleep_asked": True} for name, each in STOPS.items()}),
    (WithdrawSleep(), {"asked to sleep": {"sleep_asked": False}}),
    (
        FallAsleep("weights", ONE),
        {
            name: {"asleep": life.asleep | WEIGHTS, "asleep_by": ONE}
            for name, life in STATES.items()
        },
    ),
    (
        WakeUp("kv_cache"),
        {
            "asleep": {"asleep": frozenset()},
            "asleep, paused": {"asleep": WEIGHTS},
            "dead, drained": {"asleep": frozenset()},
        },
    ),
    (
        Settle(),
        {
            "draining": {"phase": RUNNING},
            "stopped": {"phase": RUNNING},
            "drained": {"phase": RUNNING},
            "awake, paused": {"asleep_by": None},
        },
    ),
    (Settle(others_asleep=True), {"awake, paused": {"asleep_by": None}}),
    (Die(WHY), {name: {"dead": WHY} for name in STATES}),
    (
        Die(OTHER),
        {name: {"dead": OTHER} for name, life in STATES.items() if life.dead is None},
    ),
]


@pytest.mark.parametrize(
    ("state", "event", "changes"),
    [(name, event, changes.get(name, {})) for name, (event, changes) in product(STATES, CHANGES)],
    ids=[f"{type(event).__name__} when {name}" for name, (event, _) in product(STATES, CHANGES)],
)
def test_lifecycle_after_applies_the_transition_table(
    state: str, event: Event, changes: dict[str, Any]
) -> None:
    assert after(STATES[state], event) == replace(STATES[state], **changes)


def test_transition_table_has_every_event() -> None:
    assert {type(event) for event, _ in CHANGES} == set(Event.__args__)
    for _, changes in CHANGES:
        assert changes.keys() <= STATES.keys()


def test_phase_decides_launches_and_admission() -> None:
    for phase, launching, admitting in (
        (RUNNING, True, True),
        (DRAINING, True, False),
        (STOPPED, False, True),
        (DRAINED, False, False),
    ):
        life = Lifecycle(phase)
        assert (life.launching, life.admitting) == (launching, admitting)


def test_sleeping_weights_imply_the_sleep_state() -> None:
    for name, life in STATES.items():
        assert life.has_weights == (name not in ("asleep, drained", "asleep, paused"))
        assert life.wants_sleep == (life.sleep_asked or not life.has_weights)


@pytest.mark.parametrize("first", [Stop(), Pause(ONE), AskSleep(), FallAsleep("kv_cache", ONE)])
def test_engine_runs_only_after_every_stop_has_ended(first: Event) -> None:
    life = after(after(Lifecycle(), Stop()), first)
    ends = {Pause: Resume(), AskSleep: WithdrawSleep(), FallAsleep: WakeUp("kv_cache")}
    if end := ends.get(type(first)):
        assert after(life, Settle()).phase is STOPPED
        life = after(life, end)
    assert not after(life, Settle(others_asleep=True)).launching
    assert after(life, Settle()) == Lifecycle()
