"""Measure the English of documents, docstrings, messages, test names and commits.

`python scripts/prose.py` prints every measure next to its budget. `--check`, which `make lint`
runs, fails if a measure is over its budget. `--list MEASURE [PATH ...]` prints the places that a
measure counts. `--freeze` lowers budgets to today's figures and never raises one. CONTRIBUTING.md
has the rules, `scripts/prose.toml` the budgets.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_suffix(".toml")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md")
# The API reference is generated from docstrings, which are measured themselves, and from rows of
# control routes.
REFERENCE = "docs/api.md"
ROUTES = re.compile(r"<!-- control routes -->.*?<!-- end of control routes -->", re.S)
OLD_WORDS = re.compile(
    r"\b(tell|tells|told|anew|beside|besides|alone|go on|goes on|went on|gone on|going on)\b", re.I
)
WHAT = re.compile(r"\bwhat\b", re.I)
WHERE = re.compile(r"\bwhere\b", re.I)
YOU = re.compile(r"\b(you|your|yours)\b", re.I)
SEMICOLON = re.compile(r";(?!\w)")
OPENING = re.compile(
    r"(what|whatever|whether|of|how|which|those|they|these|it|its|their|see|who|whose|one that"
    r"|one of|where|that)\b",
    re.I,
)
BARE_OF = re.compile(r"of\b")
ODD_MESSAGE = re.compile(
    r"(?<!there )\b(?:is|are) no\b|\bis none\b|\bmeans? nothing\b|\btold\b|\banew\b"
    r"|\bbeside\b|\bgo(?:es)? on\b|\b(?:lies|stands)\b"
)
ODD_TEST = re.compile(
    r"test_(what|whatever|whether|those|they|these|it|its|their|one|ones|of|where|nothing|both"
    r"|such|who|how|that|this|there|all|each|every|no|only|many|some|two|three|even|any"
    r"|everything|neither|a|an|the|as|when|if|after|before|in|at|by|from|with|without|and|or)_"
)
SUBJECT = re.compile(r"[a-z][\w ,./-]*: [a-z`]")
VAGUE_NAMES = {"found", "each", "own", "given", "told", "place"}
LONG_SENTENCE = 28  # words
LONG_NAME = 60  # characters of a test's name
LONG_SUBJECT = 72
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.M | re.S)


class Place(NamedTuple):
    path: str
    line: int
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a measure is over its budget")
    parser.add_argument("--freeze", action="store_true", help="lower budgets to today's figures")
    parser.add_argument("--list", metavar="MEASURE", help="print the places that a measure counts")
    parser.add_argument("paths", nargs="*", help="read only files under these paths")
    options = parser.parse_args()
    found = Measures(options.paths)
    if options.list:
        if options.list not in found.places:
            parser.error(f"no measure {options.list!r} with places: {', '.join(found.places)}")
        for place in found.places[options.list]:
            print(f"{place.path}:{place.line}: {place.text}")
        return
    figures = found.figures()
    if options.freeze:
        _freeze(figures)
    budgets = tomllib.loads(BUDGETS.read_text())
    over = [name for name, figure in figures.items() if not _holds(name, figure, budgets)]
    for name, figure in figures.items():
        mark = "  <- over" if name in over else ""
        print(f"{figure:10,.2f}  {_bound(name)} {budgets[name]:10,.2f}  {name}{mark}")
    if options.check and over:
        sys.exit(f"The English is over its budget: {', '.join(over)}. See CONTRIBUTING.md.")


def _bound(name: str) -> str:
    return ">=" if name == "you in documents" else "<="


def _holds(name: str, figure: float, budgets: dict[str, float]) -> bool:
    budget = budgets[name]
    return figure >= budget if _bound(name) == ">=" else figure <= budget


def _freeze(figures: dict[str, float]) -> None:
    lines = []
    budgets = tomllib.loads(BUDGETS.read_text())
    for line in BUDGETS.read_text().splitlines():
        name = line.split('"')[1] if line.startswith('"') else ""
        if name in figures and _bound(name) == "<=" and figures[name] < budgets[name]:
            line = f'"{name}" = {round(figures[name] + 0.005, 2):g}'
        lines.append(line)
    BUDGETS.write_text("\n".join(lines) + "\n")


class Measures:
    """Every measure of the files under `paths`, or of the whole repository."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = [(Path.cwd() / path).resolve() for path in paths]
        self.places: dict[str, list[Place]] = defaultdict(list)
        self.words: dict[str, int] = defaultdict(int)
        self.lengths: dict[str, list[int]] = defaultdict(list)
        self.docstrings = 0
        self._documents()
        self._sources()
        self._tests()
        self._commits()

    def figures(self) -> dict[str, float]:
        """Return the count, or the rate per 1,000 words, of each measure by name."""
        figures: dict[str, float] = {"words of documents": self.words["documents"]}
        for kind in ("documents", "docstrings"):
            words = max(1, self.words[kind]) / 1000
            for what in ("you", "what", "semicolons", "where", "old words"):
                if (kind, what) != ("docstrings", "you"):
                    figures[f"{what} in {kind}"] = len(self.places[f"{what} in {kind}"]) / words
            lengths = sorted(self.lengths[kind])
            figures[f"words of a long sentence in {kind}"] = (
                lengths[int(len(lengths) * 0.9)] if lengths else 0
            )
        opened = len(self.places["docstrings that open with a clause"])
        figures["docstrings that open with a clause"] = 100 * opened / max(1, self.docstrings)
        for name in (
            "docstrings under three words",
            "definitions that begin with of",
            "messages in old words",
            "test names over 60 characters",
            "test names without a unit",
            "vague local names in src",
            "vague local names in tests",
            "commit subjects",
        ):
            figures[name] = len(self.places[name])
        return figures

    def _wanted(self, path: Path) -> bool:
        return not self.paths or any(path == each or each in path.parents for each in self.paths)

    def _documents(self) -> None:
        for pattern in DOCUMENTS:
            for path in sorted(ROOT.glob(pattern)):
                name = str(path.relative_to(ROOT))
                if name != REFERENCE and self._wanted(path):
                    written = ROUTES.sub(_blank, path.read_text())
                    for line, text in _passages(written):
                        self._count("documents", name, line, text)

    def _count(self, kind: str, name: str, line: int, text: str) -> None:
        self.words[kind] += len(text.split())
        for what, pattern in (
            ("you", YOU),
            ("what", WHAT),
            ("semicolons", SEMICOLON),
            ("where", WHERE),
            ("old words", OLD_WORDS),
        ):
            for hit in pattern.finditer(text):
                around = " ".join(text[max(0, hit.start() - 50) : hit.end() + 50].split())
                self.places[f"{what} in {kind}"].append(Place(name, line, around))
        for sentence in _sentences(text):
            length = len(sentence.split())
            if sentence[-1] not in ".!?:)" or length < 3:
                continue  # a heading, a cell of a table
            self.lengths[kind].append(length)
            if length > LONG_SENTENCE:
                self.places[f"words of a long sentence in {kind}"].append(
                    Place(name, line, f"({length}) {sentence}")
                )

    def _sources(self) -> None:
        for path in sorted((ROOT / "src").rglob("*.py")):
            if not self._wanted(path):
                continue
            name, source = str(path.relative_to(ROOT)), path.read_text()
            tree = ast.parse(source)
            for line, text in _docstrings(tree):
                self._docstring(name, line, text)
            for number, comment in _comments(source):
                self._count("docstrings", name, number, comment)
                if BARE_OF.match(comment):
                    self.places["definitions that begin with of"].append(
                        Place(name, number, comment)
                    )
            for line, text in _messages(tree):
                if ODD_MESSAGE.search(text):
                    self.places["messages in old words"].append(Place(name, line, text))
            for line, text in _vague_names(tree):
                self.places["vague local names in src"].append(Place(name, line, text))

    def _docstring(self, name: str, line: int, text: str) -> None:
        self.docstrings += 1
        for offset, passage in _passages(text):
            self._count("docstrings", name, line + offset - 1, passage)
        first = text.strip().partition("\n")[0]
        if OPENING.match(first):
            self.places["docstrings that open with a clause"].append(Place(name, line, first))
        if len(text.split()) < 3:
            self.places["docstrings under three words"].append(Place(name, line, text))
        for offset, row in enumerate(text.splitlines()):
            definition = re.match(r"\s*[`*]*[\w, *`]+[`*]*: (.*)", row)
            if (definition and BARE_OF.match(definition[1])) or BARE_OF.match(
                row.strip()[:3] * (offset == 0)
            ):
                self.places["definitions that begin with of"].append(
                    Place(name, line + offset, row.strip())
                )

    def _tests(self) -> None:
        for path in sorted((ROOT / "tests").rglob("*.py")):
            if not self._wanted(path):
                continue
            name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
            for line, text in _vague_names(tree):
                self.places["vague local names in tests"].append(Place(name, line, text))
            for node in ast.walk(tree):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if not node.name.startswith("test_"):
                    continue
                place = Place(name, node.lineno, node.name)
                if len(node.name) > LONG_NAME:
                    self.places["test names over 60 characters"].append(place)
                if ODD_TEST.match(node.name + "_"):
                    self.places["test names without a unit"].append(place)

    def _commits(self) -> None:
        """Record bad subjects since the commit that the budgets name. None without a history."""
        since = tomllib.loads(BUDGETS.read_text())["since"]
        self.places["commit subjects"] = []
        shown = subprocess.run(
            ["git", "log", "--no-merges", "--format=%h %s", f"{since}..HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for row in shown.stdout.splitlines():
            commit, _, subject = row.partition(" ")
            if len(subject) > LONG_SUBJECT or not SUBJECT.match(subject):
                self.places["commit subjects"].append(Place(commit, 0, subject))


def _blank(match: re.Match[str]) -> str:
    """Return as many empty lines as the match has."""
    return "\n" * match[0].count("\n")


def _passages(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items, headings and table cells with their first lines, not code."""
    text = FENCE.sub(_blank, markdown)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.S)
    lines, start = [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        table = stripped.startswith("|")
        breaks = not stripped or table or re.match(r"([-*+]|\d+\.|#+|>) |!\[", stripped)
        if breaks and lines:
            yield start, _plain(" ".join(lines))
            lines = []
        if table:
            for cell in re.split(r"(?<!\\)\|", stripped):
                if re.search(r"[A-Za-z]", cell):
                    yield number, _plain(cell.strip())
        elif stripped:
            start = start if lines else number
            lines.append(re.sub(r"^([-*+]|\d+\.|#+|>) ", "", stripped))


def _plain(text: str) -> str:
    """Return text without markup. Code counts as one word, a link as its words."""
    text = re.sub(r"``.+?``|`[^`]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").replace("\\|", "|")


def _sentences(text: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?:])[)\"*]*\s+(?=[A-Z0-9\"(*`]|code)", text) if each]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node.body[0], "lineno", 1), text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments with their first lines. Comments on consecutive lines are one text."""
    block, start = [], 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        whole = re.match(r"\s*#:? (.*)", line)
        if whole:
            start = start if block else number
            block.append(whole[1])
            continue
        if block:
            yield start, " ".join(block)
            block = []
        behind = re.search(r"\S.*\s{2}# (?!noqa|type:|pyright)([^\"']+)$", line)
        if behind:
            yield number, behind[1]


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of raised errors and of log lines."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not (
            isinstance(node, ast.Raise) or _is_log(call.func)
        ):
            continue
        for argument in [*call.args, *(each.value for each in call.keywords)]:
            text = "".join(
                str(part.value)
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            if " " in text:
                yield call.lineno, text


def _vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield variables and arguments with vague names, outside comprehensions and lambdas."""
    short_lived = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension | ast.Lambda)
        for name in ast.walk(node.target if isinstance(node, ast.comprehension) else node.args)
    }
    for node in ast.walk(tree):
        if id(node) in short_lived:
            continue
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.arg if isinstance(node, ast.arg) else node.id if stored else ""
        if name in VAGUE_NAMES:
            yield node.lineno, name


def _is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in {
        "debug",
        "info",
        "warning",
        "error",
        "exception",
        "critical",
        "warn",
    }


if __name__ == "__main__":
    main()
