"""`nano-inference draft-heads`: train draft heads on the policy's own samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.generate import has_chat_template
from nano_inference.cli.prompts import as_chat, read_prompts
from nano_inference.cli.terminal import errors, load_engine, output
from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.errors import ConfigError
from nano_inference.types import SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.rl.draft_training import DraftTrainer

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
            metavar="KIND", help="Kind of heads. eagle: an EAGLE-3 head; medusa: Medusa heads."
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
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-3,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the chat template to text prompts.")
    ] = True,
    sampling: _Sampling,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Train draft heads on a model's own samples.

    Other commands use the heads with `--draft-model FOLDER`. Standard output gets the share of
    drafts that agree with the model on held-out samples.

    Examples:

    nano-inference draft-heads smollm2-135m prompts.txt heads/
    nano-inference serve smollm2-135m --draft-model heads/
    """
    from nano_inference.rl.draft_training import DraftTrainer, frequent_tokens

    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} already contains a model; choose a new folder.")
    prompts = read_prompts(file)
    num_held = min(int(len(prompts) * held_out + 0.999), len(prompts) - 1) if held_out else 0
    with load_engine(with_plain_weights(EngineConfig(model, **engine))) as built:
        if chat and has_chat_template(built):
            prompts = [as_chat(each) for each in prompts]
        samples = built.generate(prompts, SamplingParams(**sampling), num_samples)
        measured, learned = samples[: num_held * num_samples], samples[num_held * num_samples :]
        if start is not None:
            trainer = DraftTrainer.from_folder(
                built, start, places=places, learning_rate=learning_rate
            )
        else:
            known = None
            if known_tokens:
                known = frequent_tokens(learned, known_tokens, built.spec.vocab_size)
            trainer = DraftTrainer(
                built,
                kind,  # pyright: ignore[reportArgumentType] DraftTrainer checks it
                places=places,
                known_tokens=known,
                learning_rate=learning_rate,
            )
        _print_agreement(trainer, measured, "before")
        for epoch in range(epochs):
            loss = trainer.train(learned)
            errors.print(f"epoch {epoch + 1}: mean loss {loss:.3f}, {len(learned)} samples")
        _print_agreement(trainer, measured, "after")
        trainer.save(folder)
        line = f"Saved the heads to {folder}; use them with --draft-model {folder}"
        errors.print(line, soft_wrap=True)


def _print_agreement(trainer: "DraftTrainer", measured: list[TrainingSample], when: str) -> None:
    if measured:
        shares = ", ".join(f"{share:.3f}" for share in trainer.agreement(measured))
        line = f"agreement {when} training, by position: {shares}"
        output.print(line, soft_wrap=True, highlight=False)
