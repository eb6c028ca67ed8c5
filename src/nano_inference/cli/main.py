"""The app: its commands, and what holds for all of them: the version, errors in one line, exit
codes.
"""

from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

import nano_inference
from nano_inference.cli.bench import bench
from nano_inference.cli.chat import chat
from nano_inference.cli.complete import complete
from nano_inference.cli.draft_heads import draft_heads
from nano_inference.cli.generate import generate
from nano_inference.cli.info import info
from nano_inference.cli.models import models
from nano_inference.cli.options import DEBUG, Verbose
from nano_inference.cli.replay import replay
from nano_inference.cli.report import report
from nano_inference.cli.run_batch import run_batch
from nano_inference.cli.serve import serve
from nano_inference.cli.terminal import errors, set_up_logging, set_up_streams
from nano_inference.cli.train_service import train_service
from nano_inference.errors import NanoInferenceError

# Exit codes for an error of the package: 1, but 2 (as for wrong usage) where 1 is an answer.
_ERROR_CODES = {"replay": 2, "bench": 2, "run-batch": 2}


class _Commands(TyperGroup):
    """Commands whose errors are one line. Exit codes: 1 for an error of the package, 2 for wrong
    usage.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NanoInferenceError as problem:
            if ctx.meta.get(DEBUG):
                raise
            errors.print(Text(f"error: {problem}", style="red"), soft_wrap=True)
            raise typer.Exit(_ERROR_CODES.get(ctx.invoked_subcommand, 1)) from None


app = typer.Typer(
    name="nano-inference",
    cls=_Commands,
    help="An LLM inference engine for reinforcement learning.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(complete)
app.command()(info)
app.command()(models)
app.command()(replay)
app.command()(bench)
app.command("run-batch")(run_batch)
app.command()(report)
app.command("draft-heads")(draft_heads)
app.command("train-service")(train_service)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nano-inference {nano_inference.__version__}")
        raise typer.Exit


@app.callback()
def _start(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    set_up_streams()
    set_up_logging(verbose=verbose)
