"""`nano-inference runs`: list, show, compare, edit and draw runs, open a step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nano_inference.cli import Debug, errors, output, write_file
from nano_inference.errors import ConfigError
from nano_train.command import Changes, require_training

if TYPE_CHECKING:
    from nano_train.run import Run as _Run

HELP = """List, show, open, compare, edit and draw training runs.

Every subcommand reads a run's folder. docs/runs.md describes its files.

Examples:

nano-inference runs list out
nano-inference runs bisect out/grpo out/other
nano-inference runs page out/grpo
"""
runs = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=HELP,
)

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", exists=True, file_okay=False, show_default=False, help="Folder of a run."
    ),
]
Other = Annotated[
    Path | None,
    typer.Argument(
        metavar="OTHER", exists=True, file_okay=False, show_default=False, help="Another run."
    ),
]
Step = Annotated[int, typer.Argument(min=0, show_default=False, help="Number of a step.")]


@runs.command("list")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder with run folders.")
    ] = Path("out"),
    debug: Debug = False,
) -> None:
    """List the runs in a folder."""
    require_training()
    from nano_train.show import runs_in, table_of_runs

    output.print(table_of_runs(runs_in(folder)))


@runs.command("show")
def show(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Show the samples of this step.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write curves to this picture.")] = None,
    debug: Debug = False,
) -> None:
    """Show the steps of a run, or the samples of a step."""
    from nano_train.show import table_of_samples, table_of_steps

    read = _read(run)
    output.print(table_of_steps(read) if step is None else table_of_samples(read, step))
    if plot is not None:
        from nano_train import curves

        curves.plot(curves.points_of(read.folder), plot)
        errors.print(f"curves: {plot}", soft_wrap=True)


@runs.command("open")
def open_state(
    run: Run,
    step: Step,
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the model.")],
    debug: Debug = False,
) -> None:
    """Write the model of a run after STEP steps.

    Loads the nearest checkpoint before it, and repeats the updates with the logged samples.
    """
    read = _read(run)
    from nano_train.rebuild import open_step

    sha256 = open_step(read, step, out)
    output.print(f"SHA-256 of the parameters: {sha256}", soft_wrap=True)


@runs.command("bisect")
def bisect(
    run: Run,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER",
            exists=True,
            file_okay=False,
            show_default=False,
            help="Another run. Default: compute RUN again.",
        ),
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="First step to compute again.")] = 0,
    last: Annotated[int | None, typer.Option(min=0, help="Last step to compute again.")] = None,
    recompute: Annotated[
        bool,
        typer.Option(help="With OTHER: compute the first different step again, to name the run."),
    ] = True,
    debug: Debug = False,
) -> None:
    """Find the first difference of two runs, or of a run and its repetition.

    Exit code 0: there is none. 1: step, update, sample, token and layer are on standard output.
    2: the runs cannot be compared.
    """
    read = _read(run)
    from nano_train.bisect import compare_runs, repeat, repeat_one

    if other is not None and (first or last is not None):
        raise ConfigError("--first and --last are for one run; omit them with OTHER.")
    second = None if other is None else _read(other)
    finding = repeat(read, first, last) if second is None else compare_runs(read, second)
    if finding is None:
        compared = [read] if second is None else [read, second]
        output.print(_no_difference(compared), soft_wrap=True, markup=False)
        return
    output.print(str(finding), soft_wrap=True, markup=False)
    for compared in (read, second) if second is not None and recompute else ():
        agrees = "agrees" if repeat_one(compared, finding) else "disagrees"
        line = f"{compared.folder.path} {agrees} with a repetition of step {finding.step}"
        output.print(line, soft_wrap=True, markup=False)
    raise typer.Exit(1)


def _no_difference(compared: "Sequence[_Run]") -> str:
    """Return the line for equal runs, which names the shorter one."""
    steps = [len(run.folder.steps()) for run in compared]
    if len({*steps}) == 1:
        return "no difference"
    shorter = compared[steps.index(min(steps))].folder.path
    return f"no difference in the first {min(steps)} steps; {shorter} ends there"


@runs.command("edit")
def edit_run(
    run: Run,
    step: Step,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the new run.")],
    changes: Changes = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--reward", metavar="SAMPLE=NUMBER", help="New reward. May be repeated."),
    ] = None,
    completions: Annotated[
        list[str] | None,
        typer.Option("--completion", metavar="SAMPLE=TEXT", help="New text. May be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of this step's samples.")] = None,
    debug: Debug = False,
) -> None:
    """Change a run at a step. The new run equals it before; `train` continues it.

    Examples:

    nano-inference runs edit out/grpo 20 --out out/edited --reward 3=1
    nano-inference train out/edited
    """
    read = _read(run)
    from nano_train.config import parse_changes
    from nano_train.edit import edit

    child = edit(
        *(read, step, out),
        changes=parse_changes(changes or []),
        rewards={number: _real(text) for number, text in _numbered(rewards).items()},
        completions=_numbered(completions),
        seed=seed,
    )
    errors.print(f"continue with: nano-inference train {child.folder.path}", soft_wrap=True)


@runs.command("page")
def page(
    run: Run,
    other: Other = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the page to this file. Default: RUN.html."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write an HTML page of a run, or of two runs: figures, versions, samples.

    The page is a single file. It has a bounded number of samples, which it states. Code of the run
    is not executed.

    Examples:

    nano-inference runs page out/grpo --out grpo.html
    nano-inference runs page out/grpo out/edited
    """
    require_training()
    from nano_train.history import read_history
    from nano_train.run_page import page_of

    folders = [run] if other is None else [run, other]
    name = run.resolve()
    file = out or name.with_name(f"{name.name}.html")
    with errors.status(f"reading {run.name}"):
        text = page_of([read_history(folder) for folder in folders])
    write_file(file, text)
    errors.print(f"page: {file}", soft_wrap=True)


def _read(folder: Path) -> "_Run":
    require_training()
    from nano_train.run import read_run

    return read_run(folder)


def _numbered(pairs: list[str] | None) -> dict[int, str]:
    numbered: dict[int, str] = {}
    for pair in pairs or []:
        number, sign, text = pair.partition("=")
        if not sign or not number.strip().isdecimal():
            raise ConfigError(f"{pair!r} must be SAMPLE=VALUE, such as 3=1.")
        numbered[int(number)] = text
    return numbered


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number; write a reward such as 0.5.") from None
