"""The folder of a run.

    run.toml, task.py ...     copies of the files that began it
    origin.json               identity, numerics, versions, changes, edits and parent; written last
    lock                      process that works on the run
    steps.jsonl               a line per step: figures, and hashes of its parts
    timings.jsonl             seconds of each step, the only figures that depend on the machine
    samples/STEP.jsonl        samples, as `nano-inference replay` and `report` read them
    batches/STEP.json         questions, rewards, advantages, and the hash of each tensor
    checkpoints/STEP/         state after STEP steps (`checkpoints.py`)

Every file but the two logs appears complete under its name. A log may end in the middle of a line
after a crash. `rewind` cuts everything after a checkpoint, so that a resumed run writes it again.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nano_inference.data import DataError, read_jsonl, write_jsonl
from nano_inference.errors import ConfigError
from nano_inference.system import sync
from nano_train.records import Batch, RunError, Update

ORIGIN, STEPS, TIMINGS = "origin.json", "steps.jsonl", "timings.jsonl"
SAMPLES, BATCHES, CHECKPOINTS = "samples", "batches", "checkpoints"
PART = ".part"  # end of the temporary name of a file


class RunFolder:
    """Files of a run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """True if a run was begun here."""
        return (self.path / ORIGIN).is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes away until the end of the block. The end of a process ends its lock,
        so no lock is ever stale. Raises `RunError` with the number of the other process.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "lock", "a+", encoding="ascii")  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"{self.path} cannot be written: {problem}.") from problem
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                pid = lock.read().strip() or "unknown"
                raise RunError(
                    f"{self.path} is in use by process {pid}; wait for it, or end it."
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    # -- the beginning -----------------------------------------------------------------------------

    def begin(self, files: Mapping[str, str], origin: Mapping[str, Any]) -> None:
        """Write the run's own files. Raises `RunError` if the folder holds anything else."""
        known = {"lock", *files, *(f"{name}{PART}" for name in (*files, ORIGIN))}
        other = sorted(each.name for each in self.path.iterdir() if each.name not in known)
        if other and not self.exists:
            raise RunError(
                f"{self.path} is not a run, but contains {other[0]}; choose another folder."
            )
        for name, text in files.items():
            self._write(name, text)
        self._write(ORIGIN, json.dumps(origin, indent=1) + "\n")

    def origin(self) -> dict[str, Any]:
        """Return the content of origin.json. Raises `RunError`."""
        return self._read(ORIGIN)

    # -- steps -------------------------------------------------------------------------------------

    def write_batch(self, batch: Batch, updates: list[Update]) -> None:
        """Write samples, rewards and hashes of a step."""
        samples = self.path / SAMPLES / f"{batch.step}.jsonl"
        samples.parent.mkdir(exist_ok=True)
        unfinished = samples.with_name(f"{samples.name}{PART}")
        write_jsonl(batch.samples, unfinished)
        unfinished.replace(samples)
        content = {
            "questions": batch.questions,
            "rewards": batch.rewards,
            "advantages": batch.advantages,
            "updates": [asdict(update) for update in updates],
        }
        self._write(f"{BATCHES}/{batch.step}.json", json.dumps(content) + "\n")

    def read_scores(self, step: int) -> dict[str, Any]:
        """Return the content of a step's file in batches/. Raises `RunError`."""
        return self._read(f"{BATCHES}/{step}.json")

    def read_batch(self, step: int) -> tuple[Batch, list[Update]]:
        """Return samples, rewards and hashes of a step. Raises `RunError`."""
        content = self.read_scores(step)
        try:
            samples = read_jsonl(self.path / SAMPLES / f"{step}.jsonl")
            updates = [Update(**update) for update in content.pop("updates")]
            return Batch(step=step, samples=samples, **content), updates
        except (OSError, DataError, KeyError, TypeError) as problem:
            raise RunError(f"step {step} of {self.path} cannot be read: {problem}.") from problem

    def append(self, line: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Add a step to the logs."""
        for name, row in ((TIMINGS, timing), (STEPS, line)):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of steps.jsonl. An incomplete last line is ignored."""
        return self._lines(STEPS)

    def timings(self) -> list[dict[str, Any]]:
        """Return the lines of timings.jsonl."""
        return self._lines(TIMINGS)

    def log_bytes(self, steps: int) -> bytes:
        """Return the first lines of steps.jsonl. Raises `RunError` if there are fewer."""
        path = self.path / STEPS
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if len(lines) < steps or any(not line.endswith(b"\n") for line in lines[:steps]):
            raise RunError(f"{path} has fewer than {steps} complete lines; restore it.")
        return b"".join(lines[:steps])

    def rewind(self, steps: int) -> None:
        """Remove everything after the first `steps` steps, and temporary files."""
        for name in (STEPS, TIMINGS):
            path = self.path / name
            if path.is_file():
                size = sum(map(len, path.read_bytes().splitlines(keepends=True)[:steps]))
                os.truncate(path, size)
        for name in (SAMPLES, BATCHES):
            for path in (self.path / name).glob("*"):
                number = path.name.partition(".")[0]
                if path.name.endswith(PART) or not number.isdecimal() or int(number) >= steps:
                    path.unlink()

    def copy_steps(self, source: "RunFolder", steps: int) -> None:
        """Copy the first steps of another run."""
        for step in range(steps):
            for name in (f"{SAMPLES}/{step}.jsonl", f"{BATCHES}/{step}.json"):
                (self.path / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source.path / name, self.path / name)
        for name in (STEPS, TIMINGS):
            lines = (source.path / name).read_bytes().splitlines(keepends=True) if steps else []
            (self.path / name).write_bytes(b"".join(lines[:steps]))

    def sync(self) -> None:
        """Wait until the logs and files of all steps are on the disk."""
        for name in (STEPS, TIMINGS, SAMPLES, BATCHES):
            path = self.path / name
            if path.is_dir():
                for file in path.iterdir():
                    sync(file)
            if path.exists():
                sync(path)
        sync(self.path)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as problem:
            raise RunError(f"{path} is damaged: {problem}; restore it.") from problem

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{path.name}{PART}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as problem:
            raise RunError(f"{path} does not exist; name the folder of a run.") from problem
        except (OSError, ValueError, RecursionError) as problem:
            raise RunError(f"{path} cannot be read: {problem}.") from problem
        if not isinstance(content, dict):
            raise RunError(f"{path} must hold a JSON object; restore it.")
        return content
