"""`nano-inference runs page`: one or two runs as an HTML file. run_page.js shows it."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nano_inference.cli.pages import (
    Pieces,
    SampleBlock,
    encoded,
    html_page,
    pieces_of_model,
    text_of,
)
from nano_inference.errors import ConfigError, ModelLoadError
from nano_train.hashes import hash_of
from nano_train.history import History, Line, Scores
from nano_train.records import RunError
from nano_train.show import state_of
from nano_train.tree import SAMPLES

MOST_STEPS = 4000  # steps in the charts and the table
MOST_SAMPLES = 64  # samples of a step
MOST_BLOCKS = 400  # steps with samples in the page
MOST_LINES = 2**22  # bytes of a step's samples in their file
MOST_BYTES = 2**24  # bytes of all samples in the page
MOST_CONFIG = 20_000  # characters of a configuration
MOST_LISTED = 10  # problems, changes and edits
MOST_TEXT = 500  # characters of one of these
NO_PARAMETERS = hash_of({})


def page_of(histories: Sequence[History]) -> str:
    """Return the page of one or two runs. Raises `ConfigError` if both are the same."""
    if len({history.folder.path.resolve() for history in histories}) < len(histories):
        raise ConfigError("both folders are the same run; name another one, or omit it.")
    labels = _labels([history.folder.path for history in histories])
    runs: list[dict[str, Any]] = []
    data: dict[str, str] = {}
    for number, (label, history) in enumerate(zip(labels, histories, strict=True)):
        part = _Part(history, MOST_BLOCKS // len(histories), MOST_BYTES // len(histories))
        part.fill()
        runs.append({"label": label, **part.content()})
        data |= {f"samples-{number}-{step}": text for step, text in part.blocks.items()}
    bounds = {
        "samples": MOST_SAMPLES,
        "lines": MOST_LINES,
        "blocks": MOST_BLOCKS,
        "bytes": MOST_BYTES,
    }
    return html_page(
        " and ".join(labels),
        body=_text("run_page.html").replace("{samples}", text_of("samples.html")),
        style=text_of("samples.css") + _text("run_page.css"),
        script=text_of("samples.js") + _text("run_page.js"),
        data={"data": encoded({"runs": runs, "bounds": bounds}), **data},
    )


def _text(name: str) -> str:
    return text_of(name, package="nano_train")


def _labels(paths: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in paths]
    return names if len({*names}) == len(names) else [str(path) for path in paths]


@dataclass
class _Part:
    """A run's part of a page.

    Attributes:
        most_blocks: Largest number of steps with samples.
        most_bytes: Largest number of bytes of all samples.
        blocks: Samples of a step as JSON, by step.
        counts: Number of samples shown, and of all samples, by step.
        problems: Sentences about files that cannot be read.
        checkpoint: Step and SHA-256 of the last checkpoint, or None.
    """

    history: History
    most_blocks: int
    most_bytes: int
    blocks: dict[int, str] = field(default_factory=dict[int, str])
    counts: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    problems: list[str] = field(default_factory=list[str])
    checkpoint: tuple[int, str] | None = None

    def fill(self) -> None:
        """Read the checkpoint and, up to the bounds, samples: first of steps that lie far apart."""
        self._read_checkpoint()
        pieces, left = self._pieces(), self.most_bytes
        for line in islice(_spread(_shown(self.history.lines)), self.most_blocks):
            try:
                block, total = self._block(line.step, pieces)
            except RunError as problem:
                self.problems.append(str(problem))
                continue
            text = encoded(block.content())
            left -= len(text)
            if left < 0:
                break
            self.blocks[line.step] = text
            self.counts[line.step] = block.count, total

    def _read_checkpoint(self) -> None:
        try:
            self.checkpoint = self.history.checkpoint()
        except RunError as problem:
            self.problems.append(str(problem))

    def _pieces(self) -> Pieces | None:
        model = self.history.origin.config.model
        try:
            return pieces_of_model(model)
        except ModelLoadError as problem:
            reason = str(problem).rstrip(".")
            self.problems.append(f"Token ids replace the texts of tokens: {reason}.")
            return None

    def _block(self, step: int, pieces: Pieces | None) -> tuple[SampleBlock, int]:
        """Return the first samples of a step, and the number of all. Raises `RunError`."""
        path = self.history.folder.path / SAMPLES / f"{step}.jsonl"
        try:
            lines = _first_lines(path)
        except OSError as problem:
            raise RunError(f"{path} cannot be read: {problem.strerror}.") from problem
        block = SampleBlock(pieces)
        total, columns = self.history.samples_of_a_step, {}
        try:
            scores = self.history.scores(step)
            total = len(scores.rewards) or total
            columns = _columns(step, scores, total, len(lines))
        except RunError as problem:
            self.problems.append(str(problem))
        block.read(lines, {"sample_index": range(len(lines)), **columns})
        return block, max(total, block.count)

    def content(self) -> dict[str, Any]:
        """Return facts and figures as run_page.js reads them."""
        lines = self.history.lines
        shown = _shown(lines)
        return {
            "facts": self._facts(),
            "origin": list(_origin(self.history)),
            "config": json.dumps(self.history.config, indent=1)[:MOST_CONFIG],
            "mismatch": _mismatch(self.history),
            "steps": len(lines),
            "columns": _figures(self.history, shown),
            "samples": [[step, *self.counts[step]] for step in sorted(self.counts)],
            "problems": _few(self.problems),
        }

    def _facts(self) -> list[tuple[str, str]]:
        """Return names and values of the run."""
        config, done = self.history.origin.config, len(self.history.lines)
        state = state_of(self.history.folder, done, config.steps)
        facts = [
            ("name", config.name),
            ("folder", str(self.history.folder.path)),
            ("method", config.method),
            ("model", config.model),
            ("state", f"{done:,} of {config.steps:,} steps, {state}"),
            ("samples of a step", f"{config.task.prompts} questions, {config.task.samples} each"),
        ]
        if self.checkpoint is None:
            facts.append(("last checkpoint", "none"))
        else:
            step, sha256 = self.checkpoint
            facts += [("last checkpoint", f"step {step}"), ("SHA-256 of its parameters", sha256)]
        versions = self.history.origin.versions.items()
        facts.append(("software", ", ".join(f"{name} {version}" for name, version in versions)))
        return facts


def _first_lines(path: Path) -> list[bytes]:
    """Return lines of a file, at most `MOST_SAMPLES` and `MOST_LINES` bytes."""
    lines: list[bytes] = []
    left = MOST_LINES
    with path.open("rb") as file:
        while len(lines) < MOST_SAMPLES and (line := file.readline(left + 1)):
            left -= len(line)
            if left < 0:
                break
            lines.append(line)
    return lines


def _columns(step: int, scores: Scores, total: int, lines: int) -> dict[str, Sequence[Any]]:
    """Return the columns of the samples that are not in their file. Raises `RunError`."""
    columns = {
        name: values
        for name, values in (("reward", scores.rewards), ("advantage", scores.advantages))
        if values
    }
    short = next((name for name, values in columns.items() if len(values) < lines), None)
    if short is not None or not scores.questions:
        raise RunError(
            f"step {step} has fewer rewards, advantages or questions than samples ({lines}); "
            "restore its files."
        )
    size = -(-max(total, lines) // len(scores.questions))
    return {**columns, "group": [scores.questions[index // size] for index in range(lines)]}


def _shown(lines: Sequence[Line]) -> list[Line]:
    """Return the lines to show: evenly spaced, the last one, and the largest mismatch."""
    every = math.ceil(len(lines) / MOST_STEPS)
    if every < 2:
        return list(lines)
    worst = max(lines, key=lambda line: line.difference)
    kept = {line.step: line for line in (*islice(lines, 0, None, every), lines[-1], worst)}
    return [kept[step] for step in sorted(kept)]


def _spread(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield all lines: the last, the first, and then those in the middle of a gap."""
    yield from lines[-1:]
    yield from lines[:1] if len(lines) > 1 else ()
    stride = 1 << len(lines).bit_length()
    while stride := stride // 2:
        yield from islice(lines, stride, len(lines) - 1, 2 * stride)


