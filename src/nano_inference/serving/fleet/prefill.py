"""Prefill and decode on different replicas: some compute prompts, the others go on from the first
token.

A request runs on a prefill replica until all its samples have a token. Then it is given up there,
its prompt's blocks are brought to the replica that the router chose for the rest, and it goes on
there as after a failover: the same seed, positions and weights, so the same bits. What cannot be
brought is computed again.
"""

from nano_inference.serving.fleet.flight import Flight
from nano_inference.serving.fleet.router import NoReplica, Ticket
from nano_inference.serving.fleet.transfers import Stages, Transfers

LEAST = 256  # tokens of a prompt; a shorter one is computed where it decodes


class Prefill:
    """Which replicas compute prompts.

    Args:
        fleet: it.
        transfers: brings blocks.
        count: of the first replicas, how many.
        least: tokens of a prompt that is computed on one of them.

    Attributes:
        replicas: their names.
        num_prompts: that were computed there.
    """

    def __init__(self, fleet: Stages, transfers: Transfers, count: int, least: int = LEAST) -> None:
        self.replicas = frozenset(map(str, range(count)))
        self.num_prompts = 0
        self._fleet = fleet
        self._transfers = transfers
        self._least = least

    def place(self, flight: Flight) -> Ticket | None:
        """A place for the prompt of a request that nothing has come of yet; None: it is computed
        where it decodes.
        """
        message, router = flight.message, self._fleet.router
        if flight.has_begun or len(message.prompt) < self._least or message.params.max_tokens == 1:
            return None
        others = [name for name in router.replicas if name not in self.replicas]
        if all(router.is_draining(name) for name in others):
            return None
        try:
            ticket = router.place(
                message.prompt,
                flight.left,
                salt=message.params.cache_salt,
                version=self._fleet.roster.version,
                without=others,
            )
        except NoReplica:
            return None
        flight.computes_prompt = True
        return ticket

    def computed(self, flight: Flight) -> None:
        """Every sample of a request has a token: on to the replica that makes the others."""
        fleet, source = self._fleet, flight.client
        flight.let_go()
        if flight.ticket is not None:
            fleet.router.finished(flight.ticket)
        flight.moves += 1  # so that it is looked at whether it ends as it began
        self.num_prompts += 1
        self._transfers.send(flight, fleet.choose(flight, at_any=True), source)
