"""`nano-inference replay`: sample again and compare with a file, bit by bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.progress import track
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.terminal import errors, load_engine, output
from nano_inference.config import Codes, EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.types import TrainingSample

if TYPE_CHECKING:
    from nano_inference.rl.comparison import Difference
    from nano_inference.rl.replayer import Replayer

MOST_DIAGNOSES = 3  # a diagnosis takes about as long as the generation did


_Engine = Annotated[
    options.Values,
    FieldOptions(
        EngineConfig, ("ref_model_path", "kv_cache_memory", "max_model_len", "num_threads")
    ),
]


@options.from_fields
def replay(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="SAMPLES",
            show_default=False,
            help="JSON lines from `generate --json`, or a .parquet file.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Model of weight version 0, as in `generate`."
        ),
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights",
            "-w",
            metavar="VERSION=FOLDER",
            help="Folder with the weights of a version. May be repeated.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of samples to replay. Default: all.")
    ] = None,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Replay samples and compare them bit by bit.

    Samples again with the file's prompt, seed, backend, dtype and device, and compares tokens,
    logprobs and everything else that follows. Exit code 0: all samples are equal. 1: some differ
    (the output has the first difference, and its cause if an operation depends on the schedule). 2:
    the file cannot be replayed.

    Examples:

    nano-inference generate smollm2-135m -p "The sky is" --json > samples.jsonl
    nano-inference replay samples.jsonl --model smollm2-135m
    """
    folders = _folders(weights or [])
    if not file.is_file():
        raise typer.BadParameter(f"{file}: no such file.", param_hint="SAMPLES")
    with errors.status(f"reading {file}"):
        samples = _read(file)[:limit]
    if not samples:
        raise typer.BadParameter(f"{file} has no samples.", param_hint="SAMPLES")
    config = EngineConfig(model, **engine, **_numerics(samples[0].numerics))
    with load_engine(config) as built:
        from nano_inference.rl.replayer import Replayer

        replayer = Replayer(built, folders)
        versions = _check(replayer, samples)
        num_different = _compare(replayer, samples)
        num_tokens = sum(len(sample.completion_tokens) for sample in samples)
        count = len(samples) - num_different
        output.print(
            Text.assemble(
                (
                    f"{count} of {len(samples)} samples",
                    "bold red" if num_different else "bold green",
                ),
                f" are bitwise equal: {num_tokens:,} tokens compared, weight "
                f"version{'s' if len(versions) > 1 else ''} "
                f"{', '.join(map(str, sorted(versions)))}, "
                f"{built.numerics.fingerprint}",
            ),
            soft_wrap=True,
        )
    if num_different:
        raise typer.Exit(1)


def _folders(pairs: Sequence[str]) -> dict[int, str]:
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


def _read(file: Path) -> list[TrainingSample]:
    from nano_inference.data import read_jsonl, read_parquet

    return read_parquet(file) if file.suffix == ".parquet" else read_jsonl(file)


def _numerics(fingerprint: str) -> dict[str, Any]:
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


def _check(replayer: "Replayer", samples: Sequence[TrainingSample]) -> set[int]:
    """Return the weight versions of all samples. Raises `InvalidRequest` with all versions that are
    missing.
    """
    from nano_inference.rl.history import versions_of

    needed: set[int] = set()
    for number, sample in enumerate(samples, start=1):
        try:
            replayer.check(sample, versions=False)
            needed |= versions_of(sample)
        except InvalidRequest as problem:
            raise InvalidRequest(f"sample {number}: {problem}") from problem
    replayer.decoders.require(needed)
    return needed


def _compare(replayer: "Replayer", samples: Sequence[TrainingSample]) -> int:
    """Show the samples that differ, and return their number."""
    from nano_inference.rl.comparison import differences

    num_different = 0
    shown = track(
        samples, "replaying", console=errors, transient=True, disable=not errors.is_terminal
    )
    for number, sample in enumerate(shown, start=1):
        changes = differences(sample, replayer.replay(sample))
        if changes:
            num_different += 1
            _show(replayer, number, sample, changes[0], diagnosed=num_different <= MOST_DIAGNOSES)
    return num_different


def _show(
    replayer: "Replayer",
    number: int,
    sample: TrainingSample,
    difference: "Difference",
    *,
    diagnosed: bool,
) -> None:
    from nano_inference.rl.tracing import diagnose

    facts = (
        f"  request {sample.request_id}, sample {sample.sample_index}, "
        f"{len(sample.completion_tokens)} tokens"
    )
    output.print(Text.assemble((f"sample {number}", "cyan"), (facts, "dim")), soft_wrap=True)
    output.print(Text(f"  {difference}"), soft_wrap=True)
    if diagnosed:
        output.print(Text(f"  {diagnose(replayer, sample, difference)}"), soft_wrap=True)
