"""`nano-inference models`: the models on this machine, and what was made of them that can be made
again.
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
    """What is on the disk under one name."""

    name: str
    kind: str
    paths: tuple[Path, ...]
    uses: str  # as `model_path`, or what it is good for

    @property
    def size(self) -> int:
        """Bytes. A file that several names link to counts once."""
        files = {
            found.stat().st_ino: found.stat().st_size
            for path in self.paths
            for found in (path.rglob("*") if path.is_dir() else (path,))
            if found.is_file() and not found.is_symlink()
        }
        return sum(files.values())

    @property
    def days(self) -> float:
        """Since something in it was last read or written, as far as the file system tells."""
        times = [max(path.stat().st_mtime, path.stat().st_atime) for path in self.paths]
        return (time.time() - max(times, default=0.0)) / 86400


def models(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="NAME", help="Remove what has this name; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    debug: options.Debug = False,
) -> None:
    """List the models on this machine, or remove some.

    Models come from packages and from the cache of huggingface_hub. For a `.gguf` file the engine
    keeps its config.json and its tokenizer, not its weights. What packages carry is removed with
    pip. All else is made or loaded again when it is asked for; copies of `.gguf` files that earlier
    versions made are not used any more.

    Examples:

    nano-inference models
    nano-inference models --remove kernels
    """
    found = {kept.name: kept for listed in SOURCES for kept in listed()}
    if remove:
        _remove(found, remove)
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
            for kept in found.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not found:
        errors.print("no models are on this machine")
        return
    rows = [("name", "kind", "MB", "days ago", "model path")] + [
        (kept.name, kept.kind, f"{kept.size / 1e6:,.0f}", f"{kept.days:.0f}", kept.uses)
        for kept in found.values()
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
    """Return a path, without its beginning if it is longer than the width."""
    return path if len(path) <= max(width, 12) else "…" + path[-max(width, 12) + 1 :]


def _remove(found: dict[str, Kept], names: list[str]) -> None:
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ConfigError(
            f"nothing here is named {unknown[0]!r}; `nano-inference models` lists what is."
        )
    from_packages = [name for name in names if found[name].kind == "package"]
    if from_packages:
        raise ConfigError(
            f"{from_packages[0]!r} is part of a Python package: `pip uninstall` removes it."
        )
    for kept in (found[name] for name in names):
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
    from nano_inference.checkpoints.gguf.file import described_by  # brings in numpy

    for folder in _folders("gguf"):
        name = f"gguf/{folder.name}"
        if (file := described_by(folder)) is not None:
            yield Kept(name, ".gguf metadata", (folder,), str(file))
        elif (folder / "model.safetensors").is_file() or folder.name == "headers":
            yield Kept(name, "unused copy", (folder,), "")
    for file in _folders("embedded"):
        yield Kept(f"embedded/{file.name}", "joined parts", (file,), str(file))


def _kernels() -> Iterator[Kept]:
    folders = tuple(each for each in _folders("kernels") if each.is_dir())
    if folders:
        yield Kept("kernels", f"{len(folders)} builds", folders, "")


def _folders(name: str) -> list[Path]:
    root = cache_folder(name)
    return sorted(root.iterdir()) if root.is_dir() else []


SOURCES: tuple[Callable[[], Iterator[Kept]], ...] = (_packages, _hub, _gguf, _kernels)