def _figures(history: History, lines: Sequence[Line]) -> dict[str, list[Any]]:
    """Return the columns of the charts and the table."""
    size = history.samples_of_a_step
    columns = {
        "step": [line.step for line in lines],
        "version": [line.version for line in lines],
        "reward": [line.reward for line in lines],
        "held_out": [line.held_out for line in lines],
        "length": [line.tokens / size for line in lines],
        "loss": [line.loss for line in lines],
        "gradient_norm": [
            line.updates[0].gradient_norm if line.updates else None for line in lines
        ],
        "kl": [line.kl for line in lines],
        "mismatch": [line.mismatch for line in lines],
        "seconds": [history.seconds.get(line.step) for line in lines],
        "parameters": [_parameters(line) for line in lines],
    }
    return {name: [_plain(value) for value in column] for name, column in columns.items()}


def _parameters(line: Line) -> str | None:
    """Return the hash of the parameters after a step. None: they did not change, or no hash was
    recorded.
    """
    last = line.updates[-1].parameters if line.updates else NO_PARAMETERS
    return None if last == NO_PARAMETERS else last


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: nan and infinities are texts."""
    return value if not isinstance(value, float) or math.isfinite(value) else f"{value}"


def _mismatch(history: History) -> dict[str, str]:
    """Return a sentence about the logprobs of trainer and engine, and its kind."""
    compared = [line for line in history.lines if line.mismatch is not None]
    if not compared:
        text = "Trainer and engine: no logprobs were compared."
        return {"kind": "none", "text": text}
    worst = max(compared, key=lambda line: line.difference)
    if worst.mismatch == 0:
        text = (
            "Largest difference between logprobs of trainer and engine: 0, as it must be. Steps "
            f"compared: {len(compared):,}."
        )
        return {"kind": "equal", "text": text}
    text = (
        f"Logprobs of trainer and engine differ by up to {worst.mismatch:g}, in step {worst.step}. "
        "The difference must be 0."
    )
    return {"kind": "different", "text": text}


def _origin(history: History) -> Iterator[str]:
    """Yield sentences about the changes with which a run began."""
    origin = history.origin
    if origin.parent is not None:
        yield f"Continues {origin.parent.folder} from step {origin.parent.step}."
    edits = [
        *(
            f"reward of sample {number} = {reward:g}"
            for number, reward in origin.edits.rewards.items()
        ),
        *(
            f"completion of sample {number} ({len(tokens)} tokens)"
            for number, tokens in origin.edits.completions.items()
        ),
        *([] if origin.edits.seed is None else [f"seed {origin.edits.seed}"]),
    ]
    if edits:
        yield f"Edited in step {origin.edits.step}: {', '.join(_few(edits))}."
    if origin.changes:
        changes = [f"{key} = {json.dumps(value)}" for key, value in origin.changes.items()]
        yield f"Changed keys of run.toml: {', '.join(_few(changes))}."


def _few(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and how many more there are."""
    more = len(texts) - MOST_LISTED
    first = [text[:MOST_TEXT] for text in texts[:MOST_LISTED]]
    return [*first, *([f"{more:,} more"] if more > 0 else [])]
