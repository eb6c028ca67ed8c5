"""Output streams, log lines, the keyboard, and tokens colored by their logprobs."""

import codecs
import errno
import logging
import math
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.status import Status
from rich.text import Text

from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.system.progress import SELDOM, Show, heard_by, shown_by

if TYPE_CHECKING:
    from nano_inference.config import EngineConfig
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.text.tokenizer import Tokenizer
    from nano_inference.types import TrainingSample

Item = TypeVar("Item")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, as other output does."""
        raise BrokenPipeError


output = _Console(highlight=False)  # results
errors = Console(stderr=True, highlight=False)  # everything else
BROKEN_PIPE = 128 + signal.SIGPIPE  # exit code if the reader of a pipe has ended
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

# control characters except tab and newline: a terminal would execute a model's escape sequences
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return text with control characters replaced by U+FFFD if standard output is a terminal."""
    return _CONTROL.sub("\ufffd", text) if output.is_terminal else text


def write(text: str) -> None:
    """Write a model's text to standard output, unwrapped and unbuffered."""
    # not `print`, which expands tabs and drops control codes
    output.file.write(printable(text))
    output.file.flush()


def write_file(file: Path, text: str) -> None:
    """Write a UTF-8 file atomically. Raises `ConfigError`."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as problem:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {reason(file, problem)}.") from problem


def read_file(file: Path) -> str:
    """Return the text of a UTF-8 file. Raises `InvalidRequest`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"cannot read {file}: {reason(file, problem)}.") from problem


