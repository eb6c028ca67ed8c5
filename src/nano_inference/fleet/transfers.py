"""Blocks that move between replicas while a request waits for them.

`Transfers` moves them. `PrefixSharing` fetches a prompt's prefix from another replica if that is
faster than computing it. With `Prefill` some replicas compute prompts, and others resume from the
first token.
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
    """Number of blocks that were moved, and the seconds that it took."""

    num_blocks: int
    seconds: float


class Transfers:
    """Requests that are at no replica while their blocks move to the next one.

    Args:
        supervisor: Supervisor of the replicas.

    Attributes:
        num_blocks: Number of blocks moved so far.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.num_blocks = 0
        self._supervisor = supervisor
        self._on_the_way: dict[int, Ticket] = {}

    def leave(self, request: FleetRequest, ticket: Ticket) -> None:
        """Take a request off its replica, and remember its next placement."""
        request.client = request.ticket = None
        self._on_the_way[request.request_id] = ticket

    def land(self, request: FleetRequest) -> Ticket | None:
        """End a request's wait for blocks. Return its next placement, or None if it was not
        waiting.
        """
        return self._on_the_way.pop(request.request_id, None)

    async def carry(
        self, request: FleetRequest, source: EngineClient, target: EngineClient
    ) -> Brought | None:
        """Move the blocks of a request's prompt. None: that failed, and they will be recomputed."""
        began = time.monotonic()
        try:
            count = await asyncio.wait_for(
                self._bring(request, source, target), time_limits.BRING_BLOCKS
            )
        except Exception as problem:
            log.warning(
                "request %d recomputes its prompt: %s",
                request.request_id,
                problem or type(problem).__name__,
            )
            return None
        self.num_blocks += count
        return Brought(count, time.monotonic() - began)

    async def _bring(
        self, request: FleetRequest, source: EngineClient, target: EngineClient
    ) -> int:
        """Move the cached blocks of the prompt, and return how many the target imported. Raises as
        `EngineClient.call` does.
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
    """Directory of the blocks that replicas have reported, used to fetch prefixes.

    Args:
        supervisor: Supervisor of the replicas.

    Attributes:
        directory: Blocks of each replica.
        cost: Measured costs of fetching and computing. None: no replica has reported its block
            size yet.
        num_fetches: Number of requests whose prefix was fetched.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.directory = Directory()
        self.cost: FetchCost | None = None
        self.num_fetches = 0
        self._supervisor = supervisor
        self._clients: dict[str, EngineClient] = {}  # replicas in the directory
        self._silent: set[str] = set()  # replicas whose last report failed

    def source(self, request: FleetRequest, ticket: Ticket) -> EngineClient | None:
        """Return the replica to fetch a request's prefix from. None: no replica has more of it than
        the request's own, or computing it is faster.
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
        """Measure the cost of a fetched prefix."""
        if self.cost is not None:
            self.cost.fetched(*brought)

    def began(self, request: FleetRequest) -> None:
        """Measure the speed of prompt computation when a request's first delta comes. Call it
        before the request takes the delta.
        """
        if self.cost is not None and not request.has_begun:
            num_cached = max(sample.cached_tokens for sample in request.samples)
            self.cost.prefilled(
                len(request.message.prompt) - num_cached, time.monotonic() - request.handed_at
            )

    async def watch(self) -> None:
        """Collect reports as long as the fleet lives."""
        while True:
            await self.look()
            await asyncio.sleep(time_limits.BLOCK_REPORTS)

    async def look(self) -> None:
        """Collect a report from every replica."""
        living = self._supervisor.living()
        for name, client in list(self._clients.items()):
            if living.get(name) is not client:  # it left, or another engine replaced it
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
                    "replica %s does not report its cached blocks: %s",
                    name,
                    problem or type(problem).__name__,
                )
            self._silent.add(name)
        else:
            self._silent.discard(name)


def names_of_prompt(
    request: FleetRequest, block_size: int, supervisor: Supervisor
) -> tuple[int, ...]:
    """Return the names of the prompt's blocks that another replica may have cached. The last token
    is always computed, so it belongs to none of them.
    """
    prompt, params = request.message.prompt, request.message.params
    adapter = supervisor.adapter_key(params.adapter)
    known = prompt[: len(prompt) - 1]
    return names_of(known, block_size, supervisor.version, params.cache_salt, adapter)


LEAST = 256  # prompt tokens; a shorter prompt is computed at the replica that decodes it


class Prefill:
    """Prefill and decode on different replicas.

    A request runs on a prefill replica until all its samples have a token. Then it is canceled
    there, and its prompt's blocks move to the replica that the router chose for the rest. The
    request resumes there as after a failover: same seed, positions and weights, so the same bits.
    Blocks that cannot be moved are recomputed.

    Args:
        count: Number of prefill replicas, the first ones.
        least: Least number of prompt tokens for a prefill replica.
        router: Router that places requests there.
        supervisor: Supervisor of the replicas.

    Attributes:
        replicas: Names of the prefill replicas.
        num_prompts: Number of prompts computed there.
    """

    def __init__(self, count: int, least: int, router: Router, supervisor: Supervisor) -> None:
        self.replicas = frozenset(map(str, range(count)))
        self.num_prompts = 0
        self._least, self._router, self._supervisor = least, router, supervisor

    def place(self, request: FleetRequest) -> Ticket | None:
        """Return a placement for the prompt of a request that has no token yet, or None if the
        prompt is to be computed at the replica that decodes it.
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
