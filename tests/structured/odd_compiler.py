"""A grammar compiler with all kinds of faults, for `test_compile_process`."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from nano_inference.structured.compile_process import MOST_RESULT


def _spin() -> None:
    while True:
        pass


_TAKE_LONG: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(600),
    "rest": lambda: time.sleep(1.0),  # longer than the time limit
    "spin": _spin,
}


def make_compiler(tokens: list[bytes], ends: Sequence[int]) -> Callable[[str, str], bytes]:
    """Return a compiler with the fault `kind`, and report the arguments of its start."""
    told = b",".join(tokens) + repr(tuple(ends)).encode()

    def compile_one(kind: str, source: str) -> bytes:
        _TAKE_LONG.get(kind, lambda: None)()
        match kind:
            case "eat":
                held = [bytes(2**24) for _ in range(2**10)]
                return held[0][:1]
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leave":
                os._exit(3)
            case "panic":
                raise BaseException("a panic")
            case "large":
                return bytes(MOST_RESULT + 1)
            case "print":
                print("what libraries print harms nothing")
            case _:
                pass
        return told + source.encode()

    return compile_one
