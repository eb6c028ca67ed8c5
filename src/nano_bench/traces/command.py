"""`nano-inference make-trace`: write a trace of agents with published statistics."""

import json
from pathlib import Path
from typing import Annotated

import typer

from nano_bench.traces.make import Statistics, sessions
from nano_inference.cli import Debug, errors, write_file
from nano_inference.errors import ConfigError

_DEFAULT = Statistics()


def make_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, in JSON lines.")],
    number: Annotated[
        int, typer.Option("--sessions", "-n", min=1, help="Number of sessions, one per line.")
    ] = 16,
    turns: Annotated[
        int, typer.Option(min=2, help="Median of turns per session.")
    ] = _DEFAULT.turns,
    input_tokens: Annotated[
        int, typer.Option(min=64, help="Median of prompt tokens per turn.")
    ] = _DEFAULT.input_tokens,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Median of output tokens per turn.")
    ] = _DEFAULT.output_tokens,
    subagents: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of sessions with subagents.")
    ] = _DEFAULT.subagents,
    seed: Annotated[int, typer.Option(help="Seed. Equal seeds give equal traces.")] = 0,
    debug: Debug = False,
) -> None:
    """Write a synthetic trace of agents for bench --trace.

    The defaults are the published medians of coding agents. Lengths and turns scale with them.

    Examples:

    nano-inference make-trace agents.jsonl
    nano-inference make-trace small.jsonl -n 8 --turns 12 --input-tokens 3000 --output-tokens 24
    """
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {file}: there is no folder {file.absolute().parent}.")
    about = Statistics(turns, input_tokens, output_tokens, subagents)
    made = (json.dumps(each, separators=(",", ":")) for each in sessions(number, about, seed))
    write_file(file, "".join(f"{line}\n" for line in made))
    errors.print(f"written: {file}", style="dim", soft_wrap=True)
