"""Engines in lockstep: each has requests, a scheduler and attention of its own, and all have the
experts in common.

Rows go to the engine that holds their expert (`models/sharding/rank_exchange.py`), so no engine
can compute a layer while another does nothing: a step of one is a **round** of all, and an engine
without rows takes part with none. Rounds that follow each other are a **wave**. It begins when an
engine that rests has work and rings the bell for the next wave, and ends with a round in which none
had any: then all rest, and count it. A ring for a wave that has ended means nothing any more, so a
bell that is heard late begins nothing twice. (vLLM's engines with data-parallel attention rest by
such a counter too.)

At the start of a round everybody says what it brings. From that follows, the same for all:

- which weight sets are computed, one after the other;
- whether the wave ends;
- which weight update is applied by all before the next round: the one that everybody has received,
  checked, and could apply. So no row meets experts of another version, and rows of one version see
  experts of that version.
- whether the weights may be put aside: once all engines want that, as each needs the experts of
  all. An engine whose weights are to sleep stops, says so in the next round, and serves the others
  until all have said it. Then none computes until a round in which all have their weights again.
"""

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from nano_inference.core.gate import Gate, Stepping
from nano_inference.core.sequence import POLICY, REFERENCE
from nano_inference.errors import NanoInferenceError, RankLost
from nano_inference.parallel.process_group import ProcessGroup

dist: Any = torch.distributed

SETS = (POLICY, REFERENCE)  # that all engines have, in the order in which they are computed
NOTHING = -1
SLEEP_SECONDS = 60.0  # for all engines to be asked to let their weights sleep
WAKE_SECONDS = 600.0  # for all of them to read theirs back
LOOK = 0.005  # seconds between two looks at what the others have said
LISTENING = 1.0  # seconds until a bell looks whether it was closed
KEPT = 8  # waves whose keys a store holds; who listens is never so far behind


class StoreBell:
    """How an engine that has work wakes those that rest: a store of `torch.distributed` that all
    of them reach has a key for each wave.

    Args:
        store: of the lockstep alone.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._waiting = store, store.clone()  # a wait keeps a connection to itself
        self._lock = threading.Lock()
        self._wave: float = NOTHING
        self._closed = self._gone = False
        self._wake: Callable[[], None] = lambda: None

    def ring(self, wave: int) -> None:
        """Let wave `wave` begin, if it has not. Raises `RankLost` where the store is gone."""
        if self._wave < wave and not self._gone:
            try:
                self._store.set(f"wave/{wave}", "")
            except RuntimeError:
                self._gone = True
            self._hear(wave)
        if self._gone:
            raise RankLost(
                "the store in which the engines in lockstep meet is gone, and an engine with it."
            )

    def heard(self) -> float:
        """The last wave that an engine has rung for; -1: none yet."""
        return self._wave

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever an engine rings; a thread of its own listens."""
        self._wake = wake
        threading.Thread(target=self._listen, name="bell of the lockstep", daemon=True).start()

    def close(self) -> None:
        """Leave. The others see by the next wave that this engine is gone."""
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
                self._gone, self._wave = True, math.inf  # a wave is due that cannot begin
                self._wake()
                return
            self._hear(wave)
            self._wake()
            with suppress(RuntimeError):
                self._waiting.delete_key(f"wave/{wave - KEPT}")

    def _comes(self, key: str) -> bool:
        """Wait for a key. Raises `RuntimeError` where the store is gone."""
        try:
            self._waiting.wait([key], timedelta(seconds=LISTENING))
        except RuntimeError:  # of either kind: not yet, or never
            return self._waiting.check([key])
        return True


@dataclass(frozen=True, slots=True)
class Member:
    """What an engine says of itself in a round.

    Attributes:
        busy: it has requests to compute.
        version: of the weights that it serves.
        update: version of the update that it could apply now; None: there is none.
        wants_sleep: its weights are asleep, or are to be as soon as all may sleep.
    """

    busy: bool
    version: int
    update: int | None
    wants_sleep: bool


@dataclass(frozen=True)
class Lockstep:
    """One engine's seat among the engines in lockstep, before the engine is built.

    Attributes:
        group: the engines, by number. Its experts are those of `shard_of(spec, engines=(group.rank,
            group.size))`.
        bell: that all of them hear.
    """

    group: ProcessGroup
    bell: StoreBell

    def close(self) -> None:
        """Leave; the others end too, since their experts are incomplete."""
        self.group.close()
        self.bell.close()


