"""`nano-inference generate --url`: continue a text with a server's model."""

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
    """Stream a server's completion of one prompt to standard output, and figures to standard error.

    Args:
        ctx: Context of the command. Only sampling options that you set are sent.
        client: Client of the server.
        model: Model name on the server. None: the first model that the server lists.
        prompts: At most one prompt. Empty: read it from `file` or standard input.
        file: File with one prompt, or `-` for standard input.
        params: Sampling parameters.

    Raises:
        typer.BadParameter: There is no prompt, or more than one.
        InvalidRequest: The prompt is empty or unreadable.
    """
    if len(prompts) > 1:
        raise typer.BadParameter("--url takes one prompt; give -p once.")
    text = _prompt(prompts[0] if prompts else None, file)
    chosen = {name for name in options.PARAMS if options.is_given(ctx, name)}
    body = {"model": model or client.default_model(), "prompt": text}
    body |= options.request_body(chosen, params)
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


def _prompt(text: str | None, file: Path | None) -> str:
    if text is not None and file is not None:
        raise typer.BadParameter("--prompt and --file exclude each other; give one.")
    if file is not None and str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"{file}: no such file.", param_hint="--file")
    if text is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "the prompt is missing; give one with -p TEXT, -f FILE, or on standard input."
        )
    if text is None:
        text = read_text(file or Path("-"))
    if not text:
        raise InvalidRequest("the prompt is empty.")
    return text


def _figures(usage: Usage, seconds: float) -> str:
    tokens = usage.completion_tokens
    return (
        f"{tokens:,} tokens in {seconds:.1f} s: {tokens / max(seconds, 1e-9):,.1f} tok/s; "
        f"{usage.cached_tokens:,} of "
        f"{usage.prompt_tokens:,} prompt tokens cached"
    )
