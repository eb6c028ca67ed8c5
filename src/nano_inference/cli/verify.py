"""`nano-inference verify`: verify the receipts of samples by computing them again."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
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
from nano_inference.types import TrainingSample

if TYPE_CHECKING:
    from nano_inference.rl.verifier import Verdict, Verifier

_Engine = Annotated[
    options.Values,
    FieldOptions(
        EngineConfig,
        ("ref_model_path", "kv_cache_memory", "max_model_len", "num_threads", "loras"),
    ),
]
_STYLES = {"true": "bold green", "forged": "bold red", "not verifiable here": "bold yellow"}


@options.from_fields
def verify(
    *,
    file: SampleFile,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Model of weight version 0, as in `generate`."
        ),
    ],
    weights: WeightFolders = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="PEM file with the Ed25519 key that must have signed receipts."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one verdict per line, as JSON.")
    ] = False,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Verify receipts of samples: true, forged or not verifiable here.

    Checks each receipt, then draws each token again in one pass over the sample, on any kind of
    processor. Exit code 0: all are true. 1: some are forged, or lines are missing or in another
    order. 2: some cannot be verified here, or the file cannot be read.

    Examples:

    nano-inference generate smollm2-135m -p "The sky is" --json --receipt > receipts.jsonl
    nano-inference verify receipts.jsonl --model smollm2-135m
    """
    folders = weight_folders(weights or [])
    samples = read_samples(file)
    key = None
    if public_key is not None:
        from nano_inference.system.signing import read_public_key

        key = read_public_key(str(public_key))
    numerics = Counter(sample.numerics for sample in samples).most_common(1)[0][0]
    config = EngineConfig(model, **engine, **numerics_options(numerics))
    with load_engine(config) as built:
        from nano_inference.rl.verifier import Verifier, misplaced

        verdicts = _verified(Verifier(built, folders, key), samples)
        problem, fingerprint = misplaced(samples), built.numerics.fingerprint
    if as_json:
        _write(samples, verdicts)
    else:
        _show(samples, verdicts, fingerprint)
    if problem is not None:
        # standard output holds only verdicts of samples
        errors.print(Text.assemble(("forged", "bold red"), f"  the file: {problem}"))
    outcomes = {verdict.outcome for verdict in verdicts}
    if "forged" in outcomes or problem is not None:
        raise typer.Exit(1)
    if "not verifiable here" in outcomes:
        raise typer.Exit(2)


def _verified(verifier: "Verifier", samples: Sequence[TrainingSample]) -> "list[Verdict]":
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("verifying", total=len(samples))
        return verifier.verify(samples, lambda done: bar.update(task, completed=done))


def _write(samples: Sequence[TrainingSample], verdicts: "Sequence[Verdict]") -> None:
    for number, (sample, verdict) in enumerate(zip(samples, verdicts, strict=True), start=1):
        names = {"request_id": sample.request_id, "sample_index": sample.sample_index}
        typer.echo(json.dumps({"sample": number, **names, **verdict._asdict()}))


def _show(
    samples: Sequence[TrainingSample], verdicts: "Sequence[Verdict]", fingerprint: str
) -> None:
    for number, (sample, verdict) in enumerate(zip(samples, verdicts, strict=True), start=1):
        if verdict.outcome != "true":
            facts = f"  request {sample.request_id}, sample {sample.sample_index}: "
            output.print(
                Text.assemble(
                    (f"sample {number}", "cyan"),
                    (facts, "dim"),
                    (verdict.outcome, _STYLES[verdict.outcome]),
                    f": {verdict.reason}",
                ),
                soft_wrap=True,
            )
    count = sum(verdict.outcome == "true" for verdict in verdicts)
    tokens = sum(len(sample.completion_tokens) for sample in samples)
    style = _STYLES["true" if count == len(samples) else "forged"]
    output.print(
        Text.assemble(
            (f"{count} of {len(samples)} samples", style),
            f" are true: {tokens:,} tokens, {fingerprint}",
        ),
        soft_wrap=True,
    )
