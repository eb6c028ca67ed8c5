"""GGUF file as a model: its headers, and a small folder in a cache that describes it.

The folder holds config.json, generation_config.json, the tokenizer in Hugging Face's format, and a
link to the file. Creating it takes a second. Weights are not copied: `checkpoints.gguf.weights`
reads them from the file at every load.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.checkpoints.gguf.config import hf_config, require_names
from nano_inference.checkpoints.gguf.families import FAMILIES, Config, Family
from nano_inference.checkpoints.gguf.header import GgufHeader, StoredTensor, read_header, stamp
from nano_inference.checkpoints.gguf.tokenizer import write_tokenizer_or_reason
from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.read import CONVERTED, spec_from_config
from nano_inference.system.cache_folder import cache_folder, unfinished
from nano_inference.system.regular_files import read_json

# part of the folder's name: increase it when the output for a file changes
CONVERTER_VERSION = 4

# names of parts by llama.cpp's gguf-split
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TokenizerWriter = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Contents of a model's headers.

    Attributes:
        parts: Absolute paths of the files, in order.
        family: Architecture of the model.
        metadata: Metadata by key.
        stored: Tensors of all parts by GGUF name.
        digest: Hash of the files' headers, paths, sizes and modification times.
    """

    parts: tuple[Path, ...]
    family: Family
    metadata: dict[str, Any]
    stored: dict[str, StoredTensor]
    digest: str

    def config(self) -> Config:
        """Return Hugging Face's config.json.

        Raises `ModelLoadError` for an unsupported model, or for tensors that do not match its
        architecture.
        """
        try:
            config = hf_config(self.family, self.metadata, self.stored)
        except (TypeError, ValueError, LookupError, ArithmeticError) as problem:
            raise ModelLoadError(
                f"the metadata of {self.parts[0]} contains an invalid value: {problem}"
            ) from problem
        spec_from_config(config, token_ids(config))  # rejects features that the decoder lacks
        require_names(self.family, config, self.stored)
        return config


def token_ids(config: Config) -> Config:
    """Return the part of a config.json that generation_config.json repeats."""
    return {key: value for key, value in config.items() if key.endswith("_token_id")}


def read_model(path: Path) -> GgufModel:
    """Read the headers of a GGUF file, or of all parts of a split one.

    Args:
        path: Path of the file, or of any part of a split one (`-00001-of-00003.gguf`). The other
            parts are in the same folder.

    Raises:
        ModelLoadError: The file or a part is missing, truncated or not GGUF, or has an unknown
            architecture or tensor type.
    """
    parts = parts_of(path.absolute())
    headers = [read_header(part) for part in parts]
    digest = hashlib.sha256()
    for part, header in zip(parts, headers, strict=True):
        digest.update(header.digest + f"{part} {stamp(part)[2:]}".encode())
    family, metadata, stored = _model(parts, headers)
    return GgufModel(tuple(parts), family, metadata, stored, digest.hexdigest()[:16])


def describe_gguf(
    path: Path,
    cache_root: Path | None = None,
    *,
    tokenizer_writer: TokenizerWriter | None = None,
    coded: bool = False,
) -> Path:
    """Create a folder that describes a GGUF file, or return it if it exists.

    The folder holds `config.json`, `generation_config.json`, the tokenizer's files, and links to
    the file or its parts, from which `loading` reads the weights. The folder takes some megabytes,
    mostly for the tokenizer. Several processes may describe the same file simultaneously.

    Args:
        path: Path of the `.gguf` file, or of any part of a split one; see `read_model`.
        cache_root: Parent folder. None means `cache_folder("gguf")`.
        tokenizer_writer: Function that writes the tokenizer of a GGUF file into a folder. None
            means `write_tokenizer_or_reason`.
        coded: True to declare matrices of the types in `codes.KINDS` as codes in config.json
            (`quant_method` "gguf").

    Raises:
        ModelLoadError: The file or a part is missing, truncated or not GGUF. The architecture, a
            metadata key, a tensor name or a type is unknown. The cache cannot be written.
    """
    model = read_model(path)
    root = cache_folder("gguf") if cache_root is None else cache_root
    plain = root / f"{model.digest}-v{CONVERTER_VERSION}"
    folder = root / f"{plain.name}-codes" if coded else plain
    if (folder / "config.json").is_file():
        return folder
    if coded:
        plain = describe_gguf(path, cache_root, tokenizer_writer=tokenizer_writer)
        with _made_once(folder, "config.json", path) as new:
            _repeat(plain, new)
            quantization = {"quantization_config": {"quant_method": "gguf"}}
            _write_json(new / "config.json", read_json(plain / "config.json") | quantization)
        return folder
    with _made_once(folder, "config.json", path) as new:
        _write_config(model, new)
        for number, part in enumerate(model.parts, 1):
            of = "" if len(model.parts) == 1 else f"-{number:05}-of-{len(model.parts):05}"
            (new / f"model{of}.gguf").symlink_to(part)
        (tokenizer_writer or write_tokenizer_or_reason)(model.parts[0], new)
    return folder


