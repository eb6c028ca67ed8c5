"""Prefill and decode on different replicas: some compute prompts, the others go on from the first
token.

A request runs on a prefill replica until all its samples have a token. Then it is given up there,
its prompt's blocks are brought to the replica that the router chose for the rest, and it goes on
there as after a failover: the same seed, positions and weights, so the same bits. What cannot be
brought is computed again.
"""

from typing import TYPE_CHECKING

from nano_inference.serving.fleet.failover import FleetRequest
from nano_inference.serving.fleet.router import NoReplica, Ticket

if TYPE_CHECKING:
    from nano_inference.serving.fleet.fleet_client import FleetClient

LEAST = 256  # tokens of a prompt; a shorter one is computed where it decodes


class Prefill:
    """Which replicas compute prompts.

    Args:
        fleet: it.
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
