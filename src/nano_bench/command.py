"""`nano-inference bench`: measure a server with OpenAI's routes under load."""

import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import nano_inference
from nano_bench import load, outcomes
from nano_bench.cpu_time import server_parts
from nano_bench.figures import figures, latencies, request_row, within
from nano_bench.shape import HIGHEST_ID, LOWEST_ID, Ask, Lengths, Shape, start_times
from nano_bench.traces import read_trace
from nano_bench.traces import report as trace_report
from nano_bench.traces.replay import Options, replay
from nano_bench.wire import Broken, connect
from nano_inference.cli import (
    ApiKey,
    ApiKeyFile,
    Debug,
    ServedModel,
    errors,
    key_of,
    output,
    write_file,
)
from nano_inference.errors import ConfigError

REQUESTS = 256  # default without --duration
SHOWN_ERRORS = 5
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_SENT, _PACE, _TRACE, _SAID = "Requests", "Load", "Trace", "Results"


@dataclass(frozen=True)
class _Pace:
    """Times at which requests start.

    Attributes:
        requests: Number of requests, or None.
        seconds: Seconds in which requests start, or None.
        concurrency: Requests in flight in a closed loop.
        rate: Requests per second in an open loop. None: closed loop.
        evenly: True for constant intervals, False for random ones.
        ramp: Rate at the end, or None for a constant rate.
    """

    requests: int | None
    seconds: float | None
    concurrency: int
    rate: float | None
    evenly: bool
    ramp: float | None

    def starts(self, seed: int) -> Iterator[float] | None:
        if self.rate is None:
            return None
        if self.ramp is None:
            return start_times(self.rate, seed=seed, evenly=self.evenly)
        span = self.seconds or 2 * (self.requests or 0) / (self.rate + self.ramp)
        return start_times(self.rate, seed=seed, evenly=self.evenly, end_rate=self.ramp, span=span)

    def __str__(self) -> str:
        ends = {"{} requests": self.requests, "{:g} s": self.seconds}
        much = " or ".join(form.format(end) for form, end in ends.items() if end is not None)
        if self.rate is None:
            return f"{much}, {self.concurrency} at once"
        rise = "" if self.ramp is None else f" to {self.ramp:g}"
        return f"{much}, {self.rate:g}{rise} per second" + ", evenly" * self.evenly


