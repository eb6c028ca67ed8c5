"""One-time conversion of a GGUF file into an ordinary Hugging Face folder in a cache.

Reading a GGUF file's tokenizer through transformers takes seconds. So it is done once: the folder
is named by the file's hash, and every later start finds an ordinary safetensors checkpoint there.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from tokenizers.processors import TemplateProcessing

from nano_inference.cache_folder import cache_folder, unfinished
from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf_families import (
    FAMILIES,
    GLOBAL_NAMES,
    OPTIONAL_NAMES,
    Config,
    Family,
    Transform,
)
from nano_inference.regular_files import open_regular

if TYPE_CHECKING:
    from gguf import ReaderTensor

# part of the folder's name: raise it when the same file has to convert into something else
CONVERTER_VERSION = 2
TOKEN_ID_KEYS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}

TOKENIZER_SUFFIXES = ("_token_id", ".chat_template")  # the metadata that is read of the tokenizer

ROPE_FREQS = "rope_freqs.weight"
# as llama.cpp's gguf-split names them
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

INSTALL_HINT = (
    "converting a GGUF file needs the packages gguf and transformers: pip install "
    '"nano-inference[gguf]"'
)

TokenizerWriter = Callable[[Path, Path], None]

# What `_model_config` handles by hand, and keys that change nothing.
COMMON_KEYS = frozenset(
    {"vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"}
    | {"rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"}
    | {"rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"}
)


def convert_gguf(
    path: Path, cache_root: Path | None = None, *, tokenizer_writer: TokenizerWriter | None = None
) -> Path:
    """Convert a GGUF file once and return the Hugging Face folder; a later call finds that folder
    and returns it.

    It holds `config.json`, `generation_config.json`, `model.safetensors` (every tensor float32,
    Hugging Face names) and the tokenizer's files. Any number of processes may convert the same file
    at once.

    Args:
        path: the `.gguf` file, or any part of one that was split (`-00001-of-00003.gguf`); the
            others lie beside it.
        cache_root: where converted folders live; None: `cache_folder("gguf")`.
        tokenizer_writer: writes the tokenizer files, given the GGUF file and the folder; None:
            `write_tokenizer`.

    Raises:
        ModelLoadError: the file or a part of it is missing, truncated or not GGUF; its
            architecture, a metadata key or a tensor is not known; the cache cannot be written; the
            packages that convert are not installed.
    """
    parts = _parts(path)
    for part in parts:
        _check_header(part)
    root = cache_folder("gguf") if cache_root is None else cache_root
    folder = root / f"{_sha256(parts)[:16]}-v{CONVERTER_VERSION}"
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        with unfinished(folder) as new:
            _convert_into(parts, new, tokenizer_writer or write_tokenizer)
            new.rename(folder)
    except OSError as error:
        # The rename fails where another process was first: its folder holds the same and stays.
        if not (folder / "model.safetensors").is_file():
            raise ModelLoadError(f"converting {path} into {folder} failed: {error}") from error
    return folder


def _parts(path: Path) -> list[Path]:
    """The files of a model, in order: one, or what it was split into."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    parts = [
        path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part for part in parts if not part.is_file()]
    if missing or path not in parts:
        absent = missing[0] if missing else path
        raise ModelLoadError(
            f"{absent} is missing; {path.name} is one of {count} parts, which have to lie in one "
            "folder "
            f"({count - len(missing)} do)"
        )
    return parts


def _check_header(path: Path) -> None:
    try:
        with open_regular(path) as file:
            header = file.read(8)
    except OSError as error:
        raise ModelLoadError(f"cannot read the GGUF file {path}: {error}") from error
    if len(header) < 8 or header[:4] != b"GGUF":
        raise ModelLoadError(
            f"{path} is not a GGUF file: it starts with {header[:4]!r}, not b'GGUF'"
        )
    version = int.from_bytes(header[4:], "little")
    if version not in (2, 3):  # a big-endian file shows up here too
        raise ModelLoadError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read"
        )


