"""A long prompt that arrives among running streams, and its effect on the time between their
tokens.
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
PROMPT = 64  # tokens per stream
QUIET = 128  # pieces that each stream receives before the long prompt is sent
SETTLE = 16  # first pieces, which are not counted
# token limit per stream: streams are dropped at the long prompt's first token
OUTPUT = 1024
POLL = 0.01  # seconds


@dataclass(frozen=True)
class Arrival:
    """99th percentiles of the time between tokens of all streams, in milliseconds. The long
    prompt's time is in seconds.
    """

    before: float
    during: float
    waited: float


async def arrive(target: Target, prompt_tokens: int, seed: int = 0) -> Arrival:
    """Run the streams and the long prompt. Raises `Broken`, also if the streams end before the
    prompt's first token.
    """
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
            raise Broken(f"the long prompt got status {reply.status}: {reply.body[:200]!r}")
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
    """Return the gaps between tokens that end within an interval, without each stream's
    first gaps.
    """
    return [
        later - earlier
        for stream in times
        for earlier, later in itertools.pairwise(stream[SETTLE:])
        if begin < later <= end
    ]
