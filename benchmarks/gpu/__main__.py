"""`python -m benchmarks.gpu COMMAND`: run one part of `scripts/gpu_check.sh` in its own process."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.interpreter import interpret

app = typer.Typer(
    help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)

Out = Annotated[Path, typer.Option(help="Folder of the figures.")]
DryRun = Annotated[bool, typer.Option(help="Run toy sizes through Triton's interpreter on a CPU.")]
Models = Annotated[
    Path | None, typer.Option(help="Folder of the random models. Default: a temporary one.")
]


@app.command()
def missing(out: Out = Path("out/gpu"), dry_run: DryRun = False, models: Models = None) -> None:
    """List this machine's missing requirements and the skipped stages. Exit code 1: nothing can
    run.
    """
    from benchmarks.gpu import needs

    found = needs.find(out, folder_of(models), dry_run=dry_run)
    print(needs.text(found))
    out.mkdir(parents=True, exist_ok=True)
    (out / "skip").write_text("".join(f"{stage}\n" for stage in needs.skipped(found)))
    raise typer.Exit(int(any(need.fatal and need.problem for need in found)))


@app.command()
def part(
    name: Annotated[
        str,
        typer.Argument(
            help="Part: rates, engine, variants, large, torch-loop, kernels, pdl, sweep, rl or "
            "transformers."
        ),
    ],
    out: Out = Path("out/gpu"),
    dry_run: DryRun = False,
    models: Models = None,
    seconds: Annotated[float, typer.Option(help="Time limit in seconds.")] = 300.0,
) -> None:
    """Measure one part. Exit code 1: a figure could not be measured."""
    if dry_run:
        interpret()
    from benchmarks.gpu.parts import PARTS, Run
    from benchmarks.gpu.report import rows_of
    from benchmarks.gpu.scale import REAL, TOY

    if name not in PARTS:
        raise typer.BadParameter(f"{name!r} must be one of {', '.join(PARTS)}.")
    PARTS[name](Run(TOY if dry_run else REAL, out, folder_of(models), seconds))
    raise typer.Exit(int(any("problem" in row for row in rows_of(out) if row["part"] == name)))


@app.command()
def report(out: Out = Path("out/gpu"), dry_run: DryRun = False) -> None:
    """Merge the measured parts into OUT/gpu.json and tables."""
    from benchmarks.gpu.card import describe
    from benchmarks.gpu.report import write_report

    path = out / "stages.jsonl"
    stages = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    write_report(out, describe("cpu" if dry_run else "cuda"), stages)


def folder_of(models: Path | None) -> Path:
    """Return the folder of the random models."""
    return models or Path(tempfile.gettempdir()) / "nano-inference-gpu-models"


if __name__ == "__main__":
    app()
