"""Why a model's folder has no tokenizer. The reason is told when one is asked for: a model whose
tokenizer cannot be made still takes token ids, and another tokenizer.
"""

from pathlib import Path

_FILE = "missing_tokenizer.txt"


def leave_reason(folder: Path, reason: str) -> None:
    """Write a sentence into the folder."""
    (folder / _FILE).write_text(reason, encoding="utf-8")


def reason_in(folder: Path) -> str | None:
    """The sentence, if there is one."""
    path = folder / _FILE
    return path.read_text(encoding="utf-8") if path.is_file() else None
