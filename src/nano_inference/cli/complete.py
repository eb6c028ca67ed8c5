"""`nano-inference complete`: let a server's model continue a text."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from nano_inference.cli import options
from nano_inference.cli.terminal import Interruptible, errors, write
from nano_inference.errors import InvalidRequest
from nano_inference.system.http_client import HttpClient, Usage
from nano_inference.types import SamplingParams


@options.from_fields
def complete(
    ctx: typer.Context,
    *,
    url: Annotated[
        str,
        typer.Option(
            "--url", help="The server, such as http://127.0.0.1:8000.", show_default=False
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Continue the text of this file, all of it. -: standard input."
        ),
    ] = None,
    model: options.ServedModel = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    sampling: options.Sampling,
    debug: options.Debug = False,
) -> None:
    """Let a server's model continue a text.

    The prompt comes from -p, from a file or from standard input; the completion goes to standard
    output as it is made.

    Examples:

    nano-inference complete --url http://127.0.0.1:8000 -p "Once upon a time" --max-tokens 32
    echo "Once upon a time" | nano-inference complete --url http://127.0.0.1:8000
    """
    text = _prompt(prompt, file)
    params = options.checked(SamplingParams, **sampling)
    given = {name for name in options.PARAMS if options.is_given(ctx, name)}
    client = HttpClient(url, options.key_of(api_key, api_key_file))
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
        try:
            given = (
                sys.stdin.read()
                if file is None or str(file) == "-"
                else file.read_text(encoding="utf-8")
            )
        except (OSError, UnicodeDecodeError) as problem:
            raise InvalidRequest(
                f"{file or 'standard input'} cannot be read as UTF-8 text: {problem}"
            ) from None
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
