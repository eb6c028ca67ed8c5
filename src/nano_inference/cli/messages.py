"""Options on messages, which every command has, and the wording of errors in options."""

from typing import Annotated, Any

import typer

from nano_inference.cli.terminal import set_up_logging

DEBUG = "nano_inference.debug"  # key in a context: show tracebacks


def _note_debug(ctx: typer.Context, debug: bool) -> bool:
    ctx.meta[DEBUG] = debug
    return debug


def _note_verbose(verbose: bool) -> bool:
    if verbose:
        set_up_logging(verbose=True)
    return verbose


_HINTS = {
    "max_tokens": " For the model, use --model.",  # -m is the model in `serve`
    "quantization": " For the formats in a .gguf file, such as q4_0, use file.",
}


def in_own_words(problem: typer.BadParameter) -> None:
    """Reword a message of pydantic, which reads numbers and choices."""
    errors_of = getattr(problem.__cause__, "errors", None)
    if not callable(errors_of):
        return
    first: Any = errors_of()
    if not first:
        return
    value, limits = first[0].get("input"), first[0].get("ctx") or {}
    kind = str(first[0].get("type"))
    words = {
        "float_parsing": f"{value!r} is not a number.",
        "int_parsing": f"{value!r} is not a whole number.",
        "int_from_float": f"{value!r} is not a whole number.",
        "bool_parsing": f"{value!r} is neither true nor false.",
        "greater_than_equal": f"{value} is too small; the smallest value is {limits.get('ge')}.",
        "less_than_equal": f"{value} is too large; the largest value is {limits.get('le')}.",
    }
    problem.message = words.get(kind, problem.message.removeprefix("Value error, "))
    option: Any = getattr(problem, "param", None)
    problem.message += _HINTS.get(getattr(option, "name", ""), "")


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        rich_help_panel="Messages",
        callback=_note_verbose,
        help="Show the engine's log.",
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        rich_help_panel="Messages",
        callback=_note_debug,
        help="Show the traceback of an error.",
    ),
]
