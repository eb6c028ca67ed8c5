"""A client of a server with OpenAI's routes, for this package's own commands. Standard library
only.

Replies are streamed; who stops reading closes the connection, and a server worth the name then
stops computing.
"""

import http.client
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nano_inference.errors import ConfigError, InvalidRequest, NanoInferenceError

_REFUSED = frozenset({400, 404, 413, 422})  # the request is at fault, and another one may do
_MAX_ERROR = 64 * 1024  # bytes of an error's body that are read


class ServerError(NanoInferenceError):
    """A server cannot be reached, does not let us in, or failed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, as the server counted them.

    Attributes:
        num_steps: that an engine with drafts made the completion in; None: it was not told.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        text: what the model said.
        reasoning: what it said to itself.
        finish_reason: in a last piece, why it ended.
        usage: in the very last piece, where the server counts.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class HttpClient:
    """Asks one server. Safe to use for one request after the other; each has a connection of its
    own.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float = 600.0) -> None:
        """The server at `url`, with or without a `/v1` at its end.

        Args:
            url: such as `http://127.0.0.1:8000`.
            api_key: what the server lets us in with.
            timeout: seconds that it may be silent.

        Raises:
            ConfigError: that is no URL, or a key that no header can carry.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host, self._port = parts.hostname, parts.port
            (self._host or "").encode("idna")
        except ValueError:
            parts, self._host = urlsplit(""), None
        is_http = parts.scheme in ("http", "https") and parts.path.isascii()
        if not is_http or not self._host:
            raise ConfigError(
                f"{url!r} is not the URL of a server; write one such as http://127.0.0.1:8000."
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key holds characters that a header cannot carry.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "User-Agent": "nano-inference"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def default_model(self) -> str:
        """The id of the first model that `/v1/models` lists. Raises `ServerError`."""
        listed = self.get("/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise ServerError(f"{self.url} names no model that it serves; name one.")
        return first["id"]

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises `InvalidRequest`, `ServerError`."""
        with self._answer("GET", path, None) as response:
            return self._object(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that a POST is answered with. Raises `InvalidRequest`, `ServerError`."""
        with self._answer("POST", path, body) as response:
            return self._object(response.read())

    def complete(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Stream `/v1/completions`. Raises `InvalidRequest` and `ServerError`, on the first `next`
        or later.
        """
        return self._stream("/v1/completions", body)

    def chat(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Stream `/v1/chat/completions`. Raises as `complete`."""
        return self._stream("/v1/chat/completions", body)

    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._answer("POST", path, streamed) as response:
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield self._piece(self._object(data))
        raise ServerError(f"{self.url} ended the answer before its end.")

    def _piece(self, event: Mapping[str, Any]) -> Piece:
        if "error" in event:
            raise ServerError(f"{self.url} failed: {_message(event) or 'it does not say why'}")
        try:
            choice = next(iter(event.get("choices") or ()), {})
            delta = choice.get("delta") or {}
            return Piece(
                _text(choice.get("text") or delta.get("content")),
                _text(delta.get("reasoning_content") or delta.get("reasoning")),
                choice.get("finish_reason"),
                _usage(event.get("usage")),
            )
        except (AttributeError, TypeError):  # what should be an object, a text or a number is not
            raise self._odd() from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """A good response. What goes wrong with the connection, then or later, is a
        `ServerError`.
        """
        content = None if body is None else json.dumps(body).encode()
        try:
            with closing(self._connection()) as connection:
                connection.request(method, f"{self._root}{path}", content, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise self._refusal(path, response.status, response.read(_MAX_ERROR))
                yield response
        except ConnectionRefusedError:
            raise ServerError(
                f"nothing answers at {self.url}; start a server with `nano-inference serve "
                "MODEL`, or name another URL."
            ) from None
        except TimeoutError:
            raise ServerError(f"{self.url} was silent for {self._timeout:g} s.") from None
        except (OSError, http.client.HTTPException) as problem:
            what = str(problem) or type(problem).__name__
            raise ServerError(f"the connection to {self.url} failed: {what}.") from None

    def _connection(self) -> http.client.HTTPConnection:
        assert self._host is not None
        if self._secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    def _refusal(self, path: str, status: int, body: bytes) -> NanoInferenceError:
        try:
            said = _message(json.loads(body))
        except (ValueError, RecursionError):
            said = None
        if status in (401, 403):
            return ServerError(
                f"{self.url} asks for an API key that it knows; name it with --api-key-file."
            )
        if status in _REFUSED and said:
            return InvalidRequest(said)
        return ServerError(
            f"{self.url}{path} is answered with status {status}: {said or 'it does not say why.'}"
        )

    def _object(self, data: str | bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._odd()
        return found

    def _odd(self) -> ServerError:
        return ServerError(f"{self.url} does not speak JSON as a model server does.")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; comments and other fields are passed over."""
    data: list[str] = []
    for raw in response:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _message(body: Any) -> str | None:
    """What an error's body says: OpenAI's shape, Anthropic's, or a bare message."""
    error = body.get("error", body) if isinstance(body, dict) else None
    found = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return found if isinstance(found, str) and found else None


def _usage(usage: Any) -> Usage | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), cached
    if not all(isinstance(count, int) for count in counts):
        raise TypeError
    return Usage(*counts)


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise TypeError
    return value or ""
