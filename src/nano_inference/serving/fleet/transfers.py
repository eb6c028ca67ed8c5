"""Blocks that move between replicas while a request waits for them: `Transfers` brings them,
`PrefixSharing` knows which replica has a prompt's prefix, and whether fetching it is faster.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nano_inference.errors import EngineDead
from nano_inference.serving.client import EngineClient
from nano_inference.serving.fleet.directory import (
    Directory,
    FetchCost,
    names_of,
    pack_names,
    report_of,
    worth_fetching,
)
from nano_inference.serving.fleet.failover import FleetRequest
from nano_inference.serving.fleet.router import Ticket

if TYPE_CHECKING:
    from nano_inference.serving.fleet.fleet_client import FleetClient

log = logging.getLogger("nano_inference.serving")

PATIENCE = 30.0  # seconds for which a request waits for its blocks; then it computes them
LOOK = 0.5  # seconds between two reports of a replica
SECONDS = 10.0  # for one


class Transfers:
    """Requests without a replica, because their blocks are on the way to where they go on.

    Each request is handed over once: when its blocks are there, when they cannot come, or when it
    is aborted meanwhile (`land`). Blocks that are missing are computed.

    Attributes:
        num_blocks: that were brought.
    """

    def __init__(self, fleet: "FleetClient") -> None:
        self.num_blocks = 0
        self._fleet = fleet
        self._on_the_way: dict[int, Ticket] = {}

    def send(
        self,
        request: FleetRequest,
        ticket: Ticket,
        source: EngineClient | None,
        on_brought: Callable[[int, float], None] = lambda *_: None,
    ) -> None:
        """Bring the blocks of a request's prompt to its next place, and hand it over there.

        Args:
            request: without a replica.
            ticket: where it goes.
            source: the replica that has the blocks; None: it is gone.
            on_brought: is called with the number of blocks that came, and seconds.
        """
        request.client = request.ticket = None
        self._on_the_way[request.request_id] = ticket
        supervisor = self._fleet.supervisor
        target = supervisor.living().get(ticket.replica)
        if source is None or target is None or target is source:
            self.land(request)
        else:
            supervisor.spawn(self._carry(request, source, target, on_brought))

    def land(self, request: FleetRequest) -> None:
        """Hand it over without waiting for its blocks (any more): at its place or, if that replica
        is gone, anywhere.
        """
        fleet = self._fleet
        ticket = self._on_the_way.pop(request.request_id, None)
        if ticket is None:
            return
        fleet.router.finished(ticket)
        if not fleet.has(request):
            return
        if ticket.replica in fleet.supervisor.living():
            fleet.hand_over(request, fleet.router.place_at(ticket.replica, request.left))
        else:
            fleet.failover.place_again(request)

    async def _carry(
        self,
        request: FleetRequest,
        source: EngineClient,
        target: EngineClient,
        on_brought: Callable[[int, float], None],
    ) -> None:
        began = time.monotonic()
        try:
            count = await asyncio.wait_for(self._bring(request, source, target), PATIENCE)
            self.num_blocks += count
            on_brought(count, time.monotonic() - began)
        except Exception as problem:
            log.warning(
                "request %d computes its prompt again: %s",
                request.request_id,
                problem or type(problem).__name__,
            )
        self.land(request)

    async def _bring(
        self, request: FleetRequest, source: EngineClient, target: EngineClient
    ) -> int:
        """Bring the blocks of its prompt, as far as they are there; returns how many came. Raises
        as `EngineClient.call` does.
        """
        version = self._fleet.supervisor.version
        names = names_of_prompt(request, target.info.block_size, version)
        packed = pack_names(names)
        first = here = await target.call("count_blocks", names=packed)
        while here < len(names):
            data = await source.call("export_blocks", names=packed, first=here)
            now = here if data is None else await target.call("import_blocks", data=data)
            if now <= here:
                break
            here = now
        return here - first


class PrefixSharing:
    """The blocks that replicas have reported, and requests that fetch some of them.

    Attributes:
        directory: which replica holds what.
        cost: of fetching and of computing, as measured; None: no replica has told its block size.
        num_fetches: requests whose prefix was fetched.
    """

    def __init__(self, fleet: "FleetClient") -> None:
        self.directory = Directory()
        self.cost: FetchCost | None = None
        self.num_fetches = 0
        self._fleet = fleet
        self._clients: dict[str, EngineClient] = {}  # of the directory's replicas
        self._silent: set[str] = set()  # replicas whose last report did not come

    def fetch(self, request: FleetRequest, ticket: Ticket) -> bool:
        """Bring a request's prefix to its place if another replica has more of it and that is
        faster. False: it is not.
        """
        if self.cost is None or request.has_begun or ticket.replica not in self._clients:
            return False
        supervisor = self._fleet.supervisor
        living = supervisor.living()
        known = [name for name in self._clients if living.get(name) is self._clients[name]]
        names = names_of_prompt(request, self.cost.block_size, supervisor.version)
        holder = worth_fetching(self.directory, self.cost, names, ticket.replica, known)
        if holder is None:
            return False
        self.num_fetches += 1
        self._fleet.transfers.send(request, ticket, living[holder.replica], self.cost.fetched)
        return True

    def began(self, request: FleetRequest) -> None:
        """A request's first token has come: its wait says how fast prompts are computed now."""
        if self.cost is not None and not request.has_begun:
            num_cached = max(sample.cached_tokens for sample in request.samples)
            self.cost.prefilled(
                len(request.message.prompt) - num_cached, time.monotonic() - request.handed_at
            )

    async def watch(self) -> None:
        """Gather reports as long as the fleet lives."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Take in a report of every replica."""
        living = self._fleet.supervisor.living()
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
            if self._fleet.supervisor.living().get(name) is not client:
                return
            if is_new:
                self.directory.add(name)
                self._clients[name] = client
            if not self.directory.take(name, report):
                whole = report_of(await client.call("report_blocks", lost=True, timeout=SECONDS))
                self.directory.take(name, whole)
        except EngineDead:  # the supervisor logs it
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


def names_of_prompt(request: FleetRequest, block_size: int, version: int) -> tuple[int, ...]:
    """Of the blocks of its prompt that another replica could find: the last token is always
    computed.
    """
    prompt = request.message.prompt
    salt = request.message.params.cache_salt
    return names_of(prompt[: len(prompt) - 1], block_size, version, salt)