def _sha256(parts: list[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with open_regular(part) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _convert_into(parts: list[Path], folder: Path, tokenizer_writer: TokenizerWriter) -> None:
    metadata, stored = _read_parts(parts)
    name = str(metadata.get("general.architecture"))
    if name not in FAMILIES:
        raise ModelLoadError(
            f"{parts[0]} has GGUF architecture {name!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    factors = stored.pop(ROPE_FREQS, None) if FAMILIES[name].has_rope_freqs else None
    config = _model_config(FAMILIES[name], name, metadata, stored)
    if factors is not None:
        config |= _rope_factors(config, factors)
    token_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    for file_name, content in (("config.json", config), ("generation_config.json", token_ids)):
        (folder / file_name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", FAMILIES[name], config, stored)
    tokenizer_writer(parts[0], folder)


def _read_parts(parts: list[Path]) -> tuple[dict[str, Any], dict[str, "ReaderTensor"]]:
    """Metadata, which the first part holds, and the tensors of all parts."""
    metadata, stored = _read_gguf(parts[0])
    if (count := metadata.get("split.count", 1)) > 1 and count != len(parts):
        raise ModelLoadError(
            f"{parts[0]} is one of {count} parts; name them NAME-00001-of-{count:05}.gguf and so "
            "on, in one folder"
        )
    for part in parts[1:]:
        _, more = _read_gguf(part)
        if twice := sorted(stored.keys() & more.keys()):
            raise ModelLoadError(
                f"the GGUF tensor {twice[0]} is in {part.name} and in a part before it"
            )
        stored |= more
    if metadata.get("split.tensors.count", len(stored)) != len(stored):
        told = metadata["split.tensors.count"]
        raise ModelLoadError(
            f"the parts of {parts[0]} hold {len(stored)} tensors, and the first one says {told}"
        )
    return metadata, stored


def _read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, "ReaderTensor"]]:
    """Metadata and tensors (mapped, not read) by their names. Not the token lists: transformers
    reads them itself.
    """
    try:
        from gguf import GGUFReader

        reader = GGUFReader(path)
        keys = [
            key
            for key in reader.fields
            if not key.startswith("tokenizer.") or key.endswith(TOKENIZER_SUFFIXES)
        ]
        metadata = {key: reader.fields[key].contents() for key in keys}
    except ImportError as error:
        raise ModelLoadError(INSTALL_HINT) from error
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:
        # numpy past the end of the file
        raise ModelLoadError(f"{path} is truncated or damaged: {error}") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _model_config(
    family: Family, name: str, metadata: Mapping[str, Any], stored: Mapping[str, "ReaderTensor"]
) -> Config:
    """Hugging Face's `config.json` from the metadata. An architecture key that no table names is
    refused.
    """
    values = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    if unknown := sorted(
        values.keys() - family.config_keys.keys() - family.optional_keys.keys() - COMMON_KEYS
    ):
        raise ModelLoadError(
            f"the GGUF metadata key {name}.{unknown[0]} is not mapped to a configuration"
        )
    values.setdefault("attention.head_count_kv", values.get("attention.head_count"))
    config_keys = {
        **family.config_keys,
        **{key: to for key, to in family.optional_keys.items() if key in values},
    }
    # a list would hold a number for each layer
    for key in (*config_keys, "attention.head_count_kv"):
        value = values.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise ModelLoadError(
                f"the GGUF metadata key {name}.{key} is {value}; mapped is one positive number"
            )
    if "token_embd.weight" not in stored:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "rope_theta": 10000.0,  # llama.cpp's default
        **{hf_key: values[key] for key, hf_key in config_keys.items()},
        "num_key_value_heads": values["attention.head_count_kv"],
        "head_dim": _head_dim(name, values),
        **_rope_scaling(name, values),
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in stored,
        **_token_ids(family, metadata),
        "torch_dtype": "float32",
        # the loader chooses a dtype by it: float32 is only how this is stored
        "nano_inference_converted_from": "gguf",
    }
    return {**family.defaults(config), **config}


def _token_ids(family: Family, metadata: Mapping[str, Any]) -> Config:
    token_ids = {
        hf_key: metadata.get(f"tokenizer.ggml.{key}") for key, hf_key in TOKEN_ID_KEYS.items()
    }
    found = {key: token_id for key, token_id in token_ids.items() if token_id is not None}
    if family.chat_eos_ids and "tokenizer.chat_template" in metadata:
        found["eos_token_id"] = sorted(
            {*family.chat_eos_ids, found.get("eos_token_id", family.chat_eos_ids[0])}
        )
    return found


def _head_dim(name: str, values: Mapping[str, Any]) -> int:
    head_dim = values.get(
        "attention.key_length", values["embedding_length"] // values["attention.head_count"]
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"the GGUF metadata key {name}.{key} is {values[key]}; mapped is head_dim "
                f"{head_dim}"
            )
    return head_dim


def _rope_scaling(name: str, values: Mapping[str, Any]) -> Config:
    factor = values.get("rope.scaling.factor")
    # llama.cpp takes a factor without a type as linear.
    kind = values.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return {}
    if kind != "linear" or factor is None:
        raise ModelLoadError(
            f"{name}.rope.scaling.type is {kind!r} with factor {factor}; mapped are none and linear"
        )
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _rope_factors(config: Config, stored: "ReaderTensor") -> Config:
    """What divides the rotary frequencies, one by one: every Llama since 3.1 has its scaling so,
    and no metadata of it.

    transformers' name for exactly this is longrope with the same factors at all lengths.
    """
    factors = _values(stored).reshape(-1)
    if len(factors) != config["head_dim"] // 2 or not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelLoadError(
            f"the GGUF tensor {ROPE_FREQS} must hold {config['head_dim'] // 2} numbers above 0, "
            "half of head_dim"
        )
    if "rope_scaling" in config:
        raise ModelLoadError(
            f"the GGUF file has {ROPE_FREQS} and rope.scaling metadata; mapped is one of them"
        )
    each = [float(factor) for factor in factors]
    scaling = {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": each,
        "long_factor": each,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
    return {"rope_scaling": scaling} if set(each) != {1.0} else {}


def _name_table(family: Family, config: Config) -> dict[str, tuple[str, Transform | None]]:
    """GGUF name -> (Hugging Face name, transform) of every tensor that a file of this configuration
    may hold.
    """
    table = {key: (hf_name, family.transforms.get(key)) for key, hf_name in GLOBAL_NAMES.items()}
    for layer in range(config["num_hidden_layers"]):
        for key, hf_name in family.layer_names.items():
            table[f"blk.{layer}.{key}"] = (
                f"model.layers.{layer}.{hf_name}",
                family.transforms.get(key),
            )
    return table


def _write_safetensors(
    path: Path, family: Family, config: Config, stored: Mapping[str, "ReaderTensor"]
) -> None:
    """Write float32 tensors one at a time: the header follows from the shapes, so no two are ever
    in memory at once.
    """
    table = _name_table(family, config)
    if unknown := sorted(stored.keys() - table.keys()):
        raise ModelLoadError(
            f"the GGUF tensor {unknown[0]} is not mapped for {family.architecture}"
        )
    if missing := sorted(table.keys() - stored.keys() - OPTIONAL_NAMES):
        raise ModelLoadError(
            f"the GGUF file has no tensor {missing[0]}, which {family.architecture} needs"
        )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in stored.items():
        begin, end = end, end + 4 * tensor.n_elements
        # GGUF lists the fastest dimension first.
        header[table[name][0]] = {
            "dtype": "F32",
            "shape": tensor.shape.tolist()[::-1],
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the tensors start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in stored.items():
            file.write(_hf_values(tensor, table[name][1], config).data)
        file.flush()
        # the rename that publishes the folder must not reach the disk before its contents
        os.fsync(file.fileno())


def _hf_values(tensor: "ReaderTensor", transform: Transform | None, config: Config) -> np.ndarray:
    """One tensor as contiguous little-endian float32 in Hugging Face's layout."""
    values = _values(tensor)
    return np.ascontiguousarray(transform(values, config) if transform else values, dtype="<f4")


def _values(tensor: "ReaderTensor") -> np.ndarray:
    """One tensor's numbers. Raises `ModelLoadError` for a type that is not read."""
    import gguf

    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"the GGUF tensor {tensor.name} has a type that is not read: {error}"
        ) from error


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
        from gguf import GGUFReader

        reader, backend = GGUFReader(path), tokenizer.backend_tokenizer
        name = _field(reader, "pre")
        if name in PRE_TOKENIZERS:
            backend.pre_tokenizer = PRE_TOKENIZERS[name]()
        if name in NORMALIZERS:
            backend.normalizer = NORMALIZERS[name]()
        if _field(reader, "add_bos_token") and not _adds_bos(tokenizer):
            # transformers before 5.23 forgets it for Gemma
            bos = tokenizer.bos_token
            backend.post_processor = TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        tokenizer.save_pretrained(folder)


def _adds_bos(tokenizer: Any) -> bool:
    bos = tokenizer.bos_token_id
    return bos is None or tokenizer.backend_tokenizer.encode("a").ids[:1] == [bos]


def _field(reader: Any, name: str) -> Any:
    """`tokenizer.ggml.NAME`; None where the file has none."""
    field = reader.get_field(f"tokenizer.ggml.{name}")
    return field.contents() if field is not None else None