def describe_config(path: Path, cache_root: Path | None = None) -> Path:
    """Write only `config.json` and `generation_config.json` into a separate folder, or return it.

    The folder has no tokenizer: `read_vocabulary` reads it from the file. Raises `ModelLoadError`
    like `describe_gguf`.
    """
    model = read_model(path)
    root = cache_folder("gguf") if cache_root is None else cache_root
    folder = root / f"{model.digest}-v{CONVERTER_VERSION}-config"
    if not (folder / "config.json").is_file():
        with _made_once(folder, "config.json", path) as new:
            _write_config(model, new)
    return folder


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, or of all parts of a split one, by GGUF name.

    Raises `ModelLoadError`.
    """
    return read_model(path).stored


def described_by(folder: Path) -> Path | None:
    """Return the GGUF file, or its first part, that a folder of `describe_gguf` describes.

    Returns None for other folders.
    """
    links = sorted(each for each in folder.glob("*.gguf") if each.is_symlink())
    config = folder / "config.json"
    if not links or not config.exists() or read_json(config).get(CONVERTED) != "gguf":
        return None
    return links[0].readlink()


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file, or its first part, in a folder without safetensors.

    Returns None if there is none. Raises `ModelLoadError` if there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    # excludes multimodal projectors next to the model
    files = [each for each in sorted(folder.glob("*.gguf")) if "mmproj" not in each.name]
    models = {_stem(each): each for each in reversed(files)}
    if len(models) > 1:
        raise ModelLoadError(
            f"{folder} contains {len(models)} GGUF models; name one of them: "
            f"{', '.join(sorted(each.name for each in models.values()))}"
        )
    return next(iter(models.values()), None)


def _stem(path: Path) -> str:
    """Return a key that is common to the parts of a file."""
    match = _PART.fullmatch(path.name)
    return path.name if match is None else f"{match['stem']} of {match['count']}"


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model in order: one, or all parts of a split one."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise ModelLoadError(f"{path} is named as part {match['number']} of {count}")
    parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{missing[0]} is missing; put all {count} parts of the model in one folder "
            f"({count - len(missing)} are there)"
        )
    return parts


def _write_config(model: GgufModel, folder: Path) -> None:
    config = model.config()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids(config))


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _repeat(folder: Path, new: Path) -> None:
    """Copy or link the files of a folder into a new one, except config.json."""
    for file in folder.iterdir():
        if file.is_symlink():
            (new / file.name).symlink_to(file.readlink())
        elif file.name != "config.json":
            try:
                os.link(file, new / file.name)
            except OSError:  # the file system does not support links
                shutil.copy(file, new)


@contextmanager
def _made_once(folder: Path, name: str, source: Path) -> Iterator[Path]:
    """Yield a new folder to be filled, including a file `name`, then rename it to `folder`.

    Raises `ModelLoadError` if the folder cannot be written.
    """
    try:
        with unfinished(folder) as new:
            yield new
            new.rename(folder)
    except OSError as error:
        # The rename fails if another process has made an equal folder, which is then used.
        if not (folder / name).is_file():
            raise ModelLoadError(f"describing {source} in {folder} failed: {error}") from error


def _model(
    parts: list[Path], headers: list[GgufHeader]
) -> tuple[Family, dict[str, Any], dict[str, StoredTensor]]:
    """Return a model's family, the metadata of its first part, and the tensors of all parts."""
    metadata, stored = headers[0].metadata, dict(headers[0].tensors)
    if (count := metadata.get("split.count", 1)) not in (0, 1, len(parts)):
        raise ModelLoadError(
            f"{parts[0]} is one of {count} parts; put them in one folder, with the names "
            f"NAME-00001-of-{count!s:0>5}.gguf and so on"
        )
    for part, header in zip(parts[1:], headers[1:], strict=True):
        if twice := sorted(stored.keys() & header.tensors.keys()):
            raise ModelLoadError(
                f"the GGUF tensor {twice[0]} is in {part.name} and in an earlier part"
            )
        stored |= header.tensors
    if metadata.get("split.tensors.count", len(stored)) != len(stored):
        declared = metadata["split.tensors.count"]
        raise ModelLoadError(
            f"the parts of {parts[0]} have {len(stored)} tensors, but the first declares {declared}"
        )
    name = str(metadata.get("general.architecture"))
    if name not in FAMILIES:
        raise ModelLoadError(
            f"{parts[0]} has GGUF architecture {name!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name].of(metadata), metadata, stored
