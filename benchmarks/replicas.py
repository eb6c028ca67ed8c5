"""Replicas: the router's cost, two replicas of one client against two bare engines, and the pause
after a kill.
"""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks import machine
from benchmarks.measure import Row, Stopwatch, show, spread
from benchmarks.ours import Options, engine_config
from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.fleet.fleet_client import FleetClient
from nano_inference.fleet.router import Router, Ticket
from nano_inference.remote.client import EngineClient, RequestStream
from nano_inference.remote.process_client import ProcessClient

PARTS = ("router", "throughput", "failover")
LENGTHS = (128, 512, 1024, 2048, 8192)
VOCABULARY = 40_000
MAX_BACKLOG = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Size of the runs on real engines: `requests` requests of `prompt_tokens` and `output_tokens`,
    sent together.
    """

    requests: int = 64
    prompt_tokens: int = 64
    output_tokens: int = 128


def measure(
    options: Options, parts: tuple[str, ...], shape: Shape, num_replicas: int = 1000
) -> list[Row]:
    """Return the rows of the parts. Each engine has one thread."""
    options = replace(options, threads=1)
    rows: list[Row] = []
    if "router" in parts:
        rows += [
            router_row(length, num_replicas, options.repeats, just_read)
            for just_read in (True, False)
            for length in LENGTHS
        ]
        columns = {
            "prompt": _of("prompt_tokens"),
            "just read": _of("just_read"),
            "µs a request": _of("us"),
        }
        show(f"the router, {num_replicas} replicas", columns, rows)
    config = engine_config(options, kv_cache_memory=1 << 30)
    if "throughput" in parts:
        found = throughput_rows(config, shape, options.repeats)
        show(
            "two replicas",
            {"": _of("name"), "tokens/s": _of("tokens_per_s"), "of bare": _of("of_bare")},
            found,
        )
        rows += found
    if "failover" in parts:
        found = [failover_row(config, shape, options.repeats)]
        columns = {
            "longest": _of("longest_pause_s"),
            "mean": _of("mean_pause_s"),
            "moved": _of("moved"),
        }
        show("one of two replicas is killed", columns, found)
        rows += found
    return rows


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


# -- the router ------------------------------------------------------------------------------------


def router_row(
    length: int, num_replicas: int, repeats: int, just_read: bool, requests: int = 2000
) -> Row:
    """Measure placing, starting and finishing requests at a steady load. One in ten other requests
    has the same first half of the prompt.

    Args:
        length: Tokens of a prompt.
        num_replicas: Replicas of the router.
        repeats: Repetitions of the whole measurement.
        just_read: Decode each prompt right before it is placed, as a server does; the decoding is
            not timed. Otherwise all prompts are made beforehand, so for long prompts the core waits
            for memory at each token.
        requests: Number of requests.
    """
    rng, watch = random.Random(0), Stopwatch()
    stems = [_tokens(rng, length // 2) for _ in range(requests // 10)]
    prompts: list[Any] = [
        rng.choice(stems) + _tokens(rng, length - length // 2) for _ in range(requests)
    ]
    if just_read:
        prompts = [msgspec.msgpack.encode(prompt) for prompt in prompts]
    read: Callable[[Any], list[int]] = (
        msgspec.msgpack.Decoder(list[int]).decode if just_read else lambda prompt: prompt
    )
    for _ in range(repeats):
        router, live = Router(), list[Ticket]()
        for replica in range(num_replicas):
            router.add(str(replica))
        before, nanoseconds = machine.handover_ns(), 0
        for each, which in zip(
            prompts, rng.choices(range(4 * num_replicas), k=requests), strict=True
        ):
            prompt = read(each)
            began = time.perf_counter_ns()
            ticket = router.place(prompt)
            router.started(ticket)
            live.append(ticket)
            if which < len(live):
                live[which], live[-1] = live[-1], live[which]
                router.finished(live.pop())
            nanoseconds += time.perf_counter_ns() - began
        watch.add(nanoseconds / 1e9, before)
    us = spread(seconds / requests * 1e6 for seconds in watch.seconds)
    name = f"router, {length} tokens{', just read' if just_read else ''}"
    return watch.row(
        name=name, prompt_tokens=length, replicas=num_replicas, just_read=just_read, us=us
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


# -- engines ---------------------------------------------------------------------------------------


def asked(shape: Shape, seed: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts without shared prefixes."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(10, vocabulary) for _ in range(shape.prompt_tokens)],
            SamplingParams(max_tokens=shape.output_tokens, ignore_eos=True, seed=each),
        )
        for each in range(shape.requests)
    ]


def throughput_rows(config: EngineConfig, shape: Shape, repeats: int) -> list[Row]:
    """Measure two independent engines with half of the requests each, and a fleet of two with all
    requests.
    """
    watches = {name: Stopwatch() for name in ("two bare engines", "fleet", "fleet, streams")}
    bare = [_Bare(config) for _ in range(2)]
    with asyncio.Runner() as runner:
        fleet = FleetClient(lambda _: ProcessClient(config, MAX_BACKLOG), 2, MAX_BACKLOG)
        try:
            runner.run(fleet.start())
            for seed in range(repeats + 1):  # the first one is not counted
                for name, watch in watches.items():
                    work = asked(shape, 3 * seed + len(name), 40)
                    used = Stopwatch() if not seed else watch
                    if name == "two bare engines":
                        used.time(lambda work=work: _run_bare(bare, work))
                    else:
                        streaming = name.endswith("streams")
                        used.time(
                            lambda work=work, streaming=streaming: runner.run(
                                _run_fleet(fleet, work, streaming)
                            )
                        )
        finally:
            runner.run(fleet.close())
            for each in bare:
                each.close()
    tokens = shape.requests * shape.output_tokens
    rows = [
        watch.row(name=name, tokens_per_s=watch.rates(tokens)) for name, watch in watches.items()
    ]
    for row in rows:
        row["of_bare"] = row["tokens_per_s"]["median"] / rows[0]["tokens_per_s"]["median"]
    return rows


class _Bare:
    """An engine in another process that generates on request."""

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate, args=(config, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(10)


def _generate(config: EngineConfig, pipe: Connection) -> None:
    with InferenceEngine(config) as engine:
        pipe.send("ready")
        while True:
            try:
                work = pipe.recv()
            except EOFError:
                return
            engine.flush_cache()
            engine.generate(
                [prompt for prompt, _ in work], [params for _, params in work], progress=False
            )
            pipe.send("done")


def _run_bare(engines: list[_Bare], work: list[tuple[list[int], SamplingParams]]) -> None:
    for place, each in enumerate(engines):
        each.pipe.send(work[place :: len(engines)])
    for each in engines:
        each.pipe.recv()


async def _run_fleet(
    client: EngineClient, work: list[tuple[list[int], SamplingParams]], streaming: bool
) -> None:
    await client.call("flush_cache")
    streams = [client.submit(prompt, params, stream=streaming) for prompt, params in work]
    await asyncio.gather(*(_read(stream) for stream in streams))


async def _read(stream: RequestStream) -> list[int]:
    tokens: list[int] = []
    while stream.samples_left:
        for delta in await stream.next():
            tokens += delta.token_ids
    return tokens


def failover_row(config: EngineConfig, shape: Shape, repeats: int) -> Row:
    """Kill one of two replicas (-9) during streams. Measure the pause, and check that the tokens do
    not change.
    """
    return asyncio.run(_failover(config, shape, repeats))


async def _failover(config: EngineConfig, shape: Shape, repeats: int) -> Row:
    fleet = FleetClient(lambda _: ProcessClient(config, MAX_BACKLOG), 2, MAX_BACKLOG, restart=True)
    longest, mean, moved, work = list[float](), list[float](), 0, asked(shape, 1, 40)
    try:
        await fleet.start()
        quiet = await asyncio.gather(*(_read(fleet.submit(*each, stream=True)) for each in work))
        for turn in range(repeats):
            while len(fleet.supervisor.living()) < 2:
                await asyncio.sleep(0.1)
            failover = fleet.failover
            failover.longest = 0.0
            before = sum(failover.counts), failover.seconds
            reading = [
                asyncio.create_task(_read(fleet.submit(*each, stream=True))) for each in work
            ]
            await asyncio.sleep(0.3 * (1 + turn % 3))
            victim = list(fleet.supervisor.living().values())[turn % 2]
            began = time.perf_counter()
            os.kill(victim.info.pid, signal.SIGKILL)
            same = await asyncio.gather(*reading) == quiet
            assert same, "a stream has changed"
            count = sum(failover.counts) - before[0]
            moved += count
            longest.append(failover.longest)
            mean.append((failover.seconds - before[1]) / count if count else 0.0)
            print(
                f"{count} streams continued; all ended {time.perf_counter() - began:.2f} s after "
                "the kill"
            )
    finally:
        await fleet.close()
    figures = {"longest_pause_s": spread(longest), "mean_pause_s": spread(mean), "moved": moved}
    return {"name": "failover", "streams": shape.requests} | figures
