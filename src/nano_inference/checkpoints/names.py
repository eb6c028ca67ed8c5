"""Checks of a model's name that need no imports and no reading."""

import difflib
from pathlib import Path

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS


def plain_name(model_path: str) -> str:
    """Return the canonical name of an embedded model, in any case of letters.

    Other names, and those of existing files and folders, are returned unchanged.
    """
    lower = model_path.lower()
    is_embedded = lower in EMBEDDED_MODELS and not Path(model_path).exists()
    return lower if is_embedded else model_path


def why_missing(model_path: str) -> str | None:
    """Return the reason why no model has this name, without a final period.

    Returns None if only the hub can decide.
    """
    path = Path(model_path).expanduser()
    if model_path in EMBEDDED_MODELS or path.exists() or not _is_path(model_path):
        return None
    kind = "file" if path.suffix else "folder"
    near = _neighbours(path)
    return f"{model_path}: no such {kind}" + (f"; did you mean {near}?" if near else "")


def _is_path(model_path: str) -> bool:
    """Return True if this cannot be a hub id, which is a name or owner/name."""
    return (
        model_path.endswith((".gguf", "/"))
        or model_path.startswith((".", "/", "~"))
        or model_path.count("/") > 1
    )


def _neighbours(path: Path) -> str:
    """Return the most similar file or folder next to a path, or "" if none is similar."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return str(path.with_name(near[0])) if near else ""