def bench(
    ctx: typer.Context,
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Address of the server, such as http://127.0.0.1:8000."),
    ],
    model: ServedModel = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            rich_help_panel=_PACE,
            help=f"Number of requests. Default: {REQUESTS}, or unlimited with --duration.",
        ),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            rich_help_panel=_PACE,
            help="Stop sending new requests after this long (30s, 5m).",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            rich_help_panel=_PACE,
            show_default="32",
            help="Keep this many requests in flight (closed loop), or sessions of a trace.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            rich_help_panel=_PACE,
            help="Send this many requests per second, without waiting for answers (open loop).",
        ),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant"],
        typer.Option(
            rich_help_panel=_PACE, help="With --rate, send at random or constant intervals."
        ),
    ] = "poisson",
    ramp: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="RATE",
            rich_help_panel=_PACE,
            help="Change the rate linearly from --rate to this rate at the end.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_TRACE,
            help="Replay a trace of agents: Mooncake's JSON lines, or aiperf's Weka or DAG form.",
        ),
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(min=0.0, rich_help_panel=_TRACE, help="Multiply all waits by this number."),
    ] = 1.0,
    length_scale: Annotated[
        float,
        typer.Option(
            min=1e-4,
            max=1.0,
            rich_help_panel=_TRACE,
            help="Multiply the lengths of prompts and outputs by this number.",
        ),
    ] = 1.0,
    max_sessions: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=_TRACE, help="Replay the first sessions only."),
    ] = None,
    max_turns: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=_TRACE, help="Replay the first turns of a conversation only."
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="TIME", rich_help_panel=_PACE, help="Give up a request after this time."
        ),
    ] = "10m",
    warm_up: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=_PACE, help="Unmeasured requests to send first."),
    ] = 8,
    prompts: Annotated[
        Literal["tokens", "text", "chat"],
        typer.Option(
            rich_help_panel=_SENT,
            help="Send completions of random token ids, completions of random words, or chats.",
        ),
    ] = "tokens",
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            rich_help_panel=_SENT,
            help="Prompt length: 128; uniform:MIN:MAX; lognormal:MEDIAN:SIGMA or "
            "lognormal:MEDIAN:SIGMA:MAX. Counts words for text and chats.",
        ),
    ] = "64",
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTH",
            rich_help_panel=_SENT,
            help="Output length, in the syntax of --prompt-tokens.",
        ),
    ] = "128",
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=_SENT,
            help="Start the prompts of a group with this many shared tokens.",
        ),
    ] = 0,
    prefix_groups: Annotated[
        int, typer.Option(min=1, rich_help_panel=_SENT, help="Number of groups.")
    ] = 1,
    vocab_size: Annotated[
        int,
        typer.Option(
            min=LOWEST_ID + 1, rich_help_panel=_SENT, help="Draw token ids below this number."
        ),
    ] = HIGHEST_ID,
    stream: Annotated[bool, typer.Option(rich_help_panel=_SENT, help="Stream answers.")] = True,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            rich_help_panel=_SENT,
            help="Generate up to the full output length. OpenAI's own servers reject this field.",
        ),
    ] = True,
    temperature: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=_SENT, help="Sampling temperature.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(rich_help_panel=_SENT, help="Seed of prompts, lengths and random times.")
    ] = 0,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            "--goodput",
            metavar="LIMITS",
            rich_help_panel=_SAID,
            help="Count requests within limits, such as ttft=500ms,itl=50ms or vLLM's ttft:500 "
            "(milliseconds). ttft: first token; "
            "itl: longest gap between two pieces; tpot: mean per further token; e2e: whole answer.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", rich_help_panel=_SAID, help="Write results as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_SAID, help="Draw a PNG picture (requires matplotlib)."),
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SAID, help="Measure the CPU seconds of this process."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure a server with OpenAI's routes: ours, vLLM, SGLang, llama.cpp.

    Exit code 0: every request succeeded. 1: some failed (the table has the reasons). 2: wrong
    input, or no server. 130: Ctrl-C, after the figures so far.

    Examples:

    nano-inference bench http://127.0.0.1:8000 -n 256 -c 32
    nano-inference bench URL --rate 2 --ramp 20 --duration 2m --slo ttft=500ms,itl=100ms
    nano-inference bench URL --prompts chat --output-tokens lognormal:160:1:1024 -o run.json
    nano-inference bench URL --shared-prefix 512 --prefix-groups 4 --plot run.png
    nano-inference bench URL --trace agents.jsonl -c 4 --length-scale 0.05 --goodput ttft:150
    """
    limits = _limits(slo)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot requires matplotlib, not installed here; run: pip install "
            "'nano-inference[plots]'"
        )
    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.absolute().parent}.")
    _require_options_of(ctx, "trace" if trace is not None else "load")
    target = load.Target(url, model or "", key_of(api_key, api_key_file))
    fields = {"ignore_eos": ignore_eos or None, "temperature": temperature}
    if trace is not None:
        scales = (max_sessions, max_turns, length_scale, time_scale)
        measured = _replay(target, trace, scales, concurrency, fields, warm_up, _time(timeout), pid)
    else:
        shape = Shape(
            Lengths.read(prompt_tokens),
            Lengths.read(output_tokens),
            prompts,
            stream,
            shared_prefix,
            prefix_groups,
            vocab_size,
            fields,
        )
        pace = _pace(requests, duration, concurrency, rate, arrivals == "constant", ramp)
        measured = _measure(target, shape, pace, warm_up, _time(timeout), seed, pid)
    _report(load.run(measured), limits, out, plot, seed)


@dataclass(frozen=True)
class _Measured:
    """A load and its description.

    Attributes:
        about: Description for the report.
        more: Figures that only a trace has.
        rows: A row per request.
    """

    target: load.Target
    load: outcomes.Load
    about: dict[str, str]
    more: dict[str, Any]
    rows: list[dict[str, Any]]


def _report(
    measured: _Measured, limits: dict[str, float], out: Path | None, plot: Path | None, seed: int
) -> None:
    """Show the figures, write the files, and exit with the command's code."""
    done, target, about = measured.load, measured.target, measured.about
    row = done.row() | measured.more | within(done, limits)
    title = "; ".join(about.values())
    output.print(f"{target.url}, {target.model}", title, sep="\n", markup=False)
    if measured.more:
        shown = figures(row, trace_report.lines(row))
        times = latencies(row, trace_report.LATENCIES, trace_report.PERCENTS)
    else:
        shown, times = figures(row), latencies(row)
    output.print(shown, times, sep="\n")
    for text, count in Counter(done.errors).most_common(SHOWN_ERRORS):
        errors.print(f"{count} x {text}", markup=False, soft_wrap=True)
    if done.gave_up:
        errors.print(f"The load ended early: lost the connection to {target.url}.")
    if out is not None:
        report = {"url": target.url, "model": target.model, **about}
        report |= {"seed": seed, "limits": limits, "version": nano_inference.__version__}
        report |= {"summary": row, "requests": measured.rows}
        write_file(out, json.dumps(report, indent=1) + "\n")
        errors.print(f"written: {out}", style="dim", soft_wrap=True)
    if plot is not None:
        from nano_bench.picture import draw  # imports matplotlib

        draw(done, f"{target.model}: {title}", plot)
    if done.interrupted:
        raise typer.Exit(130)
    if row["errors"]:
        raise typer.Exit(1)


async def _found(target: load.Target) -> load.Target:
    """Return the target with its model. Raises `ConfigError` if there is no server."""
    try:
        (await connect(*target.address)).close()
        return target if target.model else replace(target, model=await load.model_of(target))
    except Broken as problem:
        raise ConfigError(f"{target.url}: {problem}.") from None


