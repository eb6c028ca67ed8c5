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


# Ends of typer's messages, and ours.
_WORDS = {
    "is not a valid float.": "is not a number.",
    "is not a valid float range.": "is not a number.",
    "is not a valid int.": "is not a whole number.",
    "is not a valid int range.": "is not a whole number.",
    "is not a valid integer.": "is not a whole number.",
}


def in_own_words(problem: typer.BadParameter) -> None:
    """Reword typer's message about a value."""
    for typers, ours in _WORDS.items():
        if problem.message.endswith(typers):
            problem.message = problem.message.removesuffix(typers) + ours
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
