"""Ids, keys, limits and forms of errors on every route."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import ConfigError
from nano_inference.server.api.openai.models import CompletionRequest
from nano_inference.server.api.shared import fields
from nano_inference.server.api.shared.fields import MAX_CONTAINERS, MAX_KEYS, check_json
from nano_inference.server.app import build_routes
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.http.layers import LEVELS, Level
from nano_inference.server.main import PROTOCOLS, ROUTES, running_server
from nano_inference.server.paths import CONTROL
from nano_inference.server.server import Server
from tests.depth import at_depth
from tests.server.scripted import ScriptedClient, sources

KEY, OTHER, ADMIN = "key-one", "key-two", "admin-key"
BODY = {"prompt": "Hi", "max_tokens": 3}
MOST = 1 << 30


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    config = ServerConfig(
        port=0, api_keys=(KEY, OTHER), admin_key=ADMIN, max_body_bytes=10_000, max_depth=8
    )
    client = ScriptedClient()
    client.returns["flush_cache"] = None
    with running_server(client, config) as url:
        yield url


@pytest.fixture(scope="module")
def open_() -> Iterator[str]:
    config = ServerConfig(
        port=0, cors_origins=("https://page.example",), max_body_bytes=10_000, max_depth=8
    )
    with running_server(ScriptedClient(), config) as url:
        yield url


def all_routes() -> list[tuple[str, str]]:
    routes = build_routes(Server(ServerConfig(), sources(ScriptedClient())), PROTOCOLS, ROUTES)
    paths = routes.openapi()["paths"]
    found = [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path in paths
        for method in paths[path]
    ]
    return [*found, ("GET", "/openapi.json"), ("GET", "/no/such/route"), ("DELETE", "/v1/messages")]


def check_error(reply: httpx.Response, status: int) -> str:
    """Check the form of an error and return its message: Anthropic's below /v1/messages, Ollama's
    below /api, otherwise OpenAI's.
    """
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"] == reply.headers["request-id"]
    body = reply.json()
    if reply.url.path.startswith("/v1/messages") or "anthropic-version" in reply.request.headers:
        assert body["type"] == "error"
        assert body["request_id"] == reply.headers["request-id"]
        assert set(body["error"]) == {"type", "message"}
    elif reply.url.path.startswith("/api/"):
        assert set(body) == {"error"}
        return body["error"]
    else:
        trainers = {"success", "message"} if reply.url.path in CONTROL else set()
        assert set(body) == {"error"} | trainers
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.thorough
def test_models_route_answers_in_the_callers_protocol(keyed: str) -> None:
    version = {"anthropic-version": "2023-06-01"}
    check_error(httpx.get(f"{keyed}/v1/models", headers=version), 401)
    check_error(httpx.get(f"{keyed}/v1/models"), 401)
    check_error(httpx.get(f"{keyed}/v1/models/none", headers=version | {"x-api-key": KEY}), 404)
    check_error(httpx.get(f"{keyed}/v1/models/none", headers={"x-api-key": KEY}), 404)
    check_error(
        httpx.post(f"{keyed}/v1/models", json={}, headers=version | {"x-api-key": KEY}), 405
    )


@pytest.mark.thorough(cases=["POST-/v1/completions"])
@pytest.mark.parametrize(("method", "path"), all_routes())
def test_routes_except_health_need_a_key(keyed: str, method: str, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"x-api-key": KEY + "x"},
        {"authorization": f"Basic {KEY}"},
    ):
        reply = httpx.request(
            method, keyed + path, headers=headers, json=BODY if method == "POST" else None
        )
        if LEVELS.get(path) is Level.OPEN:
            assert reply.status_code == 200
        else:
            assert KEY not in check_error(reply, 401)


@pytest.mark.parametrize("headers", [{"authorization": f"bearer {OTHER}"}, {"x-api-key": KEY}])
def test_key_is_accepted_in_either_header(keyed: str, headers: dict[str, str]) -> None:
    assert httpx.get(keyed + "/version", headers=headers).status_code == 200
    assert httpx.post(keyed + "/v1/completions", headers=headers, json=BODY).status_code == 200
    check_error(httpx.get(keyed + "/no/such/route", headers=headers), 404)
    check_error(httpx.get(keyed + "/v1/completions", headers=headers), 405)
    assert "admin" in check_error(httpx.post(keyed + "/flush_cache", headers=headers), 403)


@pytest.mark.thorough
def test_admin_routes_are_off_without_an_admin_key(keyed: str, open_: str) -> None:
    assert httpx.post(keyed + "/flush_cache", headers={"x-api-key": ADMIN}).json() == {
        "flushed": True
    }
    assert "off" in check_error(httpx.post(open_ + "/flush_cache"), 403)
    # The router's pattern accepts a trailing line feed, which must not lead to the admin route.
    check_error(httpx.post(open_ + "/flush_cache%0A"), 404)
    check_error(httpx.post(keyed + "/flush_cache%0A", headers={"x-api-key": KEY}), 404)


@pytest.mark.thorough
@given(
    sane=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)
)
@settings(max_examples=at_depth(20), deadline=None)
def test_sane_request_id_is_taken_over(open_: str, sane: str) -> None:
    reply = httpx.get(open_ + "/health", headers={"x-request-id": sane})
    assert reply.headers["x-request-id"] == reply.headers["request-id"] == sane


@pytest.mark.parametrize("wild", ["", "x" * 129, "a b", "é", "\x1b[31m"])
def test_another_request_id_is_replaced(open_: str, wild: str) -> None:
    reply = httpx.get(open_ + "/health", headers={"x-request-id": wild.encode()})
    assert reply.headers["request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/no/such/route"])
def test_bodies_that_are_too_large(open_: str, path: str) -> None:
    large = b'{"prompt": "' + b"x" * 10_000 + b'"}'
    check_error(
        httpx.post(open_ + path, content=large, headers={"content-type": "application/json"}), 413
    )


def test_chunked_body_that_is_too_large(open_: str) -> None:
    pieces = (b"[" + b"1," * 100 for _ in range(1000))
    reply = httpx.post(
        open_ + "/v1/completions", content=pieces, headers={"content-type": "application/json"}
    )
    check_error(reply, 413)
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # sent by `curl -d`
        (
            {"content-type": "application/x-www-form-urlencoded", "origin": "https://evil.example"},
            415,
        ),
        ({"origin": "https://evil.example"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
    ],
)
def test_content_types(open_: str, headers: dict[str, str], status: int) -> None:
    reply = httpx.post(open_ + "/v1/completions", content=json.dumps(BODY), headers=headers)
    assert reply.status_code == status, reply.text


def test_body_that_nests_too_deep(open_: str) -> None:
    deep = b'{"prompt": ' + b"[" * 20 + b"]" * 20 + b"}"
    message = check_error(
        httpx.post(
            open_ + "/v1/completions", content=deep, headers={"content-type": "application/json"}
        ),
        400,
    )
    assert "deeper than 8" in message


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(value=VALUES, ascii_=st.booleans())
@settings(max_examples=at_depth(200))
def test_depth_is_found_without_parsing(value: object, ascii_: bool) -> None:
    body, found = (
        json.dumps(value, ensure_ascii=ascii_).encode("utf-8", "surrogatepass"),
        depth(value),
    )
    check_json(body, max(found, 1), MOST)
    if found > 1:
        with pytest.raises(ApiError, match="nests deeper"):
            check_json(body, found - 1, MOST)


@given(body=st.binary() | st.text('"\\[]{}a').map(str.encode))
@settings(max_examples=at_depth(200))
def test_depth_of_what_is_not_json(body: bytes) -> None:
    with suppress(ApiError):  # and no others
        check_json(body, 1, 2)


@pytest.mark.parametrize(
    "bomb", [b'"' + b'\\"' * 2_000_000 + b"[[", b"[[" + b'\\"' * 2_000_000, b'""' * 500_000]
)
def test_depth_takes_linear_time(bomb: bytes) -> None:
    check_json(bomb + b"[" * 3, 64, MOST)


@pytest.mark.thorough
def test_containers_over_the_limit_are_rejected() -> None:
    with pytest.raises(ApiError, match="lists and objects"):
        check_json(b"[" + b"[]," * (MAX_CONTAINERS + 1), 64, MOST)


def commas(value: object) -> int:
    """Return a body with as many commas between values as the limit allows."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(len(inner) - 1, 0) + sum(map(commas, inner))


