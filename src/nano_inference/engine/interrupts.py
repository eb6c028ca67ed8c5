"""Ctrl-C comes between two steps."""

import signal
import threading
from types import TracebackType
from typing import Any


class HeldInterrupts:
    """A block at whose end Ctrl-C takes effect: in the middle of a step it would leave the engine
    in an unknown state.

    The second one comes at once. Where Ctrl-C means something else than `KeyboardInterrupt`, and in
    other threads, which it does not reach, nothing is held.
    """

    def __enter__(self) -> "HeldInterrupts":
        self._came, self._before = False, None
        ordinary = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ordinary and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came and kind is None:
                raise KeyboardInterrupt

    def _note(self, *_: Any) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
