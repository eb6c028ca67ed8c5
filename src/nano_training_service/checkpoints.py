"""Checkpoints on disk, and the `tinker://` paths that name them.

    STATE/runs/RUN/run.json
    STATE/runs/RUN/weights/NAME/           a PEFT folder, optimizer.safetensors, optimizer.json
    STATE/runs/RUN/sampler_weights/NAME/   a PEFT folder
    STATE/runs/RUN/external_weights/NAME/  a PEFT folder, to be downloaded
    STATE/runs/RUN/snapshots/NUMBER/       a PEFT folder that lives as long as its session

Each folder also has a `checkpoint.json`. A checkpoint appears under its name only when it is
complete, and it is on disk before `write` returns. A service locks STATE/lock, so only one can use
the folder. Names that begin with a dot are temporary: `.unfinished-` may be deleted at any time.
`.replaced-NAME` is the old checkpoint while a new one is renamed to NAME.
"""

import errno
import fcntl
import hashlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from nano_inference.errors import ConfigError, ModelLoadError
from nano_inference.system import read_json, sync
from nano_training_service.errors import Refused

Kind = Literal["weights", "sampler_weights", "external_weights"]
TYPES: dict[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
ADAPTER = "adapter_model.safetensors"
_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,127}")
_ABOUT = "checkpoint.json"
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
_ABOUT_BYTES = 512  # upper bound of checkpoint.json's size without its user_metadata


