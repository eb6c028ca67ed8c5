"""Engines in lockstep: each has its own requests, scheduler and attention, and all share the
experts.

Rows are sent to the engine that holds their expert (`models/sharding/rank_exchange.py`), so no
engine can compute a layer while another is idle. A step of one is a **round** of all, and engines
without rows take part with none. Consecutive rounds form a **wave**. A wave begins when an idle
engine has work and rings the bell for the next wave. The wave ends with a round in which no engine
had work. All are then idle and increment their number of ended waves. A ring for an ended wave is
ignored, so a bell that is heard late has no effect. (vLLM's engines with data-parallel attention
use a similar counter.)

At the start of a round, every engine reports its state. The reports determine, equally on all
engines:

- which weight sets are computed, one after the other.
- whether the wave ends.
- which weight update all apply before the next round: an update that all have received and checked,
  and can apply. Rows are therefore never sent to experts of another version.
- whether the weights may sleep: only if all engines were asked to, because each needs the experts
  of all. An engine whose weights are to sleep stops, reports it in the next round, and serves the
  others until all have reported it. Then none computes until a round in which all have their
  weights again.
"""

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nano_inference.arrays import Device, namespace
from nano_inference.core.gate import Gate, Stepping
from nano_inference.core.sequence import POLICY, REFERENCE
from nano_inference.errors import NanoInferenceError, RankLost

if TYPE_CHECKING:
    from nano_inference.parallel.process_group import ProcessGroup

SETS = (POLICY, REFERENCE)  # weight sets of all engines, in the order of computation
NOTHING = -1
SLEEP_SECONDS = 60.0  # timeout until all engines are asked to sleep
WAKE_SECONDS = 600.0  # timeout until all engines have read their weights back
LOOK = 0.005  # seconds between two checks of the others' reports
LISTENING = 1.0  # seconds between two checks whether a bell was closed
KEPT = 8  # waves whose keys a store holds; no listener is that late


class StoreBell:
    """Wake-up signal to idle engines: a common `torch.distributed` store with a key for each wave.

    Args:
        store: Store of this lockstep only.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._waiting = store, store.clone()  # a wait occupies its connection
        self._lock = threading.Lock()
        self._wave: float = NOTHING
        self._closed = self._gone = False
        self._wake: Callable[[], None] = lambda: None

    def ring(self, wave: int) -> None:
        """Begin wave `wave` unless it has begun. Raises `RankLost` if the store is gone."""
        if self._wave < wave and not self._gone:
            try:
                self._store.set(f"wave/{wave}", "")
            except RuntimeError:
                self._gone = True
            self._hear(wave)
        if self._gone:
            raise RankLost("the store of the engines in lockstep is gone: an engine has ended.")

    def heard(self) -> float:
        """Return the latest wave that was rung for: -1 if none, infinity if the store is gone."""
        return self._wave

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` on a separate thread whenever an engine rings."""
        self._wake = wake
        threading.Thread(target=self._listen, name="bell of the lockstep", daemon=True).start()

    def close(self) -> None:
        """Leave the lockstep. The others notice by the next wave."""
        self._closed = True
        wave = self._wave
        if wave < math.inf:  # else the store is gone
            with suppress(RankLost):
                self.ring(int(wave) + 1)

    def _hear(self, wave: float) -> None:
        with self._lock:
            self._wave = max(self._wave, wave)

    def _listen(self) -> None:
        while not self._closed:
            wave = int(self._wave) + 1
            try:
                if not self._comes(f"wave/{wave}"):
                    continue
            except RuntimeError:
                self._gone, self._wave = True, math.inf  # lets `ring` report the loss
                self._wake()
                return
            self._hear(wave)
            self._wake()
            with suppress(RuntimeError):
                self._waiting.delete_key(f"wave/{wave - KEPT}")

    def _comes(self, key: str) -> bool:
        """Wait for a key. Return False on a timeout. Raises `RuntimeError` if the store is gone."""
        try:
            self._waiting.wait([key], timedelta(seconds=LISTENING))
        except RuntimeError:  # a timeout, or the store is gone
            return self._waiting.check([key])
        return True


@dataclass(frozen=True, slots=True)
class Member:
    """Report of an engine in a round.

    Attributes:
        busy: True if it has requests to compute.
        version: Version of its weights.
        update: Version of the update that it can apply now, or None.
        wants_sleep: True if its weights are asleep, or are to sleep as soon as all may.
    """

    busy: bool
    version: int
    update: int | None
    wants_sleep: bool


@dataclass(frozen=True)
class Lockstep:
    """Membership of an engine in a lockstep, before the engine is built.

    Attributes:
        group: Process group of the engines. This engine's experts are those of `shard_of(spec,
            engines=(group.rank, group.size))`.
        bell: Bell of all engines.
    """

    group: "ProcessGroup"
    bell: StoreBell

    def close(self) -> None:
        """Leave. The others end too, since their experts are incomplete."""
        self.group.close()
        self.bell.close()


