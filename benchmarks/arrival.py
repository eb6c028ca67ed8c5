"""Streams that run, and a long prompt that arrives among them: what it does to the time between
their tokens.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nano_bench.load import PATIENCE, Target
from nano_bench.outcomes import percentile
from nano_bench.shape import token_requests
from nano_bench.wire import Broken, Connection, connect

STREAMS = 8
PROMPT = 64  # tokens, of each stream
QUIET = 128  # pieces that each stream brings before the long prompt sets out
SETTLE = 16  # of them the first, which are not counted
# tokens of each stream, at most: they are dropped when the long prompt's first token is there
OUTPUT = 1024
POLL = 0.01  # seconds


@dataclass(frozen=True)
class Arrival:
    """99th percentiles of the times between tokens of all streams, in milliseconds; of the long
    prompt seconds.
    """

    before: float
    during: float
    waited: float


async def arrive(target: Target, prompt_tokens: int, seed: int = 0) -> Arrival:
    """Raises `Broken`, also where the streams end before the long prompt has its first token."""
    running = token_requests(STREAMS, PROMPT, OUTPUT, stream=True, seed=2 * seed)
    (long,) = token_requests(1, prompt_tokens, 1, stream=True, seed=2 * seed + 1)
    connections = [await connect(*target.address) for _ in range(STREAMS + 1)]
    streams, last = connections[:-1], connections[-1]
    answers = [
        asyncio.ensure_future(connection.ask(target.request(ask.path, ask.body), PATIENCE))
        for connection, ask in zip(streams, running, strict=True)
    ]
    try:
        await until_all_have(streams, answers, QUIET)
        sent = time.perf_counter()
        reply = await last.ask(target.request(long.path, long.body), PATIENCE)
        if reply.status != 200 or not reply.events:
            raise Broken(f"the long prompt is answered with {reply.status}: {reply.body[:200]!r}")
        arrived = reply.events[0][0]
        if any(answer.done() for answer in answers):
            raise Broken(f"streams of {OUTPUT} tokens ended before the long prompt's first token")
        await asyncio.sleep(POLL)
        times = [connection.event_times for connection in streams]
    finally:
        for connection in connections:
            connection.close()
        await asyncio.gather(*answers, return_exceptions=True)
    return Arrival(
        before=percentile(gaps_ending_in(times, 0.0, sent), 99) * 1e3,
        during=percentile(gaps_ending_in(times, sent, arrived + POLL), 99) * 1e3,
        waited=arrived - sent,
    )


async def until_all_have(
    streams: Sequence[Connection], answers: Sequence["asyncio.Future[object]"], pieces: int
) -> None:
    while any(len(connection.event_times) < pieces for connection in streams):
        for answer in answers:
            if answer.done():
                raise Broken(f"a stream ended early: {answer.exception() or answer.result()}")
        await asyncio.sleep(POLL)


def gaps_ending_in(times: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Gaps between neighbours, of those that end between two times; each stream's first ones are
    left out.
    """
    return [
        later - earlier
        for stream in times
        for earlier, later in itertools.pairwise(stream[SETTLE:])
        if begin < later <= end
    ]
