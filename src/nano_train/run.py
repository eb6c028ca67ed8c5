"""A run in its folder: begin, resume after any interruption, end in the same bits."""

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import nano_inference
from nano_inference.errors import ConfigError
from nano_train.checkpoints import Checkpoints
from nano_train.config import RunConfig, read_config
from nano_train.hashes import hash_of, hash_of_samples
from nano_train.loggers import open_loggers, require_loggers
from nano_train.questions import Task, code_of, load_task
from nano_train.records import Batch, Edits, State, Step, StepRecord, Update
from nano_train.trainer import Trainer
from nano_train.tree import RunFolder

CONFIG = "run.toml"
OUT = Path("out")  # folder of the runs that name no other


@dataclass(frozen=True)
class Run:
    """A run with everything that it needs.

    Attributes:
        source: The run.toml. Files that it names are relative to its folder.
        code: Texts of these files by name.
        changes: Changes of run.toml's values by dotted key.
        edits: Changes of one step's data.
        parent: Folder and step of the run that this one continues, or None.
    """

    folder: RunFolder
    config: RunConfig
    task: Task
    source: Path
    code: Mapping[str, str]
    changes: Mapping[str, Any]
    edits: Edits
    parent: Mapping[str, Any] | None = None

    @property
    def identity(self) -> str:
        """SHA-256 of all that decides the run's bits."""
        return self.config.identity(
            {**self.code, "edits": json.dumps([asdict(self.edits), self.parent], sort_keys=True)}
        )

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints in the run's folder."""
        return Checkpoints(self.folder, self.identity, self.first)

    @property
    def first(self) -> int:
        """First step that this run computed itself."""
        return self.parent["step"] if self.parent else 0

    def begin(self) -> None:
        """Write the run's files. Raises `ConfigError` if the folder holds another run."""
        if self.folder.exists:
            self._require_same(self.folder.origin())
        text = self.source.read_text("utf-8")
        self.folder.begin({CONFIG: text, **self.code}, self._origin())

    def _origin(self) -> dict[str, Any]:
        versions = {
            "nano-inference": nano_inference.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        return {
            "identity": self.identity,
            "changes": dict(self.changes),
            "edits": asdict(self.edits),
            "parent": self.parent,
            "config": self.config.model_dump(mode="json"),
            "code": {name: hash_of(text) for name, text in self.code.items()},
            "versions": versions,
        }

    def _require_same(self, origin: Mapping[str, Any]) -> None:
        if origin.get("identity") == self.identity:
            return
        mine = self._origin()
        before, now = (
            _flat({k: each.get(k) for k in ("config", "code")}) for each in (origin, mine)
        )
        changed = [
            key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)
        ]
        key = next((key for key in changed if key.startswith("code.")), None) or (
            changed[0] if changed else "edits"
        )
        raise ConfigError(
            f"{self.folder.path} is another run: {key.removeprefix('config.')} was "
            f"{before.get(key)!r} there and is {now.get(key)!r} now; choose another --out, or "
            "change the run with `nano-inference runs edit`."
        )

    def start(self) -> State | None:
        """Return the state of the last checkpoint, or None. Raises `RunError` if it is damaged."""
        steps = self.checkpoints.steps()
        return self.checkpoints.read(steps[-1]) if steps else None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def read_run(path: Path, out: Path | None = None, changes: Mapping[str, Any] | None = None) -> Run:
    """Read a run, from its file or from its folder.

    Args:
        path: A run.toml, or the folder of a run.
        out: Folder of the run. None: `path` if it is a run's folder, or else `out/NAME`.
        changes: Changes of values by dotted key.

    Raises:
        ConfigError: The file, a value or a function that it names is invalid.
        RunError: The folder is damaged.
    """
    changes = dict(changes or {})
    if not path.is_dir():
        config = read_config(path, changes)
        code = code_of(config, path.parent)
        folder = RunFolder(out or OUT / config.name)
        task = load_task(config, path.parent)
        return Run(folder, config, task, path, code, changes, Edits())
    if out is not None and out.resolve() != path.resolve():
        raise ConfigError(f"--out {out} is not {path}; name a run.toml to begin another run.")
    folder = RunFolder(path)
    origin = folder.origin()
    changes = {**origin["changes"], **changes}
    config = read_config(path / CONFIG, changes)
    return Run(
        *(folder, config, load_task(config, path)),
        *(path / CONFIG, code_of(config, path), changes),
        *(edits_of(origin["edits"]), origin["parent"]),
    )


