"""Progress of long operations on a terminal, in a log, and next to a spinner. Short operations show
none.
"""

import io
import logging
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from nano_inference import EngineConfig
from nano_inference.cli import terminal
from nano_inference.engine import engine
from nano_inference.system.progress import (
    OFTEN,
    SELDOM,
    SHORT,
    FileProgress,
    Progress,
    heard_by,
    say,
    shown_by,
    told,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(stream: io.StringIO, steps: int, seconds: float, total: int = 100 * 2**20) -> None:
    """Take steps of `seconds`, one MiB each."""
    clock = Clock()
    with Progress("loading X", total, stream=stream, clock=clock) as progress:
        for _ in range(steps):
            clock.now += seconds
            progress.add(2**20)


def test_terminal_rewrites_one_line() -> None:
    stream = Terminal()
    run(stream, 100, 0.125)
    states = stream.getvalue().split("\r\x1b[K")[1:]
    assert states[0] == "loading X: 16 of 100 MiB (16%), 8.0 MiB/s"
    assert states[-1] == "loading X: 100 MiB in 12 s\n"
    assert "\n" not in "".join(states[:-1])
    assert 30 <= len(states) <= 12.5 / OFTEN + 2


def test_log_has_plain_lines_at_long_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nano_inference")
    stream = io.StringIO()
    run(stream, 100, 1.0)
    assert stream.getvalue() == ""
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "loading X: 2 of 100 MiB (2%), 1.0 MiB/s"
    assert lines[-1] == "loading X: 100 MiB in 100 s"
    assert len(lines) == 1 + (100 - SHORT) // SELDOM + 1


@pytest.mark.parametrize("make", [Terminal, io.StringIO])
def test_short_task_prints_nothing(
    caplog: pytest.LogCaptureFixture, make: Callable[[], io.StringIO]
) -> None:
    caplog.set_level(logging.INFO, "nano_inference")
    stream = make()
    run(stream, 100, (SHORT - 0.1) / 100)
    assert stream.getvalue() == ""
    assert not caplog.records


def test_spinner_receives_the_progress() -> None:
    stream, lines = Terminal(), list[str]()
    with shown_by(lines.append):
        run(stream, 100, 0.125)
    assert stream.getvalue() == ""
    assert lines[0].startswith("loading X: 16 of")
    run(stream, 100, 0.125)
    assert stream.getvalue()


def test_progress_without_a_total_has_no_percentage() -> None:
    stream = Terminal()
    run(stream, 30, 0.125, total=0)
    assert "loading X: 16 MiB, 8.0 MiB/s" in stream.getvalue()
    assert " of " not in stream.getvalue()


def test_progress_is_shared_by_threads() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("downloading X", 8000, stream=stream, clock=clock) as progress:
        threads = [
            threading.Thread(target=lambda: [progress.add(1) for _ in range(1000)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        clock.now += 60
        progress.add(0)
    assert "7.8 of 7.8 KiB (100%)" in stream.getvalue()


def test_file_progress_reports_remaining_files_and_seconds() -> None:
    stream, clock = Terminal(), Clock()
    work = {"long": 6, "middle": 3, "quick": 1}
    with FileProgress("compiling X", work, stream=stream, clock=clock) as progress:
        clock.now += 3
        progress.tick()
        clock.now += 9
        progress.finish("long")
        clock.now += 1
        progress.tick()
        clock.now += 6
        progress.finish("middle")
        clock.now += 30
        progress.tick()
        progress.finish("quick")
    assert stream.getvalue().split("\r\x1b[K")[1:] == [
        "compiling X: 0 of 3 files",
        "compiling X: 1 of 3 files, about 4 s left",
        "compiling X: 1 of 3 files, about 3 s left",
        "compiling X: 2 of 3 files, about 1 s left",
        "compiling X: 2 of 3 files, about 1 s left",
        "compiling X: 3 of 3 files in 49 s\n",
    ]


def test_file_progress_estimates_from_the_files_of_this_run() -> None:
    """Files that were ready took no time."""
    stream, clock = Terminal(), Clock()
    work = {str(number): 10 for number in range(10)}
    ready = ["0", "1", "2", "3", "4", "5"]
    with FileProgress("compiling X", work, ready, 2, stream=stream, clock=clock) as progress:
        clock.now += 24
        progress.finish("6")
    assert "7 of 10 files, about 25 s left" in stream.getvalue()


def test_listener_receives_every_state_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nano_inference")
    lines: list[str] = []
    with heard_by(lines.append):
        say("waiting")
        run(io.StringIO(), 3, 1.0, total=4 * 2**20)
    say("waiting")
    assert lines == [
        "waiting",
        "loading X: 0.0 of 4.0 MiB (0%)",
        "loading X: 1.0 of 4.0 MiB (25%), 1.0 MiB/s",
        "loading X: 2.0 of 4.0 MiB (50%), 1.0 MiB/s",
        "loading X: 3.0 of 4.0 MiB (75%), 1.0 MiB/s",
    ]
    assert [record.getMessage() for record in caplog.records][:2] == [
        "waiting",
        "loading X: 2.0 of 4.0 MiB (50%), 1.0 MiB/s",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (2048, "2.0 KiB"), (3 * 2**29, "1.5 GiB"), (269e6, "257 MiB")],
)
def test_byte_counts_are_formatted(count: int, text: str) -> None:
    assert told(count) == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_command_line_shows_progress_next_to_its_spinner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_terminal: bool
) -> None:
    caplog.set_level(logging.INFO, "nano_inference")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=200)
    monkeypatch.setattr(terminal, "errors", console)

    class Engine:
        def __init__(self, config: EngineConfig) -> None:
            run(io.StringIO(), 30, 1.0)

    monkeypatch.setattr(engine, "InferenceEngine", Engine)
    monkeypatch.setattr(terminal, "_tell_of_a_faster_setting", lambda *_: None)
    terminal.load_engine(EngineConfig("some/model"))
    lines = [record.getMessage() for record in caplog.records]
    if is_terminal:
        assert "loading X: 30 MiB in 30 s" in shown.getvalue()
        assert not lines
    else:
        assert lines[-1] == "loading X: 30 MiB in 30 s"
