"""`nano-inference run-batch`: answer a file of requests in OpenAI's batch format."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nano_bench.load import Connections, Target, run
from nano_bench.wire import TIMEOUT, Broken, connect
from nano_inference.cli import (
    ONE_ENGINE,
    RANKS,
    ApiKey,
    ApiKeyFile,
    Debug,
    FieldOptions,
    Values,
    Verbose,
    errors,
    first_given,
    from_fields,
    key_of,
    require_packages,
)
from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.server import ServerConfig

if TYPE_CHECKING:
    from nano_bench.batches import Answer, Ask, Counts

SELDOM = 30.0  # seconds between two lines of progress without a terminal
_OFTEN = 0.2  # seconds between two updates of a terminal's line
_URLS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"))
_NEEDED = ("fastapi", "msgspec", "prometheus_client", "pydantic", "starlette", "zmq")
_SERVER = (
    *("served_model_name", "tool_format", "reasoning_format", "generation_config"),
    *("max_samples", "max_logprobs"),
)
_ENGINE = (*ONE_ENGINE, *RANKS, "rank_timeout")


@from_fields
def run_batch(
    ctx: typer.Context,
    *,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            exists=True,
            dir_okay=False,
            help="Input file with one request per line.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Output file. If it exists, the run resumes after its last complete row.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Answer with an engine in this process."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Send the requests to a server with OpenAI's routes."
        ),
    ] = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Maximum requests in flight.")
    ] = 64,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Timeout of a request in seconds.")
    ] = 3600.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Derive seeds of requests without one from this seed and their custom_id. "
            "Default: 0 with --model; with --server, requests are sent unchanged."
        ),
    ] = None,
    served: Annotated[Values, FieldOptions(ServerConfig, _SERVER)],
    engine: Annotated[Values, FieldOptions(EngineConfig, _ENGINE)],
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Output rows have the order of the input lines. A request that fails gets a row with an error.
    Run the same command again to resume an interrupted run. Exit code 0: every request succeeded.
    1: some failed. 2: wrong input, or a lost connection (finished rows are kept). 130: Ctrl-C.

    Examples:

    nano-inference run-batch -i batch.jsonl -o out.jsonl --model smollm2-135m
    nano-inference run-batch -i batch.jsonl -o out.jsonl --server http://127.0.0.1:8000
    """
    if (model is None) == (server is None):
        raise ConfigError("give exactly one of --model and --server.")
    _check_given(ctx, model is not None)
    if model is not None:
        require_packages(_NEEDED, "--model", model, "server")
    if out.exists() and out.samefile(source):
        raise ConfigError(f"{out} is the input file; choose another --output.")
    from nano_bench.batches import Output, Reader, lines_of, run_lines

    if model is not None:
        # maximum number of samples in flight
        served["max_queued_samples"] = concurrency * (served["max_samples"] or 128)
        config = ServerConfig(in_process=True, request_timeout=timeout, **served)
        asker = _of_engine(EngineConfig(model, **engine), config)
        reader = Reader(_URLS, 0 if seed is None else seed)
    else:
        target = Target(server or "", key=key_of(api_key, api_key_file))
        asker = _of_server(target, timeout)
        reader = Reader(_URLS, seed)

    async def answer_all(output: Output) -> None:
        with source.open("rb") as file:
            lines = lines_of(file)
            output.pass_over(lines, reader)
            if output.counts.earlier:
                errors.print(f"Resuming after {output.counts.earlier:,} rows.", style="dim")
            async with asker as ask:
                with _Progress(output.counts, file.tell, source.stat().st_size) as progress:
                    await run_lines(lines, reader, ask, output, concurrency, progress.look)

    with Output(out) as output:
        try:
            run(answer_all(output))
        except KeyboardInterrupt:
            errors.print(
                f"Interrupted after {output.counts.rows:,} rows; run the same command to resume."
            )
            raise typer.Exit(130) from None
        finally:
            counts = output.counts
        errors.print(f"{counts.rows:,} rows, {counts.failed:,} failed: {out}", soft_wrap=True)
    if counts.failed:
        raise typer.Exit(1)


def _check_given(ctx: typer.Context, in_process: bool) -> None:
    """Raise `ConfigError` for an option that would have no effect."""
    theirs = ("api_key", "api_key_file") if in_process else (*_SERVER, *_ENGINE)
    if (flag := first_given(ctx, theirs)) is not None:
        needs = "--server" if in_process else "--model"
        raise ConfigError(f"{flag} requires {needs}.")


@asynccontextmanager
async def _of_engine(engine: EngineConfig, config: ServerConfig) -> "AsyncIterator[Ask]":
    from nano_bench.local import local_app

    with errors.status(f"loading {engine.model_path}") as status:
        async with local_app(engine, config) as ask:
            status.stop()
            yield ask


@asynccontextmanager
async def _of_server(target: Target, timeout: float) -> "AsyncIterator[Ask]":
    from nano_bench.batches import Answer, Failed, Gone

    try:
        (await connect(*target.address)).close()
    except Broken as problem:
        raise ConfigError(f"{target.url}: {problem}.") from None
    connections = Connections(target)

    async def ask(path: str, body: bytes) -> "Answer":
        try:
            reply = await connections.ask(target.post(path, body), timeout)
        except Broken as problem:
            if problem.kind == TIMEOUT:
                raise Failed("timeout", str(problem)) from None
            raise Gone(str(problem)) from None
        return Answer.of(reply.status, reply.headers, reply.body)

    try:
        yield ask
    finally:
        connections.close()


class _Progress:
    """Progress of a run: a live line on a terminal, otherwise a line every `SELDOM` seconds."""

    def __init__(self, counts: "Counts", position: Callable[[], int], size: int) -> None:
        self._counts, self._position, self._size = counts, position, size
        self._status = errors.status("") if errors.is_terminal else None

    def __enter__(self) -> "_Progress":
        self._began = self._said = time.monotonic()
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        if self._counts.rows > self._counts.earlier:
            errors.print(self._text(), style="dim", soft_wrap=True)

    def look(self) -> None:
        """Note that a row was written, and update the line if it is time."""
        now = time.monotonic()
        if now - self._said < (_OFTEN if self._status is not None else SELDOM):
            return
        self._said = now
        text = f"{self._text()}; {self._position() / max(self._size, 1):.0%} of the input read"
        if self._status is not None:
            self._status.update(text)
        else:
            errors.print(text, soft_wrap=True)

    def _text(self) -> str:
        counts, seconds = self._counts, max(time.monotonic() - self._began, 1e-9)
        made = counts.rows - counts.earlier
        return (
            f"{made:,} rows in {seconds:.1f} s: {made / seconds:,.1f} rows/s, "
            f"{counts.tokens / seconds:,.1f} tok/s, {counts.failed:,} failed"
        )
