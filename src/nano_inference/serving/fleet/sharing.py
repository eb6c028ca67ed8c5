"""Prefixes of one replica for the others: a directory of who has which blocks, and fetching where
that is faster.
"""

import asyncio
import logging
import time

from nano_inference.errors import EngineDead
from nano_inference.serving.client import EngineClient
from nano_inference.serving.fleet.directory import Directory, FetchCost, worth_fetching
from nano_inference.serving.fleet.flight import Flight
from nano_inference.serving.fleet.names import report_of
from nano_inference.serving.fleet.router import Ticket
from nano_inference.serving.fleet.transfers import Stages, Transfers, names_of_prompt

log = logging.getLogger("nano_inference.serving")

LOOK = 0.5  # seconds between two reports of a replica
SECONDS = 10.0  # for one


class Sharing:
    """What the replicas hold, block by block, half a second ago; and requests that fetch some of
    it.

    Args:
        fleet: it.
        transfers: brings blocks.

    Attributes:
        directory: who holds what.
        cost: of fetching and of computing, as measured; None: nobody has said how large a block is.
        num_fetches: requests whose prefix was fetched.
    """

    def __init__(self, fleet: Stages, transfers: Transfers) -> None:
        self.directory = Directory()
        self.cost: FetchCost | None = None
        self.num_fetches = 0
        self._fleet = fleet
        self._transfers = transfers
        self._clients: dict[str, EngineClient] = {}  # of the directory's replicas
        self._silent: set[str] = set()  # replicas whose last report did not come

    def fetch(self, flight: Flight, ticket: Ticket) -> bool:
        """Bring a request's prefix to its place if somebody has more of it and that is faster.
        False: neither.
        """
        if self.cost is None or flight.has_begun or ticket.replica not in self._clients:
            return False
        living = self._fleet.roster.living()
        known = [name for name in self._clients if living.get(name) is self._clients[name]]
        names = names_of_prompt(flight, self.cost.block_size, self._fleet.roster.version)
        found = worth_fetching(self.directory, self.cost, names, ticket.replica, known)
        if found is None:
            return False
        self.num_fetches += 1
        self._transfers.send(flight, ticket, living[found.source], self.cost.fetched)
        return True

    def began(self, flight: Flight) -> None:
        """A request's first token has come: what it waited for is how fast prompts are computed
        now.
        """
        if self.cost is not None and not flight.has_begun:
            num_cached = max(known.cached_tokens for known in flight.samples)
            self.cost.prefilled(
                len(flight.message.prompt) - num_cached, time.monotonic() - flight.handed_at
            )

    async def watch(self) -> None:
        """Gather reports as long as the fleet lives."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Take in a report of every replica."""
        living = self._fleet.roster.living()
        for name, client in list(self._clients.items()):
            if living.get(name) is not client:  # it is gone, or another engine has its place
                self.directory.remove(name)
                del self._clients[name]
        await asyncio.gather(*(self._hear(name, client) for name, client in living.items()))

    async def _hear(self, name: str, client: EngineClient) -> None:
        try:
            if self.cost is None:
                about = await client.call("describe_blocks", timeout=SECONDS)
                self.cost = FetchCost(about["block_size"], about["block_bytes"])
            is_new = name not in self._clients
            report = report_of(await client.call("report_blocks", lost=is_new, timeout=SECONDS))
            if self._fleet.roster.living().get(name) is not client:
                return
            if is_new:
                self.directory.add(name)
                self._clients[name] = client
            if not self.directory.take(name, report):
                whole = report_of(await client.call("report_blocks", lost=True, timeout=SECONDS))
                self.directory.take(name, whole)
        except EngineDead:  # which is told elsewhere
            self._silent.discard(name)
        except Exception as problem:
            if name not in self._silent:
                log.warning(
                    "replica %s does not say what it has cached: %s",
                    name,
                    problem or type(problem).__name__,
                )
            self._silent.add(name)
        else:
            self._silent.discard(name)
