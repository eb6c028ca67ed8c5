"""Reading of regular files without blocking: opening a FIFO or a device could block forever. `sync`
writes a file through to the disk.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from nano_inference.errors import ModelLoadError

MOST_TEXT = 2**26  # maximum bytes of a text file: a configuration, an index, a marker
# file in a model's folder with the reason why its tokenizer could not be made
MISSING_TOKENIZER = "missing_tokenizer.txt"


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading. Raises `OSError`, including for any other kind of file."""
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    )
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file, at most 64 MiB. Raises `OSError`, `ValueError`."""
    with open_regular(path) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise ValueError(f"file is larger than {MOST_TEXT} bytes")
    return content.decode("utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `ModelLoadError`."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing.") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelLoadError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content
