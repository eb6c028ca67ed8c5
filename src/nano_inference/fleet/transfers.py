"""Blocks that move between replicas while a request waits for them: `Transfers` brings them,
`PrefixSharing` knows which replica has a prompt's prefix, and whether fetching it is faster, and
with `Prefill` some replicas compute prompts, and others resume from the first token.
"""

import asyncio
import logging
import time
from typing import NamedTuple

from nano_inference.errors import EngineDead
from nano_inference.fleet.errors import NoReplica
from nano_inference.fleet.requests import FleetRequest
from nano_inference.fleet.router import Router, Ticket
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.remote import time_limits
from nano_inference.remote.client import EngineClient
from nano_inference.remote.directory import (
    Directory,
    FetchCost,
    names_of,
    pack_names,
    report_of,
    worth_fetching,
)

log = logging.getLogger("nano_inference.server")


class Brought(NamedTuple):
    """Blocks that came, and the seconds that they took."""

    num_blocks: int
    seconds: float


class Transfers:
    """Requests without a replica, because their blocks are on the way to where they are resumed.

    Args:
        supervisor: of the replicas.

    Attributes:
        num_blocks: that were brought.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.num_blocks = 0
        self._supervisor = supervisor
        self._on_the_way: dict[int, Ticket] = {}

    def leave(self, request: FleetRequest, ticket: Ticket) -> None:
        """Take a request off its replica, and remember its next place."""
        request.client = request.ticket = None
        self._on_the_way[request.request_id] = ticket

    def land(self, request: FleetRequest) -> Ticket | None:
        """The place of a request that is on its way, and is not any more; None: it is not."""
        return self._on_the_way.pop(request.request_id, None)

    async def carry(
        self, request: FleetRequest, source: EngineClient, target: EngineClient
    ) -> Brought | None:
        """Bring the blocks of a request's prompt; None: they did not come, and are computed."""
        began = time.monotonic()
        try:
            count = await asyncio.wait_for(
                self._bring(request, source, target), time_limits.BRING_BLOCKS
            )
        except Exception as problem:
            log.warning(
                "request %d computes its prompt again: %s",
                request.request_id,
                problem or type(problem).__name__,
            )
            return None
        self.num_blocks += count
        return Brought(count, time.monotonic() - began)

    async def _bring(
        self, request: FleetRequest, source: EngineClient, target: EngineClient
    ) -> int:
        """Bring the blocks of its prompt, as far as they are there; returns how many came. Raises
        as `EngineClient.call` does.
        """
        names = names_of_prompt(request, target.info.block_size, self._supervisor)
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

    Args:
        supervisor: of the replicas.

    Attributes:
        directory: which replica holds what.
        cost: of fetching and of computing, as measured; None: no replica has told its block size.
        num_fetches: requests whose prefix was fetched.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.directory = Directory()
        self.cost: FetchCost | None = None
        self.num_fetches = 0
        self._supervisor = supervisor
        self._clients: dict[str, EngineClient] = {}  # of the directory's replicas
        self._silent: set[str] = set()  # replicas whose last report did not come

    def source(self, request: FleetRequest, ticket: Ticket) -> EngineClient | None:
        """The replica from which a request's prefix is to be fetched, because it has more of it
        than the request's place, and that is faster; None: there is none.
        """
        if self.cost is None or request.has_begun or ticket.replica not in self._clients:
            return None
        living = self._supervisor.living()
        known = [name for name in self._clients if living.get(name) is self._clients[name]]
        names = names_of_prompt(request, self.cost.block_size, self._supervisor)
        holder = worth_fetching(self.directory, self.cost, names, ticket.replica, known)
        if holder is None:
            return None
        self.num_fetches += 1
        return living[holder.replica]

    def fetched(self, brought: Brought) -> None:
        """Measure a prefix that was fetched."""
        if self.cost is not None:
            self.cost.fetched(*brought)

    def began(self, request: FleetRequest) -> None:
        """Measure how fast prompts are computed: a request's first token has come, and is not taken
        yet.
        """
        if self.cost is not None and not request.has_begun:
            num_cached = max(sample.cached_tokens for sample in request.samples)
            self.cost.prefilled(
                len(request.message.prompt) - num_cached, time.monotonic() - request.handed_at
            )

    async def watch(self) -> None:
        """Gather reports as long as the fleet lives."""
        while True:
            await self.look()
            await asyncio.sleep(time_limits.BLOCK_REPORTS)

    async def look(self) -> None:
        """Take in a report of every replica."""
        living = self._supervisor.living()
        for name, client in list(self._clients.items()):
            if living.get(name) is not client:  # it is gone, or another engine has its place
                self.directory.remove(name)
                del self._clients[name]
        await asyncio.gather(*(self._hear(name, client) for name, client in living.items()))

    async def _hear(self, name: str, client: EngineClient) -> None:
        try:
            if self.cost is None:
                about = await client.call("describe_blocks", timeout=time_limits.BLOCK_REPORT)
                self.cost = FetchCost(about["block_size"], about["block_bytes"])
            is_new = name not in self._clients
            report = report_of(
                await client.call("report_blocks", lost=is_new, timeout=time_limits.BLOCK_REPORT)
            )
            if self._supervisor.living().get(name) is not client:
                return
            if is_new:
                self.directory.add(name)
                self._clients[name] = client
            if not self.directory.take(name, report):
                whole = report_of(
                    await client.call("report_blocks", lost=True, timeout=time_limits.BLOCK_REPORT)
                )
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
        count: of the first replicas, how many compute prompts.
        least: tokens of a prompt that is computed on one of them.
        router: places requests there.
        supervisor: of the replicas.

    Attributes:
        replicas: their names.
        num_prompts: that were computed there.
    """

    def __init__(self, count: int, least: int, router: Router, supervisor: Supervisor) -> None:
        self.replicas = frozenset(map(str, range(count)))
        self.num_prompts = 0
        self._least, self._router, self._supervisor = least, router, supervisor

    def place(self, request: FleetRequest) -> Ticket | None:
        """A place for the prompt of a request that has no token yet; None: it is computed where it
        decodes.
        """
        message, router = request.message, self._router
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
                version=self._supervisor.version,
                adapter=self._supervisor.adapter_key(message.params.adapter),
                without=others,
            )
        except NoReplica:
            return None
        request.computes_prompt = True
        return ticket
