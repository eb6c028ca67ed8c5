"""`FleetClient`: several engines served as one. No request is lost when a replica dies."""

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from nano_inference.errors import EngineDead
from nano_inference.fleet.errors import Draining, EnginesDied, NoReplica, WeightsChanged
from nano_inference.fleet.failover import Failover
from nano_inference.fleet.operations import FleetOperations
from nano_inference.fleet.replica import Changed, FleetEvent, Left, Lost, Opened
from nano_inference.fleet.requests import FleetRequest
from nano_inference.fleet.router import Router, Ticket
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.fleet.transfers import LEAST, Prefill, PrefixSharing, Transfers
from nano_inference.remote import time_limits
from nano_inference.remote.client import STOPPING, EngineClient
from nano_inference.remote.messages import Abort, Generate, Ready, ToEngine
from nano_inference.remote.operations import Operation
from nano_inference.remote.status import FleetReport
from nano_inference.remote.temporary import temporary_folder
from nano_inference.types import Delta

log = logging.getLogger("nano_inference.server")


class FleetClient(EngineClient):
    """Client of several engines, with the interface of a single engine's client.

    A request gets a seed and the replica that the router chooses. The fleet keeps the request's
    tokens until it has ended. If its replica dies or is drained, another one resumes it with the
    same bits (`Failover`). The `Supervisor` adds and removes replicas. An engine operation that
    changes one replica changes all or none (`FleetOperations`). Everything runs on one event loop.

    Args:
        make: Returns a client of an engine that is not started yet, by the number of the replica.
        replicas: Number of replicas at the start.
        max_backlog: Limit on unsent deltas, as in `EngineClient`.
        restart: Start a new engine for a replica whose engine has died.
        stall_timeout: Seconds after which a replica that has work and makes no progress is killed.
        seed: Seed of the seeds for requests without one; None: entropy.
        prefill_replicas: Number of replicas, the first ones, that only compute prompts (`Prefill`).
        prefill_least: Least number of prompt tokens for these replicas.
        share_prefixes: Fetch a prompt's prefix from the replica that has it, if that is faster
            (`PrefixSharing`).
        in_lockstep: The engines depend on each other, so none is added, removed or restarted
            separately.
        managed: True if replicas may be added and removed by name. False: the fleet is one engine
            that is restarted.

    Attributes:
        requests: Unfinished requests, by id.
        failover: Guard that decides which requests may move, and counts moves.
    """

    def __init__(
        self,
        make: Callable[[int], EngineClient],
        replicas: int,
        max_backlog: int,
        *,
        restart: bool = False,
        stall_timeout: float = 60.0,
        seed: int | None = None,
        prefill_replicas: int = 0,
        prefill_least: int = LEAST,
        share_prefixes: bool = False,
        in_lockstep: bool = False,
        managed: bool = True,
    ) -> None:
        super().__init__(max_backlog, restart=restart)
        self._is_managed = managed
        self.requests: dict[int, FleetRequest] = {}
        self.router = Router()
        self.supervisor = Supervisor(
            self._take_event,
            self.router,
            self.bring_weights,
            make,
            restart=restart,
            stall_timeout=stall_timeout,
            in_lockstep=in_lockstep,
        )
        self.failover = Failover(self.requests, self.router, self.supervisor)
        self.transfers = Transfers(self.supervisor)
        self.prefill = Prefill(prefill_replicas, prefill_least, self.router, self.supervisor)
        self.sharing = PrefixSharing(self.supervisor)
        self._shares_prefixes = share_prefixes
        self._operations = FleetOperations(self.supervisor, self.router)
        self._num_first = replicas
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    async def start(self) -> None:
        """Build all engines concurrently. Raises the error of the first that fails."""
        try:
            await self.supervisor.start(self._num_first)
            if self.prefill.replicas or self._shares_prefixes:
                # raises if these engines cannot exchange blocks; all are alike
                await next(iter(self.supervisor.living().values())).call("describe_blocks")
        except BaseException:
            await self.close()
            raise
        if self._shares_prefixes:
            self.supervisor.spawn(self.sharing.watch())

    async def close(self) -> None:
        """Close all engines."""
        self._die(STOPPING, STOPPING)
        self.requests.clear()
        await self.supervisor.close()

    @property
    def num_engines(self) -> int:
        """Number of replicas that take part in weight updates."""
        return len(self.supervisor.living())

    def replica_report(self) -> FleetReport:
        """Return the state of all replicas, and the counts of moved requests."""
        supervisor = self.supervisor
        return FleetReport(
            weight_version=supervisor.version,
            paused=supervisor.paused,
            asleep=supervisor.asleep,
            replicas=supervisor.statuses(),
            deaths=supervisor.num_deaths,
            moves=self.failover,
        )

    @property
    def managed(self) -> "FleetClient | None":
        """This client, or None if it was made as one engine."""
        return self if self._is_managed else None

    def stalled(self, seconds: float) -> bool:
        """Return True if no replica makes progress."""
        living = self.supervisor.living()
        return bool(living) and all(client.stalled(seconds) for client in living.values())

    @property
    def is_silent(self) -> bool:
        """True if no replica sends messages."""
        living = self.supervisor.living()
        return bool(living) and all(client.is_silent for client in living.values())

    def end_calls(self, problem: Exception) -> None:
        """Fail all calls and all waits for a replica to be built."""
        super().end_calls(problem)
        self.supervisor.end_starts()

    async def bring_weights(self, donor: EngineClient, client: EngineClient, version: int) -> None:
        """Give an engine the weights of this version, which `donor` has, through a local folder."""
        async with temporary_folder("weights") as folder:
            path = str(folder / "all")
            await donor.call(
                "save_weights", path=path, version=version, timeout=time_limits.BRING_WEIGHTS
            )
            await client.call("begin_update", session=0, complete=True)
            options = {"session": 0, "timeout": time_limits.BRING_WEIGHTS}
            await client.call("receive_folder", path=path, **options)
            await client.call("finish_update", version=version, kv_policy="abort", **options)

    def kill(self) -> None:
        """Kill all engines."""
        for client in self.supervisor.living().values():
            client.kill()

    # -- replicas that come and go -----------------------------------------------------------------

    async def add(self) -> str:
        """Add a replica, and return its name when it serves. Raises if it cannot be built."""
        self._require_alive()
        return await self.supervisor.add()

    def drain(self, replica: str, *, move: bool = False, draining: bool = True) -> int:
        """Send a replica no new requests. With `move`, others resume its requests. With
        `draining=False` it accepts requests again. Return the number of requests that it still
        has. Raises `ReplicaNotFound` or `ReplicaConflict`.
        """
        client = self.supervisor.drain(replica, move=move, draining=draining)
        if draining and move:
            self._move_requests(client)
        return len(self._requests_of(client))

    async def remove(self, replica: str) -> int:
        """Remove a replica. Others resume its requests. Return the number of these
        requests. Raises `ReplicaNotFound` or `ReplicaConflict`.
        """
        client = self.supervisor.remove(replica)
        num_moved = self._move_requests(client)
        await client.close()
        log.info("replica %s was removed; %d request(s) moved to others.", replica, num_moved)
        return num_moved

    def _take_event(self, event: FleetEvent) -> None:
        match event:
            case Opened(info, again):
                if again:
                    self.num_restarts += 1
                self._receive(Ready(info))
            case Lost(why, public, coming):  # like the death of a single engine
                self.restarting = self._restart or coming
                self.requests.clear()
                self.failover.waiting.clear()
                self._operations.forget()
                self._die(why, public)
            case Left(client):
                self._move_requests(client)
            case Changed():
                self.replicas_changed()

    def replicas_changed(self) -> None:
        living = self.supervisor.living().values()
        if living and self._info is not None:
            room = sum(client.info.max_batch_size for client in living)
            least = min(client.info.max_model_len for client in living)
            if (room, least) != (self._info.max_batch_size, self._info.max_model_len):
                self._info = msgspec.structs.replace(
                    self._info, max_batch_size=room, max_model_len=least
                )
        self.stats = self.supervisor.reported_stats() or self.stats
        while (suspect := self.failover.next_suspect()) is not None:
            self._place_again(suspect)

    def _requests_of(self, client: EngineClient) -> list[FleetRequest]:
        return [request for request in self.requests.values() if request.client is client]

    # -- placing requests --------------------------------------------------------------------------

    def _begin(self, message: Generate, session: str | None) -> None:
        params, asked = message.params, None
        if params.seed is None:
            params, asked = replace(params, seed=self._seeds.getrandbits(63)), params
        message = msgspec.structs.replace(message, params=params, tell=True)
        request = FleetRequest(message, session, asked, self.info.numerics)
        self.requests[message.request_id] = request
        try:
            self._place(request)
        except NoReplica:
            self._forget(request)
            raise Draining from None
        except BaseException:
            self._forget(request)
            raise

    def _place(self, request: FleetRequest, *, at_any: bool = False) -> None:
        """Choose a replica and send it the request. Raises `NoReplica` and the errors of
        `EngineClient.begin`.
        """
        if self.failover.is_suspect(request):
            if (placement := self.failover.place_suspect(request)) is not None:
                self._hand_to_replica(request, placement)
            return
        ticket = self.prefill.place(request) or self._choose(request, at_any=at_any)
        source = self.sharing.source(request, ticket)
        if source is None:
            self._hand_to_replica(request, ticket)
        else:
            self._send_blocks(request, ticket, source, is_fetched=True)

    def _choose(self, request: FleetRequest, *, at_any: bool = False) -> Ticket:
        """Return a placement for a request, or for the part after its prompt. With `at_any` a
        draining replica is allowed. Raises `NoReplica`.
        """
        message, router = request.message, self.router
        for without in (self.prefill.replicas, ()):  # prefill replicas only if no others are left
            with suppress(NoReplica):
                return router.place(
                    message.prompt,
                    request.left,
                    session=request.session,
                    salt=message.params.cache_salt,
                    version=self.supervisor.version,
                    adapter=self.supervisor.adapter_key(message.params.adapter),
                    without=without,
                )
        living = self.supervisor.living()
        if not at_any or not living:
            raise NoReplica("no replica accepts requests.")
        return router.place_at(min(living, key=router.score), request.left)

    def _hand_to_replica(self, request: FleetRequest, ticket: Ticket) -> None:
        """Send a request to the replica of this ticket. Raises as `EngineClient.begin` does."""
        supervisor = self.supervisor
        version = supervisor.version if supervisor.keeps_old else None
        client = supervisor.replicas[ticket.replica].client
        request.hand_to(client, ticket, _Replies(self._hear, self._fail, request), version)

    def _place_again(self, request: FleetRequest) -> None:
        """Choose a replica for a request that has none, or end the request if that fails."""
        try:
            self._place(request, at_any=True)
        except NoReplica:
            self._end_request(request, EngineDead("no replica is left.", "no replica is left"))
        except Exception as problem:
            log.exception("a request could not be moved")
            self._end_request(request, problem)

    def _move(self, request: FleetRequest) -> None:
        """Move a request whose replica has ended to another one."""
        if request.request_id not in self.requests:
            return
        if request.ticket is not None:
            self.router.finished(request.ticket)
        try:
            self.failover.moves(request)
        except EnginesDied as problem:
            self._end_request(request, problem)
        else:
            self._place_again(request)

    def _move_requests(self, client: EngineClient) -> int:
        """Move the requests of a replica to others, and return their number."""
        requests = self._requests_of(client)
        for request in requests:
            request.let_go()
            self._move(request)
        return len(requests)

    # -- requests that wait for blocks -------------------------------------------------------------

    def _send_blocks(
        self,
        request: FleetRequest,
        ticket: Ticket,
        source: EngineClient | None,
        *,
        is_fetched: bool = False,
    ) -> None:
        """Move the blocks of a request's prompt to its next replica, then send the request there.

        The request is sent once: when its blocks have arrived, when they cannot arrive, or when it
        is canceled meanwhile. Missing blocks are computed.

        Args:
            request: Request without a replica.
            ticket: Its next placement.
            source: Replica that has the blocks, or None if it has ended.
            is_fetched: Measure the time as the cost of fetching.
        """
        self.transfers.leave(request, ticket)
        target = self.supervisor.living().get(ticket.replica)
        if source is None or target is None or target is source:
            return self._land(request)

        async def carry() -> None:
            brought = await self.transfers.carry(request, source, target)
            if is_fetched and brought is not None:
                self.sharing.fetched(brought)
            self._land(request)

        return self.supervisor.spawn(carry())

    def _land(self, request: FleetRequest) -> None:
        """Send a request without waiting for its blocks any longer. If its next replica has ended,
        choose another.
        """
        ticket = self.transfers.land(request)
        if ticket is None:
            return
        self.router.finished(ticket)
        if request.request_id not in self.requests:
            return
        if ticket.replica in self.supervisor.living():
            self._hand_to_replica(request, self.router.place_at(ticket.replica, request.left))
        else:
            self._place_again(request)

    # -- from the client, and from replicas --------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if not isinstance(message, Abort):
            raise NotImplementedError(f"a fleet cannot forward {type(message).__name__}.")
        for request_id in message.request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if message.answered:
                self._land(request)  # if it waits for blocks
                request.end_soon()
            else:
                self._forget(request)
                request.let_go()

    def _hear(self, request: FleetRequest, delta: Delta) -> None:
        """Handle a delta from a replica."""
        if request.samples[delta.sample_index].ended:  # the delta repeats it
            return None
        self.failover.heard(request, time.monotonic() - request.heard_at)
        if request.hear(delta):
            if request.ticket is not None:
                self.router.started(request.ticket)
            self.sharing.began(request)
        try:
            new = request.take(delta)
        except WeightsChanged as problem:
            request.let_go()
            return self._end_request(request, problem)
        if new is not None:
            self._answer_with(request, new)
        if delta.finished is None and request.has_computed_prompt:
            self._resume_elsewhere(request)
        return None

    def _answer_with(self, request: FleetRequest, delta: Delta) -> None:
        """Send a delta to the client."""
        if delta.finished is not None:
            assert request.ticket is not None
            self.router.finished(request.ticket, 1)
            if not request.left:
                self.requests.pop(request.request_id, None)
        self._take(request.request_id, delta)

    def _resume_elsewhere(self, request: FleetRequest) -> None:
        """Move a request whose samples all have a token from its prefill replica to the next."""
        source, request.computes_prompt = request.client, False
        request.let_go()
        if request.ticket is not None:
            self.router.finished(request.ticket)
        request.moves += 1  # so that the end is compared with the received part
        self.prefill.num_prompts += 1
        self._send_blocks(request, self._choose(request, at_any=True), source)

    def _fail(self, request: FleetRequest, problem: Exception) -> None:
        """Handle an error from a replica that has ended or rejected a request."""
        if isinstance(problem, EngineDead):
            request.lost()
            self._move(request)
        elif not request.try_otherwise():
            self._end_request(request, problem)

    def _end_request(self, request: FleetRequest, problem: Exception) -> None:
        self._forget(request)
        self._end(request.request_id, problem)

    def _forget(self, request: FleetRequest) -> None:
        self.failover.waiting.discard(request)
        if self.requests.pop(request.request_id, None) is not None and request.ticket is not None:
            self.router.finished(request.ticket)

    # -- engine operations -------------------------------------------------------------------------

    def _ask(
        self, call_id: int, operation: Operation, seconds: float, arguments: dict[str, Any]
    ) -> float:
        """Start an operation on all replicas, which completes even if its caller stops waiting."""

        async def answer() -> None:
            try:
                value = await self._operations.call(operation, seconds, arguments)
                self._answer(call_id, lambda future: future.set_result(value))
            except Exception as problem:
                error = problem
                self._answer(call_id, lambda future: future.set_exception(error))

        self.supervisor.spawn(answer())
        return self._operations.patience(operation, seconds)


@dataclass(frozen=True, slots=True)
class _Replies:
    """Receiver of a replica's messages about one request."""

    hear: Callable[[FleetRequest, Delta], None]
    failed: Callable[[FleetRequest, Exception], None]
    request: FleetRequest
    name: str | None = None  # unknown to replicas; required by `Receiver`

    def put(self, delta: Delta) -> None:
        """Handle a delta from the replica."""
        self.hear(self.request, delta)

    def fail(self, problem: Exception) -> None:
        """Handle the end of the replica's messages."""
        self.failed(self.request, problem)
