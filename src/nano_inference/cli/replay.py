"""`nano-inference replay`: sample again and compare with a file, bit by bit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.sample_files import (
    SampleFile,
    WeightFolders,
    numerics_options,
    read_samples,
    weight_folders,
)
from nano_inference.cli.terminal import errors, load_engine, output
from nano_inference.config import EngineConfig
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
    file: SampleFile,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Model of weight version 0, as in `generate`."
        ),
    ],
    weights: WeightFolders = None,
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
    folders = weight_folders(weights or [])
    samples = read_samples(file)[:limit]
    config = EngineConfig(model, **engine, **numerics_options(samples[0].numerics))
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
