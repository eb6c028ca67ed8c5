"""`FleetOperations`: runs an engine operation on all replicas of a fleet. A change takes effect on
all of them or on none.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from nano_inference.errors import (
    AdapterError,
    EngineDead,
    InvalidRequest,
    NanoInferenceError,
    WeightUpdateConflict,
)
from nano_inference.fleet.router import Router
from nano_inference.fleet.supervisor import Supervisor, bring_adapter
from nano_inference.remote import time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.operations import FleetPolicy, Operation, operation_named
from nano_inference.types import AdapterInfo, EngineStats, KvPolicy

log = logging.getLogger("nano_inference.server")

Arguments = Mapping[str, Any]
Answers = dict[str, Any]  # by replica: its return value, or the error that it raised
Engines = Mapping[str, EngineClient]


class FleetOperations:
    """Pauses, memory, weight updates and queries of all replicas.

    A replica that dies during an operation leaves the fleet, and the others continue. If a change
    fails on some replicas, it is undone on the others. A change that cannot be undone stays, and
    the replicas without it are resynced. Every replica first checks an update (`prepare_update`).
    Then all stop between two steps, apply it, and continue. No replica draws a token with the new
    weights while another still has the old ones.
    """

    def __init__(self, supervisor: Supervisor, router: Router) -> None:
        self._supervisor = supervisor
        self._lock = supervisor.lock
        self._router = router
        # clients instead of names: an engine that replaces a dead one has no session or groups
        self._session: Engines = {}  # engines in the open weight update
        self._groups: dict[str, Engines] = {}
        self._turn = 0  # round robin of `_one`
        self._policies: Mapping[
            FleetPolicy, Callable[[Operation, float, Arguments], Awaitable[Any]]
        ] = {
            "one": self._one,
            "first": self._first,
            "same": self._same,
            "any": self._any,
            "joined": self._joined,
            "undone": self._undone,
            "replica": self._refuse,
            "stats": self._stats,
            "flush": self._flush_cache,
            "pause": self._pause,
            "resume": self._resume,
            "sleep": self._sleep,
            "wake": self._wake,
            "join": self._join_group,
            "leave": self._leave_group,
            "joined all": self._has_group,
            "begin": self._begin_update,
            "receive": self._receive,
            "finish": self._finish_update,
            "cancel": self._cancel_update,
            "load": self._load_adapter,
            "unload": self._unload_adapter,
        }

    async def call(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        """Run an operation as `EngineClient.call` does, on the whole fleet."""
        return await self._policies[operation.fleet](operation, seconds, arguments)

    async def _first(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        answers = await self._all(operation.name, seconds, arguments)
        return next(iter(answers.values()))

    async def _same(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        answers = await self._all(operation.name, seconds, arguments)
        if len(set(answers.values())) > 1:
            raise NanoInferenceError(f"the replicas do not agree on {operation.name}: {answers}.")
        return next(iter(answers.values()))

    async def _any(self, operation: Operation, seconds: float, arguments: Arguments) -> bool:
        return any((await self._all(operation.name, seconds, arguments)).values())

    async def _joined(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        assert operation.join is not None
        return operation.join(await self._all(operation.name, seconds, arguments))

    async def _undone(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        taken = operation_named(operation.undo).arguments
        undo = {name: value for name, value in arguments.items() if name in taken}
        async with self._lock:
            answers = await self._all_or_undone(operation.name, seconds, arguments, undo)
        return next(iter(answers.values()))

    async def _refuse(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        raise InvalidRequest(
            f"{operation.name!r} cannot run on a fleet; call it on one of its replicas."
        )

    @staticmethod
    def patience(operation: Operation, seconds: float) -> float:
        """Return the seconds that an operation may take in all, the sum over its calls."""
        patience, _ = operation.timed(seconds, {})
        return operation.rounds * patience

    def forget(self) -> None:
        """Forget the session and the groups, because all replicas have ended."""
        self._session = {}
        self._groups.clear()

    async def _one(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        """Call one replica, in turn, or the next one if it has died."""
        self._turn += 1
        clients = list(self._supervisor.living().values())
        for offset in range(len(clients)):
            client = clients[(self._turn + offset) % len(clients)]
            try:
                return await client.call(operation.name, timeout=seconds, **arguments)
            except EngineDead:
                continue
        raise EngineDead("no replica is left to answer.")

    # -- all of them -------------------------------------------------------------------------------

    async def _each(
        self,
        name: str,
        seconds: float,
        arguments: Arguments,
        among: Iterable[str] | None = None,
        more: Callable[[int], Arguments] = lambda _: {},
    ) -> Answers:
        """Call all replicas, or those in `among`. The i-th also gets the arguments `more(i)`. Dead
        replicas are left out. Raises `EngineDead` if none is left.
        """
        clients = self._supervisor.living()
        if among is not None:
            clients = {replica: clients[replica] for replica in among if replica in clients}
        answers = await asyncio.gather(
            *(
                client.call(name, timeout=seconds, **arguments, **more(index))
                for index, client in enumerate(clients.values())
            ),
            return_exceptions=True,
        )
        living = self._supervisor.living()
        answered = {
            replica: answer
            for replica, answer in zip(clients, answers, strict=True)
            if replica in living and not isinstance(answer, EngineDead)
        }
        if not answered:
            raise EngineDead("no replica is left to answer.")
        for answer in answered.values():
            if isinstance(answer, asyncio.CancelledError):
                raise answer
        return answered

    async def _all(
        self, name: str, seconds: float, arguments: Arguments, **options: Any
    ) -> Answers:
        """Call all replicas as `_each` does, and raise the first error."""
        answers = await self._each(name, seconds, arguments, **options)
        _raise_first(answers)
        return answers

    async def _all_or_undone(
        self,
        name: str,
        seconds: float,
        arguments: Arguments,
        undo_arguments: Arguments,
        *,
        everywhere: bool = False,
        more: Callable[[int], Arguments] = lambda _: {},
    ) -> Answers:
        """Call all replicas as `_all` does. If one fails, undo the call on the replicas on which it
        succeeded, or with `everywhere` on all.
        """
        answers = await self._each(name, seconds, arguments, more=more)
        done = [replica for replica, answer in answers.items() if not _failed(answer)]
        if len(done) < len(answers):
            if everywhere or done:
                undo, among = operation_named(name).undo, None if everywhere else done
                await self._each(undo, max(seconds, time_limits.SOON), undo_arguments, among)
            _raise_first(answers)
        return answers

    def _still(self, engines: Engines) -> Engines:
        """Return the engines that still serve."""
        living = self._supervisor.living()
        return {
            replica: client for replica, client in engines.items() if living.get(replica) is client
        }

    def _serving(self, replicas: Iterable[str]) -> Engines:
        living = self._supervisor.living()
        return {replica: living[replica] for replica in replicas if replica in living}

    def _leave_behind(self, answers: Answers, why: str) -> None:
        """Resync the replicas that have failed."""
        for replica in answers.keys() & self._supervisor.living().keys():
            if _failed(answers[replica]):
                self._supervisor.left_behind(replica, f"{why}: {answers[replica]}")

    async def _stats(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> EngineStats:
        answers = await self._all(operation.name, seconds, arguments)
        return self._supervisor.joined_stats(list(answers.values()))

    async def _flush_cache(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> None:
        await self._all(operation.name, seconds, arguments)
        self._router.forget()

    # -- pauses and memory -------------------------------------------------------------------------

    async def _pause(self, operation: Operation, seconds: float, arguments: Arguments) -> bool:
        if arguments.get("mode") != "wait":
            async with self._lock:
                return await self._pause_now(seconds, arguments)
        asked = self._supervisor.living()  # without the lock: a resume must not wait for it
        answer = await self._pause_now(seconds, arguments)
        async with self._lock:
            living = self._supervisor.living()
            late = [each for each, client in living.items() if asked.get(each) is not client]
            if self._supervisor.paused and late:
                with suppress(EngineDead):  # the late replicas have died
                    answers = await self._each("pause", time_limits.SOON, {"mode": "keep"}, late)
                    self._leave_behind(answers, "it did not pause")
        return answer

    async def _pause_now(self, seconds: float, arguments: Arguments) -> bool:
        if not await self._stop(seconds, arguments):
            return False
        self._supervisor.paused = True
        return True

    async def _stop(self, seconds: float, arguments: Arguments) -> bool:
        """Pause all engines. If one did not pause in time, resume all and return False."""
        answers = await self._each("pause", seconds, arguments)
        if all(answer is True for answer in answers.values()):
            return True
        if not self._supervisor.paused:
            await self._go_on()
        _raise_first(answers)
        return False

    async def _resume(self, operation: Operation, seconds: float, arguments: Arguments) -> None:
        async with self._lock:
            await self._go_on(seconds)
            self._supervisor.paused = False

    async def _go_on(self, seconds: float = time_limits.SOON) -> None:
        """End a pause. A replica that does not resume is resynced. Raises the first error if no
        replica resumes.
        """
        answers = await self._each("resume", seconds, {})
        if all(map(_failed, answers.values())):
            _raise_first(answers)
        self._leave_behind(answers, "it did not resume after a pause")

    async def _sleep(self, operation: Operation, seconds: float, arguments: Arguments) -> None:
        async with self._lock:
            before = self._supervisor.asleep
            awake = [part for part in ("kv_cache", "weights") if part not in before]
            await self._change_memory(operation.name, seconds, arguments, awake)
            if "kv_cache" in self._supervisor.asleep:
                self._router.forget()

    async def _wake(self, operation: Operation, seconds: float, arguments: Arguments) -> None:
        supervisor = self._supervisor
        async with self._lock:
            before = supervisor.asleep
            await self._change_memory(operation.name, seconds, arguments, before)
            if before and arguments.get("memory") is None:
                supervisor.paused = supervisor.paused and bool(supervisor.asleep)

    async def _change_memory(
        self, name: str, seconds: float, arguments: Arguments, undo: Iterable[str]
    ) -> None:
        """Sleep or wake. If it fails, call the inverse on all, for the memory parts in `undo`."""
        await self._all_or_undone(name, seconds, arguments, {"memory": list(undo)}, everywhere=True)
        self._supervisor.asleep = next(iter((await self._all("sleeping", seconds, {})).values()))

    # -- groups and updates ------------------------------------------------------------------------

    async def _join_group(self, operation: Operation, seconds: float, arguments: Arguments) -> None:
        """Join a process group. Replicas get rank, rank + 1, … in the order of the fleet."""
        count, rank = len(self._supervisor.living()), arguments["rank"]
        if count > 1 and rank + count > arguments["world_size"]:
            raise InvalidRequest(
                f"rank={rank} and world_size={arguments['world_size']} are too small for {count} "
                "replicas, each of which is one rank; the world size must be at least "
                f"{rank + count}."
            )
        group = arguments["group"]
        answers = await self._all_or_undone(
            operation.name,
            seconds,
            {key: value for key, value in arguments.items() if key != "rank"},
            {"group": group},
            more=lambda index: {"rank": rank + index},
        )
        self._groups[group] = self._serving(answers)

    async def _leave_group(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> bool:
        self._groups.pop(arguments["group"], None)
        return any((await self._all(operation.name, seconds, arguments)).values())

    async def _has_group(self, operation: Operation, seconds: float, arguments: Arguments) -> bool:
        """Return True if every replica that joined the group still has it. Later replicas get their
        weights from these.
        """
        members = self._still(self._groups.get(arguments["group"], {}))
        return all(
            (await self._all(operation.name, seconds, arguments, among=members or None)).values()
        )

    async def _begin_update(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> int:
        reason = "another replica could not begin this weight update."
        undo = {"session": arguments["session"], "reason": reason}
        async with self._lock:
            answers = await self._all_or_undone(operation.name, seconds, arguments, undo)
            self._session = self._serving(answers)
            return max(answers.values())

    async def _receive(self, operation: Operation, seconds: float, arguments: Arguments) -> Any:
        """Receive tensors on the replicas in both the session and the group. The others are
        resynced later.
        """
        serving = self._still(self._session)
        group = self._groups.get(arguments.get("group", ""), serving)
        members = {each: client for each, client in serving.items() if group.get(each) is client}
        members = members or self._supervisor.living()  # to raise the error of a single engine
        reason = "another replica could not receive this weight update."
        cancel = {"session": arguments.get("session"), "reason": reason}

        async def receive(replica: str) -> Any:
            answer = (await self._each(operation.name, seconds, arguments, [replica]))[replica]
            if _failed(answer):  # so that the others do not wait for missing tensors
                await self._each("cancel_update", time_limits.SOON, cancel)
                raise answer
            return answer

        answers = await asyncio.gather(*map(receive, members), return_exceptions=True)
        kept = {
            replica: answer
            for replica, answer in zip(members, answers, strict=True)
            if not isinstance(answer, EngineDead)
        }
        kept = {replica: kept[replica] for replica in self._serving(kept)}
        errors = [answer for answer in kept.values() if _failed(answer)]
        if errors:  # prefer the original error to cancellations that it caused
            raise next((each for each in errors if reason not in str(each)), errors[0])
        if not kept:
            raise WeightUpdateConflict("every replica that received this weight update has died.")
        self._session = self._still(members)
        return next(iter(kept.values()))

    async def _cancel_update(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> bool:
        self._session = {}
        answers = await self._each(operation.name, seconds, arguments)
        return any(answer is True for answer in answers.values())

    async def _finish_update(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> int:
        supervisor, version = self._supervisor, arguments["version"]
        policy = arguments["kv_policy"]
        async with self._lock:
            members = self._still(self._session) or supervisor.living()
            alone = len(supervisor.living()) == 1  # no other replica to wait for
            if not alone:
                await self._all("prepare_update", seconds, arguments, among=members)
            needs_no_stop = supervisor.paused or alone
            if not needs_no_stop and not await self._stop(
                seconds, {"mode": "wait" if policy == "wait" else "keep"}
            ):
                raise WeightUpdateConflict(
                    f"running requests did not end in time for weight version {version}."
                )
            try:
                answers = await self._each(operation.name, seconds, arguments, members)
                if all(map(_failed, answers.values())):
                    _raise_first(answers)
                supervisor.version, supervisor.keeps_old = version, policy == "finish_old"
                for replica in supervisor.living():
                    answer = answers.get(replica, "it took no part in the update")
                    if replica not in answers or _failed(answer):
                        why = f"it does not serve weight version {version}: {answer}"
                        supervisor.left_behind(replica, why)
                self._session = {}
                return version
            finally:
                if not needs_no_stop:
                    await self._go_on()

    # -- adapters ----------------------------------------------------------------------------------

    async def _load_adapter(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> AdapterInfo:
        """Load an adapter on one replica, which may reject it. The others get their copy from that
        replica, even if the folder has changed since. A replica that cannot have it is resynced.
        """
        supervisor, adapter = self._supervisor, arguments["name"]
        async with self._lock:
            newest = supervisor.adapter_versions.get(adapter, 0)
            version = arguments.get("version")
            if version is not None and version <= newest:
                raise AdapterError(
                    f"version={version} of adapter {adapter!r} must be above {newest}."
                )
            options = {**arguments, "version": newest + 1 if version is None else version}
            while True:  # until a living replica has it
                donor, client = next(iter(supervisor.living().items()), ("", None))
                if client is None:
                    raise EngineDead("no replica is left to load it.")
                try:
                    info: AdapterInfo = await client.call(
                        operation.name, timeout=seconds, **options
                    )
                except EngineDead:
                    if client.why_dead is None:
                        raise
                    continue
                others = {each: its for each, its in supervisor.living().items() if each != donor}
                policy: KvPolicy = arguments.get("kv_policy", "finish_old")
                answers = await asyncio.gather(
                    *(bring_adapter(client, its, adapter, policy) for its in others.values()),
                    return_exceptions=True,
                )
                if client.why_dead is None or not all(map(_failed, answers)):
                    break
            supervisor.serves_adapter(info)
            self._leave_behind(dict(zip(others, answers, strict=True)), f"no adapter {adapter!r}")
            return info

    async def _unload_adapter(
        self, operation: Operation, seconds: float, arguments: Arguments
    ) -> None:
        async with self._lock:
            answers = await self._each(operation.name, seconds, arguments)
            if all(map(_failed, answers.values())):
                _raise_first(answers)
            self._supervisor.adapters.pop(arguments["name"], None)
            self._leave_behind(answers, f"it still has adapter {arguments['name']!r}")


def _failed(answer: Any) -> bool:
    return isinstance(answer, BaseException)


def _raise_first(answers: Answers) -> None:
    for replica, answer in answers.items():
        if isinstance(answer, BaseException):
            log.warning("replica %s: %s", replica, answer)
            raise answer
