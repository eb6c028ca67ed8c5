"""The HTTP client of the commands, against a scripted server."""

import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.errors import ConfigError, InvalidRequest, NanoInferenceError
from nano_inference.system.http_client import HttpClient, Piece, ServerError, Usage
from tests.server.scripted_http import Answer, said, scripted_http

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def ask(
    answer: Answer, path: str = "/v1/chat/completions", url: str = "", **options: Any
) -> list[Piece]:
    with scripted_http(lambda _, __: answer) as seen:
        client = HttpClient(seen.url + url, "secret", **options)
        stream = client.chat if "chat" in path else client.complete
        pieces = list(stream({"model": "m"}))
        ((at, headers, body),) = seen.requests
        assert at == path
        assert headers["authorization"] == "Bearer secret"
        assert body == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    return pieces


@pytest.mark.thorough
@given(st.lists(st.text(), max_size=6), st.booleans())
def test_chat_streams_pieces(texts: list[str], chat: bool) -> None:
    pieces = ask(
        said(*texts, usage=USAGE, chat=chat), "/v1/chat/completions" if chat else "/v1/completions"
    )
    assert [piece.text for piece in pieces if piece.text] == [text for text in texts if text]
    assert pieces[-2].finish_reason == "stop"
    assert pieces[-1].usage == Usage(7, 2, 4)


def test_reasoning_is_recognized_under_either_name() -> None:
    events = [{"choices": [{"delta": {name: "hm"}}]} for name in ("reasoning_content", "reasoning")]
    pieces = ask(Answer(events=[*events, {"choices": [{"delta": {"content": "a"}}]}, "[DONE]"]))
    assert [(piece.reasoning, piece.text) for piece in pieces] == [
        ("hm", ""),
        ("hm", ""),
        ("", "a"),
    ]


@pytest.mark.parametrize("url", ["", "/", "/v1", "/v1/"])
def test_url_may_name_the_api(url: str) -> None:
    assert ask(said("x"), url=url)


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "http://x:port", "", "http://[::1", "http://a..b", "http://x/\xe9"],
)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL"):
        HttpClient(url)


@pytest.mark.parametrize("key", ["a\r\nX: y", "schlüssel"])
def test_api_key_cannot_inject_headers(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        HttpClient("http://x", key)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            Answer(400, {"error": {"message": "n is too large."}}),
            InvalidRequest,
            "^n is too large.$",
        ),
        (Answer(404, {"error": {"message": "no such model."}}), InvalidRequest, "^no such model.$"),
        (Answer(404, {"detail": "Not Found"}), InvalidRequest, "Not Found"),
        (
            Answer(401, {"error": {"message": "key?"}}),
            ServerError,
            "requires a valid API key.*--api-key-file",
        ),
        (Answer(429, {"error": {"message": "try later."}}), ServerError, "status 429: try later"),
        (Answer(503, b"<html>"), ServerError, "status 503: no reason given"),
        (Answer(events=["{"]), ServerError, "other than the JSON of a model server"),
        (Answer(events=["[1]"]), ServerError, "other than the JSON of a model server"),
        (Answer(events=["[" * 100_000]), ServerError, "other than the JSON of a model server"),
        (Answer(events=[{"choices": [1]}]), ServerError, "other than the JSON of a model server"),
        (
            Answer(events=[{"choices": [{"delta": {"content": 5}}]}]),
            ServerError,
            "other than the JSON of a model server",
        ),
        (
            Answer(events=[{"choices": [], "usage": [1]}]),
            ServerError,
            "other than the JSON of a model server",
        ),
        (
            Answer(events=[{"choices": [], "usage": {"completion_tokens": None}}]),
            ServerError,
            "other than the JSON of a model server",
        ),
        (
            Answer(events=[{"error": {"message": "the engine is dead."}}]),
            ServerError,
            "failed: the engine is dead.",
        ),
        (Answer(events=[{"choices": []}]), ServerError, "before the answer was complete"),
        (Answer(events=[{"choices": []}], cut=True), ServerError, "before the answer was complete"),
    ],
)
def test_client_error_is_one_sentence(answer: Answer, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        ask(answer)
    assert isinstance(caught.value, NanoInferenceError)
    assert "\n" not in str(caught.value)


def test_missing_or_silent_server_is_reported() -> None:
    with pytest.raises(
        ServerError, match=r"no server is listening at http://127\.0\.0\.1:1; start"
    ):
        list(HttpClient("127.0.0.1:1").complete({}))
    with pytest.raises(ServerError, match=r"connection to http://nowhere\.invalid failed"):
        HttpClient("http://nowhere.invalid").get("/v1/models")
    slow = Answer(events=[{"choices": []}, "[DONE]"], wait=lambda: time.sleep(0.3))
    with pytest.raises(ServerError, match=r"sent nothing for 0\.1 s"):
        ask(slow, timeout=0.1)


def test_abandoned_stream_closes_the_connection() -> None:
    endless = Answer(
        events=[{"choices": [{"text": "x" * 10_000}]}] * 2_000, wait=lambda: time.sleep(0.001)
    )
    with scripted_http(lambda _, __: endless) as seen:
        stream = HttpClient(seen.url).complete({})
        assert next(stream).text
        stream.close()
        assert seen.broken.wait(30.0)


def test_default_model_is_the_first_listed() -> None:
    with scripted_http(
        lambda path, _: Answer(content={"data": [{"id": "a"}, {"id": "b"}]})
    ) as seen:
        assert HttpClient(seen.url).default_model() == "a"
        assert seen.requests[0][0] == "/v1/models"
    for listed in ({}, {"data": []}, {"data": [1]}, {"data": [{"id": 3}]}):
        with (
            scripted_http(lambda path, _, listed=listed: Answer(content=listed)) as seen,
            pytest.raises(ServerError, match="lists no model"),
        ):
            HttpClient(seen.url).default_model()


def test_truncated_body_is_a_server_error() -> None:
    with (
        scripted_http(lambda *_: Answer(content={}, cut=True)) as seen,
        pytest.raises(ServerError, match="connection to"),
    ):
        HttpClient(seen.url).post("/tokenize", {})


def test_client_needs_neither_torch_nor_the_server_extra() -> None:
    code = (
        "import sys; import nano_inference.system.http_client, nano_inference.cli.main; "
        "print([name for name in ('torch', 'fastapi', 'uvicorn', 'msgspec', 'zmq') if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
