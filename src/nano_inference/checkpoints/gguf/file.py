"""A GGUF file as a model: what its header says, and a small folder in a cache that describes it.

The folder holds what follows from the header: config.json, generation_config.json and the tokenizer
as Hugging Face's files, which takes a second to make. It links to the file. Weights are
not copied: `checkpoints.gguf.weights` reads them from the file at every load.
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

# part of the folder's name: raise it when the same file has to become something else
CONVERTER_VERSION = 4

# as llama.cpp's gguf-split names them
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TokenizerWriter = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the headers of a model say.

    Attributes:
        parts: the files, in order, by absolute paths.
        family: its architecture.
        metadata: by key.
        stored: the tensors of all parts, by GGUF's names.
        digest: of the files' headers, paths, sizes and times of change.
    """

    parts: tuple[Path, ...]
    family: Family
    metadata: dict[str, Any]
    stored: dict[str, StoredTensor]
    digest: str

    def config(self) -> Config:
        """Hugging Face's config.json. Raises `ModelLoadError` for a model that is not supported, or
        whose tensors are not those of its architecture.
        """
        try:
            config = hf_config(self.family, self.metadata, self.stored)
        except (TypeError, ValueError, LookupError, ArithmeticError) as problem:
            raise ModelLoadError(
                f"the metadata of {self.parts[0]} holds a value of the wrong kind: {problem}"
            ) from problem
        spec_from_config(config, token_ids(config))  # rejects what the decoder lacks
        require_names(self.family, config, self.stored)
        return config


def token_ids(config: Config) -> Config:
    """The part of a config.json that generation_config.json repeats."""
    return {key: value for key, value in config.items() if key.endswith("_token_id")}


def read_model(path: Path) -> GgufModel:
    """Read the headers of a GGUF file, or of all parts of one that was split.

    Args:
        path: the file, or any part of one that was split (`-00001-of-00003.gguf`); the others lie
            in the same folder.

    Raises:
        ModelLoadError: the file or a part of it is missing, truncated or not GGUF; its
            architecture, or the type of a tensor, is not known.
    """
    parts = _parts(path.absolute())
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
    """Describe a GGUF file by a folder; a later call finds that folder and returns it.

    It holds `config.json`, `generation_config.json`, the tokenizer's files, and links to the file
    or its parts, from which `loading` reads the weights. Some megabytes, nearly all of them the
    tokenizer's. Any number of processes may describe the same file at once.

    Args:
        path: the `.gguf` file, or any part of one that was split, see `read_model`.
        cache_root: where such folders lie; None: `cache_folder("gguf")`.
        tokenizer_writer: writes the tokenizer files, given the GGUF file and the folder; None:
            `write_tokenizer_or_reason`.
        coded: config.json says that matrices of the types in `gguf_codes.KINDS` are codes
            (`quant_method` "gguf").

    Raises:
        ModelLoadError: the file or a part of it is missing, truncated or not GGUF; its
            architecture, a metadata key, a tensor's name or type is not known; the cache cannot be
            written.
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
            told = {"quantization_config": {"quant_method": "gguf"}}
            _write_json(new / "config.json", read_json(plain / "config.json") | told)
        return folder
    with _made_once(folder, "config.json", path) as new:
        _write_config(model, new)
        for number, part in enumerate(model.parts, 1):
            of = "" if len(model.parts) == 1 else f"-{number:05}-of-{len(model.parts):05}"
            (new / f"model{of}.gguf").symlink_to(part)
        (tokenizer_writer or write_tokenizer_or_reason)(model.parts[0], new)
    return folder


def describe_config(path: Path, cache_root: Path | None = None) -> Path:
    """Write `config.json` and `generation_config.json` only, into a folder of their own; a later
    call finds that folder. `read_vocabulary` has what the header says of the tokenizer.

    Raises `ModelLoadError` as `describe_gguf` does.
    """
    model = read_model(path)
    root = cache_folder("gguf") if cache_root is None else cache_root
    folder = root / f"{model.digest}-v{CONVERTER_VERSION}-config"
    if not (folder / "config.json").is_file():
        with _made_once(folder, "config.json", path) as new:
            _write_config(model, new)
    return folder


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file, or of all parts of one that was split, by GGUF's names.
    Raises `ModelLoadError`.
    """
    return read_model(path).stored


