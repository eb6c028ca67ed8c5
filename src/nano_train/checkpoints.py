"""Checkpoints of a run: `checkpoints/STEP/`.

    parameters.safetensors    masters: the parameters in their own dtype
    optimizer.safetensors     state of the optimizer
    state.json                step, version, identity of the run, numerics, SHA-256 of both files
                              and of the steps logged so far

A checkpoint appears under its name only when it is complete and on the disk. Names that begin with
a dot are unfinished. `read` checks every hash, so a damaged checkpoint, or one of another run, is
reported and never used.
"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference.system import sync
from nano_train.hashes import sha256_of_tensors
from nano_train.records import RunError, State
from nano_train.tree import CHECKPOINTS, RunFolder

FORMAT = 1
PARAMETERS, OPTIMIZER, ABOUT = "parameters.safetensors", "optimizer.safetensors", "state.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a run.

    Attributes:
        run: The run's folder.
        identity: SHA-256 of all that decides the run's bits.
        first: Step at which an edited run begins. Its checkpoint always remains.
    """

    run: RunFolder
    identity: str
    first: int = 0

    @property
    def folder(self) -> Path:
        """Folder of all checkpoints."""
        return self.run.path / CHECKPOINTS

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        names = (path.name for path in self.folder.glob("*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def last_before(self, step: int) -> int | None:
        """Return the step of the newest checkpoint that is not after `step`, or None."""
        return max((number for number in self.steps() if number <= step), default=None)

    def write(self, state: State, keep: int = 0) -> str:
        """Write a checkpoint, and return the SHA-256 of the parameters.

        Only the newest `keep` checkpoints remain. 0: all.
        """
        self.run.sync()
        unfinished = self.folder / f"{_UNFINISHED}{state.step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(_plain(state.parameters), unfinished / PARAMETERS)
        save_file(_plain(state.optimizer), unfinished / OPTIMIZER)
        sha256 = sha256_of_tensors(state.parameters)
        about = {
            "format": FORMAT,
            "identity": self.identity,
            "numerics": state.numerics,
            "step": state.step,
            "version": state.version,
            "parameters_sha256": sha256,
            "files": _hashes(unfinished),
            "log_sha256": hashlib.sha256(self.run.log_bytes(state.step)).hexdigest(),
        }
        about["sha256"] = _seal(about)
        (unfinished / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        target = self.folder / str(state.step)
        self._remove(state.step)  # a step is done again
        unfinished.rename(target)
        sync(self.folder)
        for step in self.steps()[:-keep] if keep else ():
            if step != self.first:
                self._remove(step)
        return sha256

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, which no longer has its name when its files begin to go."""
        if (self.folder / str(step)).exists():
            renamed = self.folder / f"{_UNFINISHED}old-{step}"
            (self.folder / str(step)).rename(renamed)
            shutil.rmtree(renamed)

    def clean(self) -> None:
        """Remove unfinished checkpoints."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)

    def read(self, step: int) -> State:
        """Return the state of a checkpoint. Raises `RunError`, which names the checkpoint, if it is
        damaged or belongs to another run.
        """
        folder = self.folder / str(step)
        about = self.about(step)
        for name, key, mine in (
            ("format", "format", FORMAT),
            ("run", "identity", self.identity),
            ("step", "step", step),
        ):
            if about.get(key) != mine:
                raise RunError(
                    f"checkpoint {folder} is foreign: its {name} is {about.get(key)!r}, this run's "
                    f"is {mine!r}; remove it."
                )
        for name, sha256 in _hashes(folder).items():
            if about["files"].get(name) != sha256:
                raise _damaged(folder, f"{name} does not have the recorded SHA-256")
        if hashlib.sha256(self.run.log_bytes(step)).hexdigest() != about.get("log_sha256"):
            raise RunError(
                f"steps.jsonl of {self.run.path} is not that of checkpoint {folder}; restore it."
            )
        try:
            tensors = [load_file(folder / name) for name in (PARAMETERS, OPTIMIZER)]
        except (OSError, SafetensorError) as problem:
            raise _damaged(folder, str(problem)) from problem
        return State(step, about["version"], about["numerics"], *tensors)

    def about(self, step: int) -> dict[str, Any]:
        """Return the content of a checkpoint's state.json. Raises `RunError`."""
        folder = self.folder / str(step)
        try:
            content = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise _damaged(folder, f"{ABOUT} cannot be read: {problem}") from problem
        if not isinstance(content, dict) or content.pop("sha256", None) != _seal(content):
            raise _damaged(folder, f"{ABOUT} does not have its own SHA-256")
        return content


def _damaged(folder: Path, reason: str) -> RunError:
    return RunError(
        f"checkpoint {folder} is damaged: {reason}; remove it to resume from an earlier one."
    )


def _seal(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that safetensors can write: contiguous, on the CPU, without shared memory."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of both files. A missing one has the hash ""."""
    names = (PARAMETERS, OPTIMIZER)
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
