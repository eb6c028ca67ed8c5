"""One-time conversion of a GGUF file into an ordinary Hugging Face folder in a cache.

Making a GGUF file's tokenizer takes a second, and dequantising its weights many. So both are done
once: the folder is named by the file's hash, and every later start finds an ordinary safetensors
checkpoint there. What describes a model (config.json, the tokenizer) follows from the header, and
has a folder of its own.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nano_inference.cache_folder import cache_folder, unfinished
from nano_inference.errors import ModelLoadError
from nano_inference.models.gguf_config import hf_config
from nano_inference.models.gguf_families import FAMILIES, Config, Family
from nano_inference.models.gguf_header import GgufHeader, read_header
from nano_inference.models.gguf_tokenizer import write_tokenizer_or_reason
from nano_inference.models.gguf_weights import Stored, require_names, write_safetensors
from nano_inference.models.spec import spec_from_config
from nano_inference.progress import Progress
from nano_inference.regular_files import open_regular, read_json

logger = logging.getLogger("nano_inference")

# part of the folder's name: raise it when the same file has to convert into something else
CONVERTER_VERSION = 4

# as llama.cpp's gguf-split names them
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TokenizerWriter = Callable[[Path, Path], None]


def convert_gguf(
    path: Path,
    cache_root: Path | None = None,
    *,
    tokenizer_writer: TokenizerWriter | None = None,
    coded: bool = False,
) -> Path:
    """Convert a GGUF file once and return the Hugging Face folder; a later call finds that folder
    and returns it.

    It holds `config.json`, `generation_config.json`, `model.safetensors` (Hugging Face names;
    tensors of float32, float16 and bfloat16 as they are, quantised ones in bfloat16) and the
    tokenizer's files. Any number of processes may convert the same file at once. Memory: what is
    stored of one tensor, and some megabytes.

    Args:
        path: the `.gguf` file, or any part of one that was split (`-00001-of-00003.gguf`); the
            others lie beside it.
        cache_root: where converted folders live; None: `cache_folder("gguf")`.
        tokenizer_writer: writes the tokenizer files, given the GGUF file and the folder; None:
            `write_tokenizer_or_reason`.
        coded: matrices of the types in `gguf_codes.KINDS` are written as codes, scales and minima,
            which config.json says (`quant_method` "gguf").

    Raises:
        ModelLoadError: the file or a part of it is missing, truncated or not GGUF; its
            architecture, a metadata key, a tensor or a tensor's type is not known; the cache cannot
            be written, or has no room; the packages that convert are not installed.
    """
    parts = _parts(path)
    headers = [read_header(part) for part in parts]
    root = _root(cache_root)
    folder = root / f"{_sha256(parts)[:16]}-v{CONVERTER_VERSION}{'-codes' if coded else ''}"
    if (folder / "model.safetensors").is_file():
        return folder
    described = _described(parts, headers, root, tokenizer_writer or write_tokenizer_or_reason)
    family, _, stored = _model(parts, headers)
    config: Config = read_json(described / "config.json")
    logger.info("converting %s once, into %s", path, folder)
    with _made_once(folder, "model.safetensors", path) as new:
        for file in described.iterdir():
            shutil.copy(file, new)
        weights = new / "model.safetensors"
        write_safetensors(weights, family, config, stored, parts[0].name, coded)
        if coded:
            told = {**config, "quantization_config": {"quant_method": "gguf"}}
            (new / "config.json").write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    return folder


def describe_gguf(path: Path, cache_root: Path | None = None) -> Path:
    """As `convert_gguf`, without weights and tokenizer: a folder of `config.json` and
    `generation_config.json`. Of the file its header is read, and what stretches the rotary
    frequencies. `read_vocabulary` has what the header says of the tokenizer.
    """
    parts = _parts(path)
    headers = [read_header(part) for part in parts]
    return _described(parts, headers, _root(cache_root), None)


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


def tensors_of(path: Path) -> Stored:
    """The tensors of a GGUF file, or of all parts of one that was split, by GGUF's names. Raises
    `ModelLoadError`.
    """
    parts = _parts(path)
    return _model(parts, [read_header(part) for part in parts])[2]


def _root(cache_root: Path | None) -> Path:
    return cache_folder("gguf") if cache_root is None else cache_root


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


def _sha256(parts: list[Path]) -> str:
    digest = hashlib.sha256()
    size = sum(part.stat().st_size for part in parts)
    with Progress(f"reading {parts[0].name}", size) as progress:
        for part in parts:
            with open_regular(part) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    progress.add(len(chunk))
    return digest.hexdigest()


def _described(
    parts: list[Path],
    headers: list[GgufHeader],
    root: Path,
    tokenizer_writer: TokenizerWriter | None,
) -> Path:
    """The folder of all but weights, named by what it follows from. Without a writer it has no
    tokenizer.
    """
    family, metadata, stored = _model(parts, headers)
    digest = hashlib.sha256()
    for header in headers:
        digest.update(header.content)
    for name in sorted(family.rope_factors & stored.keys()):
        digest.update(stored[name].rows().tobytes())
    kind = "" if tokenizer_writer else "-config"
    folder = root / "headers" / f"{digest.hexdigest()[:16]}-v{CONVERTER_VERSION}{kind}"
    if (folder / "config.json").is_file():
        return folder
    try:
        config = hf_config(family, metadata, stored)
    except (TypeError, ValueError, LookupError, ArithmeticError) as problem:
        raise ModelLoadError(
            f"the metadata of {parts[0]} holds a value of the wrong kind: {problem}"
        ) from problem
    token_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    spec_from_config(config, token_ids)  # refuses what the decoder lacks
    require_names(family, config, stored)
    with _made_once(folder, "config.json", parts[0]) as new:
        for name, content in (("config.json", config), ("generation_config.json", token_ids)):
            (new / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if tokenizer_writer:
            tokenizer_writer(parts[0], new)
    return folder


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
            raise ModelLoadError(f"converting {source} into {folder} failed: {error}") from error


def _model(parts: list[Path], headers: list[GgufHeader]) -> tuple[Family, dict[str, Any], Stored]:
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
