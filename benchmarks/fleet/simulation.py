"""The real router over simulated replicas: events in order of their time, one seed, no clock of
this machine.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.fleet.load import Arrivals, Conversation, Load, Turn, prompt_of
from benchmarks.fleet.replica import Machine, Replica
from nano_inference.fleet.router import Router

Row = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        name: of it.
        replicas: how many.
        requests: how many arrive; the first fifth is not counted, as caches fill.
        policy: `"router"`, or `"round robin"`, which ignores load and prefixes.
        router: options of the router.
        sessions: the conversation is named to the router as a session.
        lost: replicas that die in the middle; what they had is continued elsewhere.
        pause: seconds until the death is noticed.
        slow: replicas that take `slowness` times as long for everything.
        slowness: see there.
        load: what is asked.
        machine: what a step takes.
        seed: of all draws.
    """

    name: str
    replicas: int = 1000
    requests: int = 1_000_000
    policy: str = "router"
    router: dict[str, Any] = field(default_factory=dict[str, Any])
    sessions: bool = False
    lost: int = 0
    pause: float = 1.0
    slow: int = 0
    slowness: float = 3.0
    load: Load = field(default_factory=Load)
    machine: Machine = field(default_factory=Machine)
    seed: int = 0


class Simulation:
    """Runs a scenario once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.arrivals = Arrivals(scenario.load, scenario.seed)
        self.replicas = [
            Replica(scenario.machine, scenario.slowness if place < scenario.slow else 1.0)
            for place in range(scenario.replicas)
        ]
        self.router = Router(**scenario.router)
        self.names = [f"r{place}" for place in range(scenario.replicas)]
        for name in self.names:
            self.router.add(name)
        self.places = {name: place for place, name in enumerate(self.names)}
        self.alive = list(range(scenario.replicas))
        self.turn_of = 0  # round robin
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._due = [-1] * scenario.replicas  # number of each replica's valid event
        self.num_arrived = 0
        self.ended: list[Turn] = []
        self.balance: list[float] = []
        self.in_system: list[float] = []
        self.moved: list[Turn] = []
        self.span = (0.0, 0.0)

    def run(self) -> "Simulation":
        """Until everything has ended."""
        load, scenario = self.scenario.load, self.scenario
        rate = load.rate * scenario.replicas
        self.between = load.turns / rate  # two new conversations
        started = int(rate * load.think_time)  # that are thinking at the beginning
        for _ in range(started):
            self._at(
                self.arrivals.gap(load.think_time),
                lambda: self._arrive(self.arrivals.conversation()),
            )
        self._at(self.arrivals.gap(self.between), self._begin)
        self._at(1.0, self._look)
        if scenario.lost:
            self._at(0.6 * scenario.requests / rate, self._lose)
        events = self._events
        while events:
            self.now, _, act = heapq.heappop(events)
            act()
        return self

    # -- events ------------------------------------------------------------------------------------

    def _at(self, time: float, act: Callable[[], None]) -> int:
        number = next(self._order)
        heapq.heappush(self._events, (time, number, act))
        return number

    def _begin(self) -> None:
        if self.num_arrived < self.scenario.requests:
            self._arrive(self.arrivals.conversation())
            self._at(self.now + self.arrivals.gap(self.between), self._begin)

    def _arrive(self, conversation: Conversation) -> None:
        if self.num_arrived >= self.scenario.requests:
            return
        self.num_arrived += 1
        turn = self.arrivals.turn(conversation, self.now)
        if self.num_arrived == self.scenario.requests // 5:
            self.span = (self.now, self.now)
        elif self.num_arrived == self.scenario.requests:
            self.span = (self.span[0], self.now)
        self._place(turn)

    def _place(self, turn: Turn) -> None:
        if self.scenario.policy == "router":
            session = turn.conversation.number if self.scenario.sessions else None
            turn.ticket = self.router.place(prompt_of(turn), session=session)  # pyright: ignore[reportArgumentType]
            place = self.places[turn.ticket.replica]
        else:
            self.turn_of = (self.turn_of + 1) % len(self.alive)
            place = self.alive[self.turn_of]
        replica = self.replicas[place]
        replica.advance(self.now)
        replica.add(turn)
        self._plan(place)

    def _plan(self, place: int) -> None:
        ends = self.replicas[place].next_end()
        if ends < float("inf"):
            number = self._at(ends, lambda: self._end(place, number))
            self._due[place] = number
        else:
            self._due[place] = -1

    def _end(self, place: int, number: int) -> None:
        if self._due[place] != number:
            return
        replica = self.replicas[place]
        replica.advance(self.now)
        first, done = replica.ended()
        for turn in first:
            if turn.first_token < 0:
                turn.first_token = self.now
            if turn.moved_at >= 0:
                turn.pause = self.now - turn.moved_at
            if turn.ticket is not None:
                self.router.started(turn.ticket)
        for turn in done:
            if turn.ticket is not None:
                self.router.finished(turn.ticket)
            turn.ended = self.now
            self.ended.append(turn)
            if self.arrivals.goes_on():
                later = self.now + self.arrivals.gap(self.scenario.load.think_time)
                self._at(later, lambda conversation=turn.conversation: self._arrive(conversation))
        self._plan(place)

    def _look(self) -> None:
        sizes = np.array([self.replicas[place].size for place in self.alive])
        if self.span[0] and self.num_arrived < self.scenario.requests and sizes.mean() > 0:
            self.balance.append(float(sizes.max() / sizes.mean()))
            self.in_system.append(float(sizes.mean()))
        if self.num_arrived < self.scenario.requests:
            self._at(self.now + 1.0, self._look)

    def _lose(self) -> None:
        """Some die. Until that is noticed the router goes on sending: what it sent is continued
        with the rest.
        """
        for place in self.arrivals.rng.sample(self.alive, self.scenario.lost):
            self.replicas[place].advance(self.now)
            self.replicas[place].dead = True
            self._due[place] = -1
            self._at(
                self.now + self.scenario.pause,
                lambda place=place, then=self.now: self._continue(place, then),
            )

    def _continue(self, place: int, then: float) -> None:
        self.alive.remove(place)
        if self.scenario.policy == "router":
            self.router.remove(self.names[place])
        for turn in self.replicas[place].everything():
            turn.moved_at = then
            self.moved.append(turn)
            self._place(turn)


def measure(scenario: Scenario) -> Row:
    """What a run came to; times are simulated seconds."""
    run = Simulation(scenario).run()
    counted = [turn for turn in run.ended if turn.number > scenario.requests // 5]
    prompts = sum(turn.prompt_length for turn in counted)
    row: Row = {
        "name": scenario.name,
        "replicas": scenario.replicas,
        "requests": len(run.ended),
        "seconds": round(run.span[1], 1),
        "requests_a_second": round(len(counted) / (run.span[1] - run.span[0])),
        "mean_in_replica": round(float(np.mean(run.in_system)), 2),
        "balance_mean": round(float(np.mean(run.balance)), 3),
        "balance_worst": round(float(np.max(run.balance)), 3),
        "hit_rate": round(sum(turn.hit for turn in counted) / prompts, 4),
        "hit_rate_ideal": round(sum(turn.ideal for turn in counted) / prompts, 4),
        "computed_prompt_tokens": sum(replica.computed for replica in run.replicas),
        "first_token": percentiles([turn.first_token - turn.arrival for turn in counted]),
        "whole": percentiles([turn.ended - turn.arrival for turn in counted]),
    }
    if run.moved:
        begun = [turn for turn in run.moved if turn.had_begun]
        row["moved"] = {
            "requests": len(run.moved),
            "had_begun": len(begun),
            "computed_again": sum(turn.known - turn.cached for turn in begun),
            "pause": percentiles([turn.pause for turn in begun]),
            "whole": percentiles([turn.ended - turn.arrival for turn in run.moved]),
        }
    return row


def percentiles(values: list[float]) -> dict[str, float]:
    """50, 99, 99.9 and the most."""
    marks = np.percentile(values, (50, 99, 99.9, 100)) if values else np.zeros(4)
    return {
        name: round(float(mark), 4)
        for name, mark in zip(("p50", "p99", "p99.9", "max"), marks, strict=True)
    }