@given(value=VALUES, ascii_=st.booleans())
@settings(max_examples=at_depth(200))
def test_values_are_counted_without_parsing(value: object, ascii_: bool) -> None:
    """Count no commas and brackets inside strings, whatever surrounds them."""
    whole = [value, '",[{:\\"', "x," * 3]
    body = json.dumps(whole, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")
    check_json(body, 64, commas(whole))
    with pytest.raises(ApiError, match="values"):
        check_json(body, 64, commas(whole) - 1)


@pytest.mark.parametrize(
    ("bomb", "what"),
    [
        (b'{"prompt": [' + b"1," * 3_000 + b"1]}", "values"),
        (b'{"prompt": [' + b'"a,a",' * 3_000 + b'"a"]}', "values"),
        (b'{"logit_bias": {' + b'"1":1,' * (MAX_KEYS + 1) + b'"2":2}}', "keys"),
        (b'{"prompt": ["' + b"\\" * 100_000 + b'", ' + b"1," * 3_000 + b"1]}", "values"),
        (b'{"prompt": [["' + b"x," * 100_000 + b'"], ' + b"1," * 3_000 + b"1]}", "values"),
    ],
    ids=["numbers", "texts", "keys", "behind escapes", "behind a text"],
)
def test_values_and_keys_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch, bomb: bytes, what: str
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(fields.msgspec.json, "decode", parsed.append)
    config = ServerConfig(max_values=2_000 if what == "values" else 10 * MAX_KEYS)
    with pytest.raises(ApiError, match=f"has more than .* {what}"):
        fields.decode(bomb, config)
    assert not parsed


def test_request_within_limits_is_accepted() -> None:
    prompts = json.dumps({"prompt": [[7] * 8192] * 127}).encode()
    check_json(prompts, 64, ServerConfig().max_values)
    text = json.dumps({"prompt": "a, b: c; [d] {e} " * 100_000}).encode()
    check_json(text, 64, 10)


@pytest.mark.parametrize("nested", [False, True])
def test_long_logit_bias_is_refused_before_it_is_validated(nested: bool) -> None:
    """Send values that are not numbers: validation would report them first."""
    bias = {"logit_bias": dict.fromkeys(map(str, range(2000)), "x")}
    body = json.dumps(
        {"prompt": "Hi", "sampling_params": bias} if nested else {"prompt": "Hi"} | bias
    ).encode()
    with pytest.raises(ApiError, match="logit_bias has 2000 entries"):
        fields.read_body(body, CompletionRequest, ServerConfig())


def raw(url: str, *pieces: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            while more := connection.recv(65536):
                answer += more
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"a: " + b"x" * 70_000 + b"\r\n\r\n"],
        [HEAD, b"a: ", *[b"x" * 10_000] * 60],  # one endless line
        [HEAD, *[b"a" * 10_000] * 60],  # without a colon
        [HEAD + b"a: b\r\n" * 200 + b"\r\n"],
        [b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n"],
        [HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000],  # trailers
    ],
    ids=["long", "endless", "name", "many", "path", "trailers"],
)
def test_header_bombs(open_: str, pieces: list[bytes]) -> None:
    answer = raw(open_, *pieces)
    # The kernel may drop the answer while the client writes, but the connection closes anyway.
    if answer and not answer.startswith(b"HTTP/1.1 200"):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 431 " in head.split(b"\r\n")[0]
        assert b"request-id: req_" in head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(open_ + "/health").status_code == 200


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n"]
)
def test_non_http_bytes_are_answered_in_json(open_: str, nonsense: bytes) -> None:
    answer = raw(open_, nonsense)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_cors(open_: str) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    preflight = httpx.options(
        open_ + "/v1/completions",
        headers={**asks, "access-control-request-headers": "authorization"},
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    reply = httpx.post(
        open_ + "/v1/completions", headers={"origin": "https://page.example"}, json=BODY
    )
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    stranger = httpx.options(
        open_ + "/v1/completions", headers={**asks, "origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in stranger.headers


def test_pages_may_forget_a_response(open_: str) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "DELETE"}
    answer = httpx.options(f"{open_}/v1/responses/resp_1", headers=asks)
    assert answer.status_code == 200
    assert "DELETE" in answer.headers["access-control-allow-methods"]


def test_cors_is_off_by_default(keyed: str) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    reply = httpx.options(keyed + "/v1/completions", headers=asks)
    check_error(reply, 401)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": "secret"},
        {"api_keys": ("",)},
        {"api_keys": ("se cret",)},
        {"admin_key": ""},
        {"reasoning_key": "a b"},
        {"api_keys": ("secret",), "admin_key": "secret"},
        {"max_queued_samples": -1},
        {"max_body_bytes": 0},
        {"request_timeout": float("nan")},
        {"tls_cert": "cert.pem"},
        {"port": 65536},
    ],
)
def test_configuration_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**wrong)
    assert "secret" not in str(raised.value)