async def _replay(
    target: load.Target,
    file: Path,
    scales: tuple[int | None, int | None, float, float],
    at_once: int | None,
    fields: dict[str, Any],
    warm_up: int,
    timeout: float,
    pid: int | None,
) -> _Measured:
    """Warm up, then replay a trace. Raises `ConfigError` if it is invalid or without a server."""
    sessions, turns, length_scale, time_scale = scales
    trace = read_trace(file).limited(
        max_sessions=sessions,
        max_turns=turns,
        length_scale=length_scale,
        time_scale=time_scale,
    )
    at_once = at_once or trace.at_once
    target = await _found(target)
    kept = {name: value for name, value in fields.items() if value is not None}
    with errors.status("warming up") as status:
        if warm_up:
            first = Shape(Lengths.read("16"), Lengths.read("8"), "chat", more=fields)
            asks = itertools.islice(first.asks(-1), warm_up)
            await load.drive(target, [*asks], concurrency=4, timeout=timeout)
        count = itertools.count(1)
        options = Options(
            at_once,
            timeout,
            kept,
            server_parts(pid) if pid is not None else {},
            lambda: status.update(f"{next(count)} of {trace.turns} turns"),
        )
        done, played = await replay(target, trace, options)
    pace = f"{at_once} sessions at once" if at_once else "sessions at their times"
    scaled = f", lengths x {length_scale:g}" * (length_scale != 1) + f", waits x {time_scale:g}" * (
        time_scale != 1
    )
    about = {"sent": f"{file.name}: {trace}{scaled}", "pace": pace}
    rows = [*trace_report.trace_rows(done, played)]
    return _Measured(target, done, about, trace_report.trace_row(done, played), rows)


async def _measure(
    target: load.Target,
    shape: Shape,
    pace: _Pace,
    warm_up: int,
    timeout: float,
    seed: int,
    pid: int | None,
) -> _Measured:
    """Warm up, then run the load. Raises `ConfigError` if there is no server."""
    target = await _found(target)
    with errors.status("warming up") as status:
        if warm_up:
            first = itertools.islice(shape.asks(seed - 1), warm_up)
            await load.drive(target, [*first], concurrency=pace.concurrency, timeout=timeout)
        count, total = itertools.count(1), pace.requests or "?"
        asks: Iterator[Ask] = itertools.islice(shape.asks(seed), pace.requests)
        done = await load.drive(
            target,
            asks,
            concurrency=pace.concurrency,
            starts=pace.starts(seed),
            seconds=pace.seconds,
            timeout=timeout,
            watched=server_parts(pid) if pid is not None else {},
            ended=lambda: status.update(f"{next(count)} of {total} requests"),
            interruptible=True,
        )
    rows = [request_row(one, done.began) for one in done.outcomes]
    return _Measured(target, done, {"sent": str(shape), "pace": str(pace)}, {}, rows)


_ONLY_LOAD = (
    *("requests", "duration", "rate", "arrivals", "ramp", "prompts", "prompt_tokens"),
    *("output_tokens", "shared_prefix", "prefix_groups", "vocab_size", "stream", "seed"),
)
_ONLY_TRACE = ("time_scale", "length_scale", "max_sessions", "max_turns")


def _require_options_of(ctx: typer.Context, kind: Literal["trace", "load"]) -> None:
    """Reject options that the kind of load ignores. Raises `ConfigError`."""
    for name in _ONLY_LOAD if kind == "trace" else _ONLY_TRACE:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            if kind == "trace":
                raise ConfigError(f"--trace and {flag} exclude each other; give one.")
            raise ConfigError(f"{flag} requires --trace.")


def _pace(
    requests: int | None,
    duration: str | None,
    concurrency: int | None,
    rate: float | None,
    evenly: bool,
    ramp: float | None,
) -> _Pace:
    if rate is None and (ramp is not None or evenly):
        raise ConfigError("--ramp and --arrivals require --rate.")
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; give one.")
    seconds = None if duration is None else _time(duration)
    if requests is None and seconds is None:
        requests = REQUESTS
    return _Pace(requests, seconds, concurrency or 32, rate, evenly, ramp)


def _time(text: str) -> float:
    """Return the seconds of a time such as `500ms` or `5m`. Raises `ConfigError`."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", text.strip())
    if parts is None or not float(parts[1]):
        raise ConfigError(f"{text!r} is not a time; write one such as 500ms, 30s or 5m.")
    return float(parts[1]) * _SECONDS[parts[2]]


def _limits(text: str | None) -> dict[str, float]:
    """Return limits in seconds by name in `outcomes.LIMITED`. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text is not None else []:
        name, colon, value = part.partition(":")  # vLLM's form, in milliseconds
        if colon:
            value = f"{value}ms" if value[-1:].isdecimal() else value
        else:
            name, _, value = part.partition("=")
        if name.strip() not in outcomes.LIMITED:
            raise ConfigError(
                f"--slo: {part!r} is not a limit; write one of {', '.join(outcomes.LIMITED)} with "
                "a time, such as ttft=500ms."
            )
        limits[name.strip()] = _time(value)
    return limits