class LockstepGate(Gate):
    """One engine's side of the lockstep.

    Args:
        seat: Membership of this engine.
        say: Function that returns this engine's report, called in every round.
        wake: Function to call when a round is due.
        device: Device of exchanged reports.

    Attributes:
        wave: Number of ended waves.
        running: True if the next wave has begun.
    """

    alone = False

    def __init__(
        self,
        seat: Lockstep,
        say: Callable[[], Member],
        wake: Callable[[], None],
        device: Device,
    ) -> None:
        self.group, self._bell = seat.group, seat.bell
        self.wave = 0
        self.running = False
        self.asleep = False
        self.num_rounds = 0
        self._say, self._device, self._seat = say, device, seat
        self._agreed: int | None = None  # the update that all apply before the next round
        self._told: int | None = None  # the update in this engine's last report
        self._told_sleep = False
        self._bell.listen(wake)

    def is_due(self) -> bool:
        """Return True if this engine has to take part in a round."""
        if self.running or self._bell.heard() >= self.wave:
            return True
        mine = self._say()
        return (
            mine.busy
            or mine.update not in (None, self._told)
            or mine.wants_sleep != self._told_sleep
        )

    def allows(self, version: int | None) -> bool:
        """Return True if all engines apply the update of this version now."""
        return version is not None and version == self._agreed

    def begin(self, weight_sets: Collection[str] = ()) -> list[str]:
        """Begin a round. Return all weight sets that some engine computes, in order.

        Args:
            weight_sets: Weight sets that this engine computes.

        Raises `RankLost` if an engine is missing or has another version.
        """
        if unknown := set(weight_sets) - set(SETS):
            raise RuntimeError(f"engines in lockstep do not share the weight set {min(unknown)!r}.")
        if not self.running:
            self._bell.ring(self.wave)
            self.running = True
        mine = self._say()
        sets = sum(1 << place for place, name in enumerate(SETS) if name in weight_sets)
        update = NOTHING if mine.update is None else mine.update
        xp = namespace(self._device)
        said = xp.tensor(
            [mine.busy, mine.version, update, sets, mine.wants_sleep], device=self._device
        )
        try:
            reports = xp.stack(self.group.all_gather(said))
        except RankLost as lost:
            raise RankLost(f"the engines in lockstep cannot continue: {lost}") from lost
        return self._take_in(reports.tolist(), mine)

    def await_sleep(self, engine: Stepping) -> None:
        """Serve the other engines until all may sleep. See `Gate`."""
        self._wait(lambda: self.asleep or not engine.life.wants_sleep, engine, SLEEP_SECONDS)

    def await_wake(self, engine: Stepping) -> None:
        """Wait until all engines are awake, or this one is to sleep again. See `Gate`."""
        if not self._wait(lambda: engine.life.wants_sleep or not self.asleep, engine, WAKE_SECONDS):
            raise NanoInferenceError(
                "the weights of other engines in lockstep are still asleep; wake() them, and then "
                "this engine again."
            )

    def _wait(self, holds: Callable[[], bool], engine: Stepping, seconds: float) -> bool:
        """Take part in rounds until `holds()`. Return False on a timeout."""
        end = time.monotonic() + seconds
        while not holds():
            engine.require_alive()
            if time.monotonic() > end:
                return False
            if engine.has_work():  # otherwise wait for the others, or for a stepping thread
                engine.advance()
            else:
                time.sleep(LOOK)
        return True

    def close(self) -> None:
        """Leave the lockstep. See `Gate`."""
        self._seat.close()

    def _take_in(self, reports: list[list[int]], mine: Member) -> list[str]:
        busy, versions, updates, sets, sleepers = zip(*reports, strict=True)
        if len(set(versions)) > 1:
            raise RankLost(
                "the engines in lockstep serve different weight versions: "
                f"{', '.join(map(str, versions))}."
            )
        self.num_rounds += 1
        self._told, self._told_sleep = mine.update, bool(sleepers[self.group.rank])
        self.asleep = all(sleepers) or (self.asleep and any(sleepers))
        self._agreed = mine.update if set(updates) == {mine.update} else None
        if not any(busy) and not any(sets) and self._agreed is None:
            self.running, self.wave = False, self.wave + 1
        return [name for place, name in enumerate(SETS) if any(each >> place & 1 for each in sets)]


def not_together() -> NanoInferenceError:
    """Return the error for weights of an engine in lockstep that may not sleep."""
    return NanoInferenceError(
        "the weights of engines in lockstep can only sleep together; not all engines were asked to "
        f"sleep within {SLEEP_SECONDS:g} s, or some were woken. Call sleep() on all of them."
    )


def process_in_lockstep(meeting: str, rank: int, size: int, device: Device) -> Lockstep:
    """Return the lockstep of an engine in its own process.

    Args:
        meeting: Path of an unused file that all engines of this machine can access.
        rank: Index of this engine.
        size: Number of engines.
        device: Device of this engine.

    Raises `RankLost` if the others do not connect in time.
    """
    import torch.distributed

    from nano_inference.parallel.process_group import ProcessGroup

    dist: Any = torch.distributed
    store = dist.FileStore(meeting, -1)
    group = ProcessGroup.meet(dist.PrefixStore("group", store), rank, size, device)
    return Lockstep(group, StoreBell(dist.PrefixStore("bell", store)))
