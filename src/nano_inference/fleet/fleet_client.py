"""`FleetClient`: several engines as one. A replica that dies takes no request with it."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from nano_inference.fleet.errors import Draining, NoReplica
from nano_inference.fleet.failover import MOST_MOVES, Failover, FleetRequest
from nano_inference.fleet.operations import FleetOperations
from nano_inference.fleet.replica import FleetEvents
from nano_inference.fleet.router import Router, Ticket
from nano_inference.fleet.supervisor import ReplicaStatus, Supervisor
from nano_inference.fleet.transfers import LEAST, Prefill, PrefixSharing, Transfers
from nano_inference.remote.client import STOPPING, EngineClient
from nano_inference.remote.messages import Abort, EngineInfo, Generate, Ready, ToEngine
from nano_inference.remote.operations import Operation
from nano_inference.remote.temporary import temporary_folder
from nano_inference.types import Delta

SYNC_TIMEOUT = 600.0  # seconds in which a replica gets the weights of another one


class FleetClient(EngineClient):
    """One engine to the server, and several behind it.

    A request goes to the replica that the router chooses, with a seed; its tokens are kept until it
    has ended. When its replica dies, or is drained, another one goes on with the same bits
    (`Failover`). Replicas come and go in the `Supervisor`, and an engine operation that changes one
    of them changes all or none (`FleetOperations`). All of it happens on one event loop.

    Args:
        make: a client of an engine that is not started yet, by the number of its place.
        replicas: how many there are in the beginning.
        max_backlog: see `EngineClient`.
        restart: start a new engine in the place of one that has died.
        stall_timeout: seconds after which a replica that has something to do and gets nowhere is
            killed.
        seed: where seeds come from of requests that have none; None: entropy.
        prefill_replicas: of the first replicas, how many only compute prompts (`Prefill`).
        prefill_least: tokens of the prompts that they compute.
        share_prefixes: fetch a prompt's prefix from the replica that has it, where that is faster
            (`PrefixSharing`).
        in_lockstep: the engines cannot do without each other, so none is added, taken out or
            started again alone.

    Attributes:
        requests: those that have not ended, by id.
        failover: moves them, and counts it.
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
        is_one_engine: bool = False,
    ) -> None:
        super().__init__(max_backlog, restart=restart)
        self.is_one_engine = is_one_engine  # that is to be started again: there are no routes
        self.requests: dict[int, FleetRequest] = {}
        self.router = Router()
        self.supervisor = Supervisor(
            FleetEvents(
                opened=self._opened,
                lost=self._lost,
                left=self._move_requests,
                died=self._replica_died,
                changed=self.replicas_changed,
            ),
            self.router,
            self.bring_weights,
            make,
            restart=restart,
            stall_timeout=stall_timeout,
            in_lockstep=in_lockstep,
        )
        self.failover = Failover(self)
        self.transfers = Transfers(self)
        self.prefill = Prefill(self, prefill_replicas, prefill_least)
        self.sharing = PrefixSharing(self)
        self._shares_prefixes = share_prefixes
        self._operations = FleetOperations(self.supervisor, self.router)
        self._num_first = replicas
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    async def start(self) -> None:
        """Build all engines at once. Raises what kept one from being built."""
        try:
            await self.supervisor.start(self._num_first)
            if self.prefill.replicas or self._shares_prefixes:
                # raises what keeps these engines from exchanging blocks; all are alike
                await next(iter(self.supervisor.living().values())).call("describe_blocks")
        except BaseException:
            await self.close()
            raise
        if self._shares_prefixes:
            self.supervisor.spawn(self.sharing.watch())

    async def close(self) -> None:
        """Let all engines end."""
        self._die(STOPPING, STOPPING)
        self.requests.clear()
        await self.supervisor.close()

    @property
    def num_engines(self) -> int:
        """Replicas that take part in weight updates."""
        return len(self.supervisor.living())

    def replica_report(self) -> tuple[Sequence[ReplicaStatus], Failover]:
        """All engines, and counts of the requests that were moved."""
        return self.supervisor.statuses(), self.failover

    def stalled(self, seconds: float) -> bool:
        """Whether no replica gets on."""
        living = self.supervisor.living()
        return bool(living) and all(client.stalled(seconds) for client in living.values())

    @property
    def is_silent(self) -> bool:
        """Whether no replica is heard of."""
        living = self.supervisor.living()
        return bool(living) and all(client.is_silent for client in living.values())

    def end_calls(self, problem: Exception) -> None:
        """As of one engine; also those end that wait for a replica to be built."""
        super().end_calls(problem)
        self.supervisor.end_starts()

    async def bring_weights(self, donor: EngineClient, client: EngineClient, version: int) -> None:
        """Give an engine the weights of this version, which `donor` serves: by way of a folder of
        this machine.
        """
        async with temporary_folder("weights") as folder:
            path = str(folder / "all")
            await donor.call("save_weights", path=path, version=version, timeout=SYNC_TIMEOUT)
            await client.call("begin_update", session=0, complete=True)
            options = {"session": 0, "timeout": SYNC_TIMEOUT}
            await client.call("receive_folder", path=path, **options)
            await client.call("finish_update", version=version, kv_policy="abort", **options)

    def kill(self) -> None:
        """End all engines at once."""
        for client in self.supervisor.living().values():
            client.kill()

    # -- replicas that come and go -----------------------------------------------------------------

    async def add(self) -> str:
        """Add a replica; returns its name when it serves. Raises what keeps it from being built."""
        self._require_alive()
        return await self.supervisor.add()

    def drain(self, replica: str, *, move: bool = False, draining: bool = True) -> int:
        """Give a replica nothing new; with `move` others go on with what it has. With
        `draining=False` it takes requests again. Returns how many requests it still has. Raises
        `ReplicaNotFound` or `ReplicaConflict`.
        """
        client = self.supervisor.drain(replica, move=move, draining=draining)
        return len(self._requests_of(client))

    async def remove(self, replica: str) -> int:
        """Take a replica out for good; others go on with what it has. Returns how many requests
        those were. Raises
        `ReplicaNotFound` or `ReplicaConflict`.
        """
        return await self.supervisor.remove(replica)

    # -- events of the supervisor ------------------------------------------------------------------

    def _opened(self, info: EngineInfo, version: int, again: bool) -> None:
        """A first replica serves this weight version; `again`: after all had died."""
        if again:
            self.num_restarts += 1
        self._receive(Ready(msgspec.structs.replace(info, weight_version=version)))

    def _lost(self, why: str, public: str, coming: bool) -> None:
        """No replica is left, as when an engine dies; `coming`: another one is on its way."""
        self.restarting = self._restart or coming
        self.requests.clear()
        self.failover.waiting.clear()
        self._operations.forget()
        self._die(why, public)

    def _move_requests(self, client: EngineClient) -> int:
        """Let others go on with what a replica has; returns how many requests that is."""
        requests = self._requests_of(client)
        for request in requests:
            request.let_go()
            self.failover.move(request)
        return len(requests)

    def _replica_died(self) -> None:
        self.failover.deaths += 1

    def replicas_changed(self) -> None:
        """Other replicas serve than before, or they have reported."""
        living = self.supervisor.living().values()
        if living and self._info is not None:
            room = sum(client.info.max_batch_size for client in living)
            least = min(client.info.max_model_len for client in living)
            if (room, least) != (self._info.max_batch_size, self._info.max_model_len):
                self._info = msgspec.structs.replace(
                    self._info, max_batch_size=room, max_model_len=least
                )
        self.stats = self.supervisor.reported_stats() or self.stats
        self.failover.place_waiting()

    def _requests_of(self, client: EngineClient) -> list[FleetRequest]:
        return [request for request in self.requests.values() if request.client is client]

    # -- requests ----------------------------------------------------------------------------------

    def _begin(self, message: Generate, session: str | None) -> None:
        params, asked = message.params, None
        if params.seed is None:
            params, asked = replace(params, seed=self._seeds.getrandbits(63)), params
        message = msgspec.structs.replace(message, params=params, tell=True)
        request = FleetRequest(self, message, session, asked, self.info.numerics)
        self.requests[message.request_id] = request
        try:
            self.place(request)
        except NoReplica:
            self._forget(request)
            raise Draining from None
        except BaseException:
            self._forget(request)
            raise

    def place(self, request: FleetRequest, *, at_any: bool = False) -> None:
        """Choose a replica and hand the request over. Raises `NoReplica`, and what
        `EngineClient.begin` does.
        """
        if request.deaths >= MOST_MOVES:
            if (alone := self.failover.place_suspect(request)) is not None:
                self.hand_over(request, alone)
            return
        ticket = self.prefill.place(request) or self.choose(request, at_any=at_any)
        if not self.sharing.fetch(request, ticket):
            self.hand_over(request, ticket)

    def choose(self, request: FleetRequest, *, at_any: bool = False) -> Ticket:
        """A place for a request, or for what follows its prompt; `at_any`: a draining replica will
        do. Raises `NoReplica`.
        """
        message, router = request.message, self.router
        for without in (self.prefill.replicas, ()):  # those that compute prompts only if need be
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
            raise NoReplica("no replica takes requests.")
        return router.place_at(min(living, key=router.score), request.left)

    def hand_over(self, request: FleetRequest, ticket: Ticket) -> None:
        """Let the replica of this ticket take a request. Raises as `EngineClient.begin` does."""
        supervisor = self.supervisor
        version = supervisor.version if supervisor.keeps_old else None
        request.hand_to(supervisor.replicas[ticket.replica].client, ticket, version)

    def _send(self, message: ToEngine) -> None:
        if not isinstance(message, Abort):
            raise NotImplementedError(f"a fleet hands on no {type(message).__name__}.")
        for request_id in message.request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if message.answered:
                self.transfers.land(request)  # if it is on its way
                request.end_soon()
            else:
                self._forget(request)
                request.let_go()

    def _forget(self, request: FleetRequest) -> None:
        self.failover.waiting.discard(request)
        if self.requests.pop(request.request_id, None) is not None and request.ticket is not None:
            self.router.finished(request.ticket)

    # -- what requests tell ------------------------------------------------------------------------

    def has(self, request: FleetRequest) -> bool:
        """Whether this request has not ended."""
        return request.request_id in self.requests

    def arrived(self, request: FleetRequest, delta: Delta) -> None:
        """A delta is for the client."""
        if delta.finished is not None:
            assert request.ticket is not None
            self.router.finished(request.ticket, 1)
            if not request.left:
                self.requests.pop(request.request_id, None)
        self._take(request.request_id, delta)

    def ended(self, request: FleetRequest, problem: Exception) -> None:
        """It has failed."""
        self._forget(request)
        self._end(request.request_id, problem)

    def began(self, request: FleetRequest) -> None:
        """Its first tokens have come."""
        if request.ticket is not None:
            self.router.started(request.ticket)
        self.sharing.began(request)

    # -- engine operations -------------------------------------------------------------------------

    def _ask(
        self, call_id: int, operation: Operation, seconds: float, arguments: dict[str, Any]
    ) -> float:
        """Of all replicas; see `FleetOperations`. It goes on where its caller leaves."""

        async def answer() -> None:
            try:
                value = await self._operations.call(operation, seconds, arguments)
                self._answer(call_id, lambda future: future.set_result(value))
            except Exception as problem:
                error = problem
                self._answer(call_id, lambda future: future.set_exception(error))

        self.supervisor.spawn(answer())
        return self._operations.patience(operation, seconds)
