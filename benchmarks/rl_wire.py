"""The cost of RL over HTTP: logprobs with every token, and weight updates while requests run.

- `logprobs`: A closed loop of completions without logprobs, with them in each dialect's form, and
  as flat arrays. The forms take turns on one server. vLLM's server runs the same loop.
- `update`: All weights arrive from a second process over gloo while streams run. The result is the
  extra wait for a token, compared with a blocking update in process.
"""

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import servers, weight_transfer
from benchmarks.arrival import gaps_ending_in
from benchmarks.machine import handover_ns, placement
from benchmarks.measure import Row, console, show, spread
from benchmarks.ours import Options, opened
from benchmarks.peers import install
from benchmarks.peers.compare import OURS
from benchmarks.peers.process import PeerFailed, Worker
from benchmarks.rl import RUNNING, run_many, seconds_of
from benchmarks.serve import Choice, log_of, under_load
from benchmarks.servers import Running
from benchmarks.wire_trainer import FLOWS
from nano_bench.load import Target, drive, run
from nano_bench.outcomes import Load
from nano_bench.shape import Ask, token_requests
from nano_bench.wire import connect

PARTS = ("logprobs", "update")
PLAIN = "/v1/completions, none"
STREAMED = 600  # tokens of each stream during an update
LEAD = 60  # average tokens of each stream at the start of the update
AFTER = 0.5  # seconds after it, enough for a token of the new weights


def plain(body: Mapping[str, Any]) -> Ask:
    return Ask("/v1/completions", body)


def as_trl(body: Mapping[str, Any]) -> Ask:
    """Return a request for logprobs and token ids as TRL sends it."""
    more = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return Ask("/v1/completions", dict(body) | more)


def as_vllm(body: Mapping[str, Any], **more: Any) -> Ask:
    params = {name: body[name] for name in ("max_tokens", "ignore_eos", "temperature")}
    told = {"token_ids": body["prompt"], "sampling_params": params | {"logprobs": 1}}
    return Ask("/inference/v1/generate", told | more)


def as_sglang(body: Mapping[str, Any]) -> Ask:
    params = {
        "max_new_tokens": body["max_tokens"],
        "ignore_eos": True,
        "temperature": body["temperature"],
    }
    return Ask(
        "/generate",
        {"input_ids": body["prompt"], "sampling_params": params, "return_logprob": True},
    )


Form = Callable[[Mapping[str, Any]], Ask]
OUR_FORMS: dict[str, Form] = {
    PLAIN: plain,
    "/v1/completions, logprobs and ids": as_trl,
    "/inference/v1/generate, objects": as_vllm,
    "/inference/v1/generate, base64": lambda body: as_vllm(body, flat_logprobs="base64"),
    "/generate, lists": as_sglang,
}
VLLM_FORMS = {name: OUR_FORMS[name] for name in (PLAIN, "/v1/completions, logprobs and ids")}


def measure(options: Options, parts: Sequence[str], choice: Choice) -> list[Row]:
    options = replace(options, threads=options.threads or psutil.cpu_count(logical=False) or 1)
    measured = {"logprobs": logprobs, "update": update}
    return [row for part in parts for row in measured[part](options, choice)]


# -- logprobs --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Figures of one form over all rounds."""

    rates: list[float]
    handovers: list[tuple[float | None, float | None]]
    cpu: list[dict[str, float]]


def logprobs(options: Options, choice: Choice) -> list[Row]:
    rows: list[Row] = []
    if OURS in choice.engines:
        with servers.ours(options, log_of(choice, "ours"), "--rl") as server:
            rows += forms(server, OURS, OUR_FORMS, options, choice)
    if "vllm" in choice.engines:
        try:
            with servers.vllm(
                options, choice.cache, log_of(choice, "vllm"), choice.setting
            ) as server:
                rows += forms(server, "vllm", VLLM_FORMS, options, choice)
        except PeerFailed as why:
            console.print(f"skipping vllm: {why}", markup=False)
    show(
        f"logprobs over HTTP, {options.model}, {choice.concurrency} in flight",
        LOGPROB_COLUMNS,
        rows,
    )
    return rows


def forms(
    server: Running, engine: str, table: Mapping[str, Form], options: Options, choice: Choice
) -> list[Row]:
    """Run every form once per round, in turns. Compare each with the round's completions without
    logprobs.
    """
    seen = {name: Seen([], [], []) for name in table}
    for form in table.values():
        under_load(server, asks_of(form, choice, -1, choice.warm_up), choice)
    for number in range(options.repeats):
        shift = number % len(table)
        order = [*table][shift:] + [*table][:shift]
        for place, name in enumerate(order):
            before = handover_ns()
            done = under_load(
                server,
                asks_of(table[name], choice, number * len(order) + place, choice.requests),
                choice,
            )
            require_whole(done, engine, choice)
            found = seen[name]
            found.rates.append(done.tokens / done.seconds)
            found.handovers.append((before, handover_ns()))
            found.cpu.append(done.cpu)
            console.print(f"round {number + 1}: {engine}, {name}: {found.rates[-1]:,.0f} tok/s")
    return [
        row_of(engine, name, each, seen[PLAIN].rates, server.config) for name, each in seen.items()
    ]


def asks_of(form: Form, choice: Choice, variant: int, count: int) -> list[Ask]:
    """Return the requests. No two variants share a prompt."""
    made = token_requests(
        count, choice.prompt_tokens, choice.output_tokens, stream=False, seed=20_000 + variant
    )
    return [form(ask.body) for ask in made]


