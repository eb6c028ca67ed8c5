"""`Together`: a call of one engine, made of all replicas of a fleet. What it changes, it changes on
all or on none.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from nano_inference.errors import (
    EngineDead,
    InvalidRequest,
    NanoInferenceError,
    WeightUpdateConflict,
)
from nano_inference.serving.client import EngineClient
from nano_inference.serving.fleet.joined_stats import joined_stats
from nano_inference.types import EngineStats, Memory, TrainingSample

log = logging.getLogger("nano_inference.serving")

SOON = 60.0  # seconds of calls that wait for a step at most
Arguments = Mapping[str, Any]
Engines = Mapping[str, EngineClient]
_KEEP: Arguments = {"mode": "keep", "seconds": SOON}


class Members(Protocol):
    """A fleet as its control plane sees it. Replicas go by their names.

    Attributes:
        lock: held by what changes its state, also by a replica that joins.
        version: of the weights that all of them serve.
        paused: whether somebody has paused it.
        asleep: the parts of the memory that were given back.
        gone: what engines counted that are no more; see `joined_stats`.
    """

    lock: asyncio.Lock
    version: int
    paused: bool
    asleep: tuple[Memory, ...]
    gone: Counter[str]

    def living(self) -> dict[str, EngineClient]:
        """Those that serve, draining ones too."""
        ...

    def left_behind(self, replica: str, why: str) -> None:
        """It does not have what the others have: it is to be brought there before it serves
        again.
        """
        ...

    def new_version(self, version: int, keeps_old: bool) -> None:
        """All others serve this version now; `keeps_old`: requests finish on the one before."""
        ...

    def flushed(self) -> None:
        """No prefix is cached any more."""
        ...


class Together:
    """The control plane: pause, memory, weight updates and questions, for all replicas at once.

    A replica that dies meanwhile leaves the fleet, and the others go on. Whatever else fails on one
    is undone on all. An update is first checked by all (`prepare_update`), then all stop between
    two steps, take it, and go on: while one of them has the old weights no other draws a token with
    the new ones.
    """

    def __init__(self, fleet: Members) -> None:
        self.lock = fleet.lock
        self._fleet = fleet
        # Engines, not places alone: another one in the place of a dead one has neither its session
        # nor its groups.
        self._session: Engines = {}  # that take part in the open weight session
        self._groups: dict[str, Engines] = {}
        self._calls: dict[str, Callable[[str, float, Arguments], Awaitable[Any]]] = {
            "stats": self._stats,
            "get_weight_version": self._same,
            "weights_checksum": self._checksums,
            "flush_cache": self._flush,
            "pause": self._pause,
            "pause_within": self._pause,
            "resume": self._resume,
            "end_pause": self._resume,
            "is_paused": self._any,
            "sleep": self._sleep,
            "wake": self._wake,
            "sleeping": self._first,
            "take_in": self._nothing,
            "join_group": self._join,
            "leave_group": self._leave_group,
            "has_group": self._has_group,
            "begin_update": self._begin,
            "finish_update": self._finish,
            "cancel_update": self._cancel,
            "weight_rows": self._first,
            "describe": self._describe,
        }

    async def call(self, name: str, seconds: float, arguments: Arguments) -> Any:
        """As `EngineClient.call`, of the whole fleet."""
        if name in (
            "receive_broadcast",
            "receive_stream",
            "receive_file",
            "receive_folder",
            "receive_bucket",
        ):
            return await self._receive(name, seconds, arguments)
        if name not in self._calls:
            raise InvalidRequest(
                f"{name!r} is not a call of a fleet; there are {', '.join(self._calls)}."
            )
        return await self._calls[name](name, seconds, arguments)

    @staticmethod
    def patience(name: str, seconds: float) -> float:
        """The time that a call may take in all: one that is made of several gets it for each."""
        return (4 if name == "finish_update" else 2) * seconds

    def forget(self) -> None:
        """All replicas are gone, and what they had with them."""
        self._session = {}
        self._groups.clear()

    # -- all of them -------------------------------------------------------------------------------

    async def each(
        self,
        name: str,
        seconds: float,
        arguments: Arguments,
        among: Iterable[str] | None = None,
        more: Callable[[int], Arguments] = lambda _: {},
    ) -> dict[str, Any]:
        """Call all replicas (or these); what each returned, or the error that it raised. The dead
        are left out.

        Raises `EngineDead` if none is left.
        """
        clients = self._fleet.living()
        if among is not None:
            clients = {replica: clients[replica] for replica in among if replica in clients}
        answers = await asyncio.gather(
            *(
                client.call(name, timeout=seconds, **arguments, **more(place))
                for place, client in enumerate(clients.values())
            ),
            return_exceptions=True,
        )
        living = self._fleet.living()
        found = {
            replica: answer
            for replica, answer in zip(clients, answers, strict=True)
            if replica in living and not isinstance(answer, EngineDead)
        }
        if not found:
            raise EngineDead("no replica is left that could answer.")
        for answer in found.values():
            if isinstance(answer, asyncio.CancelledError):
                raise answer
        return found

    async def all_or_error(
        self, name: str, seconds: float, arguments: Arguments, **options: Any
    ) -> dict[str, Any]:
        """As `each`; raises the first error."""
        found = await self.each(name, seconds, arguments, **options)
        _raise_first(found)
        return found

    async def _nothing(self, name: str, seconds: float, arguments: Arguments) -> None:
        await self.all_or_error(name, seconds, arguments)

    async def _any(self, name: str, seconds: float, arguments: Arguments) -> bool:
        return any((await self.all_or_error(name, seconds, arguments)).values())

    async def _has_group(self, name: str, seconds: float, arguments: Arguments) -> bool:
        """Of those that joined it; a replica that came later gets its weights from them."""
        living = self._fleet.living()
        among = self._still(self._groups.get(arguments["group"], {})) or living
        return all((await self.all_or_error(name, seconds, arguments, among=among)).values())

    def _still(self, engines: Engines) -> Engines:
        """Those of them that serve."""
        living = self._fleet.living()
        return {
            replica: client for replica, client in engines.items() if living.get(replica) is client
        }

    def _serving(self, replicas: Iterable[str]) -> Engines:
        living = self._fleet.living()
        return {replica: living[replica] for replica in replicas if replica in living}

    async def _go_on(self, name: str = "end_pause", seconds: float = SOON) -> None:
        """End a pause. One that does not go on with the others leaves, and comes back as they are.
        Raises the error of the first if none goes on.
        """
        found = await self.each(name, seconds, {})
        if all(isinstance(answer, BaseException) for answer in found.values()):
            _raise_first(found)
        self._leave_behind(found, "it does not go on after a pause")

    def _leave_behind(self, found: Mapping[str, Any], why: str) -> None:
        """Those that have failed come back as the others are."""
        for replica in found.keys() & self._fleet.living().keys():
            if isinstance(found[replica], BaseException):
                self._fleet.left_behind(replica, f"{why}: {found[replica]}")

    async def _same(self, name: str, seconds: float, arguments: Arguments) -> Any:
        found = await self.all_or_error(name, seconds, arguments)
        if len(set(found.values())) > 1:
            raise NanoInferenceError(f"the replicas do not agree on {name}: {found}.")
        return next(iter(found.values()))

    # -- questions ---------------------------------------------------------------------------------

    async def _stats(self, name: str, seconds: float, arguments: Arguments) -> EngineStats:
        found: dict[str, EngineStats] = await self.all_or_error("stats", seconds, arguments)
        return joined_stats(list(found.values()), self._fleet.gone)

    async def _checksums(self, name: str, seconds: float, arguments: Arguments) -> dict[str, str]:
        found: dict[str, dict[str, str]] = await self.all_or_error(
            "weights_checksum", seconds, arguments
        )
        (first, expected), *others = found.items()
        for replica, checksums in others:
            differ = sorted(
                name for name in expected.keys() & checksums if expected[name] != checksums[name]
            )
            if differ:
                raise NanoInferenceError(
                    f"replicas {first} and {replica} do not have the same weights: {differ[0]!r} "
                    "differs, one of "
                    f"{len(differ)}."
                )
            expected = checksums | expected  # of engines in lockstep each has some of the experts
        return expected

    async def _first(self, name: str, seconds: float, arguments: Arguments) -> Any:
        found: dict[str, Any] = await self.all_or_error(name, seconds, arguments)
        return next(iter(found.values()))

    async def _describe(self, name: str, seconds: float, arguments: Arguments) -> dict[str, Any]:
        found: dict[str, dict[str, Any]] = await self.all_or_error("describe", seconds, arguments)
        return {**next(iter(found.values())), "replicas": len(found)}

    # -- pauses and memory -------------------------------------------------------------------------

    async def _flush(self, name: str, seconds: float, arguments: Arguments) -> None:
        await self.all_or_error("flush_cache", seconds, arguments)
        self._fleet.flushed()

    async def _pause(self, name: str, seconds: float, arguments: Arguments) -> Any:
        if arguments.get("mode") == "wait":  # without the lock: somebody may resume meanwhile
            asked = self._fleet.living()
            answer = await self._pause_now(name, seconds, arguments)
            async with self.lock:
                late = [
                    each
                    for each, client in self._fleet.living().items()
                    if asked.get(each) is not client
                ]
                if self._fleet.paused and late:
                    with suppress(EngineDead):  # those have died
                        self._leave_behind(
                            await self.each("pause_within", SOON, _KEEP, late), "it does not pause"
                        )
            return answer
        async with self.lock:
            return await self._pause_now(name, seconds, arguments)

    async def _pause_now(self, name: str, seconds: float, arguments: Arguments) -> Any:
        found = await self.each(name, seconds, arguments)
        failed = [
            answer
            for answer in found.values()
            if isinstance(answer, BaseException) or answer is False
        ]
        if failed:
            if not self._fleet.paused:
                await self._go_on()
            _raise_first(found)
            return False
        self._fleet.paused = True
        if name == "pause_within":
            return True
        samples: list[TrainingSample] = [sample for answer in found.values() for sample in answer]
        return samples

    async def _resume(self, name: str, seconds: float, arguments: Arguments) -> None:
        async with self.lock:
            await self._go_on(name, seconds)
            self._fleet.paused = False

    async def _sleep(self, name: str, seconds: float, arguments: Arguments) -> None:
        async with self.lock:
            before = self._fleet.asleep
            found = await self.each("sleep", seconds, arguments)
            if any(isinstance(answer, BaseException) for answer in found.values()):
                slept = [part for part in ("kv_cache", "weights") if part not in before]
                await self.each("wake", seconds, {"memory": slept})
                _raise_first(found)
            self._fleet.asleep = await self._parts(seconds)
            if "kv_cache" in self._fleet.asleep:
                self._fleet.flushed()

    async def _wake(self, name: str, seconds: float, arguments: Arguments) -> None:
        async with self.lock:
            before = self._fleet.asleep
            found = await self.each("wake", seconds, arguments)
            if any(isinstance(answer, BaseException) for answer in found.values()):
                await self.each("sleep", seconds, {"memory": list(before)})
                _raise_first(found)
            self._fleet.asleep = await self._parts(seconds)
            if before and arguments.get("memory") is None and not self._fleet.asleep:
                self._fleet.paused = False

    async def _parts(self, seconds: float) -> tuple[Memory, ...]:
        return tuple(await self._first("sleeping", seconds, {}))

    # -- groups and updates ------------------------------------------------------------------------

    async def _join(self, name: str, seconds: float, arguments: Arguments) -> None:
        """Replicas get rank, rank + 1, … in the order in which they came to the fleet."""
        replicas, rank = tuple(self._fleet.living()), arguments["rank"]
        if rank + len(replicas) > arguments["world_size"]:
            raise InvalidRequest(
                f"rank={rank} and world_size={arguments['world_size']} leave no room for "
                f"{len(replicas)} replicas, "
                "which are as many engines; the world size has to be at least "
                f"{rank + len(replicas)}."
            )
        plain = {key: value for key, value in arguments.items() if key != "rank"}
        found = await self.each(
            "join_group", seconds, plain, replicas, lambda place: {"rank": rank + place}
        )
        if any(isinstance(answer, BaseException) for answer in found.values()):
            joined = [
                replica
                for replica, answer in found.items()
                if not isinstance(answer, BaseException)
            ]
            if joined:
                await self.each("leave_group", SOON, {"group": arguments["group"]}, joined)
            _raise_first(found)
        self._groups[arguments["group"]] = self._serving(found)

    async def _leave_group(self, name: str, seconds: float, arguments: Arguments) -> bool:
        self._groups.pop(arguments["group"], None)
        return await self._any(name, seconds, arguments)

    async def _begin(self, name: str, seconds: float, arguments: Arguments) -> int:
        async with self.lock:
            found = await self.each("begin_update", seconds, arguments)
            if any(isinstance(answer, BaseException) for answer in found.values()):
                reason = "another replica could not begin this weight update."
                begun = [
                    replica
                    for replica, answer in found.items()
                    if not isinstance(answer, BaseException)
                ]
                if begun:
                    await self.each(
                        "cancel_update",
                        SOON,
                        {"session": arguments["session"], "reason": reason},
                        begun,
                    )
                _raise_first(found)
            self._session = self._serving(found)
            return max(found.values())

    async def _receive(self, name: str, seconds: float, arguments: Arguments) -> Any:
        """Those receive that are in the session and in the group; the others are brought to the new
        version later.
        """
        serving = self._still(self._session)
        members = self._still(self._groups.get(arguments.get("group", ""), serving))
        among = {
            replica: client for replica, client in serving.items() if members.get(replica) is client
        }
        if not among:  # as one engine says it
            among = self._fleet.living()
        session = arguments.get("session")
        reason = "another replica could not receive this weight update."

        async def one(replica: str) -> Any:
            found = await self.each(name, seconds, arguments, [replica])
            answer = found[replica]
            if isinstance(answer, BaseException):  # the others need not wait for what will not come
                await self.each("cancel_update", SOON, {"session": session, "reason": reason})
                raise answer
            return answer

        answers = await asyncio.gather(
            *(one(replica) for replica in sorted(among)), return_exceptions=True
        )
        living = self._fleet.living()
        kept = [
            answer
            for replica, answer in zip(sorted(among), answers, strict=True)
            if replica in living and not isinstance(answer, EngineDead)
        ]
        errors = [answer for answer in kept if isinstance(answer, BaseException)]
        if errors:  # the one that came first; others were cancelled for it
            raise next((each for each in errors if reason not in str(each)), errors[0])
        if not kept:
            raise WeightUpdateConflict("every replica that received this weight update has died.")
        self._session = self._still(among)
        return kept[0]

    async def _cancel(self, name: str, seconds: float, arguments: Arguments) -> bool:
        self._session = {}
        return any(
            answer is True
            for answer in (await self.each("cancel_update", seconds, arguments)).values()
        )

    async def _finish(self, name: str, seconds: float, arguments: Arguments) -> int:
        async with self.lock:
            return await self._finish_locked(seconds, arguments)

    async def _finish_locked(self, seconds: float, arguments: Arguments) -> int:
        fleet, version, policy = self._fleet, arguments["version"], arguments["kv_policy"]
        members = self._still(self._session) or fleet.living()
        await self.all_or_error("prepare_update", seconds, arguments, among=members)
        stopped = not fleet.paused
        if stopped:
            within = {
                "mode": "wait" if policy == "wait" else "keep",
                "seconds": arguments["seconds"],
            }
            found = await self.each("pause_within", seconds, within)
            if any(
                isinstance(answer, BaseException) or answer is False for answer in found.values()
            ):
                await self._go_on()
                _raise_first(found)
                raise WeightUpdateConflict(
                    f"the requests did not end in time for weight version {version}."
                )
        try:
            found = await self.each("finish_update", seconds, arguments, members)
            took = [
                replica
                for replica, answer in found.items()
                if not isinstance(answer, BaseException)
            ]
            if not took:
                _raise_first(found)
            fleet.new_version(version, policy == "finish_old")
            for replica in fleet.living():
                if replica not in took:
                    why = found.get(replica, "it took no part in the update")
                    fleet.left_behind(replica, f"it does not serve weight version {version}: {why}")
            self._session = {}
            return version
        finally:
            if stopped:
                await self._go_on()


def _raise_first(found: Mapping[str, Any]) -> None:
    for replica, answer in found.items():
        if isinstance(answer, BaseException):
            log.warning("replica %s: %s", replica, answer)
            raise answer
