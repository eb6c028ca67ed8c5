"""Formats of log lines in both processes. Control characters in client text are escaped."""

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]


def send_to_stderr(logger: logging.Logger, log_format: LogFormat, process: str = "") -> None:
    """Make a logger write only to stderr. A nonempty `process` appears in each line."""
    handler = _ToStderr()
    if log_format == "json":
        handler.setFormatter(JsonLines(process))
    else:
        handler.setFormatter(ShortLines() if sys.stderr.isatty() else TextLines(process))
    logger.handlers[:] = [handler]
    logger.propagate = False


class _ToStderr(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, even if that was replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Current standard error stream."""
        return sys.stderr


def set_up_logs(log_level: str, log_format: LogFormat) -> None:
    """Send the logs of this package and of uvicorn to stderr. Only for the command line: a library
    leaves logging unchanged.
    """
    for name in ("nano_inference", "uvicorn"):
        send_to_stderr(logging.getLogger(name), log_format)
    logging.getLogger("nano_inference").setLevel(log_level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def escaped(text: str) -> str:
    """Return the text on one line, with line feeds, ANSI sequences and other control characters
    escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


class TextLines(logging.Formatter):
    """Lines of the form `time level logger message`. Tracebacks are indented so that none of their
    lines looks like a log entry.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__(
            f"%(asctime)s %(levelname)s {process + ' ' if process else ''}%(name)s %(message)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without the traceback."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Return the indented, escaped traceback."""
        return "\n".join(
            "    " + escaped(line) for line in super().formatException(ei).splitlines()
        )


class ShortLines(TextLines):
    """Lines of the form `time message` for terminals, with the level from WARNING on."""

    def __init__(self) -> None:
        super().__init__()
        self.datefmt = "%H:%M:%S"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without the traceback. It replaces a progress line."""
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"\r\x1b[K{record.asctime} {level}{escaped(record.message)}"


class JsonLines(logging.Formatter):
    """One JSON object per line. A record's `extra={"fields": ...}` becomes its fields."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
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
        return json.dumps(entry)  # escapes control and non-ASCII characters


class Rarely:
    """Rate limit for log lines that clients can cause: passes some and counts the others."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._held_back = 0

    def due(self) -> int | None:
        """Return the number of lines suppressed since the last one. None: suppress this one too."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._seconds
        held_back, self._held_back = self._held_back, 0
        return held_back
