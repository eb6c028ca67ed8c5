"""`nano-inference models`: the models on this machine, and files that the engine derived from
them and can derive again.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from nano_inference.cli import options
from nano_inference.cli.terminal import errors, output
from nano_inference.errors import ConfigError
from nano_inference.system.cache_folder import cache_folder


@dataclass(frozen=True)
class Kept:
    """Files on the disk under one name."""

    name: str
    kind: str
    paths: tuple[Path, ...]
    uses: str  # the `model_path` that uses it, or empty

    @property
    def size(self) -> int:
        """Size in bytes. A file with several hard links counts once."""
        files = {
            file.stat().st_ino: file.stat().st_size
            for path in self.paths
            for file in (path.rglob("*") if path.is_dir() else (path,))
            if file.is_file() and not file.is_symlink()
        }
        return sum(files.values())

    @property
    def days(self) -> float:
        """Days since the last read or write, if the file system records reads."""
        times = [max(path.stat().st_mtime, path.stat().st_atime) for path in self.paths]
        return (time.time() - max(times, default=0.0)) / 86400


def models(
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="NAME", help="Remove the entry of this name. May be repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")] = False,
    debug: options.Debug = False,
) -> None:
    """List the models on this machine, or remove some.

    The list has models from Python packages and from the Hugging Face cache. For a `.gguf` file the
    engine keeps config.json and tokenizer. For any large model it keeps packed weights, which it
    maps at the next start. Remove models in packages with pip.
    Other entries are made or downloaded again when you need them. Unused copies are `.gguf` files
    that earlier versions converted.

    Examples:

    nano-inference models
    nano-inference models --remove kernels
    """
    entries = {kept.name: kept for listed in SOURCES for kept in listed()}
    if remove:
        _remove(entries, remove)
        return
    if as_json:
        rows = [
            {
                "name": kept.name,
                "kind": kept.kind,
                "bytes": kept.size,
                "days": round(kept.days, 1),
                "uses": kept.uses,
                "paths": [str(path) for path in kept.paths],
            }
            for kept in entries.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not entries:
        errors.print("there are no models on this machine")
        return
    rows = [("name", "kind", "MB", "days ago", "model path")] + [
        (kept.name, kept.kind, f"{kept.size / 1e6:,.0f}", f"{kept.days:.0f}", kept.uses)
        for kept in entries.values()
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for row in rows:
        *cells, path = (
            text.rjust(width) if name in ("MB", "days ago") else text.ljust(width)
            for name, text, width in zip(rows[0], row, [*widths, 0], strict=True)
        )
        start = "  ".join(cells) + "  "
        path = _end_of(path, output.width - len(start)) if output.is_terminal else path
        style = "dim" if row is rows[0] else ""
        output.print(Text((start + path).rstrip(), style), soft_wrap=True)


def _end_of(path: str, width: int) -> str:
    """Return the end of a path that fits the width."""
    return path if len(path) <= max(width, 12) else "…" + path[-max(width, 12) + 1 :]


def _remove(entries: dict[str, Kept], names: list[str]) -> None:
    unknown = [name for name in names if name not in entries]
    if unknown:
        raise ConfigError(
            f"there is no entry {unknown[0]!r}; `nano-inference models` lists all names."
        )
    from_packages = [name for name in names if entries[name].kind == "package"]
    if from_packages:
        raise ConfigError(
            f"{from_packages[0]!r} is part of a Python package; remove it with `pip uninstall`."
        )
    for kept in (entries[name] for name in names):
        size = kept.size
        for path in kept.paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        errors.print(f"removed {kept.name}, {size / 1e6:,.0f} MB", soft_wrap=True)


def _packages() -> Iterator[Kept]:
    from nano_inference.checkpoints.embedded import EMBEDDED_MODELS, embedded_parts

    for name in EMBEDDED_MODELS:
        parts = embedded_parts(name)
        if parts:
            yield Kept(name, "package", tuple(parts), name)


def _hub() -> Iterator[Kept]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir().repos, key=lambda each: each.repo_id):
            if repo.repo_type == "model":
                yield Kept(repo.repo_id, "hub", (Path(repo.repo_path),), repo.repo_id)


def _gguf() -> Iterator[Kept]:
    from nano_inference.checkpoints.gguf.file import described_by  # imports numpy

    for folder in _folders("gguf"):
        name = f"gguf/{folder.name}"
        if (file := described_by(folder)) is not None:
            yield Kept(name, ".gguf metadata", (folder,), str(file))
        elif (folder / "model.safetensors").is_file() or folder.name == "headers":
            yield Kept(name, "unused copy", (folder,), "")
    for file in _folders("embedded"):
        yield Kept(f"embedded/{file.name}", "joined parts", (file,), str(file))


def _packed() -> Iterator[Kept]:
    from nano_inference.checkpoints.packed_files import packed_files  # imports numpy

    for path, model in packed_files():
        others = (path.with_suffix(suffix) for suffix in (".stamp", ".lock"))
        paths = (path, *(other for other in others if other.is_file()))
        yield Kept(f"packed/{path.stem}", "packed weights", paths, model)


def _kernels() -> Iterator[Kept]:
    folders = tuple(each for each in _folders("kernels") if each.is_dir())
    if folders:
        yield Kept("kernels", f"{len(folders)} builds", folders, "")


def _folders(name: str) -> list[Path]:
    root = cache_folder(name)
    return sorted(root.iterdir()) if root.is_dir() else []


SOURCES: tuple[Callable[[], Iterator[Kept]], ...] = (_packages, _hub, _gguf, _packed, _kernels)