def edits_of(content: Mapping[str, Any]) -> Edits:
    """Return edits as JSON holds them: numbers of samples are texts there."""
    numbered = {
        name: {int(number): value for number, value in content[name].items()}
        for name in ("rewards", "completions")
    }
    return Edits(content["step"], seed=content["seed"], **numbered)


def train(run: Run, show: Callable[[StepRecord], None] = lambda _: None) -> str:
    """Begin or resume a run, and return the SHA-256 of its last parameters.

    Args:
        run: The run.
        show: Function that receives the figures of each step.

    Raises:
        RunError: The folder is in use, damaged, or belongs to another run.
        ConfigError: A package of a logger is missing.
        RewardError, LogprobMismatch: A step failed. The run resumes from its last checkpoint.
    """
    require_loggers(run.config)
    with run.folder.locked():
        run.begin()
        checkpoints = run.checkpoints
        checkpoints.clean()
        done = checkpoints.steps()[-1] if checkpoints.steps() else 0
        if done > run.config.steps:
            raise ConfigError(
                f"steps={run.config.steps} is less than the {done} steps done; raise it."
            )
        if done < run.config.steps:
            _remaining(run, checkpoints, show)
        return checkpoints.about(run.config.steps)["parameters_sha256"]


def _remaining(run: Run, checkpoints: Checkpoints, show: Callable[[StepRecord], None]) -> None:
    config = run.config
    start = run.start()
    first = start.step if start else 0
    run.folder.rewind(first)
    with (
        Trainer(config, run.task, start, run.edits) as trainer,
        _logging(run, first) as log,
    ):
        del start  # its tensors are copied
        for step in trainer.steps():
            run.folder.write_batch(step.batch, step.updates)
            line = line_of(step)
            run.folder.append(line, {"step": step.record.step, "seconds": step.record.seconds})
            log(step.record)
            show(step.record)
            if trainer.step % config.checkpoint_every == 0 or trainer.step == config.steps:
                checkpoints.write(trainer.state(), config.keep_checkpoints)


def line_of(step: Step) -> dict[str, Any]:
    """Return a step's line of steps.jsonl: figures and hashes, no times."""
    line = asdict(step.record)
    del line["seconds"]
    return line | hashes_of(step.batch) | {"updates": [hashed(update) for update in step.updates]}


def hashes_of(batch: Batch) -> dict[str, str]:
    """Return the hash of each part of a step's data, in the order of their computation."""
    return {
        "questions": hash_of(batch.questions),
        "samples": hash_of_samples(batch.samples),
        "rewards": hash_of(batch.rewards),
        "advantages": hash_of(batch.advantages),
    }


def hashed(update: Update) -> dict[str, Any]:
    """Return an update with one hash for all values of a kind."""
    kinds = ("logprobs", "gradients", "parameters")
    return asdict(update) | {kind: hash_of(getattr(update, kind)) for kind in kinds}


@contextmanager
def _logging(run: Run, first: int) -> Iterator[Callable[[StepRecord], None]]:
    with ExitStack() as opened:
        loggers = open_loggers(run.folder.path, run.config, run.identity, first)
        for logger in loggers:
            opened.callback(logger.close)

        def log(record: StepRecord) -> None:
            figures = {
                name: value
                for name, value in asdict(record).items()
                if name != "step" and value is not None
            }
            for logger in loggers:
                logger.log(record.step, figures)

        yield log
