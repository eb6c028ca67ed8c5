"""The tokenizer of a GGUF file, written as Hugging Face's files."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from tokenizers.processors import TemplateProcessing

from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf_header import INSTALL_HINT, read_header


def _digits_then_bytes() -> PreTokenizer:
    return Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


# `tokenizer.ggml.pre` -> how text is split before merging. transformers writes a plain ByteLevel
# whatever the file says; for these that joins what the model was trained to see apart ("\n\n1."
# keeps its digit away from the newlines).
PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {"smollm": _digits_then_bytes}
# The same for what is done to text first: Qwen's own tokenizer composes accents, so that "e\u0301"
# is read as "é".
NORMALIZERS: dict[str, Callable[[], Normalizer]] = {"qwen2": NFC}


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template of the GGUF file `path`
    into `folder`; nothing where the file has no tokenizer.

    Raises:
        ModelLoadError: transformers is not installed, or does not know the file's tokenizer.
    """
    metadata = read_header(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return
    # transformers prefers a tokenizer.json or config.json that lies beside the file, so the file is
    # shown to it alone.
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                alone, gguf_file="model.gguf", local_files_only=True
            )
        except ImportError as error:
            raise ModelLoadError(INSTALL_HINT) from error
        except (ValueError, LookupError, NotImplementedError) as error:
            raise ModelLoadError(
                f"transformers cannot read the tokenizer of {path}: {error}"
            ) from error
        backend = tokenizer.backend_tokenizer
        name = metadata.get("tokenizer.ggml.pre")
        if name in PRE_TOKENIZERS:
            backend.pre_tokenizer = PRE_TOKENIZERS[name]()
        if name in NORMALIZERS:
            backend.normalizer = NORMALIZERS[name]()
        if metadata.get("tokenizer.ggml.add_bos_token") and not _adds_bos(tokenizer):
            # transformers before 5.23 forgets it for Gemma
            bos = tokenizer.bos_token
            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        tokenizer.save_pretrained(folder)


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is None or tokenizer.backend_tokenizer.encode("a").ids[:1] == [bos]
