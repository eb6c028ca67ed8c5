"""`Failover`: which replica may have a request that engines died with, and how long clients of
moved requests waited.
"""

import logging
from collections.abc import Mapping

from nano_inference.fleet.errors import EnginesDied
from nano_inference.fleet.requests import FleetRequest
from nano_inference.fleet.router import Router, Ticket
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.remote.status import MoveCounts

log = logging.getLogger("nano_inference.server")

MOST_MOVES = 2  # of one request, away from engines that died


class Failover(MoveCounts):
    """Counts moves, and keeps a request that kills engines from killing all of them.

    A request that two engines have died with is a suspect, and so are those that were with it both
    times by chance. A replica has one suspect at a time; the others wait for a replica that has
    none. So when a third engine dies, it is known which suspect it had: that one ends with an
    error, and moves no more. No other request ends: the others have lost fewer engines.

    Args:
        requests: of the fleet, those that have not ended, by id.
        router: where they are.
        supervisor: knows which replicas live.

    Attributes:
        waiting: requests of which nothing has come since they were moved.
    """

    def __init__(
        self, requests: Mapping[int, FleetRequest], router: Router, supervisor: Supervisor
    ) -> None:
        super().__init__()
        self.waiting: set[FleetRequest] = set()
        self._requests, self._router, self._supervisor = requests, router, supervisor

    def moves(self, request: FleetRequest) -> None:
        """Count a move of a request, whose replica is gone. Raises `EnginesDied` for a suspect that
        another engine has died with.
        """
        if request.deaths > MOST_MOVES:
            log.error(
                "request %d was with %d engines that died, and is not tried again.",
                request.request_id,
                request.deaths,
            )
            raise EnginesDied(request.deaths)
        request.computes_prompt = False
        request.moves += 1
        self.waiting.add(request)
        self.moved += 1

    def heard(self, request: FleetRequest, seconds: float) -> None:
        """Note that a delta of a request has come, so long after the one before."""
        if request not in self.waiting:
            return
        self.waiting.discard(request)
        self.paused(seconds)
        log.debug("request %d goes on, after %.3f s.", request.request_id, seconds)
        if not self.waiting:
            log.info("all requests that were handed on go on; the last one after %.3f s.", seconds)

    @staticmethod
    def is_suspect(request: FleetRequest) -> bool:
        """Whether a request may be why engines died."""
        return request.deaths >= MOST_MOVES

    def place_suspect(self, request: FleetRequest) -> Ticket | None:
        """A place for a suspect; None: it waits until there is one."""
        request.client = request.ticket = None
        free, router = self._without_suspects(), self._router
        return router.place_at(min(free, key=router.score), request.left) if free else None

    def next_suspect(self) -> FleetRequest | None:
        """The suspect that waits and can be placed now; None: there is none."""
        if not self._without_suspects():
            return None
        return next((each for each in self._suspects() if each.ticket is None), None)

    def _suspects(self) -> list[FleetRequest]:
        return [each for each in self._requests.values() if self.is_suspect(each)]

    def _without_suspects(self) -> list[str]:
        """Replicas without a suspect; draining ones only if there are no others."""
        taken = {each.ticket.replica for each in self._suspects() if each.ticket is not None}
        living = self._supervisor.living()
        staying = [name for name in living if not self._router.is_draining(name)]
        return [name for name in staying or living if name not in taken]
