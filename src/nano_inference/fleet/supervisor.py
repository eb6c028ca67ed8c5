"""`Supervisor`: the engines of a fleet from their start to their end, and the state that they
share.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, get_args

import msgspec

from nano_inference.errors import EngineDead, NanoInferenceError
from nano_inference.fleet.counts import FleetCounts
from nano_inference.fleet.errors import ReplicaConflict, ReplicaNotFound
from nano_inference.fleet.replica import Changed, FleetEvent, Left, Lost, Opened, Replica
from nano_inference.fleet.router import Router
from nano_inference.kv_cache.block_hash import adapter_key
from nano_inference.remote import time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.messages import EngineInfo
from nano_inference.remote.status import ReplicaStatus, State
from nano_inference.remote.tasks import start_task
from nano_inference.remote.temporary import temporary_folder
from nano_inference.types import AdapterInfo, EngineStats, KvPolicy, Memory

log = logging.getLogger("nano_inference.server")


_SAME = ("model_path", "vocab_size", "eos_token_ids", "numerics")  # of all replicas


class Supervisor:
    """Starts engines, ends those that hang, and lets a new one serve when it has what the others
    have: weights of the same version, the same pause, the same sleep.

    Args:
        report: called with each event of the engines.
        router: gets the names of the replicas that take requests.
        bring_weights: (donor, client, version): gives an engine the weights that the donor serves.
        make: a client of an engine that is not started yet, by the number of its place.
        restart: start a new engine in the place of one that has died.
        stall_timeout: seconds after which a replica that has something to do and gets nowhere is
            killed.
        in_lockstep: with one all die; new ones are started when none is left, all at once.

    Attributes:
        replicas: all of them, by name.
        lock: held by what changes the state that all have in common, and by a replica that is
            brought to it.
        version: of the weights that all of them serve.
        paused: whether the fleet was paused by a call.
        asleep: the parts of the memory that were given back.
        keeps_old: whether requests finish on the version before.
        adapters: that all of them serve, by name.
        adapter_versions: the newest of each name, also of those that were unloaded.
        num_deaths: replicas that died after they were built.
    """

    def __init__(
        self,
        report: Callable[[FleetEvent], None],
        router: Router,
        bring_weights: Callable[[EngineClient, EngineClient, int], Awaitable[None]],
        make: Callable[[int], EngineClient],
        *,
        restart: bool,
        stall_timeout: float,
        in_lockstep: bool,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.lock = asyncio.Lock()
        self.version = 0
        self.paused = False
        self.asleep: tuple[Memory, ...] = ()
        self.keeps_old = False
        self.adapters: dict[str, AdapterInfo] = {}
        self.adapter_versions: dict[str, int] = {}
        self.num_deaths = 0
        self._report = report
        self._router = router
        self._bring_weights = bring_weights
        self._make = make
        self._restart = restart
        self._stall_timeout = stall_timeout
        self._in_lockstep = in_lockstep
        self._first: EngineInfo | None = None  # what all others must be like
        self._counts = FleetCounts()
        self._num_made = 0
        self._tasks = set[asyncio.Task[Any]]()
        self._ends = set[asyncio.Task[None]]()
        self._closing = False

    async def start(self, count: int) -> None:
        """Build so many at once. Raises what kept one from being built."""
        replicas = [self._new() for _ in range(count)]
        for answer in await asyncio.gather(
            *(each.client.start() for each in replicas), return_exceptions=True
        ):
            if isinstance(answer, BaseException):
                raise answer
        self._first = replicas[0].client.info
        self._open(replicas, again=False)
        self.spawn(self._watch())

    async def close(self) -> None:
        """Let all end."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()  # one that starts an engine ends it then
        ends = [each.client.close() for each in self.replicas.values()]
        await asyncio.gather(*ends, *tasks, *self._ends, return_exceptions=True)

    def end_starts(self) -> None:
        """Give up those that do not serve yet, and begin no other: the end is near."""
        self._closing = True
        for each in self.replicas.values():
            if each.state in ("starting", "syncing"):
                self._end(each.client)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task, until the fleet's end."""
        start_task(work, self._tasks)

    def _end(self, client: EngineClient) -> None:
        """Close it. `close` waits for this task, and does not cancel it."""
        start_task(client.close(), self._ends)

    def living(self) -> dict[str, EngineClient]:
        """Those that serve, draining ones too."""
        return {name: each.client for name, each in self.replicas.items() if each.is_alive}

    def adapter_key(self, name: str | None) -> str | None:
        """What blocks are named by that a request with this adapter computes now."""
        info = None if name is None else self.adapters.get(name)
        return None if info is None else adapter_key(info.name, info.version)

    def serves_adapter(self, info: AdapterInfo) -> None:
        """All serve this version from now on."""
        self.adapters[info.name] = info
        newest = self.adapter_versions.get(info.name, 0)
        self.adapter_versions[info.name] = max(newest, info.version)

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Of all."""
        return tuple(map(self._status, self.replicas.values()))

    def reported_stats(self) -> EngineStats | None:
        """Of all engines that are not dead, as they have last reported them; None: none has."""
        clients = [each.client for each in self.replicas.values() if each.state != "dead"]
        known = [client.stats for client in clients if client.stats is not None]
        return self.joined_stats(known) if known else None

    def joined_stats(self, each: Sequence[EngineStats]) -> EngineStats:
        """Return the statistics of these engines as if they were one, and of those that are
        gone.
        """
        return self._counts.joined(each, self.version)

    # -- coming and going --------------------------------------------------------------------------

    async def add(self) -> str:
        """One more; returns its name when it serves. Raises what keeps it from that."""
        self._require_independent()
        self._require_awake()
        each = self._new()
        client = each.client
        try:
            await client.start()
            await self._sync(each, client)
        except BaseException as problem:
            was_there = self.replicas.pop(each.name, None) is not None
            await each.client.close()
            if not was_there and isinstance(problem, Exception):
                raise ReplicaConflict(
                    f"replica {each.name!r} was removed before it served."
                ) from problem
            raise
        return each.name

    def drain(self, replica: str, *, move: bool, draining: bool) -> EngineClient:
        """See `FleetClient.drain`; returns its client, whose requests stay there."""
        each = self._named(replica)
        if not each.is_alive:
            raise ReplicaConflict(f"replica {replica!r} does not serve: it is {each.state}.")
        if move:
            self._require_others(each)
        self._router.drain(replica, draining)
        each.state = "draining" if draining else "serving"
        return each.client

    def remove(self, replica: str) -> EngineClient:
        """See `FleetClient.remove`; returns its client, which still has requests and is open."""
        self._require_independent()
        each = self._named(replica)
        if each.is_alive:
            self._require_others(each)
        del self.replicas[replica]
        self._leave(each, "dead", "it was removed")
        self._look_whether_lost("it was removed.", "it was removed")
        return each.client

    def _new(self) -> Replica:
        number, self._num_made = self._num_made, self._num_made + 1
        each = self.replicas[str(number)] = Replica(str(number), self._make(number))
        self._look_after(each)
        return each

    def _look_after(self, each: Replica) -> None:
        client = each.client
        client.watch(lambda: self._died(each, client))

    def _open(
        self,
        replicas: list[Replica],
        version: int | None = None,
        adapters: Iterable[AdapterInfo] | None = None,
        *,
        again: bool,
    ) -> None:
        """These are the first that serve, with weights of this version and these adapters; None:
        those that they were built with. `again`: after all had died.
        """
        for each in replicas:
            self._require_same(each)
        info = replicas[0].client.info
        self.version = info.weight_version if version is None else version
        self.paused, self.asleep, self.keeps_old = False, (), False
        self.adapters.clear()
        for adapter in info.adapters if adapters is None else adapters:
            self.serves_adapter(adapter)
        kept = {"adapters": tuple(self.adapters.values()), "weight_version": self.version}
        self._report(Opened(msgspec.structs.replace(info, **kept), again))
        for each in replicas:
            self._admit(each)

    def _admit(self, each: Replica) -> None:
        each.state, each.why = "serving", ""
        each.backoff.ready(time.monotonic())
        self._router.add(each.name)
        self._report(Changed())
        log.info("replica %s serves weight version %d.", each.name, self.version)

    def _leave(self, each: Replica, state: State, why: str) -> None:
        stats = each.client.stats
        if state == "dead" != each.state and stats is not None:
            self._counts.keep(stats)
        each.state, each.why = state, why
        if each.name in self._router.replicas:
            self._router.remove(each.name)
        self._report(Changed())

    def _died(self, each: Replica, client: EngineClient, why: str | None = None) -> None:
        """An engine has died; its requests will fail next, and go on elsewhere."""
        if self._closing or each.client is not client or each.state == "dead":
            return
        why = why or client.why_dead or "it has died."
        log.error("replica %s has died (%s): %s", each.name, each.state, why)
        if each.state != "starting":
            self.num_deaths += 1
        self._leave(each, "dead", why)
        self._end(client)
        self._look_whether_lost(why, client.public_reason)
        if self._restart and each.name in self.replicas:
            delay = each.backoff.died(time.monotonic())
            if not self._in_lockstep:
                self.spawn(self._start_again(each, delay))
            elif all(other.state == "dead" for other in self.replicas.values()):
                self.spawn(self._start_all_again(delay))

    def _look_whether_lost(self, why: str, public: str) -> None:
        """One is gone. If none serves, the fleet is told, also when the one that was to come does
        not.
        """
        if self._first is not None and not self.living():
            coming = any(other.state in ("starting", "syncing") for other in self.replicas.values())
            self._report(Lost(why, public, coming))

    async def _start_again(self, each: Replica, delay: float) -> None:
        await asyncio.sleep(delay)
        while "weights" in self.asleep and self.living():  # a trainer has the memory now
            await asyncio.sleep(time_limits.WATCH)
        if self._closing or self.replicas.get(each.name) is not each:  # it was removed
            return
        await self._bring_up(each, self._renew(each).start)

    async def _start_all_again(self, delay: float) -> None:
        """Engines that cannot do without each other, when the last one has died."""
        await asyncio.sleep(delay)
        if self._closing:
            return
        started = [(each, self._renew(each)) for each in self.replicas.values()]
        try:
            await asyncio.gather(*(client.start() for _, client in started))
            for each, client in started:
                self._require_there(each, client)
            self._open([each for each, _ in started], again=True)
        except Exception as problem:  # the others would wait for that one
            for each, client in started:
                self._died(each, client, str(problem))
                client.kill()

    def _renew(self, each: Replica) -> EngineClient:
        """Another engine in its place, which is not started yet."""
        each.client, each.state = self._make(int(each.name)), "starting"
        each.num_starts += 1
        self._look_after(each)
        return each.client

    async def _bring_up(
        self, each: Replica, begin: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Let a replica serve, when it has what the others have; end it if it cannot have that."""
        client = each.client
        try:
            if begin is not None:
                await begin()
            await self._sync(each, client)
        except Exception as problem:
            log.error("replica %s could not be brought up: %s", each.name, problem)
            if each.client is client:
                self._died(each, client, str(problem))  # first, so that this is why
                client.kill()

    # -- what all have in common -------------------------------------------------------------------

    def left_behind(self, replica: str, why: str) -> None:
        """It does not have what the others have, and is brought there before it serves again. Its
        requests go on elsewhere meanwhile.
        """
        each = self.replicas[replica]
        log.warning("replica %s is brought to the others: %s", replica, why)
        self._leave(each, "syncing", why)
        self._report(Left(each.client))
        self.spawn(self._bring_up(each))

    async def _sync(self, each: Replica, client: EngineClient) -> None:
        """Weights, adapters, pause and sleep as the others have them. With the lock, so that
        nothing changes meanwhile.

        If no replica is left that has them, it is the first one again, with the weights that it
        has.
        """
        self._require_there(each, client)
        each.state = "syncing"
        async with self.lock:
            self._require_there(each, client)
            self._require_same(each)
            version = await self._bring_what_serves(each, client)
            adapters = await self._bring_adapters(client)
            if self.living():
                self._require_awake()
                await client.call(
                    "wake", memory=[part for part in get_args(Memory) if part not in self.asleep]
                )
                if self.paused:
                    await client.call("pause", mode="keep")
                else:
                    await client.call("resume")
                if self.asleep:
                    await client.call("sleep", memory=list(self.asleep))
            if not self.living():
                await client.call("wake", memory=list(get_args(Memory)))
                await client.call("resume")
            self._require_there(each, client)
            if self.living():
                self._admit(each)
            else:
                self._open([each], version, adapters, again=True)

    async def _bring_what_serves(self, each: Replica, client: EngineClient) -> int:
        """The weights that serve, from any that has them; returns the version that it has then."""
        version: int = await client.call("get_weight_version")
        if version == self.version:
            return version

        async def bring(donor: EngineClient) -> None:
            self._require_awake()
            await self._bring_weights(donor, client, self.version)

        began = time.monotonic()
        if not await self._from_a_donor(client, bring):
            return version
        seconds = time.monotonic() - began
        log.info("replica %s got weight version %d in %.2f s.", each.name, self.version, seconds)
        return self.version

    async def _bring_adapters(self, client: EngineClient) -> list[AdapterInfo]:
        """The adapters that serve, also those that it has read itself: their folders may hold
        others by now. Returns those that it has then.
        """
        own = {each.name: each for each in await client.call("adapters")}
        for name in own.keys() - self.adapters.keys() if self.living() else ():
            await client.call("unload_adapter", name=name)
        for name in self.adapters:
            await self._from_a_donor(
                client, lambda donor, name=name: bring_adapter(donor, client, name)
            )
        return list(await client.call("adapters"))

    async def _from_a_donor(
        self, client: EngineClient, bring: Callable[[EngineClient], Awaitable[None]]
    ) -> bool:
        """Bring an engine something from a replica that serves, and from the next one where that
        dies; whether there was one.
        """
        while (donor := next(iter(self.living().values()), None)) is not None:
            try:
                await bring(donor)
            except EngineDead:
                if donor.why_dead is None or client.why_dead is not None:
                    raise
            else:
                return True
        return False

    def _named(self, replica: str) -> Replica:
        if replica not in self.replicas:
            raise ReplicaNotFound(replica)
        return self.replicas[replica]

    def _require_there(self, each: Replica, client: EngineClient) -> None:
        """Raise if it was removed, or has died, while it waited for something."""
        if self.replicas.get(each.name) is not each:
            raise NanoInferenceError(f"replica {each.name!r} was removed before it served.")
        if each.client is not client or client.why_dead is not None:
            raise EngineDead(client.why_dead or "it has died.")

    def _require_awake(self) -> None:
        if "weights" in self.asleep and self.living():
            raise ReplicaConflict("the weights of the other replicas are asleep; wake them first.")

    def _require_same(self, each: Replica) -> None:
        info, first = each.client.info, self._first
        for name in _SAME:
            if first is not None and getattr(info, name) != getattr(first, name):
                raise NanoInferenceError(
                    f"the replicas differ in {name}: {getattr(info, name)!r} and "
                    f"{getattr(first, name)!r}; they could "
                    "not go on with each other's requests."
                )

    def _require_others(self, each: Replica) -> None:
        if not any(other is not each and other.is_alive for other in self.replicas.values()):
            raise ReplicaConflict(
                "it is the last replica that serves; no other could go on with what it has."
            )

    def _require_independent(self) -> None:
        if self._in_lockstep:
            text = (
                "engines in lockstep share their experts: none can come or go; start a server "
                "with another number."
            )
            raise ReplicaConflict(text)

    # -- now and then ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Let the fleet gather what replicas report, and end those that hang."""
        while True:
            await asyncio.sleep(time_limits.WATCH)
            self._report(Changed())
            for name, client in self.living().items():
                if client.stalled(self._stall_timeout):
                    log.error(
                        "replica %s has got nowhere for %g s, and is killed.",
                        name,
                        self._stall_timeout,
                    )
                    client.kill()

    def _status(self, each: Replica) -> ReplicaStatus:
        routed, alive = each.name in self._router.replicas, each.is_alive
        return ReplicaStatus(
            name=each.name,
            state=each.state,
            waiting=self._router.waiting(each.name) if routed else 0,
            running=self._router.running(each.name) if routed else 0,
            weight_version=self.version if alive else None,
            num_starts=each.num_starts,
            pid=each.client.info.pid if alive else None,
            why=each.why,
        )


async def bring_adapter(
    donor: EngineClient, client: EngineClient, name: str, kv_policy: KvPolicy = "finish_old"
) -> None:
    """Give an engine an adapter that `donor` serves, as the same version and to the bit, by way of
    a file of this machine.
    """
    async with temporary_folder("adapter") as folder:
        path = str(folder / "adapter")
        await donor.call("save_adapter", name=name, path=path, timeout=time_limits.BRING_ADAPTER)
        await client.call(
            "receive_adapter", path=path, kv_policy=kv_policy, timeout=time_limits.BRING_ADAPTER
        )
