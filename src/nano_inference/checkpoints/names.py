"""What can be said of a model's name before anything is imported or read."""

import difflib
from pathlib import Path

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS


def plain_name(model_path: str) -> str:
    """The name of an embedded model as its table has it, whatever the case of its letters; any
    other name, and that of a file or folder that exists, as it is.
    """
    lower = model_path.lower()
    is_embedded = lower in EMBEDDED_MODELS and not Path(model_path).exists()
    return lower if is_embedded else model_path


def why_missing(model_path: str) -> str | None:
    """Why there is no model of this name, if that can be said without the hub: a sentence without
    its full stop; None: there may be one.
    """
    path = Path(model_path).expanduser()
    if model_path in EMBEDDED_MODELS or path.exists() or not _is_path(model_path):
        return None
    kind = "file" if path.suffix else "folder"
    near = _neighbours(path)
    return f"{model_path}: no such {kind}" + (f"; did you mean {near}?" if near else "")


def _is_path(model_path: str) -> bool:
    """Whether it cannot be a hub id, which is a name or owner/name."""
    return (
        model_path.endswith((".gguf", "/"))
        or model_path.startswith((".", "/", "~"))
        or model_path.count("/") > 1
    )


def _neighbours(path: Path) -> str:
    """The file or folder beside it that its name resembles most; empty: none does."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return str(path.with_name(near[0])) if near else ""
