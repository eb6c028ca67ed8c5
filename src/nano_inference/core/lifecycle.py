"""`Lifecycle`: the state of an engine as one immutable value.

It says whether the engine launches steps, admits requests, sleeps or is dead. Only `after` changes
it. Locks, events and waiting are in `engine/shared_loop.py`.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Protocol, assert_never

from nano_inference.types import Memory


class Caller(Protocol):
    """A caller that paused the engine or put it to sleep."""

    def is_calling(self) -> bool:
        """Return True if the current code runs for this caller.

        Waiting for the caller would then deadlock.
        """
        ...


class Why(NamedTuple):
    """A reason, and the same reason without exception text, for `EngineDead.public`."""

    text: str
    public: str


class Phase(Enum):
    """Two switches: steps are launched or not, and new requests are admitted or held."""

    RUNNING = auto()  # launches steps, admits new requests
    DRAINING = auto()  # launches steps, holds new requests
    STOPPED = auto()  # launches nothing, admits new requests
    DRAINED = auto()  # launches nothing, holds new requests


_STOPPED = {Phase.RUNNING: Phase.STOPPED, Phase.DRAINING: Phase.DRAINED}
_HOLDING = {Phase.RUNNING: Phase.DRAINING, Phase.STOPPED: Phase.DRAINED}


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of an engine between two steps.

    Attributes:
        phase: Phase of the engine.
        paused_by: Caller of `pause`, until `resume`. None if the engine is not paused.
        asleep: Parts of the memory that were released.
        asleep_by: Caller of the last `sleep`, until nothing is asleep.
        sleep_asked: True if the weights are to sleep as soon as the engines in lockstep allow it.
        dead: Reason why every call fails. None if the engine is alive.
    """

    phase: Phase = Phase.RUNNING
    paused_by: Caller | None = None
    asleep: frozenset[Memory] = frozenset()
    asleep_by: Caller | None = None
    sleep_asked: bool = False
    dead: Why | None = None

    @property
    def launching(self) -> bool:
        """True if steps are launched."""
        return self.phase in (Phase.RUNNING, Phase.DRAINING)

    @property
    def admitting(self) -> bool:
        """True if new requests are admitted. Otherwise they are held."""
        return self.phase in (Phase.RUNNING, Phase.STOPPED)

    @property
    def has_weights(self) -> bool:
        """True if the weights are in memory."""
        return "weights" not in self.asleep

    @property
    def wants_sleep(self) -> bool:
        """True if the weights are asleep or waiting to sleep."""
        return self.sleep_asked or not self.has_weights


@dataclass(frozen=True, slots=True)
class Drain:
    """Hold new requests from now on."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Launch nothing until `Resume`."""

    by: Caller


@dataclass(frozen=True, slots=True)
class UndoPause:
    """Undo an interrupted pause, unless another caller has paused since."""

    by: Caller
    before: Caller | None  # the pause that it replaced


@dataclass(frozen=True, slots=True)
class Resume:
    """Undo all pauses."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Launch nothing until `Settle`."""


@dataclass(frozen=True, slots=True)
class AskSleep:
    """Launch nothing, and let the weights sleep once the engines in lockstep allow it."""


@dataclass(frozen=True, slots=True)
class WithdrawSleep:
    """Withdraw `AskSleep`: the weights are asleep, or no longer need to be."""


@dataclass(frozen=True, slots=True)
class FallAsleep:
    """Mark a part of the memory as released."""

    part: Memory
    by: Caller


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Mark a part of the memory as restored."""

    part: Memory


@dataclass(frozen=True, slots=True)
class Settle:
    """Run again, unless a pause, a sleep or another engine prevents it."""

    others_asleep: bool = False  # some engine in lockstep has not woken its weights


@dataclass(frozen=True, slots=True)
class Die:
    """Fail every call from now on. The first reason is kept."""

    why: Why


Event = (
    Drain
    | Pause
    | UndoPause
    | Resume
    | Stop
    | AskSleep
    | WithdrawSleep
    | FallAsleep
    | WakeUp
    | Settle
    | Die
)


def after(life: Lifecycle, event: Event) -> Lifecycle:
    """Return the state after an event. Pure. Every event is valid in every state."""
    match event:
        case Pause() | UndoPause() | Resume():
            return _after_pause(life, event)
        case Stop() | AskSleep() | WithdrawSleep() | FallAsleep() | WakeUp():
            return _after_sleep(life, event)
        case Drain():
            return replace(life, phase=_HOLDING.get(life.phase, life.phase))
        case Die(why):
            return replace(life, dead=life.dead or why)
        case Settle(others_asleep):
            return _settled(life, others_asleep)
        case _:
            assert_never(event)


def _after_pause(life: Lifecycle, event: Pause | UndoPause | Resume) -> Lifecycle:
    match event:
        case Pause(by):
            return replace(life, phase=_STOPPED.get(life.phase, life.phase), paused_by=by)
        case UndoPause(by, before):
            return replace(life, paused_by=before) if life.paused_by is by else life
        case Resume():
            return replace(life, paused_by=None)


def _after_sleep(
    life: Lifecycle, event: Stop | AskSleep | WithdrawSleep | FallAsleep | WakeUp
) -> Lifecycle:
    stopped = _STOPPED.get(life.phase, life.phase)
    match event:
        case Stop():
            return replace(life, phase=stopped)
        case AskSleep():
            return replace(life, phase=stopped, sleep_asked=True)
        case WithdrawSleep():
            return replace(life, sleep_asked=False)
        case FallAsleep(part, by):
            return replace(life, asleep=life.asleep | {part}, asleep_by=by)
        case WakeUp(part):
            return replace(life, asleep=life.asleep - {part})


def _settled(life: Lifecycle, others_asleep: bool) -> Lifecycle:
    if life.asleep or life.dead is not None:
        return life
    is_kept = life.paused_by is not None or life.sleep_asked or others_asleep
    return replace(life, asleep_by=None, phase=life.phase if is_kept else Phase.RUNNING)
