"""Move modules and folders, and update imports, dotted names, and paths in documents.

`python scripts/move.py TABLE` reads lines `old new`, both from the repository's root without the
suffix `.py`: `src/nano_inference/engine/loop src/nano_inference/core/loop`. A line for a folder
moves all of its files that have no line of their own. The script moves files with git and rewrites
every tracked text. Run the formatter and the import sorter afterwards.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".json", ".cfg", ".html", ".js", ""}
DONE = "\0"  # marks a name that is already rewritten


def main() -> None:
    table = read_table(Path(sys.argv[1]))
    moves = moved_files(table, tracked())
    for old, new in moves.items():
        move(old, new)
    names = dotted_names(table, moves)
    for path in tracked():
        if path.suffix in TEXT and (ROOT / path).is_file():
            rewrite(ROOT / path, names, moves)


def tracked() -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in found.stdout.splitlines()]


def read_table(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return dict(rows)


def moved_files(table: dict[str, str], files: list[Path]) -> dict[str, str]:
    """Map each moved file to its new path, by the longest matching line of the table."""
    moves = {}
    for path in map(str, files):
        own = path.removesuffix(".py")
        covering = [old for old in table if own == old or path.startswith(f"{old}/")]
        if covering:
            old = max(covering, key=len)
            moves[path] = table[old] + path[len(old) :]
    return moves


def move(old: str, new: str) -> None:
    (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)


def dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def dotted_names(table: dict[str, str], moves: dict[str, str]) -> dict[str, str]:
    """Return old and new dotted names of all moved modules and folders."""
    names = {dotted(old): dotted(new) for old, new in moves.items() if old.endswith(".py")}
    return {dotted(old): dotted(new) for old, new in table.items()} | names


def rewrite(path: Path, names: dict[str, str], moves: dict[str, str]) -> None:
    text = before = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = follow_from_imports(text, names)
    text = follow_dotted(text, names)
    text = follow_paths(text, moves).replace(DONE, "")
    if text != before:
        path.write_text(text, encoding="utf-8")


def follow_from_imports(text: str, names: dict[str, str]) -> str:
    """Rewrite `from package import module` into one statement per moved module."""

    def replaced(found: re.Match[str]) -> str:
        indent, package, listed = found.groups()
        wanted = [item.strip() for item in listed.strip("()\n ").split(",") if item.strip()]
        kept, moved = [], []
        for item in wanted:
            name, _, alias = item.partition(" as ")
            new = names.get(f"{package}.{name}")
            if new is None or new == f"{package}.{name}":
                kept.append(item)
                continue
            parent, _, last = new.rpartition(".")
            bound = alias or name
            renamed = "" if bound == last else f" as {bound}"
            moved.append(f"{indent}from {DONE}{parent} import {last}{renamed}")
        if not moved:
            return found.group(0)
        lines = [f"{indent}from {package} import {', '.join(kept)}"] if kept else []
        return "\n".join(lines + moved)

    return re.sub(
        r"(?m)^([ \t]*)from ([\w.]+) import (\([^)#]*\)|[\w, ]+(?: as \w+)?)$", replaced, text
    )


def follow_dotted(text: str, names: dict[str, str]) -> str:
    tops = "|".join(sorted({name.partition(".")[0] for name in names}))

    def replaced(found: re.Match[str]) -> str:
        parts = found.group(0).split(".")
        for end in range(len(parts), 0, -1):
            new = names.get(".".join(parts[:end]))
            if new is not None:
                return ".".join([new, *parts[end:]])
        return found.group(0)

    return re.sub(rf"(?<![\w./{DONE}-])(?:{tops})(?:\.\w+)+", replaced, text)


def follow_paths(text: str, moves: dict[str, str]) -> str:
    """Replace paths as documents write them: from the root, src/, or the package's folder."""
    shorter = {}
    for old, new in moves.items():
        shorter[old] = new
        shorter[old.removeprefix("src/")] = new.removeprefix("src/")
        inside = old.removeprefix("src/nano_inference/")
        if inside != old and "/" in inside:
            shorter[inside] = new.removeprefix("src/nano_inference/").removeprefix("src/")

    def replaced(found: re.Match[str]) -> str:
        return shorter.get(found.group(0), found.group(0))

    return re.sub(r"(?<![\w/.-])[\w./-]+\.[a-z]+\b", replaced, text)


if __name__ == "__main__":
    main()
