"""Threads that receive weights run at a lower priority than threads that decode."""

import os
import sys
import threading
from collections.abc import Callable

import pytest

from nano_inference.parallel.deadline import NICENESS, Deadline, before, step_back

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="threads have priorities of their own on Linux"
)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)


def test_step_back_lowers_only_its_thread_and_children() -> None:
    initial, seen = niceness(), list[int]()

    def bring() -> None:
        step_back()
        seen.append(niceness())
        in_a_thread(lambda: seen.append(niceness()))

    in_a_thread(bring)
    assert seen == [NICENESS, NICENESS]
    assert niceness() == initial


def test_deadline_before_runs_in_a_background_thread() -> None:
    assert before(Deadline(5), niceness, "the trainer") == NICENESS
