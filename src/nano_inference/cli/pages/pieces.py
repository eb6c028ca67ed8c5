"""Texts of single tokens."""

from collections.abc import Callable
from pathlib import Path

Pieces = Callable[
    [list[int]], list[str]
]  # token ids -> the text of each; "" if a later token completes it


def pieces_of_folder(folder: Path) -> Pieces:
    """Return the function for a folder's tokenizer. Raises `ModelLoadError`."""
    from nano_inference.text import Detokenizer, load_tokenizer

    loaded = load_tokenizer(folder)

    def pieces(ids: list[int]) -> list[str]:
        detokenizer = Detokenizer(loaded, skip_special_tokens=False)
        texts = [detokenizer.push((token_id,)) for token_id in ids]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts

    return pieces


def pieces_of_model(model: str) -> Pieces:
    """Return the function for a model as in `EngineConfig.model_path`. No weights are downloaded.

    Raises `ModelLoadError`.
    """
    from nano_inference.checkpoints.folders import describe_model, gguf_of, resolve_model

    # the description of a `.gguf` file lacks the tokenizer
    is_gguf = gguf_of(model) is not None
    return pieces_of_folder(resolve_model(model) if is_gguf else describe_model(model))
