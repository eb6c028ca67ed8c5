"""The app: its commands, and what holds for all of them: the version, errors in one line, exit
codes. Only the command that runs is imported.
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
from nano_inference.cli.options import DEBUG, Verbose, in_own_words
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
    """A command that is imported when it runs.

    Attributes:
        function: where it is, as `module:function`; it is imported when the command runs.
        summary: its line in the list of commands.
        error_code: exit code for an error of the package. 2, as for wrong usage, if 1 is an answer.
        common: the options that `--help` shows; empty: all. `--help-all` shows the others too.
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
        "Serve a model over HTTP.",
        common=(
            *("model", "model_option", "host", "port", "served_model_name", "api_key_file"),
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
        "Compare every sample of a file with a new one, bit by bit.",
        error_code=2,
    ),
    "bench": Row(
        "nano_bench.command:bench",
        "Put load on a server with OpenAI's routes: ours, vLLM, SGLang, llama.cpp.",
        error_code=2,
    ),
    "run-batch": Row(
        "nano_bench.run_batch:run_batch",
        "Answer a file of requests in OpenAI's batch form.",
        error_code=2,
    ),
    "report": Row(
        "nano_bench.report:report", "Make a page of samples: groups side by side, tokens coloured."
    ),
    "draft-heads": Row(
        "nano_inference.cli.draft_heads:draft_heads",
        "Train heads that draft on samples of the model itself.",
    ),
    "train-service": Row(
        "nano_training_service.command:train_service", "Train LoRA adapters of a model over HTTP."
    ),
}
# words that users of other programs try first
_OTHER_WORDS = {"run": "chat", "launch": "serve", "server": "serve", "list": "models"} | {
    "ls": "models",
    "ps": "models",
    "rm": "models --remove",
    "show": "info",
    "complete": "generate --url",
}


def load_command(name: str) -> TyperCommand:
    """The command of this name, with its options."""
    row = COMMANDS[name]
    alone = typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    module, _, function = row.function.partition(":")
    run = getattr(import_module(module), function)
    alone.command(name, cls=Command)(run)
    command: Any = get_command(alone)
    command.common = row.common
    command.flags = getattr(run, "flags", {})
    return command


_WRONG_INPUT = (ConfigError, ModelLoadError, InvalidRequest, AdapterError)


def exit_code(problem: BaseException) -> int:
    """Return 2 for input that the caller can correct (an option, a prompt, a model, a path), and 1
    for a failure of the machine, a server or the engine, which may not come again.
    """
    if not isinstance(problem, _WRONG_INPUT):
        return 1
    cause = problem.__cause__
    is_path = isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return 1 if isinstance(cause, OSError) and not is_path else 2


def _flags(ctx: Any) -> Flags:
    """Return the options of the command that runs, by field."""
    name = ctx.invoked_subcommand
    command: Any = load_command(name) if name in COMMANDS else None
    return getattr(command, "flags", {})


class _Commands(TyperGroup):
    """Commands whose errors are one line. Exit codes: 1 for an error of the package, 2 for wrong
    usage.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # what the list of commands needs; a command that runs is imported in `resolve_command`
        self.commands = {
            name: TyperCommand(name, help=row.summary) for name, row in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names, imported."""
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
