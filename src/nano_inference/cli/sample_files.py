"""Files of samples, and the engine options that repeat them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from nano_inference.cli.terminal import errors
from nano_inference.config import Codes
from nano_inference.types import TrainingSample

SampleFile = Annotated[
    Path,
    typer.Argument(
        metavar="SAMPLES",
        show_default=False,
        help="JSON lines from `generate --json`, or a .parquet file.",
    ),
]
WeightFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        "-w",
        metavar="VERSION=FOLDER",
        help="Folder with the weights of a version. May be repeated.",
    ),
]


def weight_folders(pairs: Sequence[str]) -> dict[int, str]:
    """Return the folders of `--weights`, by version. Raises `typer.BadParameter`."""
    folders: dict[int, str] = {}
    for pair in pairs:
        version, _, folder = pair.partition("=")
        if not version.strip().isdecimal() or not folder:
            raise typer.BadParameter(
                f"{pair!r} must be VERSION=FOLDER, such as 3=checkpoints/3.", param_hint="-w"
            )
        if int(version) in folders:
            raise typer.BadParameter(
                f"version {version} occurs twice; give it once.", param_hint="--weights"
            )
        folders[int(version)] = folder
    return folders


def read_samples(file: Path) -> list[TrainingSample]:
    """Read the samples in a file, at least one. Raises `typer.BadParameter` and `DataError`."""
    if not file.is_file():
        raise typer.BadParameter(f"{file}: no such file.", param_hint="SAMPLES")
    from nano_inference.data import read_jsonl, read_parquet

    with errors.status(f"reading {file}"):
        samples = read_parquet(file) if file.suffix == ".parquet" else read_jsonl(file)
    if not samples:
        raise typer.BadParameter(f"{file} has no samples.", param_hint="SAMPLES")
    return samples


def numerics_options(fingerprint: str) -> dict[str, Any]:
    """Return engine options from a sample's numerics. `Replayer.check` rejects numerics that no
    options give.
    """
    parts = fingerprint.split("/")
    kept = parts.pop().removeprefix("kv-") if parts[-1].startswith("kv-") else "auto"
    quantization = parts.pop() if parts[-1] in get_args(Codes) else None
    sums = parts.pop() if parts[-1] == "tiles" else "pairs"
    if parts[-1].startswith("torch-"):
        parts.pop()
    if len(parts) != 3:
        return {}
    backend, dtype, device = parts[0].rsplit("-", 1)[0], parts[1], parts[2].split("-")[0]
    values: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": quantization}
    values["kv_cache_dtype"] = kept
    if backend == "cpu" and dtype == "bfloat16":
        values["cpu_sums"] = sums
    if backend == "cuda-invariant":
        values["batch_invariant"] = True
    return values | ({"backend": backend} if backend in ("reference", "cpu") else {})
