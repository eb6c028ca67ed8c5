"""`FleetClient`: several engines as one. A replica that dies takes no request with it."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from nano_inference.errors import EngineDead
from nano_inference.serving.client import STOPPING, EngineClient
from nano_inference.serving.errors import ApiError, retry_after
from nano_inference.serving.fleet.flight import Flight
from nano_inference.serving.fleet.joined_stats import joined_stats
from nano_inference.serving.fleet.prefill import LEAST, Prefill
from nano_inference.serving.fleet.replica import Failovers, ReplicaStatus
from nano_inference.serving.fleet.roster import Roster
from nano_inference.serving.fleet.router import NoReplica, Router, Ticket
from nano_inference.serving.fleet.sharing import Sharing
from nano_inference.serving.fleet.suspects import MOST_MOVES, Suspects, given_up
from nano_inference.serving.fleet.together import Together
from nano_inference.serving.fleet.transfers import Transfers
from nano_inference.serving.fleet.weights import BringWeights
from nano_inference.serving.messages import Abort, EngineInfo, Generate, Ready, ToEngine
from nano_inference.types import Delta

log = logging.getLogger("nano_inference.serving")


class FleetClient(EngineClient):
    """One engine to the server, and several behind it.

    A request goes to the replica that the router says, with a seed; its tokens are kept until it
    has ended. When its replica dies, or is to be empty, another one goes on with the same bits
    (`Flight`). Replicas come and go in the `Roster`, and whatever changes one of them changes all
    or none (`Together`). All of it happens on one event loop.

    Args:
        make: a client of an engine that is not started yet, by the number of its place.
        replicas: how many there are in the beginning.
        max_backlog: see `EngineClient`.
        restart: start a new engine in the place of one that has died.
        stall_timeout: seconds after which a replica that has something to do and gets nowhere is
            killed.
        seed: where seeds come from of requests that have none; None: entropy.
        router: places requests.
        bring_weights: see `Roster`.
        prefill_replicas: of the first replicas, how many only compute prompts (`Prefill`).
        prefill_least: tokens of the prompts that they compute.
        share_prefixes: fetch a prompt's prefix from the replica that has it, where that is faster
            (`Sharing`).
        in_lockstep: the engines cannot do without each other, so none is added, taken out or
            started again alone.
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
        router: Router | None = None,
        bring_weights: BringWeights | None = None,
        prefill_replicas: int = 0,
        prefill_least: int = LEAST,
        share_prefixes: bool = False,
        in_lockstep: bool = False,
    ) -> None:
        super().__init__(max_backlog, restart=restart)
        self.router = router if router is not None else Router()
        self.roster = Roster(
            self,
            make,
            self.router,
            restart=restart,
            stall_timeout=stall_timeout,
            bring_weights=bring_weights,
            in_lockstep=in_lockstep,
        )
        self.transfers = Transfers(self)
        self.prefill = (
            Prefill(self, self.transfers, prefill_replicas, prefill_least)
            if prefill_replicas
            else None
        )
        self.sharing = Sharing(self, self.transfers) if share_prefixes else None
        self.suspects = Suspects(self)
        self._together = Together(self.roster)
        self._num_first = replicas
        self._in_lockstep = in_lockstep
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._flights: dict[int, Flight] = {}
        self._silent = set[Flight]()  # that were handed on, and of which nothing has come since

    async def start(self) -> None:
        """Build all engines at once. Raises what kept one from being built."""
        try:
            await self.roster.start(self._num_first)
            await self._require_blocks()
        except BaseException:
            await self.close()
            raise
        if self.sharing is not None:
            self.roster.spawn(self.sharing.watch())

    async def _require_blocks(self) -> None:
        """Raise what keeps these engines from exchanging blocks, if that is asked for."""
        if self.prefill is not None or self.sharing is not None:
            for client in list(self.roster.living().values())[:1]:  # all are alike
                await client.call("describe_blocks")

    async def close(self) -> None:
        """Let all engines end."""
        self._die(STOPPING, STOPPING)
        self._flights.clear()
        await self.roster.close()

    @property
    def num_engines(self) -> int:
        """Replicas that take part in weight updates."""
        return len(self.roster.living())

    @property
    def failovers(self) -> Failovers:
        """What became of requests whose replica was gone."""
        return self.roster.failovers

    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        """Of all replicas."""
        return self.roster.statuses()

    def stalled(self, seconds: float) -> bool:
        """Whether no replica gets on."""
        living = self.roster.living()
        return bool(living) and all(client.stalled(seconds) for client in living.values())

    @property
    def is_silent(self) -> bool:
        """Whether no replica is heard of."""
        living = self.roster.living()
        return bool(living) and all(client.is_silent for client in living.values())

    def end_calls(self, problem: Exception) -> None:
        """As of one engine; also those end that wait for a replica to be built."""
        super().end_calls(problem)
        self.roster.end_starts()

    def kill(self) -> None:
        """End all engines at once."""
        for client in self.roster.living().values():
            client.kill()

    # -- replicas that come and go -----------------------------------------------------------------

    async def add(self) -> str:
        """Add a replica; returns its name when it serves. Raises what keeps it from being built."""
        self._require_alive()
        self._require_independent()
        return await self.roster.add()

    def drain(self, replica: str, *, move: bool = False, draining: bool = True) -> int:
        """Give a replica nothing new; with `move` others go on with what it has. With
        `draining=False` it takes requests again. Returns how many requests it still has. Raises
        `ApiError`.
        """
        each = self.roster.drain(replica, move=move, draining=draining)
        return sum(flight.client is each.client for flight in self._flights.values())

    async def remove(self, replica: str) -> int:
        """Take a replica out for good; others go on with what it has. Returns how many requests
        those were. Raises `ApiError`.
        """
        self._require_independent()
        return await self.roster.remove(replica)

    def _require_independent(self) -> None:
        if self._in_lockstep:
            text = (
                "engines in lockstep share their experts: none can come or go; start a server "
                "with another number."
            )
            raise ApiError(409, text)

    def opened(self, info: EngineInfo, again: bool) -> None:
        """See `Owner`."""
        if again:
            self.num_restarts += 1
        self._receive(Ready(info))

    def lost(self, why: str, public: str, coming: bool) -> None:
        """See `Owner`: as when an engine dies."""
        self.restarting = self._restart or coming
        self._flights.clear()
        self._silent.clear()
        self.suspects.forget()
        self._together.forget()
        self._die(why, public)

    def hand_on(self, client: EngineClient) -> int:
        """See `Owner`."""
        flights = [flight for flight in self._flights.values() if flight.client is client]
        for flight in flights:
            flight.let_go()
            self.orphaned(flight)
        return len(flights)

    def changed(self) -> None:
        """See `Owner`."""
        living = self.roster.living().values()
        if living and self._info is not None:
            room = sum(client.info.max_batch_size for client in living)
            least = min(client.info.max_model_len for client in living)
            if (room, least) != (self._info.max_batch_size, self._info.max_model_len):
                self._info = msgspec.structs.replace(
                    self._info, max_batch_size=room, max_model_len=least
                )
        if known := self.roster.known_stats():
            self.stats = joined_stats(known, self.roster.gone)
        self.suspects.go_on()

    # -- requests ----------------------------------------------------------------------------------

    def _begin(self, message: Generate, session: str | None) -> None:
        params, asked = message.params, None
        if params.seed is None:
            params, asked = replace(params, seed=self._seeds.getrandbits(63)), params
        message = msgspec.structs.replace(message, params=params, tell=True)
        flight = Flight(self, message, session, asked, self.info.numerics)
        self._flights[message.request_id] = flight
        try:
            self._place(flight)
        except NoReplica:
            del self._flights[message.request_id]
            text = "no replica takes requests now; all of them are about to leave."
            raise ApiError(503, text, code="draining", headers=retry_after(1.0)) from None
        except BaseException:
            self._forget(flight)
            raise

    def _place(self, flight: Flight, *, at_any: bool = False) -> None:
        """Choose a replica and hand it over. Raises `NoReplica`, and what `EngineClient.begin`
        does.
        """
        if flight.deaths >= MOST_MOVES:
            if (alone := self.suspects.place(flight)) is not None:
                self._hand_over(flight, alone)
            return
        ticket = self.prefill.place(flight) if self.prefill is not None else None
        ticket = ticket or self.choose(flight, at_any=at_any)
        if self.sharing is None or not self.sharing.fetch(flight, ticket):
            self._hand_over(flight, ticket)

    def choose(self, flight: Flight, *, at_any: bool = False) -> Ticket:
        """A place for a request, or for what follows its prompt. Raises `NoReplica`."""
        message, router, roster = flight.message, self.router, self.roster
        asked = {
            "session": flight.session,
            "salt": message.params.cache_salt,
            "version": roster.version,
        }
        if self.prefill is not None:
            with suppress(NoReplica):  # then those that are left
                return router.place(
                    message.prompt, flight.left, without=self.prefill.replicas, **asked
                )
        try:
            return router.place(message.prompt, flight.left, **asked)
        except NoReplica:
            living = roster.living()
            if not at_any or not living:
                raise
            return router.place_at(min(living, key=router.score), flight.left)

    def go_on_at(self, flight: Flight, ticket: Ticket) -> None:
        """See `Stages`."""
        self.router.finished(ticket)
        if not self.has(flight):
            return
        if ticket.replica in self.roster.living():
            self._hand_over(flight, self.router.place_at(ticket.replica, flight.left))
        else:
            self.place_again(flight)

    def _hand_over(self, flight: Flight, ticket: Ticket) -> None:
        roster = self.roster
        flight.hand_to(
            roster.replicas[ticket.replica].client,
            ticket,
            roster.version if roster.keeps_old else None,
        )

    def _send(self, message: ToEngine) -> None:
        if not isinstance(message, Abort):
            raise NotImplementedError(f"a fleet hands on no {type(message).__name__}.")
        for request_id in message.request_ids:
            flight = self._flights.get(request_id)
            if flight is None:
                continue
            if message.answered:
                self.transfers.land(flight)  # if it is on its way
                flight.end_soon()
            else:
                self._forget(flight)
                flight.let_go()

    def _forget(self, flight: Flight) -> None:
        self._silent.discard(flight)
        if self._flights.pop(flight.request_id, None) is not None and flight.ticket is not None:
            self.router.finished(flight.ticket)

    # -- what flights tell -------------------------------------------------------------------------

    def arrived(self, flight: Flight, delta: Delta) -> None:
        """See `Fleet`."""
        if delta.finished is not None:
            assert flight.ticket is not None
            self.router.finished(flight.ticket, 1)
            if not flight.left:
                self._flights.pop(flight.request_id, None)
        self._take(flight.request_id, delta)

    def ended(self, flight: Flight, problem: Exception) -> None:
        """See `Fleet`."""
        self._forget(flight)
        self._end(flight.request_id, problem)

    def began(self, flight: Flight) -> None:
        """See `Fleet`."""
        if flight.ticket is not None:
            self.router.started(flight.ticket)
        if self.sharing is not None:
            self.sharing.began(flight)

    def prompt_computed(self, flight: Flight) -> None:
        """See `Fleet`."""
        assert self.prefill is not None
        self.prefill.computed(flight)

    def orphaned(self, flight: Flight) -> None:
        """See `Fleet`."""
        if not self.has(flight):
            return
        if flight.ticket is not None:
            self.router.finished(flight.ticket)
        if flight.deaths > MOST_MOVES:
            self.ended(flight, given_up(flight))
            return
        flight.moved()
        self._silent.add(flight)
        self.failovers.moved += 1
        self.place_again(flight)

    def has(self, flight: Flight) -> bool:
        """See `Places`."""
        return flight.request_id in self._flights

    def place_again(self, flight: Flight) -> None:
        """See `Places`."""
        try:
            self._place(flight, at_any=True)
        except NoReplica:
            self.ended(flight, EngineDead("no replica is left.", "no replica is left"))
        except Exception as problem:
            log.exception("a request could not be handed on")
            self.ended(flight, problem)

    def went_on(self, flight: Flight, seconds: float) -> None:
        """See `Fleet`."""
        self.failovers.paused(seconds)
        self._silent.discard(flight)
        log.debug("request %d goes on, after %.3f s.", flight.request_id, seconds)
        if not self._silent:
            log.info("all requests that were handed on go on; the last one after %.3f s.", seconds)

    # -- control -----------------------------------------------------------------------------------

    async def call(self, name: str, *, timeout: float = 60.0, **arguments: Any) -> Any:
        """As `EngineClient.call`, of all replicas; see `Together`. It goes on where its caller
        leaves.
        """
        self._require_alive()
        call_id = next(self._ids)
        self._calls[call_id] = future = asyncio.get_running_loop().create_future()

        async def answer() -> None:
            try:
                value = await self._together.call(name, timeout, arguments)
                self._answer(call_id, lambda future: future.set_result(value))
            except Exception as problem:
                error = problem
                self._answer(call_id, lambda future: future.set_exception(error))

        self.roster.spawn(answer())
        try:
            return await asyncio.wait_for(future, self._together.patience(name, timeout))
        finally:
            self._calls.pop(call_id, None)
