"""Formats of log lines, in both processes. Text from clients is escaped."""

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]


def send_to_stderr(logger: logging.Logger, log_format: LogFormat, process: str = "") -> None:
    """Let a logger write to stderr and nowhere else. `process` is named in each line where it is
    not empty.
    """
    handler = _ToStderr()
    if log_format == "json":
        handler.setFormatter(JsonLines(process))
    else:
        handler.setFormatter(ShortLines() if sys.stderr.isatty() else TextLines(process))
    logger.handlers[:] = [handler]
    logger.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Standard error."""
        return sys.stderr


def set_up_logs(log_level: str, log_format: LogFormat) -> None:
    """Send what this package and uvicorn log to stderr. For the command; a library leaves logging
    as it is.
    """
    for name in ("nano_inference", "uvicorn"):
        send_to_stderr(logging.getLogger(name), log_format)
    logging.getLogger("nano_inference").setLevel(log_level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def escaped(text: str) -> str:
    """On one line, and without what a terminal would obey: no line feeds, no ANSI sequences."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


class TextLines(logging.Formatter):
    """`time level logger message`. Lines of tracebacks are indented, so that none looks like an
    entry.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__(
            f"%(asctime)s %(levelname)s {process + ' ' if process else ''}%(name)s %(message)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line without the traceback."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Indented and escaped."""
        return "\n".join(
            "    " + escaped(line) for line in super().formatException(ei).splitlines()
        )


class ShortLines(TextLines):
    """`time message` for a person at a terminal, with the level from WARNING on."""

    def __init__(self) -> None:
        super().__init__()
        self.datefmt = "%H:%M:%S"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line without the traceback. It replaces a progress line that stands there."""
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"\r\x1b[K{record.asctime} {level}{escaped(record.message)}"


class JsonLines(logging.Formatter):
    """One object a line; `extra={"fields": ...}` of a record becomes its fields."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
        }
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)  # escapes control characters, and all that is not ASCII


class Rarely:
    """For lines that a client could cause without end: lets one through now and then, and counts
    the others.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._held_back = 0

    def due(self) -> int | None:
        """How many were held back since the last one; None: hold this one back too."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._seconds
        held_back, self._held_back = self._held_back, 0
        return held_back
