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
from rich.table import Table

import nano_inference
from nano_bench import load, outcomes
from nano_bench.cpu_time import server_parts
from nano_bench.shape import HIGHEST_ID, LOWEST_ID, Ask, Lengths, Shape, start_times
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
_SENT, _PACE, _SAID = "Requests", "Load", "Results"


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
            help="Keep this many requests in flight (closed loop).",
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
            metavar="LIMITS",
            rich_help_panel=_SAID,
            help="Count requests within limits, such as ttft=500ms,itl=50ms. ttft: first token; "
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
    """
    pace = _pace(requests, duration, concurrency, rate, arrivals == "constant", ramp)
    limits = _limits(slo)
    shape = Shape(
        Lengths.read(prompt_tokens),
        Lengths.read(output_tokens),
        prompts,
        stream,
        shared_prefix,
        prefix_groups,
        vocab_size,
        {"ignore_eos": ignore_eos or None, "temperature": temperature},
    )
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot requires matplotlib, not installed here; run: pip install "
            "'nano-inference[plots]'"
        )
    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.absolute().parent}.")
    target = load.Target(url, model or "", key_of(api_key, api_key_file))
    done, target = load.run(_measure(target, shape, pace, warm_up, _time(timeout), seed, pid))
    row = done.row() | _within(done, limits)
    output.print(f"{target.url}, {target.model}", f"{shape}; {pace}", sep="\n", markup=False)
    output.print(_figures(row), _latencies(row), sep="\n")
    for text, count in Counter(done.errors).most_common(SHOWN_ERRORS):
        errors.print(f"{count} x {text}", markup=False, soft_wrap=True)
    if done.gave_up:
        errors.print(f"The load ended early: lost the connection to {target.url}.")
    if out is not None:
        about = {"url": target.url, "model": target.model, "sent": str(shape), "pace": str(pace)}
        report = about | {"seed": seed, "limits": limits, "version": nano_inference.__version__}
        report |= {"summary": row, "requests": [*_rows(done)]}
        write_file(out, json.dumps(report, indent=1) + "\n")
        errors.print(f"written: {out}", style="dim", soft_wrap=True)
    if plot is not None:
        from nano_bench.picture import draw  # imports matplotlib

        draw(done, f"{target.model}: {shape}; {pace}", plot)
    if done.interrupted:
        raise typer.Exit(130)
    if row["errors"]:
        raise typer.Exit(1)


async def _measure(
    target: load.Target,
    shape: Shape,
    pace: _Pace,
    warm_up: int,
    timeout: float,
    seed: int,
    pid: int | None,
) -> tuple[outcomes.Load, load.Target]:
    """Warm up, then run the load. Raises `ConfigError` if there is no server."""
    try:
        (await connect(*target.address)).close()
        if not target.model:
            target = replace(target, model=await load.model_of(target))
    except Broken as problem:
        raise ConfigError(f"{target.url}: {problem}.") from None
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
    return done, target


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
        name, _, value = part.partition("=")
        if name.strip() not in outcomes.LIMITED:
            raise ConfigError(
                f"--slo: {part!r} is not a limit; write one of {', '.join(outcomes.LIMITED)} with "
                "a time, such as ttft=500ms."
            )
        limits[name.strip()] = _time(value)
    return limits


def _within(done: outcomes.Load, limits: dict[str, float]) -> dict[str, Any]:
    if not limits:
        return {}
    count = done.within(limits)
    return {
        "within_limits": count,
        "within_limits_share": round(count / max(len(done.outcomes), 1), 4),
        "goodput_per_s": round(count / max(done.seconds, 1e-9), 4),
    }


_LATENCIES = {
    "first token": "first_token_ms",
    "between two pieces": "between_tokens_ms",
    "each further token": "per_token_ms",
    "whole answer": "whole_ms",
}


def _figures(row: dict[str, Any]) -> Table:
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["errors_by_kind"].items())
    ways = row["counted_by"]
    figures = {
        "requests": f"{row['requests']:,}",
        "failed": f"{row['errors']:,}" + f" ({kinds})" * bool(kinds),
        "seconds": f"{row['seconds']:,.2f}",
        "requests/s": f"{row['requests_per_s']:,.2f}",
        "output tokens/s": f"{row['output_tokens_per_s']:,.1f}",
        "output tokens": f"{row['output_tokens']:,}"
        + f", counted by {' and '.join(ways)}" * bool(ways),
        "prompt tokens": f"{row['prompt_tokens']:,}, of them cached {row['cached_tokens']:,}",
    }
    if row["tokens_per_event"] is not None:
        figures["tokens in a piece"] = f"{row['tokens_per_event']:.2f}"
    if "within_limits" in row:
        figures["within limits"] = f"{row['within_limits']:,} ({row['within_limits_share']:.1%})"
        figures["goodput, requests/s"] = f"{row['goodput_per_s']:,.2f}"
    if len(row["cpu_s"]) > 1:
        figures["CPU s"] = ", ".join(f"{name} {spent:.2f}" for name, spent in row["cpu_s"].items())
    table = Table.grid(padding=(0, 2))
    for name, text in figures.items():
        table.add_row(name, text)
    return table


def _latencies(row: dict[str, Any]) -> Table:
    table = Table()
    for index, column in enumerate(("milliseconds", "p50", "p90", "p99", "max")):
        table.add_column(column, justify="right" if index else "left")
    for name, key in _LATENCIES.items():
        values: dict[str, float] = row[key] or {}
        table.add_row(name, *(f"{values[p]:,.1f}" if p in values else "-" for p in _PERCENTS))
    return table


_PERCENTS = ("p50", "p90", "p99", "p100")


def _rows(done: outcomes.Load) -> Iterator[dict[str, Any]]:
    """Yield a row per request in order of their start. Times are seconds since the load began."""
    for one in done.outcomes:
        yield {
            "began_s": round(one.began - done.began, 6),
            "first_token_s": None if one.first_token is None else round(one.first_token, 6),
            "longest_gap_s": round(max(outcomes.gaps(one.pieces)), 6) if one.pieces[1:] else None,
            "whole_s": round(one.ended - one.began, 6),
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "output_tokens": one.tokens,
            "counted_by": None if one.error else one.counted_by,
            "error_kind": one.kind,
            "error": one.error,
        }