def require_whole(done: Load, engine: str, choice: Choice) -> None:
    if done.errors or done.tokens != choice.requests * choice.output_tokens:
        raise PeerFailed(
            f"{engine} made {done.tokens} tokens, {len(done.errors)} errors: {done.errors[:3]}."
        )


def row_of(engine: str, name: str, seen: Seen, plain: Sequence[float], config: str) -> Row:
    parts = sorted({part for each in seen.cpu for part in each})
    return {
        "name": f"logprobs: {engine}, {name}",
        "part": "logprobs",
        "engine": engine,
        "form": name,
        "output_tokens_per_s": spread(seen.rates),
        "of_none": spread(own / other for own, other in zip(seen.rates, plain, strict=True)),
        "cpu_s": {part: spread(each.get(part, 0.0) for each in seen.cpu) for part in parts},
        "handover_ns": [list(pair) for pair in seen.handovers],
        "placement": placement(seen.handovers),
        "config": config,
    }


# -- an update -------------------------------------------------------------------------------------


def update(options: Options, choice: Choice) -> list[Row]:
    swaps = in_process(options)
    rows: list[Row] = [
        {
            "name": f"update: in process, {RUNNING} requests stand still",
            "part": "update",
            "seconds": spread(swaps),
        }
    ]
    with servers.ours(options, log_of(choice, "ours"), "--rl") as server:
        command = [
            sys.executable,
            "-m",
            "benchmarks.wire_trainer",
            server.target.url,
            options.model,
            options.dtype,
        ]
        worker = Worker("trainer", "", command, os.environ, log_of(choice, "trainer"), "")
        try:
            for flow in FLOWS:
                rows.append(over_the_wire(server, worker, flow, options, statistics.median(swaps)))
        finally:
            worker.stop()
    show(f"all weights of {options.model} while {RUNNING} requests run", UPDATE_COLUMNS, rows)
    return rows


def in_process(options: Options) -> list[float]:
    """Return the seconds of blocking updates between two steps of running requests."""
    with opened(options) as engine:
        weights = weight_transfer.state_dict(engine.model)
        weight_transfer.copy_and_update(engine, weights, 2)
        run_many(engine, RUNNING)
        swaps: list[float] = []
        for _ in range(options.repeats + 1):
            swaps.append(
                seconds_of(lambda: engine.update_weights(weights, blocking=True, kv_policy="keep"))
            )
            for _ in range(5):
                engine.step()
        return swaps[1:]


def over_the_wire(server: Running, worker: Worker, flow: str, options: Options, swap: float) -> Row:
    """Measure updates of one flow, each with new streams."""
    pauses: list[float] = []
    lengths: list[float] = []
    steps: list[float] = []
    size = 0
    for number in range(options.repeats + 1):
        load, told = run(meet(server, worker, flow, number))
        if load.errors:
            raise PeerFailed(f"{len(load.errors)} streams failed: {load.errors[:3]}.")
        times = [each.pieces for each in load.outcomes]
        usual = statistics.median(gaps_ending_in(times, 0.0, told["began"]))
        pauses.append(max(gaps_ending_in(times, told["began"], told["ended"] + AFTER)) - usual)
        lengths.append(told["ended"] - told["began"])
        steps.append(usual)
        size = told["bytes"]
    return {
        "name": f"update: over gloo and HTTP, {flow}",
        "part": "update",
        "bytes": size,
        "seconds": spread(pauses[1:]),
        "update_s": spread(lengths[1:]),
        "usual_gap_s": spread(steps[1:]),
        "of_in_process": spread(pause / swap for pause in pauses[1:]),
    }


async def meet(
    server: Running, worker: Worker, flow: str, number: int
) -> tuple[Load, dict[str, Any]]:
    """Start streams, and send an update while they run."""
    asks = token_requests(RUNNING, 32, STREAMED, stream=True, seed=30_000 + number)
    before = await completion_tokens(server.target)
    streams = asyncio.create_task(drive(server.target, asks, concurrency=RUNNING))
    while await completion_tokens(server.target) < before + RUNNING * LEAD:
        await asyncio.sleep(0.05)
    told = await asyncio.to_thread(worker.ask, {"flow": flow})
    return await streams, told


async def completion_tokens(target: Target) -> int:
    """Return the completion tokens that the server's engine has drawn so far."""
    connection = await connect(*target.address)
    try:
        reply = await connection.ask(target.request("/stats"), 30.0)
    finally:
        connection.close()
    return int(json.loads(reply.body)["engine"]["completion_tokens"])


LOGPROB_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "engine": lambda row: row["engine"],
    "form": lambda row: row["form"],
    "output tok/s": lambda row: row["output_tokens_per_s"],
    "of none": lambda row: row["of_none"],
    "cores": lambda row: row["placement"],
}
UPDATE_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "what": lambda row: row["name"].removeprefix("update: "),
    "pause, s": lambda row: row["seconds"],
    "of in process": lambda row: row.get("of_in_process"),
    "whole update, s": lambda row: row.get("update_s"),
}


def choice_of(
    engines: tuple[str, ...], requests: int, concurrency: int, cache: Path | None
) -> Choice:
    return Choice(
        engines=engines, requests=requests, concurrency=concurrency, cache=cache or install.CACHE
    )
