"""Log lines, as text or as JSON. Whatever a client sent is escaped in them; keys are never in them."""

import ipaddress
import json
import logging
import socket
from typing import Any

from nano_inference.serving.config import ServerConfig
from nano_inference.serving.edge.record import RequestRecord
from nano_inference.serving.handler import Generation
from nano_inference.serving.messages import EngineInfo

access = logging.getLogger("nano_inference.access")
log = logging.getLogger("nano_inference.serving")
prompts = logging.getLogger("nano_inference.prompts")

_WATCHED = ("/health", "/metrics")
_LONGEST = 256  # characters of what a client sent


def set_up_logs(config: ServerConfig) -> None:
    """Send what this package and uvicorn log to stderr. For the command; a library leaves logging as it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    for name in ("nano_inference", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("nano_inference").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def escaped(text: str) -> str:
    """On one line, and without what a terminal would obey: no line feeds, no ANSI sequences."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


class TextLines(logging.Formatter):
    """`time level logger message`. Lines of tracebacks are indented, so that none looks like an entry."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line without the traceback."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Indented and escaped."""
        return "\n".join("    " + escaped(line) for line in super().formatException(ei).splitlines())


class JsonLines(logging.Formatter):
    """One object a line; `extra={"fields": ...}` of a record becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        entry |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)  # escapes control characters, and all that is not ASCII


def log_access(record: RequestRecord) -> None:
    """A request has been answered. What watches the server all the time is only told to those who want to know all."""
    level = logging.DEBUG if record.path in _WATCHED and record.status == 200 else logging.INFO
    if not access.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method[:16],
        "path": record.path[:_LONGEST],
        "status": record.status,
        "seconds": round(record.seconds, 4),
    }
    if record.model is not None:
        fields |= {
            "model": record.model,
            "n": record.num_samples,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
        }
    if record.first_token is not None:
        fields["first_token"] = round(record.first_token, 4)
    if record.problem is not None:
        fields["problem"] = record.problem[:_LONGEST]
    words = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
    access.log(level, "%s", words, extra={"fields": fields})


def _quoted(value: object) -> str:
    """So that a value cannot look like two fields."""
    text = str(value)
    return json.dumps(text) if not text or any(each in ' "=' for each in text) or not text.isprintable() else text


def log_texts(generation: Generation, request_id: str) -> None:
    """What was asked and what was said; only where `log_prompts` is set."""
    tokenizer = generation.served.tokenizer
    asks = [ask.prompt if tokenizer is None else tokenizer.decode(ask.prompt) for ask in generation.builder.asks]
    said = [choice.reasoning + choice.content for choice in generation.choices]
    fields = {"request_id": request_id, "prompts": asks, "completions": said}
    prompts.info("%s", json.dumps(fields), extra={"fields": fields})


def log_start(config: ServerConfig, url: str) -> None:
    """The server listens."""
    keys = f"{len(config.api_keys)} API key(s)" if config.api_keys else "no API key"
    admin = "an admin key" if config.admin_key is not None else "no admin key (its routes are off)"
    log.info("listening on %s, with %s and %s; the engine is being built.", url, keys, admin)
    if not config.api_keys and not is_loopback(config.host):
        log.warning(
            "host=%s can be reached from other machines, and no API key is set: anybody who reaches it may use it.",
            config.host,
        )


def log_ready(config: ServerConfig, info: EngineInfo, name: str) -> None:
    """The engine is ready."""
    log.info(
        "serving %s (%s): max_model_len=%d, max_batch_size=%d, max_queued_samples=%d, request_timeout=%g s.",
        name,
        info.numerics,
        info.max_model_len,
        info.max_batch_size,
        config.max_queued_samples,
        config.request_timeout,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if not host:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)
