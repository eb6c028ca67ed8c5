"""The tokenizer of a GGUF file as `tokenizer.json`, by transformers' converter and a table of what
that leaves out.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from nano_inference.errors import ModelLoadError

INSTALL_HINT = (
    "converting a GGUF file needs the packages gguf and transformers: pip install "
    '"nano-inference[gguf]"'
)


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
    into `folder`.

    Raises:
        ModelLoadError: transformers is not installed, or does not know the file's tokenizer.
    """
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
        name = _pre_tokenizer_name(path)
        if name in PRE_TOKENIZERS:
            tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
        if name in NORMALIZERS:
            tokenizer.backend_tokenizer.normalizer = NORMALIZERS[name]()
        tokenizer.save_pretrained(folder)


def _pre_tokenizer_name(path: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else ""
