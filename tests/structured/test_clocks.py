"""Limits of work: counted time, and when a limit is reached."""

import os
import threading
import time

import pytest

from nano_inference.structured import clocks
from nano_inference.structured.clocks import Spent, process_clock, thread_clock


class Hand:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spent_counts_work() -> None:
    work, wall = Hand(), Hand()
    spent = Spent(10.0, work, wall)
    assert spent.left == 10.0
    wall.now += 60.0
    assert spent.left == 10.0  # other processes used the machine
    work.now += 4.0
    assert spent.left == 6.0
    work.now += 7.0
    assert spent.left == 0.0


def test_spent_ends_idle_work() -> None:
    work, wall = Hand(), Hand()
    spent = Spent(10.0, work, wall)
    wall.now += 10.0 * clocks.PATIENCE - 1.0
    assert spent.left == 1.0
    wall.now += 1.0
    assert spent.left == 0.0


def test_spent_uses_wall_time_without_a_clock() -> None:
    wall = Hand()
    spent = Spent(10.0, None, wall)
    wall.now += 4.0
    assert spent.left == 6.0


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="not told here")
def test_thread_clock_counts_only_its_thread() -> None:
    go, done = threading.Event(), threading.Event()

    clocks_of: list[clocks.Clock | None] = []

    def work() -> None:
        clocks_of.append(thread_clock())
        done.set()
        go.wait(30)
        spin(0.2)
        done.set()
        go.clear()
        go.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(30)
    done.clear()
    (clock,) = clocks_of
    assert clock is not None
    spin(0.2)
    assert clock() < 0.1
    go.set()
    assert done.wait(30)
    counted = clock()
    assert counted >= 0.2
    while go.is_set():
        time.sleep(0.001)
    go.set()
    thread.join(30)
    assert clock() >= counted  # also after the end


def test_process_clock_counts_the_busiest_thread() -> None:
    clock = process_clock(os.getpid())
    assert clock is not None
    threads = [threading.Thread(target=spin, args=(0.3,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    spin(0.3)
    assert 0.25 <= clock() < 0.8
