"""Process groups: collectives that are late, complete or failed at any moment, and a trainer that
stops while a group forms.
"""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from nano_inference.errors import WeightTransferError
from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.transports.interface import Deadline
from nano_inference.weights.transports.trainer_broadcasts import join_trainer

CPU = torch.device("cpu")
# on a slow machine the call may be abandoned before it reports
TOO_LATE = r"(could not join its group|accepted a connection but did not respond) within 0\.7 s"
STORE = """
import os, signal, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGSTOP)
"""


class EndsAsTheWaitDoes:
    """A collective that completes between the end of a wait and the check for completion, like
    those of torch.
    """

    def __init__(self, failure: str | None = None) -> None:
        self.is_done, self.failure = False, failure

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_done:
            self.is_done = True
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.is_done


def test_collective_may_end_with_its_timeout() -> None:
    ProcessGroup(None, CPU).wait([EndsAsTheWaitDoes()], "'a'", Deadline(30.0))
    with pytest.raises(
        WeightTransferError, match="'a' did not arrive, the other side is gone: connection reset"
    ):
        ProcessGroup(None, CPU).wait([EndsAsTheWaitDoes("connection reset")], "'a'", Deadline(30.0))


@pytest.fixture
def store() -> Iterator["subprocess.Popen[str]"]:
    """Start a trainer that serves a store and never makes a group. It stops when it receives a
    line.
    """
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.kill()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_failed_group_leaves_nothing_open(store: "subprocess.Popen[str]") -> None:
    assert store.stdout is not None
    port = int(store.stdout.readline())

    def fail_to_join() -> int:
        with pytest.raises(WeightTransferError, match=TOO_LATE):
            join_trainer(("127.0.0.1", port), 1, 2, Deadline(0.7))
        for thread in threading.enumerate():  # the abandoned group still has its sockets
            if thread.name.startswith("call of "):
                thread.join(30)
        return len(list(Path("/proc/self/fd").iterdir()))

    fail_to_join()
    gc.collect()
    gc.disable()  # only a later check would find it
    try:
        assert fail_to_join() >= fail_to_join()
    finally:
        gc.enable()


@pytest.mark.thorough
def test_trainer_can_be_stopped_before_its_group_forms(store: "subprocess.Popen[str]") -> None:
    assert store.stdin is not None
    assert store.stdout is not None
    port = int(store.stdout.readline())
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        joining = pool.submit(join_trainer, ("127.0.0.1", port), 1, 2, Deadline(2.0))
        time.sleep(0.7)
        print(file=store.stdin, flush=True)
        try:
            with pytest.raises(WeightTransferError, match="within 2 s"):
                joining.result(30)
            assert time.monotonic() - began < 30
        finally:
            store.kill()  # a torch thread may still wait for it
