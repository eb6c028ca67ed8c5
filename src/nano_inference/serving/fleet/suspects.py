"""`Suspects`: requests that engines have died with, one of which may be the reason."""

import logging
from collections import deque
from typing import Protocol

from nano_inference.serving.errors import NO_RETRY, ApiError
from nano_inference.serving.fleet.flight import Flight
from nano_inference.serving.fleet.roster import Roster
from nano_inference.serving.fleet.router import Router, Ticket

log = logging.getLogger("nano_inference.serving")

MOST_MOVES = 2  # away from engines that died


class Places(Protocol):
    """A fleet as its suspects see it."""

    router: Router
    roster: Roster

    def has(self, flight: Flight) -> bool:
        """Whether this request has not ended."""
        ...

    def place_again(self, flight: Flight) -> None:
        """Choose a replica for it, and hand it over."""
        ...


class Suspects:
    """Keeps a request that kills engines from killing all of them.

    A request that two engines have died with is a suspect, and so are those that were with it both
    times by chance. A replica has one suspect at a time; the others wait for a replica that has
    none. So when a third engine dies, it is known which suspect it had: that one ends with an
    error, and moves no more. Nothing else does: those beside it have lost fewer engines.

    Args:
        fleet: it.
    """

    def __init__(self, fleet: Places) -> None:
        self._fleet = fleet
        self._tried = set[Flight]()  # those that replicas have
        self._waiting = deque[Flight]()

    def place(self, flight: Flight) -> Ticket | None:
        """A place for a suspect; None: it waits, and `place_again` is called when there is one."""
        flight.client = flight.ticket = None
        free = self._free()
        if not free:
            self._waiting.append(flight)
            return None
        self._tried.add(flight)
        return self._fleet.router.place_at(min(free, key=self._fleet.router.score), flight.left)

    def go_on(self) -> None:
        """Place those that wait, as far as there are replicas without a suspect."""
        while self._waiting and self._free():
            flight = self._waiting.popleft()
            if self._fleet.has(flight):
                self._fleet.place_again(flight)

    def forget(self) -> None:
        """All have ended."""
        self._tried.clear()
        self._waiting.clear()

    def _free(self) -> list[str]:
        """Replicas without a suspect; such as are about to leave only if there are no others."""
        self._tried = {
            flight
            for flight in self._tried
            if self._fleet.has(flight) and flight.ticket is not None
        }
        taken = {flight.ticket.replica for flight in self._tried if flight.ticket is not None}
        living = self._fleet.roster.living()
        staying = [name for name in living if not self._fleet.router.is_draining(name)]
        return [name for name in staying or living if name not in taken]


def given_up(flight: Flight) -> ApiError:
    """Why a suspect ends that another engine has died with."""
    log.error(
        "request %d was with %d engines that died, and is not tried again.",
        flight.request_id,
        flight.deaths,
    )
    text = (
        f"{flight.deaths} engines died while they had this request; it may be why, and is not "
        "tried again."
    )
    return ApiError(500, text, code="engines_died", headers=NO_RETRY)
