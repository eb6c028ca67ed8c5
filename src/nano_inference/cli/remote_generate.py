"""`nano-inference generate --url`: a server's model continues a text."""

import sys
import time
from pathlib import Path

import typer

from nano_inference.cli import options
from nano_inference.cli.prompts import read_text
from nano_inference.cli.terminal import Interruptible, errors, write
from nano_inference.errors import InvalidRequest
from nano_inference.system.http_client import HttpClient, Usage
from nano_inference.types import SamplingParams


def generate_on(
    ctx: typer.Context,
    client: HttpClient,
    model: str | None,
    prompts: list[str],
    file: Path | None,
    params: SamplingParams,
) -> None:
    """Write a server's completion of one prompt as it is made; the figures go to standard error.

    Args:
        ctx: of the command, which knows what options were given: only these are sent.
        client: of the server.
        model: its name on the server; None: the first that the server lists.
        prompts: at most one. None: the prompt is read from `file` or standard input.
        file: a file that is one prompt; `-`: standard input.
        params: how tokens are drawn.

    Raises:
        typer.BadParameter: there is no prompt, or more than one.
        InvalidRequest: the prompt is empty or cannot be read.
    """
    if len(prompts) > 1:
        raise typer.BadParameter("--url takes one prompt; give -p once.")
    text = _prompt(prompts[0] if prompts else None, file)
    given = {name for name in options.PARAMS if options.is_given(ctx, name)}
    asked = {"model": model or client.default_model(), "prompt": text}
    body = asked | options.request_body(given, params)
    usage: Usage | None = None
    began = time.perf_counter()
    with Interruptible(client.complete(body)) as pieces:
        for piece in pieces:
            if piece.text:
                write(piece.text)
            usage = piece.usage or usage
    write("\n")
    if usage is not None and not pieces.stopped:
        errors.print(_figures(usage, time.perf_counter() - began), style="dim")
    if pieces.stopped:
        raise typer.Exit(130)


def _prompt(given: str | None, file: Path | None) -> str:
    if given is not None and file is not None:
        raise typer.BadParameter("--prompt and --file are two prompts; give one.")
    if file is not None and str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"{file}: no such file.", param_hint="--file")
    if given is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "there is no prompt; give one with -p TEXT, -f FILE, or on standard input."
        )
    if given is None:
        given = read_text(file or Path("-"))
    if not given:
        raise InvalidRequest("the prompt is empty.")
    return given


def _figures(usage: Usage, seconds: float) -> str:
    tokens = usage.completion_tokens
    return (
        f"{tokens:,} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):,.1f} tok/s; "
        f"{usage.cached_tokens:,} of "
        f"{usage.prompt_tokens:,} prompt tokens cached"
    )