class LockstepGate(Gate):
    """One engine's side of the lockstep.

    Args:
        seat: of this engine.
        say: asked in every round.
        wake: called when a round is wanted.
        device: where messages lie as they travel.

    Attributes:
        wave: how many waves have ended.
        running: whether the next one has begun.
    """

    alone = False

    def __init__(
        self,
        seat: Lockstep,
        say: Callable[[], Member],
        wake: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.group, self._bell = seat.group, seat.bell
        self.wave = 0
        self.running = False
        self.asleep = False
        self.num_rounds = 0
        self._say, self._device, self._seat = say, device, seat
        self._agreed: int | None = None  # the update that all apply before the next round
        self._told: int | None = None  # the update that the others know of
        self._told_sleep = False
        self._bell.listen(wake)

    def is_due(self) -> bool:
        """Whether this engine has to take part in a round."""
        if self.running or self._bell.heard() >= self.wave:
            return True
        mine = self._say()
        return (
            mine.busy
            or mine.update not in (None, self._told)
            or mine.wants_sleep != self._told_sleep
        )

    def allows(self, version: int | None) -> bool:
        """Whether everybody applies the update of this version now."""
        return version is not None and version == self._agreed

    def begin(self, weight_sets: Collection[str] = ()) -> list[str]:
        """Begin a round; returns all weight sets that some engine computes, in order.

        Args:
            weight_sets: that this engine computes.

        Raises `RankLost` where an engine does not come, or serves another version.
        """
        if unknown := set(weight_sets) - set(SETS):
            raise RuntimeError(
                f"engines in lockstep have no weight set {min(unknown)!r} in common."
            )
        if not self.running:
            self._bell.ring(self.wave)
            self.running = True
        mine = self._say()
        sets = sum(1 << place for place, name in enumerate(SETS) if name in weight_sets)
        update = NOTHING if mine.update is None else mine.update
        said = torch.tensor(
            [mine.busy, mine.version, update, sets, mine.wants_sleep], device=self._device
        )
        try:
            told = torch.stack(self.group.all_gather(said))
        except RankLost as lost:
            raise RankLost(f"the engines in lockstep cannot go on: {lost}") from lost
        return self._take_in(told.tolist(), mine)

    def await_sleep(self, engine: Stepping) -> None:
        """See `Gate`. Serves the other engines meanwhile."""
        self._wait(lambda: self.asleep or not engine.life.wants_sleep, engine, SLEEP_SECONDS)

    def await_wake(self, engine: Stepping) -> None:
        """See `Gate`. Ends early where this engine is to sleep again."""
        if not self._wait(lambda: engine.life.wants_sleep or not self.asleep, engine, WAKE_SECONDS):
            raise NanoInferenceError(
                "the weights of other engines in lockstep sleep on, and this one waits for them; "
                "wake() them, and then this one again."
            )

    def _wait(self, holds: Callable[[], bool], engine: Stepping, seconds: float) -> bool:
        """Take part in rounds until it holds; False: not in so many seconds."""
        end = time.monotonic() + seconds
        while not holds():
            engine.require_alive()
            if time.monotonic() > end:
                return False
            if engine.has_work():  # else the others' rounds, or a thread that steps, are waited for
                engine.advance()
            else:
                time.sleep(LOOK)
        return True

    def close(self) -> None:
        """See `Gate`."""
        self._seat.close()

    def _take_in(self, told: list[list[int]], mine: Member) -> list[str]:
        busy, versions, updates, sets, sleepers = zip(*told, strict=True)
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
    """Why the weights of an engine in lockstep may not sleep."""
    return NanoInferenceError(
        "the weights of engines in lockstep sleep together, and not all of these were asked to "
        f"sleep within {SLEEP_SECONDS:g} s, or some were woken; ask all of them at once."
    )


def process_in_lockstep(meeting: str, rank: int, size: int, device: torch.device) -> Lockstep:
    """The lockstep of an engine that has a process to itself.

    Args:
        meeting: path of a file that all engines of this machine see, and that was not used
            before.
        rank: this engine's number.
        size: how many there are.
        device: that it computes on.

    Raises `RankLost` if the others do not come in time.
    """
    store = dist.FileStore(meeting, -1)
    group = ProcessGroup.meet(dist.PrefixStore("group", store), rank, size, device)
    return Lockstep(group, StoreBell(dist.PrefixStore("bell", store)))
