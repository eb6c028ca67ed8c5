"""`EngineChild`: one engine process and the two sockets to it, seen from the process that starts
it.
"""

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable

import msgspec
import zmq

from nano_inference.child_process import start_child
from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.serving.log_lines import LogFormat, Rarely
from nano_inference.serving.messages import NOT_UNDERSTOOD, Begin, FromEngine, Stop, ToEngine
from nano_inference.serving.socket_folder import private_folder

log = logging.getLogger("nano_inference.serving")

STOP_PATIENCE = 5.0  # seconds that it gets to end by itself
HANG_UP_PATIENCE = 2.0  # and when its stdin has ended, which it obeys also amid a step
AT_ONCE = 64  # messages taken in before others get their turn on the event loop
BYTES_AT_ONCE = 1 << 20  # or so many bytes of them

_DECODER = msgspec.msgpack.Decoder(FromEngine)
_ENCODER = msgspec.msgpack.Encoder()


class EngineChild:
    """Everything here happens on the event loop on which it was made. It holds a folder, a process
    and two sockets until `close`.

    Args:
        config: of the engine.
        receive: takes each message.
        ended: called when the process has ended, after its last message, with a sentence on why.
        log_format: of its log lines.
        number: of the engine among several.
        meeting: see `Begin`.
    """

    def __init__(
        self,
        config: EngineConfig,
        receive: Callable[[FromEngine], None],
        ended: Callable[[str], None],
        log_format: LogFormat = "text",
        number: int = 0,
        meeting: str = "",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._ended = ended
        self._rarely = Rarely()
        self._exited = asyncio.Event()
        self._closed = False
        self.folder = private_folder()
        self._context = zmq.Context()
        try:
            # Whoever receives binds: a stranger on the socket can send, and take nothing away.
            self._inbox = self._context.socket(zmq.PULL)
            self._inbox.bind(f"ipc://{self.folder}/api")
            self._outbox = self._context.socket(zmq.PUSH)
            self._outbox.set_hwm(0)  # sending never waits
            self._outbox.connect(f"ipc://{self.folder}/engine")
            begin = Begin(
                config=config,
                inbox=f"ipc://{self.folder}/engine",
                outbox=f"ipc://{self.folder}/api",
                log_level=log.getEffectiveLevel(),
                log_format=log_format,
                parent=os.getpid(),
                number=number,
                meeting=meeting,
            )
            self._process = start_child("nano_inference.serving.engine_process", begin)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        fd = self._inbox.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor tells of changes alone
        threading.Thread(target=self._wait, name="wait for the engine process", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send it, without waiting. Raises `InvalidRequest` for what cannot be said on the wire."""
        try:
            data = _ENCODER.encode(message)
        except (TypeError, ValueError, OverflowError) as problem:
            # a lone surrogate, a huge integer
            raise InvalidRequest(
                f"the request cannot be handed to the engine: {problem}."
            ) from problem
        if not self._closed:
            self._outbox.send(data, zmq.NOBLOCK)

    def kill(self) -> None:
        """End the process at once; that is noticed like any other end."""
        self._process.kill()

    async def close(self, patience: float = STOP_PATIENCE) -> None:
        """Let the process end, within `patience` seconds (0: at once), or make it; then nothing of
        it is left.
        """
        if not self._closed and not self._exited.is_set():
            if not patience:  # it does not listen yet, and has nothing to put away
                self._process.kill()
            self.send(Stop())
            if not await self._has_exited(patience or HANG_UP_PATIENCE):
                self._hang_up()
                if not await self._has_exited(HANG_UP_PATIENCE):
                    log.warning("the engine process does not end, and is killed")
                    self._process.kill()
                    await self._has_exited(HANG_UP_PATIENCE)
        self._discard()

    async def _has_exited(self, patience: float) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), patience)
        except TimeoutError:
            return False
        return True

    def _wait(self) -> None:
        """The thread that waits for the process."""
        code = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._exit, code)
        except RuntimeError:  # the event loop was closed before us
            shutil.rmtree(self.folder, ignore_errors=True)

    def _exit(self, code: int) -> None:
        self._exited.set()
        if not self._closed:
            # Its last words are in the socket, or about to be.
            self._loop.call_later(0.05, self._bury, code)

    def _bury(self, code: int) -> None:
        while not self._closed and self._read_some():
            pass
        if not self._closed:
            self._discard()
            self._ended(_epitaph(code))

    def _discard(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._hang_up()

    def _hang_up(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _read(self) -> None:
        if not self._closed and self._read_some():
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
            try:
                message = _DECODER.decode(data)
            except Exception as problem:
                if (more := self._rarely.due()) is not None:
                    log.warning(NOT_UNDERSTOOD, len(data), str(problem), more)
                continue
            try:
                self._receive(message)
            except Exception:
                log.exception("a message of the engine could not be handled")
            if self._closed:
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
