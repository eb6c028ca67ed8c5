"""`ProcessClient`: an engine in its own process, and the private folder of its two sockets."""

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

AT_ONCE = 64  # maximum messages handled before other tasks run on the event loop
BYTES_AT_ONCE = 1 << 20  # the same limit in bytes


class ProcessClient(RemoteClient):
    """Client that starts an engine process and detects its end. Holds a folder, a process and
    two sockets from `start` until `close` or that end.

    Args:
        config: Configuration of the engine.
        max_backlog: Maximum unread tokens of a stream, per sample.
        log_format: Format of the engine process's log lines. Their level is this process's.
        number: Index of the engine among several. If no device is configured, each engine takes the
            next one.
        meeting: Rendezvous file, as in `Begin`.

    Attributes:
        pid: Process id of the engine process, once started.
        folder: Folder of the sockets.
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
        self._process: subprocess.Popen[bytes] | None = None  # None: gone with its sockets

    async def start(self) -> None:
        """Start the process and wait until its engine is ready.

        Raises the error that prevented it, and `EngineDead` if the process ended without reporting
        one.
        """
        self._started = asyncio.get_running_loop().create_future()
        try:
            self._launch()
            await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Shut the engine down within seconds, by force if necessary. Afterwards its process,
        sockets and folder are gone.
        """
        self._die(STOPPING, STOPPING)
        self._settle(EngineDead(STOPPING))
        if self._process is not None and not self._exited.is_set():
            if self._info is None:  # still building: it cannot receive `Stop` and needs no cleanup
                self._process.kill()
            self._send(Stop())
            if not await self._has_exited(time_limits.PROCESS_STOP):
                self._hang_up()
                if not await self._has_exited(time_limits.HANG_UP):
                    log.warning("killing the engine process: it did not exit in time")
                    self.kill()
                    await self._has_exited(time_limits.HANG_UP)
        self._discard()

    def kill(self) -> None:
        """Kill the process immediately. Its end is detected like any other."""
        if self._process is not None:
            self._process.kill()

    # -- the process and its sockets ---------------------------------------------------------------

    def _launch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.folder: Path = private_folder()
        self._context = zmq.Context()
        try:
            # The receiver binds: another process that connects can send, but not take messages.
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
        self._loop.call_soon(self._read)  # the descriptor only signals changes
        threading.Thread(
            target=self._wait, args=(process,), name="wait for the engine process", daemon=True
        ).start()

    def _send_bytes(self, data: bytes) -> None:
        if self._process is not None:
            self._outbox.send(data, zmq.NOBLOCK)

    async def _has_exited(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the process to end, on a thread."""
        code = process.wait()
        try:
            self._loop.call_soon_threadsafe(self._exit, code)
        except RuntimeError:  # the event loop is closed already
            shutil.rmtree(self.folder, ignore_errors=True)

    def _exit(self, code: int) -> None:
        self._exited.set()
        self._loop.call_later(time_limits.LAST_WORDS_ARRIVE, self._bury, code)

    def _bury(self, code: int) -> None:
        """Clean up after the process has ended, expectedly or not."""
        while self._process is not None and self._read_some():
            pass
        if self._process is None:
            return
        self._discard()
        reason = _epitaph(code)
        self._die(reason, "its process has ended")  # no effect if it reported why
        if self._watcher is None:  # a supervisor logs it itself
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
            # the descriptor does not signal messages that were already there
            self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Handle a bounded number of messages. Return True if there may be more."""
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


# -- private folder of the sockets -----------------------------------------------------------------

PREFIX = "nano-inference-"
MAX_ADDRESS = 100  # maximum bytes of a socket path, slightly below the system's limit


def private_folder() -> Path:
    """Create a private folder whose path is short enough for a socket."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    if len(os.fsencode(f"{folder}/engine")) > MAX_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    return folder


def remove_abandoned() -> None:
    """Remove folders left by processes that were killed together. Others remove their own."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        with suppress(OSError):
            for folder in list(Path(parent).glob(f"{PREFIX}*")):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return True if the folder is one of ours and no process listens in it. A process id would be
    less reliable: it may be reused, or belong to another container.
    """
    try:
        status = folder.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or stat.S_IMODE(status.st_mode) != 0o700
            or status.st_uid != os.getuid()
        ):
            return False
        if time.time() - status.st_mtime < time_limits.ABANDONED:
            return False
        return all(
            each.name in ("api", "engine") and not _listens(each) for each in folder.iterdir()
        )
    except OSError:  # removed in the meantime
        return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.1)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # it may listen and be overloaded
            return True
        return True
