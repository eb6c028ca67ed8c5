"""`nano-inference draft-heads`: train draft heads on the policy's own samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.generate import has_chat_template
from nano_inference.cli.prompts import as_chat, read_prompts
from nano_inference.cli.terminal import errors, load_engine, output
from nano_inference.config import MTP, EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError
from nano_inference.types import SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.rl.draft_training import DraftTrainer
    from nano_inference.rl.head_trainer import HeadTrainer

KINDS = ("eagle", "medusa", MTP)
_Sampling = Annotated[
    options.Values, FieldOptions(SamplingParams, ("max_tokens", "temperature", "seed"))
]
_Engine = Annotated[
    options.Values,
    FieldOptions(EngineConfig, ("dtype", "kv_cache_memory", "max_model_len", "num_threads")),
]


@options.from_fields
def draft_heads(
    *,
    model: options.Model,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            show_default=False,
            exists=True,
            dir_okay=False,
            help='File of prompts, one per line. In a .jsonl file, each line is {"prompt": ...} '
            '(text or token ids) or {"messages": [...]}.',
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", show_default=False, help="New folder for the heads.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Kind of heads. eagle: an EAGLE-3 head; medusa: Medusa heads; mtp: the model's "
            "own layer of multi-token prediction, saved with the whole model.",
        ),
    ] = "eagle",
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Continue training the heads of a folder."),
    ] = None,
    places: Annotated[int, typer.Option(min=1, help="Number of tokens to draft ahead.")] = 3,
    known_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draft only the N most frequent tokens of the samples. 0: all tokens.",
        ),
    ] = 0,
    num_samples: Annotated[
        int, typer.Option("--num-samples", "-n", min=1, help="Samples per prompt.")
    ] = 4,
    held_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Share of prompts held out to measure agreement."),
    ] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the samples.")] = 2,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            show_default=False,
            help="Learning rate of AdamW. Default: 0.001, for mtp 0.0001.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the chat template to text prompts.")
    ] = True,
    sampling: _Sampling,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Train draft heads on a model's own samples.

    Other commands use the heads with `--draft-model FOLDER`, or a layer of multi-token prediction
    with `--draft-model mtp`. Standard output gets the share of drafts that agree with the model on
    held-out samples.

    Examples:

    nano-inference draft-heads smollm2-135m prompts.txt heads/
    nano-inference serve smollm2-135m --draft-model heads/
    """
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} already contains a model; choose a new folder.")
    if kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}; got {kind!r}.")
    is_mtp = kind == MTP
    if is_mtp and (start is not None or known_tokens):
        raise ConfigError(
            "--kind mtp trains the model's own layer; omit --from and --known-tokens."
        )
    prompts = read_prompts(file)
    num_held = min(int(len(prompts) * held_out + 0.999), len(prompts) - 1) if held_out else 0
    config = EngineConfig(model, **engine, draft_model=MTP if is_mtp else None)
    with load_engine(with_plain_weights(config)) as built:
        if chat and has_chat_template(built):
            prompts = [as_chat(each) for each in prompts]
        samples = built.generate(prompts, SamplingParams(**sampling), num_samples)
        measured, learned = samples[: num_held * num_samples], samples[num_held * num_samples :]
        if learning_rate is None:
            learning_rate = 1e-4 if is_mtp else 1e-3
        options: dict[str, Any] = {"places": places, "learning_rate": learning_rate}
        if is_mtp:
            from nano_inference.rl.mtp_training import MtpTrainer

            trainer = MtpTrainer(built, **options)
        else:
            trainer = _heads_trainer(built, learned, kind, start, known_tokens, options)
        _print_agreement(trainer, measured, "before")
        for epoch in range(epochs):
            loss = trainer.train(learned)
            errors.print(f"epoch {epoch + 1}: mean loss {loss:.3f}, {len(learned)} samples")
        _print_agreement(trainer, measured, "after")
        trainer.save(folder)
        line = f"Saved the heads to {folder}; use them with --draft-model {folder}"
        if is_mtp:
            line = f"Saved the model to {folder}; use it with --draft-model mtp"
        errors.print(line, soft_wrap=True)


def _heads_trainer(
    engine: "InferenceEngine",
    samples: list[TrainingSample],
    kind: Any,
    start: Path | None,
    known_tokens: int,
    options: dict[str, Any],
) -> "DraftTrainer":
    from nano_inference.rl.draft_training import DraftTrainer, frequent_tokens

    if start is not None:
        return DraftTrainer.from_folder(engine, start, **options)
    known = None
    if known_tokens:
        known = frequent_tokens(samples, known_tokens, engine.spec.vocab_size)
    return DraftTrainer(engine, kind, known_tokens=known, **options)


def _print_agreement(trainer: "HeadTrainer", measured: list[TrainingSample], when: str) -> None:
    if measured:
        shares = ", ".join(f"{share:.3f}" for share in trainer.agreement(measured))
        line = f"agreement {when} training, by position: {shares}"
        output.print(line, soft_wrap=True, highlight=False)
