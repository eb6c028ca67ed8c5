"""Blocks that are brought from replica to replica while a request waits for them."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from nano_inference.serving.client import EngineClient
from nano_inference.serving.fleet.flight import Flight
from nano_inference.serving.fleet.names import names_of, pack_names
from nano_inference.serving.fleet.roster import Roster
from nano_inference.serving.fleet.router import Router, Ticket

log = logging.getLogger("nano_inference.serving")

PATIENCE = 30.0  # seconds for which a request waits for its blocks; then it computes them


class Stages(Protocol):
    """A fleet as requests on their way see it."""

    router: Router
    roster: Roster

    def choose(self, flight: Flight, *, at_any: bool = False) -> Ticket:
        """A place for a request, or for what follows its prompt."""
        ...

    def go_on_at(self, flight: Flight, ticket: Ticket) -> None:
        """Hand a flight over, there or, if that replica is gone, anywhere; not if it has ended
        meanwhile.
        """
        ...


class Transfers:
    """Requests that no replica has, because their blocks are on the way to where they go on.

    Whatever becomes of the blocks, each request is handed over once: when they are there, when they
    cannot come, or when somebody does not want to wait (`land`). Blocks that are missing are
    computed.

    Args:
        fleet: it.

    Attributes:
        num_blocks: that were brought.
    """

    def __init__(self, fleet: Stages) -> None:
        self.num_blocks = 0
        self._fleet = fleet
        self._on_the_way: dict[int, tuple[Flight, Ticket]] = {}

    def send(
        self,
        flight: Flight,
        ticket: Ticket,
        source: EngineClient | None,
        told: Callable[[int, float], None] = lambda *_: None,
    ) -> None:
        """Bring the blocks of a flight's prompt to its next place, and hand it over there.

        Args:
            flight: that no replica has.
            ticket: where it goes.
            source: who has the blocks; None: nobody.
            told: is told how many blocks came, and in how many seconds.
        """
        flight.client = flight.ticket = None
        self._on_the_way[flight.request_id] = flight, ticket
        target = self._fleet.roster.living().get(ticket.replica)
        if source is None or target is None or target is source:
            self.land(flight)
        else:
            self._fleet.roster.spawn(self._carry(flight, source, target, told))

    def land(self, flight: Flight) -> None:
        """Do not wait (any more) for its blocks."""
        _, ticket = self._on_the_way.pop(flight.request_id, (flight, None))
        if ticket is not None:
            self._fleet.go_on_at(flight, ticket)

    async def _carry(
        self,
        flight: Flight,
        source: EngineClient,
        target: EngineClient,
        told: Callable[[int, float], None],
    ) -> None:
        began = time.monotonic()
        try:
            count = await asyncio.wait_for(self._bring(flight, source, target), PATIENCE)
            self.num_blocks += count
            told(count, time.monotonic() - began)
        except Exception as problem:
            log.warning(
                "request %d computes its prompt again: %s",
                flight.request_id,
                problem or type(problem).__name__,
            )
        self.land(flight)

    async def _bring(self, flight: Flight, source: EngineClient, target: EngineClient) -> int:
        return await bring(
            source,
            target,
            names_of_prompt(flight, target.info.block_size, self._fleet.roster.version),
        )


def names_of_prompt(flight: Flight, block_size: int, version: int) -> tuple[int, ...]:
    """Of the blocks of its prompt that another replica could find: the last token is always
    computed.
    """
    prompt = flight.message.prompt
    return names_of(
        prompt[: len(prompt) - 1], block_size, version, flight.message.params.cache_salt
    )


async def bring(source: EngineClient, target: EngineClient, names: tuple[int, ...]) -> int:
    """Bring the blocks of a chain from one engine to another, as far as they are there; returns how
    many came.

    Raises as `EngineClient.call` does.
    """
    packed = pack_names(names)
    first = here = await target.call("count_blocks", names=packed)
    while here < len(names):
        data = await source.call("export_blocks", names=packed, first=here)
        now = here if data is None else await target.call("import_blocks", data=data)
        if now <= here:
            break
        here = now
    return here - first
