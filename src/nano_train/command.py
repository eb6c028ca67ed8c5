"""`nano-inference train`: begin or resume a training run."""

from pathlib import Path
from typing import Annotated

import typer

from nano_inference.cli import Debug, errors, output, require_packages

_NEEDED = ("pydantic", "torch")

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of run.toml, such as optimizer.learning_rate=1e-4. May be repeated.",
    ),
]


def require_training() -> None:
    """Raise `ConfigError` if packages that runs require are missing."""
    require_packages(_NEEDED, "a training run", "", "runs")


def train(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            exists=True,
            show_default=False,
            help="A run.toml, or the folder of a run.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the run. Default: out/NAME."),
    ] = None,
    changes: Changes = None,
    debug: Debug = False,
) -> None:
    """Begin or resume a training run.

    Executes the Python files that run.toml names. After any interruption, also kill -9, the same
    command resumes from the last checkpoint and ends in the same bits. docs/runs.md has the keys.

    Examples:

    nano-inference train examples/grpo/run.toml --out out/grpo
    """
    require_training()
    from nano_train.config import parse_changes
    from nano_train.run import read_run, train
    from nano_train.show import line

    run = read_run(file, out, parse_changes(changes or []))
    errors.print(f"run {run.folder.path}: {run.config.steps} steps", soft_wrap=True)
    sha256 = train(run, lambda record: output.print(line(record), soft_wrap=True))
    output.print(f"SHA-256 of the parameters: {sha256}", soft_wrap=True)
