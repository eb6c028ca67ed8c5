"""`ProcessClient`: an engine in a process of its own, and the private folder of its two sockets."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import zmq

from nano_inference.config import EngineConfig
from nano_inference.errors import EngineDead
from nano_inference.remote import time_limits
from nano_inference.remote.client import STOPPING, RemoteClient
from nano_inference.remote.log_lines import LogFormat
from nano_inference.remote.messages import Begin, Stop
from nano_inference.system.child_process import start_child

log = logging.getLogger("nano_inference.server")

AT_ONCE = 64  # messages taken in before others get their turn on the event loop
BYTES_AT_ONCE = 1 << 20  # or so many bytes of them


class ProcessClient(RemoteClient):
    """Starts an engine process, and notices at once when it ends. From `start` to `close`, or to
    that end, it holds a folder, a process and two sockets.

    Args:
        config: of the engine.
        max_backlog: tokens that a stream may hold, a sample, for a client that does not read.
        log_format: of the engine process's log lines; their level is that of this process.
        number: of the engine among several; where the configuration names no device, each takes the
            next one.
        meeting: see `Begin`.

    Attributes:
        pid: of the process, once it was started.
        folder: of the sockets.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_backlog: int,
        *,
        log_format: LogFormat = "text",
        number: int = 0,
        meeting: str = "",
    ) -> None:
        super().__init__(max_backlog)
        self._config = config
        self._log_format: LogFormat = log_format
        self._number, self._meeting = number, meeting
        self.pid = 0
        self._exited = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None  # None: it is gone, with its sockets

    async def start(self) -> None:
        """Start the process and wait until its engine is ready.

        Raises what kept the engine from being built, and `EngineDead` if its process ended without
        a word.
        """
        self._started = asyncio.get_running_loop().create_future()
        try:
            self._launch()
            await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let the engine end, or end it, within seconds. Its process, sockets and folder are gone
        then.
        """
        self._die(STOPPING, STOPPING)
        self._settle(EngineDead(STOPPING))
        if self._process is not None and not self._exited.is_set():
            if self._info is None:  # it does not listen yet, and has nothing to put away
                self._process.kill()
            self._send(Stop())
            if not await self._has_exited(time_limits.PROCESS_STOP):
                self._hang_up()
                if not await self._has_exited(time_limits.HANG_UP):
                    log.warning("the engine process does not end, and is killed")
                    self.kill()
                    await self._has_exited(time_limits.HANG_UP)
        self._discard()

    def kill(self) -> None:
        """End its process at once; that is noticed like any other end."""
        if self._process is not None:
            self._process.kill()

    # -- the process and its sockets ---------------------------------------------------------------

    def _launch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.folder: Path = private_folder()
        self._context = zmq.Context()
        try:
            # The receiver binds: a stranger on the socket can send, and take nothing away.
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.bind(f"ipc://{self.folder}/api")
            self._outbox = self._context.socket(zmq.PUSH)
            self._outbox.set_hwm(0)  # sending never waits
            self._outbox.connect(f"ipc://{self.folder}/engine")
            begin = Begin(
                config=self._config,
                inbox=f"ipc://{self.folder}/engine",
                outbox=f"ipc://{self.folder}/api",
                log_level=log.getEffectiveLevel(),
                log_format=self._log_format,
                parent=os.getpid(),
                number=self._number,
                meeting=self._meeting,
            )
            process = start_child("nano_inference.remote.engine_process", begin)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._process, self.pid = process, process.pid
        fd = self._inbox.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor tells of changes alone
        threading.Thread(
            target=self._wait, args=(process,), name="wait for the engine process", daemon=True
        ).start()

    def _send_bytes(self, data: bytes) -> None:
        if self._process is not None:
            self._outbox.send(data, zmq.NOBLOCK)

    async def _has_exited(self, patience: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), patience)
        except TimeoutError:
            return False
        return True

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """The thread that waits for the process."""
        code = process.wait()
        try:
            self._loop.call_soon_threadsafe(self._exit, code)
        except RuntimeError:  # the event loop was closed before us
            shutil.rmtree(self.folder, ignore_errors=True)

    def _exit(self, code: int) -> None:
        self._exited.set()
        self._loop.call_later(time_limits.LAST_WORDS_ARRIVE, self._bury, code)

    def _bury(self, code: int) -> None:
        """The process has ended, unasked unless `close` was called."""
        while self._process is not None and self._read_some():
            pass
        if self._process is None:
            return
        self._discard()
        reason = _epitaph(code)
        self._die(reason, "its process has ended")  # unless it said itself why
        if self._watcher is None:  # else a supervisor says so
            log.error("the engine has died: %s", self._dead)
        self._settle(EngineDead(reason))

    def _discard(self) -> None:
        if self._process is not None:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._hang_up()
            self._process = None

    def _hang_up(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _read(self) -> None:
        if self._process is not None and self._read_some():
            # the descriptor does not tell again of what is there already
            self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Take in a number of messages; whether there may be more."""
        size = 0
        for _ in range(AT_ONCE):
            if size > BYTES_AT_ONCE:
                break
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            size += len(data)
            self._hear_bytes(data)
            if self._process is None:
                return False
        return True


def _epitaph(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with exit code {code}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the engine process was killed by {name}."


# -- the private folder of its sockets; folders left by killed processes are removed ---------------

PREFIX = "nano-inference-"
MAX_ADDRESS = 100  # bytes of a socket's path; the system's limit is a little more


def private_folder() -> Path:
    """A fresh folder that is ours alone, with a path short enough for a socket."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    if len(os.fsencode(f"{folder}/engine")) > MAX_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder


def remove_abandoned() -> None:
    """Remove folders of processes that were all killed at once; other ends remove their own."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        with suppress(OSError):
            for folder in list(Path(place).glob(f"{PREFIX}*")):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether it is one of ours in which no process listens. A process id would say less: it may
    belong to another container, or be used again.
    """
    try:
        found = folder.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or stat.S_IMODE(found.st_mode) != 0o700
            or found.st_uid != os.getuid()
        ):
            return False
        if time.time() - found.st_mtime < time_limits.ABANDONED:
            return False
        return all(
            each.name in ("api", "engine") and not _listens(each) for each in folder.iterdir()
        )
    except OSError:  # it has just gone
        return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.settimeout(0.1)
        try:
            one.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # it may listen, and have too much to do
            return True
        return True
