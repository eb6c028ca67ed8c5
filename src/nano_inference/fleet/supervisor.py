"""`Supervisor`: the engines of a fleet from start to end, and their shared state."""

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


_SAME = ("model_path", "vocab_size", "eos_token_ids", "numerics")  # equal in all replicas


class Supervisor:
    """Manager that starts engines and ends those that hang. A new engine serves once it has the
    shared state of the others: the weight version, the adapters, the pause and the sleep.

    Args:
        report: Called with each event of the engines.
        router: Router that gets the names of the replicas that accept requests.
        bring_weights: (donor, client, version): gives an engine the weights of the donor.
        make: Returns a client of an engine that is not started yet, by the number of the replica.
        restart: Start a new engine for a replica whose engine has died.
        stall_timeout: Seconds after which a replica that has work and makes no progress is killed.
        in_lockstep: The engines depend on each other, so all die with one. New ones are started
            together, once none is left.

    Attributes:
        replicas: All replicas, by name.
        lock: Held while the shared state changes, and while a replica is brought to it.
        version: Weight version of all replicas.
        paused: True if a call has paused the fleet.
        asleep: Parts of the memory that were released.
        keeps_old: True if requests finish on the previous version.
        adapters: Adapters that all replicas serve, by name.
        adapter_versions: Newest version per adapter name, including unloaded adapters.
        num_deaths: Number of replicas that died after they were built.
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
        self._first: EngineInfo | None = None  # all others must match it
        self._counts = FleetCounts()
        self._num_made = 0
        self._tasks = set[asyncio.Task[Any]]()
        self._ends = set[asyncio.Task[None]]()
        self._closing = False

    async def start(self, count: int) -> None:
        """Build `count` replicas concurrently. Raises the error of the first that fails."""
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
        """Close all replicas, and cancel all tasks."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()  # a task that is starting an engine then ends the engine
        ends = [each.client.close() for each in self.replicas.values()]
        await asyncio.gather(*ends, *tasks, *self._ends, return_exceptions=True)

    def end_starts(self) -> None:
        """Give up replicas that do not serve yet, and start no others. Call it before `close`."""
        self._closing = True
        for replica in self.replicas.values():
            if replica.state in ("starting", "syncing"):
                self._end(replica.client)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task in the background until the fleet is closed."""
        start_task(work, self._tasks)

    def _end(self, client: EngineClient) -> None:
        """Close a client in a task that `close` awaits and does not cancel."""
        start_task(client.close(), self._ends)

    def living(self) -> dict[str, EngineClient]:
        """Return the clients of the replicas that serve or drain, by name."""
        return {name: each.client for name, each in self.replicas.items() if each.is_alive}

    def adapter_key(self, name: str | None) -> str | None:
        """Return the adapter's key in the names of newly computed blocks, or None."""
        info = None if name is None else self.adapters.get(name)
        return None if info is None else adapter_key(info.name, info.version)

    def serves_adapter(self, info: AdapterInfo) -> None:
        """Record that all replicas serve this adapter version from now on."""
        self.adapters[info.name] = info
        newest = self.adapter_versions.get(info.name, 0)
        self.adapter_versions[info.name] = max(newest, info.version)

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Return the status of every replica."""
        return tuple(map(self._status, self.replicas.values()))

    def reported_stats(self) -> EngineStats | None:
        """Return the joint statistics that engines reported last, or None if none has reported."""
        clients = [each.client for each in self.replicas.values() if each.state != "dead"]
        known = [client.stats for client in clients if client.stats is not None]
        return self.joined_stats(known) if known else None

    def joined_stats(self, stats: Sequence[EngineStats]) -> EngineStats:
        """Return the statistics of these engines and of ended ones, as of one engine."""
        return self._counts.joined(stats, self.version)

    # -- coming and going --------------------------------------------------------------------------

    async def add(self) -> str:
        """Add a replica, and return its name when it serves. Raises if that fails."""
        self._require_independent()
        self._require_awake()
        replica = self._new()
        client = replica.client
        try:
            await client.start()
            await self._sync(replica, client)
        except BaseException as problem:
            was_there = self.replicas.pop(replica.name, None) is not None
            await replica.client.close()
            if not was_there and isinstance(problem, Exception):
                raise ReplicaConflict(
                    f"replica {replica.name!r} was removed before it served."
                ) from problem
            raise
        return replica.name

    def drain(self, replica: str, *, move: bool, draining: bool) -> EngineClient:
        """Drain a replica as `FleetClient.drain` does. Return its client, which keeps requests."""
        entry = self._named(replica)
        if not entry.is_alive:
            raise ReplicaConflict(f"replica {replica!r} does not serve: it is {entry.state}.")
        if move:
            self._require_others(entry)
        self._router.drain(replica, draining)
        entry.state = "draining" if draining else "serving"
        return entry.client

    def remove(self, replica: str) -> EngineClient:
        """Remove a replica, and return its client, which is open and still has its requests."""
        self._require_independent()
        entry = self._named(replica)
        if entry.is_alive:
            self._require_others(entry)
        del self.replicas[replica]
        self._leave(entry, "dead", "it was removed")
        self._look_whether_lost("it was removed.", "it was removed")
        return entry.client

    def _new(self) -> Replica:
        number, self._num_made = self._num_made, self._num_made + 1
        replica = self.replicas[str(number)] = Replica(str(number), self._make(number))
        self._look_after(replica)
        return replica

    def _look_after(self, replica: Replica) -> None:
        client = replica.client
        client.watch(lambda: self._died(replica, client))

    def _open(
        self,
        replicas: list[Replica],
        version: int | None = None,
        adapters: Iterable[AdapterInfo] | None = None,
        *,
        again: bool,
    ) -> None:
        """Let the first replicas serve, with this weight version and these adapters. None: as the
        engines were built. `again`: all replicas had died before.
        """
        for replica in replicas:
            self._require_same(replica)
        info = replicas[0].client.info
        self.version = info.weight_version if version is None else version
        self.paused, self.asleep, self.keeps_old = False, (), False
        self.adapters.clear()
        for adapter in info.adapters if adapters is None else adapters:
            self.serves_adapter(adapter)
        kept = {"adapters": tuple(self.adapters.values()), "weight_version": self.version}
        self._report(Opened(msgspec.structs.replace(info, **kept), again))
        for replica in replicas:
            self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        replica.state, replica.why = "serving", ""
        replica.backoff.ready(time.monotonic())
        self._router.add(replica.name)
        self._report(Changed())
        log.info("replica %s serves weight version %d.", replica.name, self.version)

    def _leave(self, replica: Replica, state: State, why: str) -> None:
        stats = replica.client.stats
        if state == "dead" != replica.state and stats is not None:
            self._counts.keep(stats)
        replica.state, replica.why = state, why
        if replica.name in self._router.replicas:
            self._router.remove(replica.name)
        self._report(Changed())

    def _died(self, replica: Replica, client: EngineClient, why: str | None = None) -> None:
        """Handle the death of an engine. Its requests fail next, and move to other replicas."""
        if self._closing or replica.client is not client or replica.state == "dead":
            return
        why = why or client.why_dead or "it has died."
        log.error("replica %s has died (%s): %s", replica.name, replica.state, why)
        if replica.state != "starting":
            self.num_deaths += 1
        self._leave(replica, "dead", why)
        self._end(client)
        self._look_whether_lost(why, client.public_reason)
        if self._restart and replica.name in self.replicas:
            delay = replica.backoff.died(time.monotonic())
            if not self._in_lockstep:
                self.spawn(self._start_again(replica, delay))
            elif all(other.state == "dead" for other in self.replicas.values()):
                self.spawn(self._start_all_again(delay))

    def _look_whether_lost(self, why: str, public: str) -> None:
        """Report `Lost` if no replica serves, also if one that was being built has failed."""
        if self._first is not None and not self.living():
            coming = any(other.state in ("starting", "syncing") for other in self.replicas.values())
            self._report(Lost(why, public, coming))

    async def _start_again(self, replica: Replica, delay: float) -> None:
        await asyncio.sleep(delay)
        while "weights" in self.asleep and self.living():  # a trainer uses the memory now
            await asyncio.sleep(time_limits.WATCH)
        if self._closing or self.replicas.get(replica.name) is not replica:  # it was removed
            return
        await self._bring_up(replica, self._renew(replica).start)

    async def _start_all_again(self, delay: float) -> None:
        """Restart all engines in lockstep once the last one has died."""
        await asyncio.sleep(delay)
        if self._closing:
            return
        started = [(replica, self._renew(replica)) for replica in self.replicas.values()]
        try:
            await asyncio.gather(*(client.start() for _, client in started))
            for replica, client in started:
                self._require_there(replica, client)
            self._open([replica for replica, _ in started], again=True)
        except Exception as problem:  # the other engines would wait for the failed one
            for replica, client in started:
                self._died(replica, client, str(problem))
                client.kill()

    def _renew(self, replica: Replica) -> EngineClient:
        """Give a replica a new client, of an engine that is not started yet."""
        replica.client, replica.state = self._make(int(replica.name)), "starting"
        replica.num_starts += 1
        self._look_after(replica)
        return replica.client

    async def _bring_up(
        self, replica: Replica, begin: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Let a replica serve once it has the shared state, or end it if that fails."""
        client = replica.client
        try:
            if begin is not None:
                await begin()
            await self._sync(replica, client)
        except Exception as problem:
            log.error("replica %s could not be brought up: %s", replica.name, problem)
            if replica.client is client:
                self._died(replica, client, str(problem))  # before `kill`, to record this reason
                client.kill()

    # -- shared state ------------------------------------------------------------------------------

    def left_behind(self, replica: str, why: str) -> None:
        """Take a replica that lacks the shared state out of service, and resync it. Its requests
        move to other replicas.
        """
        entry = self.replicas[replica]
        log.warning("resyncing replica %s: %s", replica, why)
        self._leave(entry, "syncing", why)
        self._report(Left(entry.client))
        self.spawn(self._bring_up(entry))

    async def _sync(self, replica: Replica, client: EngineClient) -> None:
        """Bring a replica to the shared weights, adapters, pause and sleep, and let it serve. Holds
        the lock, so that nothing changes meanwhile.

        If no other replica is left, this one defines the shared state, with the weights it has.
        """
        self._require_there(replica, client)
        replica.state = "syncing"
        async with self.lock:
            self._require_there(replica, client)
            self._require_same(replica)
            version = await self._bring_what_serves(replica, client)
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
            self._require_there(replica, client)
            if self.living():
                self._admit(replica)
            else:
                self._open([replica], version, adapters, again=True)

    async def _bring_what_serves(self, replica: Replica, client: EngineClient) -> int:
        """Bring the shared weights from any replica, and return the version that the engine has."""
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
        log.info("replica %s got weight version %d in %.2f s.", replica.name, self.version, seconds)
        return self.version

    async def _bring_adapters(self, client: EngineClient) -> list[AdapterInfo]:
        """Bring the shared adapters, including those that the engine loaded itself, because their
        folders may have changed since. Return the adapters that the engine has then.
        """
        loaded = {each.name: each for each in await client.call("adapters")}
        for name in loaded.keys() - self.adapters.keys() if self.living() else ():
            await client.call("unload_adapter", name=name)
        for name in self.adapters:
            await self._from_a_donor(
                client, lambda donor, name=name: bring_adapter(donor, client, name)
            )
        return list(await client.call("adapters"))

    async def _from_a_donor(
        self, client: EngineClient, bring: Callable[[EngineClient], Awaitable[None]]
    ) -> bool:
        """Call `bring` with a serving replica, or with the next one if that dies. Return False if
        none is left.
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

    def _require_there(self, replica: Replica, client: EngineClient) -> None:
        """Raise if a replica was removed or died meanwhile."""
        if self.replicas.get(replica.name) is not replica:
            raise NanoInferenceError(f"replica {replica.name!r} was removed before it served.")
        if replica.client is not client or client.why_dead is not None:
            raise EngineDead(client.why_dead or "it has died.")

    def _require_awake(self) -> None:
        if "weights" in self.asleep and self.living():
            raise ReplicaConflict("the weights of the other replicas are asleep; wake them first.")

    def _require_same(self, replica: Replica) -> None:
        info, first = replica.client.info, self._first
        for name in _SAME:
            if first is not None and getattr(info, name) != getattr(first, name):
                raise NanoInferenceError(
                    f"the replicas differ in {name} ({getattr(info, name)!r} and "
                    f"{getattr(first, name)!r}), so they could not resume each other's requests; "
                    "start all with the same options."
                )

    def _require_others(self, replica: Replica) -> None:
        if not any(other is not replica and other.is_alive for other in self.replicas.values()):
            raise ReplicaConflict(
                "it is the last replica that serves, and no other could resume its requests; add a "
                "replica first."
            )

    def _require_independent(self) -> None:
        if self._in_lockstep:
            text = (
                "engines in lockstep share their experts, so none can be added or removed; start a "
                "server with another number of engines."
            )
            raise ReplicaConflict(text)

    # -- periodic checks ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Report changes regularly, and kill replicas that hang."""
        while True:
            await asyncio.sleep(time_limits.WATCH)
            self._report(Changed())
            for name, client in self.living().items():
                if client.stalled(self._stall_timeout):
                    log.error(
                        "killing replica %s: no progress for %g s.",
                        name,
                        self._stall_timeout,
                    )
                    client.kill()

    def _status(self, replica: Replica) -> ReplicaStatus:
        routed, alive = replica.name in self._router.replicas, replica.is_alive
        return ReplicaStatus(
            name=replica.name,
            state=replica.state,
            waiting=self._router.waiting(replica.name) if routed else 0,
            running=self._router.running(replica.name) if routed else 0,
            weight_version=self.version if alive else None,
            num_starts=replica.num_starts,
            pid=replica.client.info.pid if alive else None,
            why=replica.why,
        )


async def bring_adapter(
    donor: EngineClient, client: EngineClient, name: str, kv_policy: KvPolicy = "finish_old"
) -> None:
    """Give an engine an adapter of `donor`, bit for bit, through a local file."""
    async with temporary_folder("adapter") as folder:
        path = str(folder / "adapter")
        await donor.call("save_adapter", name=name, path=path, timeout=time_limits.BRING_ADAPTER)
        await client.call(
            "receive_adapter", path=path, kv_policy=kv_policy, timeout=time_limits.BRING_ADAPTER
        )
