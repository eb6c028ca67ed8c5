"""The app: its commands, the version, one-line errors and exit codes. Only the command that runs
is imported.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import nano_inference
from nano_inference.cli.field_options import Flags, with_flags
from nano_inference.cli.help_texts import Command
from nano_inference.cli.messages import DEBUG, Verbose, in_own_words
from nano_inference.cli.terminal import (
    BROKEN_PIPE,
    drop_output,
    errors,
    is_full,
    set_up_logging,
    set_up_streams,
)
from nano_inference.errors import (
    NO_MEMORY,
    AdapterError,
    ConfigError,
    InvalidRequest,
    ModelLoadError,
    NanoInferenceError,
)


@dataclass(frozen=True)
class Row:
    """Row of the table of commands.

    Attributes:
        function: Function of the command, or app of its subcommands, as `module:name`, imported
            when it runs.
        summary: Line in the list of commands.
        error_code: Smallest exit code for an error. 2 if the command uses 1 as an answer.
        common: Options that `--help` shows. Empty: all. `--help-all` shows every option.
    """

    function: str
    summary: str
    error_code: int = 1
    common: tuple[str, ...] = ()


_ENGINE = ("dtype", "quantization", "device", "max_model_len", "kv_cache_memory", "num_threads")
COMMANDS = {
    "generate": Row(
        "nano_inference.cli.generate:generate",
        "Sample completions of prompts, here or on a server.",
        common=(
            *("model", "model_option", "url", "api_key_file"),
            *("prompt", "file", "num_samples", "chat"),
            *("temperature", "top_p", "top_k", "max_tokens", "seed", "stop"),
            *("json_schema", "logprobs", "as_json", *_ENGINE, "verbose"),
        ),
    ),
    "chat": Row(
        "nano_inference.cli.chat:chat",
        "Talk to a model, here or on a server.",
        common=(
            *("model", "model_option", "url", "api_key_file", "system"),
            *("temperature", "top_p", "top_k", "max_tokens", "seed", *_ENGINE, "verbose"),
        ),
    ),
    "serve": Row(
        "nano_inference.cli.serve:serve",
        "Serve models over HTTP.",
        common=(
            *("models", "model_option", "host", "port", "served_model_name", "api_key_file"),
            *("cors_origins", "replicas", "max_queued_samples", "request_timeout"),
            *("tool_format", "reasoning_format", "generation_config", "rl", "log_level"),
            *("max_batch_size", "loras", "speculation", *_ENGINE),
        ),
    ),
    "info": Row(
        "nano_inference.cli.info:info", "Show a model: architecture, memory, numerics, tokenizer."
    ),
    "models": Row(
        "nano_inference.cli.models:models", "List the models on this machine, or remove some."
    ),
    "replay": Row(
        "nano_inference.cli.replay:replay",
        "Replay samples and compare them bit by bit.",
        error_code=2,
    ),
    "verify": Row(
        "nano_inference.cli.verify:verify",
        "Verify receipts of samples: true, forged or not verifiable here.",
        error_code=2,
    ),
    "bench": Row(
        "nano_bench.command:bench",
        "Measure a server with OpenAI's routes: ours, vLLM, SGLang, llama.cpp.",
        error_code=2,
    ),
    "make-trace": Row(
        "nano_bench.traces.command:make_trace",
        "Write a synthetic trace of agents for bench --trace.",
    ),
    "run-batch": Row(
        "nano_bench.run_batch:run_batch",
        "Answer a file of requests in OpenAI's batch format.",
        error_code=2,
    ),
    "report": Row(
        "nano_bench.report:report", "Write an HTML page of samples, with colored tokens."
    ),
    "draft-heads": Row(
        "nano_inference.cli.draft_heads:draft_heads",
        "Train draft heads on a model's own samples.",
    ),
    "train": Row("nano_train.command:train", "Begin or resume a training run."),
    "runs": Row(
        "nano_train.runs_command:runs",
        "List, show, open, compare, edit and draw training runs.",
        error_code=2,
    ),
    "train-service": Row(
        "nano_training_service.command:train_service", "Train LoRA adapters of a model over HTTP."
    ),
}
# commands of other programs
_OTHER_WORDS = {"run": "chat", "launch": "serve", "server": "serve", "list": "models"} | {
    "ls": "models",
    "ps": "models",
    "rm": "models --remove",
    "show": "info",
    "complete": "generate --url",
}


def load_command(name: str) -> Any:
    """Import a command and return it with its options."""
    row = COMMANDS[name]
    module, _, function = row.function.partition(":")
    run = getattr(import_module(module), function)
    if isinstance(run, typer.Typer):
        return _with_subcommands(run)
    single = typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    single.command(name, cls=Command)(run)
    command: Any = get_command(single)
    command.common = row.common
    command.flags = getattr(run, "flags", {})
    return command


def _with_subcommands(subcommands: typer.Typer) -> Any:
    group: Any = get_command(subcommands)
    group.flags = {}
    return group


_WRONG_INPUT = (ConfigError, ModelLoadError, InvalidRequest, AdapterError)


def exit_code(problem: BaseException) -> int:
    """Return 2 for input that the caller can correct (an option, a prompt, a model, a path), and 1
    for a failure of the machine, a server or the engine, after which a retry may help.
    """
    if not isinstance(problem, _WRONG_INPUT):
        return 1
    cause = problem.__cause__
    is_path = isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return 1 if isinstance(cause, OSError) and not is_path else 2


def _flags(ctx: Any) -> Flags:
    """Return the running command's options by configuration field."""
    name = ctx.invoked_subcommand
    command: Any = load_command(name) if name in COMMANDS else None
    return getattr(command, "flags", {})


class _Commands(TyperGroup):
    """Commands with one-line errors. `exit_code` chooses the exit codes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # enough for the list of commands, since `resolve_command` imports the one that runs
        self.commands = {
            name: TyperCommand(name, help=row.summary) for name, row in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names, imported."""
        if args and args[0] in _OTHER_WORDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {_OTHER_WORDS[args[0]]!r}?")
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as problem:
            if ctx.meta.get(DEBUG) and isinstance(problem.__cause__, NanoInferenceError):
                raise problem.__cause__ from None
            in_own_words(problem)
            problem.message = with_flags(problem.message, _flags(ctx))
            raise
        except BrokenPipeError:
            drop_output()
            raise typer.Exit(BROKEN_PIPE) from None
        except (NanoInferenceError, MemoryError) as problem:
            if ctx.meta.get(DEBUG):
                raise
            message = str(problem) if isinstance(problem, NanoInferenceError) else NO_MEMORY
            message = with_flags(message, _flags(ctx))
            errors.print(Text(f"error: {message}", style="red"), soft_wrap=True)
            code = max(exit_code(problem), COMMANDS[ctx.invoked_subcommand].error_code)
            raise typer.Exit(code) from None

    def main(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().main(*arguments, **settings)
        except OSError as problem:
            if not is_full(problem):
                raise
            drop_output()
            errors.print(f"error: cannot write the output: {problem.strerror}", style="red")
            sys.exit(1)


app = typer.Typer(
    name="nano-inference",
    cls=_Commands,
    help="An LLM inference engine for reinforcement learning.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