@dataclass(frozen=True)
class Run:
    """Record of a model in training, kept after the model ends."""

    run_id: str
    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: dict[str, Any] | None
    created: float
    last_request: float


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        kind: Second to last part of the path.
        name: Last part of the path.
        created: Time of creation, in seconds since the epoch.
        expires: Time of expiry, in seconds since the epoch. None: never.
        size: Total size of its files in bytes.
        sha256: Digest of the adapter's file.
    """

    run_id: str
    kind: Kind
    name: str
    created: float
    expires: float | None
    size: int
    sha256: str
    user_metadata: dict[str, str] | None
    folder: Path

    @property
    def path(self) -> str:
        """Path `tinker://RUN/KIND/NAME` of the checkpoint."""
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @property
    def files(self) -> dict[str, Path]:
        """Files of the adapter and the optimizer, by name."""
        return {each.name: each for each in self.folder.iterdir() if each.name != _ABOUT}


def moment(seconds: float) -> str:
    """Format a time as the client reads it: ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Checkpoints:
    """All checkpoints of a state folder, including those of earlier services. The folder stays
    locked until `close`. Any thread may call, but only one may write.

    Args:
        folder: State folder.
        most: Maximum total size of all checkpoints except snapshots, in bytes. None: no limit.

    Raises:
        ConfigError: Another service uses the folder, or it is not writable.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._runs, self._most = folder / "runs", most
        self._names = threading.Lock()  # held while a checkpoint takes the name of another
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "ab")  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"state_dir={str(folder)!r} cannot be written: {problem}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            self._lock.close()
            why = "cannot be locked" if problem.errno != errno.EWOULDBLOCK else "is in use"
            raise ConfigError(
                f"state_dir={str(folder)!r} {why}: {problem.strerror}. Two services cannot share a "
                "folder; end the other one, or name another folder (--state-dir)."
            ) from None
        self._clean_up()

    def close(self) -> None:
        """Unlock the folder for other services."""
        self._lock.close()

    def _clean_up(self) -> None:
        """Remove or restore folders that an interrupted service left behind."""
        for old in self._runs.glob(f"*/*/{_REPLACED}*"):
            target = old.with_name(old.name.removeprefix(_REPLACED))
            if target.exists():  # the new one
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for left in (*self._runs.glob("*/snapshots"), *self._runs.glob(f"*/*/{_UNFINISHED}*")):
            shutil.rmtree(left, ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Write the record of a run, new or with an updated `last_request`."""
        folder = self._runs / run.run_id
        folder.mkdir(exist_ok=True)
        _write_json(folder / "run.json", asdict(run))

    def run(self, run_id: str) -> Run:
        """Return the record of a run. Raises `Refused` 404 if there is none."""
        if not _NAME.fullmatch(run_id) or not (self._runs / run_id / "run.json").is_file():
            raise Refused(f"there is no training run {run_id!r}.", 404)
        return Run(**read_json(self._runs / run_id / "run.json"))

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        records = [self.run(path.parent.name) for path in self._runs.glob("*/run.json")]
        return sorted(records, key=lambda run: (-run.created, run.run_id))

    def write(
        self,
        run_id: str,
        kind: Kind,
        name: str,
        fill: Callable[[Path], None],
        size: int,
        *,
        overwrite: bool = False,
        ttl: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Write and return a new checkpoint. `fill` writes its files, at most `size` bytes, into a
        folder. Raises `Refused` before writing if the name is invalid or taken, or if the
        checkpoint could exceed the limit.
        """
        if not _NAME.fullmatch(name):
            raise Refused(
                f"{name!r} cannot name a checkpoint; use 1 to 128 letters, digits, and . _ : -"
            )
        target = self._runs / run_id / kind / name
        if target.exists() and not overwrite:
            raise Refused(
                f"the checkpoint {kind}/{name} already exists; set overwrite=True to replace it."
            )
        now = time.time()
        about: dict[str, Any] = {
            "created": now,
            "expires": None if ttl is None else now + ttl,
            "user_metadata": user_metadata,
        }
        self._require_room(size + _ABOUT_BYTES + len(json.dumps(user_metadata)), target)
        with _filled(target, fill) as folder:
            about["sha256"] = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
            _write_json(folder / _ABOUT, about)
            for path in (*folder.iterdir(), folder, self._runs / run_id / "run.json"):
                sync(path)
            self._name(folder, target)
        return self._read(target)

    def _name(self, folder: Path, target: Path) -> None:
        """Rename a folder to `target` and delete the old one. After a crash one of them remains."""
        old = target.with_name(f"{_REPLACED}{target.name}")
        with self._names:
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            try:
                folder.rename(target)
            except BaseException:
                if old.exists():
                    old.rename(target)
                raise
        for parent in (target.parent, target.parent.parent, self._runs, self._runs.parent):
            sync(parent)
        shutil.rmtree(old, ignore_errors=True)

    def write_snapshot(self, run_id: str, number: int, fill: Callable[[Path], None]) -> Path:
        """Write an unnamed PEFT adapter and return its folder."""
        target = self._runs / run_id / "snapshots" / str(number)
        with _filled(target, fill) as folder:
            folder.rename(target)
        return target

    def drop_snapshots(self, run_id: str) -> None:
        """Delete all snapshots of a run."""
        shutil.rmtree(self._runs / run_id / "snapshots", ignore_errors=True)

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint of a `tinker://` path. Raises `Refused`: 400 if the path is
        malformed, 404 if the checkpoint does not exist or has expired.
        """
        run_id, _, rest = path.removeprefix(_SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(_SCHEME) or kind not in TYPES:
            raise Refused(
                f"{path!r} must be tinker://RUN/KIND/NAME, where KIND is {' or '.join(TYPES)}."
            )
        if not (_NAME.fullmatch(run_id) and _NAME.fullmatch(name)):
            raise Refused(f"there is no checkpoint {path!r}.", 404)
        folder = self._runs / run_id / kind / name
        with self._names:
            if not (folder / _ABOUT).is_file():
                raise Refused(f"there is no checkpoint {path!r}.", 404)
            checkpoint = self._read(folder)
        if checkpoint.expires is not None and checkpoint.expires <= time.time():
            raise Refused(f"the checkpoint {path!r} has expired.", 404)
        return checkpoint

    def of(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or all of them, newest first."""
        folder = run_id if run_id is not None else "*"
        checkpoints: list[Checkpoint] = []
        for kind in TYPES:
            for about in self._runs.glob(f"{folder}/{kind}/*/{_ABOUT}"):
                if not about.parent.name.startswith("."):
                    # another thread may be deleting it
                    with suppress(FileNotFoundError, ModelLoadError):
                        checkpoints.append(self._read(about.parent))
        return sorted(checkpoints, key=lambda each: (-each.created, each.path))

    def remove(self, path: str) -> None:
        """Delete a checkpoint. Raises `Refused` like `find`."""
        self._drop(self.find(path).folder)

    def set_ttl(self, path: str, ttl: float | None) -> None:
        """Set the expiry to `ttl` seconds from now. None: never. Raises `Refused` like `find`."""
        checkpoint = self.find(path)
        about = read_json(checkpoint.folder / _ABOUT)
        about["expires"] = None if ttl is None else time.time() + ttl
        _write_json(checkpoint.folder / _ABOUT, about)
        sync(checkpoint.folder / _ABOUT)

    def sweep(self) -> None:
        """Delete expired checkpoints."""
        for checkpoint in self.of():
            if checkpoint.expires is not None and checkpoint.expires <= time.time():
                self._drop(checkpoint.folder)

    def _drop(self, folder: Path) -> None:
        """Delete a folder. A rename hides it from other threads first, in one step."""
        gone = folder.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):  # another thread was first
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _require_room(self, size: int, target: Path) -> None:
        """Raise `Refused` if replacing `target` with `size` bytes would exceed the limit."""
        if self._most is None:
            return
        self.sweep()
        taken = sum(each.size for each in self.of() if each.folder != target)
        if taken + size > self._most:
            raise Refused(
                f"this checkpoint may take {size:,} bytes in addition to {taken:,} bytes of "
                f"others, which exceeds the limit of {self._most:,} (max_checkpoint_bytes). Delete "
                "checkpoints, or save them with ttl_seconds."
            )

    def _read(self, folder: Path) -> Checkpoint:
        about = read_json(folder / _ABOUT)
        kind: Any = folder.parent.name
        return Checkpoint(
            run_id=folder.parent.parent.name,
            kind=kind,
            name=folder.name,
            created=about["created"],
            expires=about["expires"],
            size=sum(file.stat().st_size for file in folder.iterdir()),
            sha256=about["sha256"],
            user_metadata=about["user_metadata"],
            folder=folder,
        )


@contextmanager
def _filled(target: Path, fill: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a filled folder next to `target`. Delete it afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f"{_UNFINISHED}{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        fill(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
