"""Blocks that move between replicas while a request waits for them: `Transfers` brings them,
`PrefixSharing` knows which replica has a prompt's prefix, and whether fetching it is faster, and
with `Prefill` some replicas compute prompts, and others go on from the first token.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nano_inference.errors import EngineDead
from nano_inference.fleet.errors import NoReplica
from nano_inference.fleet.failover import FleetRequest
from nano_inference.fleet.router import Ticket
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.remote.client import EngineClient
from nano_inference.remote.directory import (
    Directory,
    FetchCost,
    names_of,
    pack_names,
    report_of,
    worth_fetching,
)

if TYPE_CHECKING:
    from nano_inference.fleet.fleet_client import FleetClient

log = logging.getLogger("nano_inference.server")

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
        names = names_of_prompt(request, target.info.block_size, self._fleet.supervisor)
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
        names = names_of_prompt(request, self.cost.block_size, supervisor)
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


def names_of_prompt(
    request: FleetRequest, block_size: int, supervisor: Supervisor
) -> tuple[int, ...]:
    """Of the blocks of its prompt that another replica could find: the last token is always
    computed.
    """
    prompt, params = request.message.prompt, request.message.params
    adapter = supervisor.adapter_key(params.adapter)
    known = prompt[: len(prompt) - 1]
    return names_of(known, block_size, supervisor.version, params.cache_salt, adapter)


LEAST = 256  # tokens of a prompt; a shorter one is computed where it decodes


class Prefill:
    """Prefill and decode on different replicas: which ones compute prompts.

    A request runs on a prefill replica until all its samples have a token. Then it is given up
    there, its prompt's blocks are brought to the replica that the router chose for the rest, and it
    goes on there as after a failover: the same seed, positions and weights, so the same bits. What
    cannot be brought is computed again.

    Args:
        fleet: whose replicas exchange blocks.
        count: of the first replicas, how many.
        least: tokens of a prompt that is computed on one of them.

    Attributes:
        replicas: their names.
        num_prompts: that were computed there.
    """

    def __init__(self, fleet: "FleetClient", count: int, least: int = LEAST) -> None:
        self.replicas = frozenset(map(str, range(count)))
        self.num_prompts = 0
        self._fleet = fleet
        self._least = least

    def place(self, request: FleetRequest) -> Ticket | None:
        """A place for the prompt of a request that has no token yet; None: it is computed where it
        decodes.
        """
        message, router = request.message, self._fleet.router
        if not self.replicas or request.has_begun or message.params.max_tokens == 1:
            return None
        if len(message.prompt) < self._least:
            return None
        others = [name for name in router.replicas if name not in self.replicas]
        if all(router.is_draining(name) for name in others):
            return None
        try:
            ticket = router.place(
                message.prompt,
                request.left,
                salt=message.params.cache_salt,
                version=self._fleet.supervisor.version,
                adapter=self._fleet.supervisor.adapter_key(message.params.adapter),
                without=others,
            )
        except NoReplica:
            return None
        request.computes_prompt = True
        return ticket

    def computed(self, request: FleetRequest) -> None:
        """Every sample of a request has a token: on to the replica that makes the others."""
        fleet, source = self._fleet, request.client
        request.let_go()
        if request.ticket is not None:
            fleet.router.finished(request.ticket)
        request.moves += 1  # so that it is compared whether it ends as it began
        self.num_prompts += 1
        fleet.transfers.send(request, fleet.choose(request, at_any=True), source)
