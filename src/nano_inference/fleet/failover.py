"""`Failover`: moves requests away from dead engines, and measures how long their clients waited."""

import logging
from collections.abc import Mapping

from nano_inference.fleet.errors import EnginesDied
from nano_inference.fleet.requests import FleetRequest
from nano_inference.fleet.router import Router, Ticket
from nano_inference.fleet.supervisor import Supervisor
from nano_inference.remote.status import MoveCounts

log = logging.getLogger("nano_inference.server")

MOST_MOVES = 2  # maximum moves of a request away from dead engines


class Failover(MoveCounts):
    """Counter of moves, and guard against requests that kill every engine that computes them.

    A request that had two engines die is a suspect. Requests that shared both engines with it by
    chance are suspects, too. A replica has at most one suspect at a time, and further suspects wait
    for a replica without one. So when a third engine dies, its suspect is the cause: that request
    ends with an error. No other request ends, since the others have lost fewer engines.

    Args:
        requests: Unfinished requests of the fleet, by id.
        router: Router that places them.
        supervisor: Supervisor that knows the living replicas.

    Attributes:
        waiting: Requests that have had no delta since they were moved.
    """

    def __init__(
        self, requests: Mapping[int, FleetRequest], router: Router, supervisor: Supervisor
    ) -> None:
        super().__init__()
        self.waiting: set[FleetRequest] = set()
        self._requests, self._router, self._supervisor = requests, router, supervisor

    def moves(self, request: FleetRequest) -> None:
        """Count a move of a request whose replica has ended. Raises `EnginesDied` for a suspect
        that lost another engine.
        """
        if request.deaths > MOST_MOVES:
            log.error(
                "request %d had %d engines die and is not retried.",
                request.request_id,
                request.deaths,
            )
            raise EnginesDied(request.deaths)
        request.computes_prompt = False
        request.moves += 1
        self.waiting.add(request)
        self.moved += 1

    def heard(self, request: FleetRequest, seconds: float) -> None:
        """Record a request's delta that came `seconds` after the previous one."""
        if request not in self.waiting:
            return
        self.waiting.discard(request)
        self.paused(seconds)
        log.debug("request %d resumed after %.3f s.", request.request_id, seconds)
        if not self.waiting:
            log.info("all moved requests have resumed, the last one after %.3f s.", seconds)

    @staticmethod
    def is_suspect(request: FleetRequest) -> bool:
        """Return True if a request may be the reason why engines died."""
        return request.deaths >= MOST_MOVES

    def place_suspect(self, request: FleetRequest) -> Ticket | None:
        """Return a ticket for a suspect, or None if it must wait for a replica without one."""
        request.client = request.ticket = None
        free, router = self._without_suspects(), self._router
        return router.place_at(min(free, key=router.score), request.left) if free else None

    def next_suspect(self) -> FleetRequest | None:
        """Return a waiting suspect that can be placed now, or None."""
        if not self._without_suspects():
            return None
        return next((each for each in self._suspects() if each.ticket is None), None)

    def _suspects(self) -> list[FleetRequest]:
        return [each for each in self._requests.values() if self.is_suspect(each)]

    def _without_suspects(self) -> list[str]:
        """Return the replicas without a suspect. Draining ones count only if no others live."""
        taken = {each.ticket.replica for each in self._suspects() if each.ticket is not None}
        living = self._supervisor.living()
        staying = [name for name in living if not self._router.is_draining(name)]
        return [name for name in staying or living if name not in taken]
