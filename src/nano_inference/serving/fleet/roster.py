"""`Roster`: the engines of a fleet from their start to their end, and what they have in common."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, get_args

import msgspec

from nano_inference.errors import EngineDead, NanoInferenceError
from nano_inference.serving.client import EngineClient
from nano_inference.serving.errors import ApiError
from nano_inference.serving.fleet.joined_stats import counted
from nano_inference.serving.fleet.replica import Failovers, Owner, Replica, ReplicaStatus, State
from nano_inference.serving.fleet.router import Router
from nano_inference.serving.fleet.weights import BringWeights, by_folder
from nano_inference.serving.messages import EngineInfo
from nano_inference.types import EngineStats, Memory

log = logging.getLogger("nano_inference.serving")

GLANCE = 0.2  # seconds between two looks at the replicas
_SAME = ("model_path", "vocab_size", "eos_token_ids", "numerics")  # of all replicas


class Roster:
    """Starts engines, ends those that hang, and lets a new one serve when it has what the others
    have: weights of the same version, the same pause, the same sleep.

    Args:
        owner: who has it.
        make: a client of an engine that is not started yet, by the number of its place.
        router: is told which replicas take requests.
        restart: start a new engine in the place of one that has died.
        stall_timeout: seconds after which a replica that has something to do and gets nowhere is
            killed.
        bring_weights: lets one that serves give another one the weights of a version; None: by way
            of a folder.
        in_lockstep: with one all die; new ones are started when none is left, all at once.

    Attributes:
        replicas: all of them, by name.
        failovers: what became of requests whose replica was gone.
        lock: held by what changes the state that all have in common, and by a replica that is
            brought to it.
        version, paused, asleep: that state; see `Members`.
        keeps_old: whether requests finish on the version before.
        gone: what engines had counted that are no more.
    """

    def __init__(
        self,
        owner: Owner,
        make: Callable[[int], EngineClient],
        router: Router,
        *,
        restart: bool,
        stall_timeout: float,
        bring_weights: "BringWeights | None" = None,
        in_lockstep: bool = False,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.failovers = Failovers()
        self.lock = asyncio.Lock()
        self.version = 0
        self.paused = False
        self.asleep: tuple[Memory, ...] = ()
        self.keeps_old = False
        self.gone: Counter[str] = Counter()
        self._owner = owner
        self._make = make
        self._router = router
        self._restart = restart
        self._stall_timeout = stall_timeout
        self._bring_weights = bring_weights if bring_weights is not None else by_folder
        self._in_lockstep = in_lockstep
        self._first: EngineInfo | None = None  # what all others must be like
        self._num_made = 0
        self._tasks = set[asyncio.Task[Any]]()
        self._ends: list[asyncio.Task[None]] = []
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
        for task in list(self._tasks):
            task.cancel()
        ends = [each.client.close() for each in self.replicas.values()]
        await asyncio.gather(*ends, *self._ends, return_exceptions=True)

    def end_starts(self) -> None:
        """Give up those that do not serve yet, and begin no other: the end is near."""
        self._closing = True
        for each in self.replicas.values():
            if each.state in ("starting", "syncing"):
                # nobody cancels it
                self._ends.append(asyncio.get_running_loop().create_task(each.client.close()))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let something go on, until the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def living(self) -> dict[str, EngineClient]:
        """Those that serve, draining ones too."""
        return {name: each.client for name, each in self.replicas.items() if each.is_alive}

    def known_stats(self) -> list[EngineStats]:
        """As engines have last reported, also such as do not serve now."""
        clients = [each.client for each in self.replicas.values() if each.state != "dead"]
        return [client.stats for client in clients if client.stats is not None]

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Of all."""
        return tuple(map(self._status, self.replicas.values()))

    # -- coming and going --------------------------------------------------------------------------

    async def add(self) -> str:
        """One more; returns its name when it serves. Raises what keeps it from that."""
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
                raise ApiError(
                    409, f"replica {each.name!r} was removed before it served."
                ) from problem
            raise
        return each.name

    def drain(self, replica: str, *, move: bool, draining: bool) -> Replica:
        """See `FleetClient.drain`; returns it."""
        each = self.replicas.get(replica)
        if each is None:
            raise _unknown(replica)
        if not each.is_alive:
            raise ApiError(409, f"replica {replica!r} does not serve: it is {each.state}.")
        if move:
            self._require_others(each)
        self._router.drain(replica, draining)
        each.state = "draining" if draining else "serving"
        if draining and move:
            self._owner.hand_on(each.client)
        return each

    async def remove(self, replica: str) -> int:
        """See `FleetClient.remove`."""
        each = self.replicas.get(replica)
        if each is None:
            raise _unknown(replica)
        if each.is_alive:
            self._require_others(each)
        del self.replicas[replica]
        self._leave(each, "dead", "it was removed")
        self._look_whether_lost("it was removed.", "it was removed")
        num_moved = self._owner.hand_on(each.client)
        await each.client.close()
        log.info("replica %s was removed; %d request(s) went on elsewhere.", replica, num_moved)
        return num_moved

    def _new(self) -> Replica:
        number, self._num_made = self._num_made, self._num_made + 1
        each = Replica(str(number), self._make(number))
        self.replicas[each.name] = each
        self._look_after(each)
        return each

    def _look_after(self, each: Replica) -> None:
        client = each.client
        client.on_dead = lambda: self._bury(each, client)

    def _open(self, replicas: list[Replica], version: int | None = None, *, again: bool) -> None:
        """These are the first that serve, with weights of this version; None: those that they were
        built with.
        """
        for each in replicas:
            self._require_same(each)
        info = replicas[0].client.info
        self.version = info.weight_version if version is None else version
        self.paused, self.asleep, self.keeps_old = False, (), False
        self._owner.opened(msgspec.structs.replace(info, weight_version=self.version), again)
        for each in replicas:
            self._admit(each)

    def _admit(self, each: Replica) -> None:
        each.state, each.why = "serving", ""
        each.backoff.ready(time.monotonic())
        self._router.add(each.name)
        self._owner.changed()
        log.info("replica %s serves weight version %d.", each.name, self.version)

    def _leave(self, each: Replica, state: State, why: str) -> None:
        if state == "dead" != each.state and each.client.stats is not None:
            self.gone.update(counted(each.client.stats))
        each.state, each.why = state, why
        if each.name in self._router.replicas:
            self._router.remove(each.name)
        self._owner.changed()

    def _bury(self, each: Replica, client: EngineClient, why: str | None = None) -> None:
        """An engine has died; its requests will fail next, and go on elsewhere."""
        if self._closing or each.client is not client or each.state == "dead":
            return
        why = why or client.why_dead or "it has died."
        log.error("replica %s has died (%s): %s", each.name, each.state, why)
        served = each.state not in ("starting", "dead")
        self._leave(each, "dead", why)
        self.spawn(client.close())
        if served:
            self.failovers.deaths += 1
        self._look_whether_lost(why, client.public_reason)
        if self._restart and each.name in self.replicas:
            delay = each.backoff.died(time.monotonic())
            if not self._in_lockstep:
                self.spawn(self._start_again(each, delay))
            elif all(other.state == "dead" for other in self.replicas.values()):
                self.spawn(self._start_all_again(delay))

    def _look_whether_lost(self, why: str, public: str) -> None:
        """One is gone. If none serves, the owner is told, also when the one that was to come does
        not.
        """
        if self._first is not None and not self.living():
            coming = any(other.state in ("starting", "syncing") for other in self.replicas.values())
            self._owner.lost(why, public, coming)

    async def _start_again(self, each: Replica, delay: float) -> None:
        await asyncio.sleep(delay)
        while "weights" in self.asleep and self.living():  # the memory is somebody else's now
            await asyncio.sleep(GLANCE)
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
                self._bury(each, client, str(problem))
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
                self._bury(each, client, str(problem))  # first, so that this is why
                client.kill()

    # -- what all have in common -------------------------------------------------------------------

    def new_version(self, version: int, keeps_old: bool) -> None:
        """See `Members`."""
        self.version, self.keeps_old = version, keeps_old

    def flushed(self) -> None:
        """See `Members`."""
        self._router.forget()

    def left_behind(self, replica: str, why: str) -> None:
        """See `Members`. Its requests go on elsewhere meanwhile."""
        each = self.replicas[replica]
        log.warning("replica %s is brought to the others: %s", replica, why)
        self._leave(each, "syncing", why)
        self._owner.hand_on(each.client)
        self.spawn(self._bring_up(each))

    async def _sync(self, each: Replica, client: EngineClient) -> None:
        """Weights, pause and sleep as the others have them. With the lock, so that nothing changes
        meanwhile.

        If nobody is left who has them, it is the first one again, with the weights that it has.
        """
        self._require_there(each, client)
        each.state = "syncing"
        async with self.lock:
            self._require_there(each, client)
            self._require_same(each)
            version = await self._bring_what_serves(each, client)
            if self.living():
                self._require_awake()
                await client.call(
                    "wake", memory=[part for part in get_args(Memory) if part not in self.asleep]
                )
                if self.paused:
                    await client.call("pause_within", mode="keep", seconds=60.0)
                else:
                    await client.call("end_pause")
                if self.asleep:
                    await client.call("sleep", memory=list(self.asleep))
            if not self.living():
                await client.call("wake", memory=list(get_args(Memory)))
                await client.call("end_pause")
            self._require_there(each, client)
            if self.living():
                self._admit(each)
            else:
                self._open([each], version, again=True)

    async def _bring_what_serves(self, each: Replica, client: EngineClient) -> int:
        """The weights that serve, from any that has them; returns the version that it has then."""
        version: int = await client.call("get_weight_version")
        while (
            donor := next(iter(self.living().values()), None)
        ) is not None and version != self.version:
            self._require_awake()
            began = time.monotonic()
            try:
                await self._bring_weights(donor, client, self.version)
            except EngineDead:
                if donor.why_dead is None or client.why_dead is not None:
                    raise
                continue  # there may be another one
            version = self.version
            log.info(
                "replica %s got weight version %d in %.2f s.",
                each.name,
                version,
                time.monotonic() - began,
            )
        return version

    def _require_there(self, each: Replica, client: EngineClient) -> None:
        """Raise if it was removed, or has died, while it waited for something."""
        if self.replicas.get(each.name) is not each:
            raise NanoInferenceError(f"replica {each.name!r} was removed before it served.")
        if each.client is not client or client.why_dead is not None:
            raise EngineDead(client.why_dead or "it has died.")

    def _require_awake(self) -> None:
        if "weights" in self.asleep and self.living():
            raise ApiError(409, "the weights of the other replicas are asleep; wake them first.")

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
            raise ApiError(
                409, "it is the last replica that serves; nobody could go on with what it has."
            )

    # -- now and then ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Let the owner gather what replicas report, and end those that hang."""
        while True:
            await asyncio.sleep(GLANCE)
            self._owner.changed()
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


def _unknown(replica: str) -> ApiError:
    return ApiError(404, f"there is no replica {replica!r}.")
