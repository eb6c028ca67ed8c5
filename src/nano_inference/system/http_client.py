"""HTTP client of OpenAI-compatible servers, for this package's own commands. Standard library only.

Responses are streamed. Closing the stream closes the connection, at which a good server stops
computing.
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

_REFUSED = frozenset({400, 404, 413, 422})  # the request is at fault, not the server
_MAX_ERROR = 64 * 1024  # maximum bytes read from an error's body


class ServerError(NanoInferenceError):
    """Server that is unreachable, denies access or fails."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, as the server reported them.

    Attributes:
        num_steps: Steps that an engine with drafts took for the completion. None if not reported.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a streamed answer.

    Attributes:
        text: Text of the answer.
        reasoning: Text of the model's reasoning.
        finish_reason: Reason why the answer ended, in its last text part.
        usage: Token counts, in the very last part, if the server reports them.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class HttpClient:
    """Client of one server. Use it for one request after the other. Each has its own connection."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float = 600.0) -> None:
        """Create a client of the server at `url`, with or without a trailing `/v1`.

        Args:
            url: URL such as `http://127.0.0.1:8000`.
            api_key: API key of the server.
            timeout: Seconds that the server may be silent.

        Raises:
            ConfigError: The URL is invalid, or the key contains characters that a header cannot
                carry.
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
            raise ConfigError(
                "the API key contains characters that a header cannot carry; use printable ASCII."
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "User-Agent": "nano-inference"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def default_model(self) -> str:
        """Return the id of the first model that `/v1/models` lists. Raises `ServerError`."""
        listed = self.get("/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise ServerError(f"{self.url} lists no model; name one.")
        return first["id"]

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raises `InvalidRequest` and `ServerError`."""
        with self._answer("GET", path, None) as response:
            return self._object(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a POST request and return the JSON object of the response. Raises `InvalidRequest`
        and `ServerError`.
        """
        with self._answer("POST", path, body) as response:
            return self._object(response.read())

    def complete(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Stream `/v1/completions`. Raises `InvalidRequest` and `ServerError` on the first `next`
        or later.
        """
        return self._stream("/v1/completions", body)

    def chat(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Stream `/v1/chat/completions`. Raises the same errors as `complete`."""
        return self._stream("/v1/chat/completions", body)

    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._answer("POST", path, streamed) as response:
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield self._piece(self._object(data))
        raise ServerError(f"{self.url} closed the stream before the answer was complete.")

    def _piece(self, event: Mapping[str, Any]) -> Piece:
        if "error" in event:
            raise ServerError(f"{self.url} failed: {_message(event) or 'no reason given'}")
        try:
            choice = next(iter(event.get("choices") or ()), {})
            delta = choice.get("delta") or {}
            return Piece(
                _text(choice.get("text") or delta.get("content")),
                _text(delta.get("reasoning_content") or delta.get("reasoning")),
                choice.get("finish_reason"),
                _usage(event.get("usage")),
            )
        except (AttributeError, TypeError):  # a value of a wrong type
            raise self._odd() from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield a response with status 200. Connection failures, also while it is read, become
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
                f"no server is listening at {self.url}; start one with `nano-inference serve "
                "MODEL`, or name another URL."
            ) from None
        except TimeoutError:
            raise ServerError(f"{self.url} sent nothing for {self._timeout:g} s.") from None
        except (OSError, http.client.HTTPException) as problem:
            reason = str(problem) or type(problem).__name__
            raise ServerError(f"the connection to {self.url} failed: {reason}.") from None

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
                f"{self.url} requires a valid API key; pass one with --api-key-file."
            )
        if status in _REFUSED and said:
            return InvalidRequest(said)
        return ServerError(
            f"{self.url}{path} returned status {status}: {said or 'no reason given.'}"
        )

    def _object(self, data: str | bytes) -> dict[str, Any]:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise self._odd()
        return content

    def _odd(self) -> ServerError:
        return ServerError(
            f"{self.url} returned something other than the JSON of a model server; check the URL."
        )


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of server-sent events. Comments and other fields are skipped."""
    data: list[str] = []
    for raw in response:
        line = raw.decode(errors="replace").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _message(body: Any) -> str | None:
    """Return the message of an error's body: OpenAI's or Anthropic's form, or a bare string."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


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
