"""`Pauser`: the caller that paused an engine. A call that would wait for its own caller is rejected
instead of hanging.
"""

import asyncio
import threading
from contextvars import ContextVar
from weakref import ref

# The pauses that were made in this context and have not ended. Each call of `asyncio.to_thread`
# runs in a copy of its task's context, and forgets at its end what it adds here.
_made_here: ContextVar[tuple["ref[Pauser]", ...]] = ContextVar("pauses made here", default=())


class Pauser:
    """The caller that makes this object: a thread or, in a pool that asyncio shares, one call.

    A thread by itself does not identify a caller: `asyncio.to_thread` runs the next call of any
    task on the same idle thread, while another task may resume the engine. A context by itself does
    not either: a call in a pool inherits the context of the task that made it.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()  # not its ident, which a later thread may get
        others = (each for each in _made_here.get() if each() is not None)
        _made_here.set((*others, ref(self)))

    def is_calling(self) -> bool:
        """Whether the code that asks is this caller, so that waiting here would never end."""
        if threading.current_thread() is not self._thread:
            return False
        # no task runs while another blocks the thread of their event loop
        return _runs_event_loop() or any(each() is self for each in _made_here.get())


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
