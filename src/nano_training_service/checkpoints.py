"""Checkpoints on disk, and the `tinker://` paths that name them.

    STATE/runs/RUN/run.json
    STATE/runs/RUN/weights/NAME/           a PEFT folder, optimizer.safetensors, optimizer.json
    STATE/runs/RUN/sampler_weights/NAME/   a PEFT folder
    STATE/runs/RUN/external_weights/NAME/  a PEFT folder, to be downloaded
    STATE/runs/RUN/snapshots/NUMBER/       a PEFT folder that lives as long as its session

Each folder also has a `checkpoint.json`. A checkpoint appears under its name only when it is whole,
and is on the disk before `write` returns. One service at a time has the folder: it holds a lock on
STATE/lock. Names that begin with a dot are on their way in or out: `.unfinished-` may be deleted at
any time, `.replaced-NAME` is the old checkpoint while a new one takes its name.
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
_ABOUT_BYTES = 512  # of checkpoint.json without its user_metadata, at most


@dataclass(frozen=True)
class Run:
    """What is known of a model in training, also after it has ended."""

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
    """One that is whole.

    Attributes:
        kind, name: the last two parts of its path.
        created, expires: seconds since the epoch; None: never.
        size: of its files, bytes.
        sha256: of its adapter's file.
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
        """`tinker://RUN/KIND/NAME`."""
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @property
    def files(self) -> dict[str, Path]:
        """What it is made of, by name."""
        return {each.name: each for each in self.folder.iterdir() if each.name != _ABOUT}


def moment(seconds: float) -> str:
    """As the client reads times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class Checkpoints:
    """All checkpoints of a state folder, of earlier services too; the folder is this object's until
    `close`. Safe to call from any thread, but one thread writes.

    Args:
        folder: of the state.
        most: bytes of all checkpoints together, but for snapshots; None: as the disk has.

    Raises:
        ConfigError: another service has the folder, or it cannot be written.
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
        """Let another service have the folder."""
        self._lock.close()

    def _clean_up(self) -> None:
        """Undo what a service that has ended left half done."""
        for old in self._runs.glob(f"*/*/{_REPLACED}*"):
            target = old.with_name(old.name.removeprefix(_REPLACED))
            if target.exists():  # the new one
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for left in (*self._runs.glob("*/snapshots"), *self._runs.glob(f"*/*/{_UNFINISHED}*")):
            shutil.rmtree(left, ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Note a run, new or with another `last_request`."""
        folder = self._runs / run.run_id
        folder.mkdir(exist_ok=True)
        _write_json(folder / "run.json", asdict(run))

    def run(self, run_id: str) -> Run:
        """What is known of a run. Raises `Refused` 404."""
        if not _NAME.fullmatch(run_id) or not (self._runs / run_id / "run.json").is_file():
            raise Refused(f"there is no training run {run_id!r}.", 404)
        return Run(**read_json(self._runs / run_id / "run.json"))

    def runs(self) -> list[Run]:
        """All, the newest first."""
        found = [self.run(path.parent.name) for path in self._runs.glob("*/run.json")]
        return sorted(found, key=lambda run: (-run.created, run.run_id))

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
        """A new checkpoint, whose files `fill` writes into a folder, `size` bytes at most. Raises
        `Refused`, before anything is written: for a name that is none, or that is taken, and where
        there is no room.
        """
        if not _NAME.fullmatch(name):
            raise Refused(
                f"{name!r} cannot name a checkpoint: 1 to 128 letters, digits, and . _ : - can."
            )
        target = self._runs / run_id / kind / name
        if target.exists() and not overwrite:
            raise Refused(f"the checkpoint {kind}/{name} exists already; overwrite=True replaces.")
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
        """Give a folder its name, in the place of what has it. A crash leaves one of the two."""
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
        """A folder of a PEFT adapter that nothing but its owner names."""
        target = self._runs / run_id / "snapshots" / str(number)
        with _filled(target, fill) as folder:
            folder.rename(target)
        return target

    def drop_snapshots(self, run_id: str) -> None:
        """All of a run's."""
        shutil.rmtree(self._runs / run_id / "snapshots", ignore_errors=True)

    def find(self, path: str) -> Checkpoint:
        """The checkpoint of a `tinker://` path. Raises `Refused`: 400 for no such path, 404 for
        none there, or one that has expired.
        """
        run_id, _, rest = path.removeprefix(_SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(_SCHEME) or kind not in TYPES:
            raise Refused(f"{path!r} is not tinker://RUN/KIND/NAME; KIND is {' or '.join(TYPES)}.")
        if not (_NAME.fullmatch(run_id) and _NAME.fullmatch(name)):
            raise Refused(f"there is no checkpoint {path!r}.", 404)
        folder = self._runs / run_id / kind / name
        with self._names:
            if not (folder / _ABOUT).is_file():
                raise Refused(f"there is no checkpoint {path!r}.", 404)
            found = self._read(folder)
        if found.expires is not None and found.expires <= time.time():
            raise Refused(f"the checkpoint {path!r} has expired.", 404)
        return found

    def of(self, run_id: str | None = None) -> list[Checkpoint]:
        """Those of a run, or all, the newest first."""
        folder = run_id if run_id is not None else "*"
        found: list[Checkpoint] = []
        for kind in TYPES:
            for about in self._runs.glob(f"{folder}/{kind}/*/{_ABOUT}"):
                if not about.parent.name.startswith("."):
                    # another thread deletes it
                    with suppress(FileNotFoundError, ModelLoadError):
                        found.append(self._read(about.parent))
        return sorted(found, key=lambda each: (-each.created, each.path))

    def remove(self, path: str) -> None:
        """Delete a checkpoint. Raises as `find`."""
        self._drop(self.find(path).folder)

    def set_ttl(self, path: str, ttl: float | None) -> None:
        """Let it expire so many seconds from now; None: never. Raises as `find`."""
        found = self.find(path)
        about = read_json(found.folder / _ABOUT)
        about["expires"] = None if ttl is None else time.time() + ttl
        _write_json(found.folder / _ABOUT, about)
        sync(found.folder / _ABOUT)

    def sweep(self) -> None:
        """Delete what has expired."""
        for each in self.of():
            if each.expires is not None and each.expires <= time.time():
                self._drop(each.folder)

    def _drop(self, folder: Path) -> None:
        """It is gone at once for all others, whole."""
        gone = folder.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):  # another thread was first
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _require_room(self, size: int, target: Path) -> None:
        """Raises `Refused` where so many bytes, in the place of what `target` has, are too many."""
        if self._most is None:
            return
        self.sweep()
        taken = sum(each.size for each in self.of() if each.folder != target)
        if taken + size > self._most:
            raise Refused(
                f"this checkpoint may take {size:,} bytes, and the others take {taken:,}; all may "
                f"take {self._most:,} (max_checkpoint_bytes). Delete some, or save with "
                "ttl_seconds, after which they go."
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
    """A folder beside `target` with files in it; gone at the end unless it was renamed."""
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