def reason(file: Path, problem: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a file could not be read or written, as a clause."""
    if isinstance(problem, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {problem.start})"
    if isinstance(problem, IsADirectoryError) or file.is_dir():
        return "it is a folder"
    if isinstance(problem, FileNotFoundError | NotADirectoryError) and not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if isinstance(problem, FileNotFoundError):
        return "no such file"
    return (problem.strerror or str(problem)).lower()


def is_full(problem: OSError) -> bool:
    """Return True if writing failed because the disk is full or broken."""
    return problem.errno in _FULL


def drop_output() -> None:
    """Discard buffered standard output after a failed write. Otherwise Python writes it again when
    it exits, and prints another error.
    """
    with suppress(OSError, ValueError):  # a test's stream has no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


def set_up_streams() -> None:
    """Make any text printable. An ASCII locale gets UTF-8. In other encodings, unsupported
    characters become question marks, with a notice.
    """
    codecs.register_error(_REPLACED, _Replacement())
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        is_ascii = codecs.lookup(stream.encoding).name == "ascii"
        reconfigure(encoding="utf-8" if is_ascii else None, errors=_REPLACED)


_REPLACED = "nano_inference.replaced"


class _Replacement:
    """Error handler that replaces characters with question marks and prints a notice once."""

    def __init__(self) -> None:
        self._is_noted = False

    def __call__(self, problem: UnicodeError) -> tuple[str, int]:
        if not isinstance(problem, UnicodeEncodeError):
            raise problem
        if not self._is_noted:
            self._is_noted = True
            errors.print(
                f"Characters outside {problem.encoding} are printed as question marks; set "
                "PYTHONIOENCODING=utf-8 to print them.",
                style="dim",
            )
        return "?" * (problem.end - problem.start), problem.end


def set_up_logging(*, verbose: bool) -> None:
    """Log the engine's warnings to standard error, and its information too if `verbose`."""
    logger = logging.getLogger("nano_inference")
    logger.handlers = [RichHandler(console=errors, show_time=False, show_path=False, markup=False)]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    if not verbose:
        # transformers logs much while it converts models
        logging.getLogger("transformers").setLevel(logging.ERROR)


def load_engine(config: "EngineConfig") -> "InferenceEngine":
    """Build an engine and show the progress."""
    name = config.model_path
    if Path(name).exists():
        name = Path(name).name
    with errors.status(one_line(f"loading {name}")) as status, _shown_in(status):
        from nano_inference.engine.engine import InferenceEngine

        built = InferenceEngine(config)
    _tell_of_rounding(built, config)
    _tell_of_a_faster_setting(built, config)
    return built


def _tell_of_rounding(engine: "InferenceEngine", asked: "EngineConfig") -> None:
    """Print a line if weights are less precise than the checkpoint and you did not choose that."""
    if asked.dtype != "fast":
        return
    dtype = str(engine.model.dtype)
    is_plain = engine.config.codes is None and engine.spec.quantisation is None
    wide = engine.spec.checkpoint_dtype == "float32" and not engine.spec.quantized_source
    if is_plain and wide and dtype.endswith("bfloat16"):
        line = "the float32 checkpoint is computed in bfloat16; --dtype float32 keeps its digits"
        errors.print(line, style="dim", soft_wrap=True)


def _tell_of_a_faster_setting(engine: "InferenceEngine", asked: "EngineConfig") -> None:
    """Print dtype and memory if an option that you left out would make the engine faster."""
    from nano_inference.device.quantization import faster_setting, told_weights

    model, weights = engine.model, engine.memory_budget.weights
    facts = engine.config, asked, model.dtype, weights, model.device
    if faster_setting(*facts) is not None:
        errors.print(told_weights(*facts), style="dim", soft_wrap=True)


@contextmanager
def _shown_in(status: Status) -> Iterator[None]:
    """Show the progress of long work next to the spinner. Without a terminal, print a line at the
    start of a kernel build and every half minute.
    """
    if not errors.is_terminal:
        with heard_by(_builds()):
            yield
        return
    with shown_by(lambda line: status.update(one_line(line))):
        yield


def one_line(text: str) -> Text:
    """Return text for a spinner, shortened to the width of the terminal."""
    line = Text(text)
    line.truncate(errors.width - 2, overflow="ellipsis")  # 2: the spinner and a space
    return line


def _builds(clock: Callable[[], float] = time.monotonic) -> Show:
    last = -math.inf

    def hear(line: str) -> None:
        nonlocal last
        if line.startswith("compiling") and clock() - last >= SELDOM:
            last = clock()
            errors.print(line)

    return hear


@contextmanager
def keys_for_later() -> Iterator[None]:
    """Keep keys pressed within the block for the next prompt, Ctrl-D included, without an echo.
    Ctrl-C still interrupts.

    In the terminal's line mode, a Ctrl-D would reach the line editor as a zero byte, because the
    editor reads in another mode.
    """
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # not a terminal
        yield
        return
    changed = [*before[:3], before[3] & ~(termios.ICANON | termios.ECHO), *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class Interruptible(Generic[Item]):
    """Iterator over the deltas of a `generate` or the pieces of a reply that ends on Ctrl-C. Use it
    as a context manager.

    An interrupt within a step would leave the engine in an unknown state. The first Ctrl-C only
    ends the stream after the next delta, and closing it aborts unfinished samples. The second one
    raises `KeyboardInterrupt`.

    Attributes:
        stopped: True after Ctrl-C.
    """

    def __init__(self, deltas: Iterator[Item]) -> None:
        self.stopped = False
        self._deltas: Any = deltas

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __iter__(self) -> Iterator[Item]:
        for delta in self._deltas:
            yield delta
            if self.stopped:
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._deltas.close()
            else:
                with suppress(Exception):  # report the first problem
                    self._deltas.close()
        finally:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, *_: object) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


# (smallest probability, style, name). Styles set foreground and background outside a theme's 16
# colors, so that they look the same on dark and light terminals. Less probable tokens are darker,
# for readers who do not see the hues.
_LEVELS = (
    (0.9, "", "≥ 90 %"),
    (0.5, "color(16) on color(228)", "≥ 50 %"),
    (0.1, "color(16) on color(215)", "≥ 10 %"),
    (0.01, "color(16) on color(203)", "≥ 1 %"),
    (0.0, "color(231) on color(88)", "< 1 %"),
)


def has_colors(console: Console) -> bool:
    """Return True if a console shows colors: false in files, and if NO_COLOR is set."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Text:
    """Return a line that explains the colors."""
    if not has_colors(console):
        return Text("A logprob follows each token.")
    line = Text("probability of a token: ")
    for _, style, name in _LEVELS:
        line.append(f" {name} ", style).append(" ")
    return line


def colored(sample: "TrainingSample", tokenizer: "Tokenizer", console: Console) -> Text:
    """Return all tokens of a completion, including end tokens."""
    text = Text()
    for piece, logprob in _pieces(sample, tokenizer):
        if not has_colors(console):
            text.append(f"{printable(piece)}[{logprob:z.2f}]")
            continue
        style = next(style for least, style, _ in _LEVELS if math.exp(logprob) >= least)
        # a line end has no width to color
        text.append(printable(piece).replace("\n", "↵\n" if style else "\n"), style)
    return text


def _pieces(sample: "TrainingSample", tokenizer: "Tokenizer") -> Iterator[tuple[str, float]]:
    """Yield (text, logprob) per token. Tokens that form a character together are one item, with
    their lowest logprob.
    """
    from nano_inference.text.detokenizer import Detokenizer

    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    least = 0.0
    for token_id, logprob in zip(sample.completion_tokens, sample.logprobs, strict=True):
        least = min(least, logprob)
        if piece := detokenizer.push((token_id,)):
            yield piece, least
            least = 0.0
    if rest := detokenizer.finish():
        yield rest, least