def described_by(folder: Path) -> Path | None:
    """The GGUF file, or the first part of the one, that a folder of `describe_gguf` describes.
    None: it is another folder.
    """
    links = sorted(each for each in folder.glob("*.gguf") if each.is_symlink())
    config = folder / "config.json"
    if not links or not config.exists() or read_json(config).get(CONVERTED) != "gguf":
        return None
    return links[0].readlink()


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file, or the first part of one, that a folder holds instead of safetensors. None:
    it has none. Raises `ModelLoadError` where there are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    # projectors of images and sounds lie beside the model
    files = [each for each in sorted(folder.glob("*.gguf")) if "mmproj" not in each.name]
    models = {_stem(each): each for each in reversed(files)}
    if len(models) > 1:
        raise ModelLoadError(
            f"{folder} holds {len(models)} GGUF models; name one of them: "
            f"{', '.join(sorted(each.name for each in models.values()))}"
        )
    return next(iter(models.values()), None)


def _stem(path: Path) -> str:
    """What the parts of a file have in common."""
    found = _PART.fullmatch(path.name)
    return path.name if found is None else f"{found['stem']} of {found['count']}"


def _parts(path: Path) -> list[Path]:
    """The files of a model, in order: one, or what it was split into."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        raise ModelLoadError(f"{path} is named as part {found['number']} of {count}")
    parts = [
        path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [part for part in parts if not part.is_file()]:
        raise ModelLoadError(
            f"{missing[0]} is missing; {path.name} is one of {count} parts, which have to lie in "
            f"one folder ({count - len(missing)} do)"
        )
    return parts


def _write_config(model: GgufModel, folder: Path) -> None:
    config = model.config()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids(config))


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _repeat(folder: Path, new: Path) -> None:
    """The same files, but for config.json, without taking their space twice where that is
    possible.
    """
    for file in folder.iterdir():
        if file.is_symlink():
            (new / file.name).symlink_to(file.readlink())
        elif file.name != "config.json":
            try:
                os.link(file, new / file.name)
            except OSError:  # a file system without links
                shutil.copy(file, new)


@contextmanager
def _made_once(folder: Path, name: str, source: Path) -> Iterator[Path]:
    """A new folder, to be filled with a file of that name among others, that becomes `folder`.
    Raises `ModelLoadError` where it cannot be written.
    """
    try:
        with unfinished(folder) as new:
            yield new
            new.rename(folder)
    except OSError as error:
        # The rename fails where another process was first: its folder holds the same and stays.
        if not (folder / name).is_file():
            raise ModelLoadError(f"describing {source} in {folder} failed: {error}") from error


def _model(
    parts: list[Path], headers: list[GgufHeader]
) -> tuple[Family, dict[str, Any], dict[str, StoredTensor]]:
    """Its family; metadata, which the first part holds; and the tensors of all parts."""
    metadata, stored = headers[0].metadata, dict(headers[0].tensors)
    if (count := metadata.get("split.count", 1)) not in (0, 1, len(parts)):
        raise ModelLoadError(
            f"{parts[0]} is one of {count} parts; name them NAME-00001-of-{count!s:0>5}.gguf and "
            "so on, in one folder"
        )
    for part, header in zip(parts[1:], headers[1:], strict=True):
        if twice := sorted(stored.keys() & header.tensors.keys()):
            raise ModelLoadError(
                f"the GGUF tensor {twice[0]} is in {part.name} and in a part before it"
            )
        stored |= header.tensors
    if metadata.get("split.tensors.count", len(stored)) != len(stored):
        told = metadata["split.tensors.count"]
        raise ModelLoadError(
            f"the parts of {parts[0]} hold {len(stored)} tensors, and the first one says {told}"
        )
    name = str(metadata.get("general.architecture"))
    if name not in FAMILIES:
        raise ModelLoadError(
            f"{parts[0]} has GGUF architecture {name!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name].of(metadata), metadata, stored
