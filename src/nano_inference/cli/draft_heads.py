"""`nano-inference draft-heads`: heads that draft, trained on samples of their policy."""

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
            help='Prompts, one a line; a .jsonl file has {"prompt": ...} (text or token ids) or '
            '{"messages": [...]} in each.',
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", show_default=False, help="A new folder for them.")
    ],
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="eagle: an EAGLE-3 head; medusa: Medusa heads.")
    ] = "eagle",
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Go on with the heads of a folder."),
    ] = None,
    places: Annotated[
        int, typer.Option(min=1, help="How many tokens ahead they learn to guess.")
    ] = 3,
    known_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Know this many tokens, the most frequent in the samples; 0: all."
        ),
    ] = 0,
    num_samples: Annotated[
        int, typer.Option("--num-samples", "-n", min=1, help="Samples of each prompt.")
    ] = 4,
    held_out: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Share of the prompts that only measures agreement."),
    ] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="How often each sample is learned.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 1e-3,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Put text into the chat template.")
    ] = True,
    sampling: _Sampling,
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Train heads that draft on samples of the model itself.

    `--draft-model FOLDER` of other commands drafts with them. Agreement with the policy on held-out
    samples goes to standard output.

    Examples:

    nano-inference draft-heads smollm2-135m prompts.txt heads/
    nano-inference serve smollm2-135m --draft-model heads/
    """
    from nano_inference.rl.draft_training import DraftTrainer, frequent_tokens

    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model already; name a new folder.")
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
                kind,  # pyright: ignore[reportArgumentType] it is checked there
                places=places,
                known_tokens=known,
                learning_rate=learning_rate,
            )
        _tell(trainer, measured, "before")
        for epoch in range(epochs):
            loss = trainer.train(learned)
            errors.print(f"epoch {epoch + 1}: mean loss {loss:.3f} of {len(learned)} samples")
        _tell(trainer, measured, "after")
        trainer.save(folder)
        errors.print(f"The heads are in {folder}; draft with them by --draft-model {folder}")


def _tell(trainer: "DraftTrainer", measured: list[TrainingSample], when: str) -> None:
    if measured:
        shares = ", ".join(f"{share:.3f}" for share in trainer.agreement(measured))
        output.print(f"agreement {when}, by place: {shares}", soft_wrap=True, highlight=False)
