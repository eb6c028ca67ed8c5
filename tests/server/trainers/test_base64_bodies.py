"""Base64 files in JSON: threads decode them in portions, with the result of a whole JSON parse."""

import asyncio
import base64
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import running_server
from nano_inference.server.trainers import reading
from nano_inference.server.trainers.reading import decoded, read_with_file
from tests.depth import at_depth
from tests.server.scripted import ScriptedClient

CONFIG = ServerConfig(rl=True)
NAMES = ("file", "older")
BYTES = st.binary(min_size=0, max_size=200)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the sizes of long strings, portions and windows."""
    monkeypatch.setattr(reading, "LONG", 16)
    monkeypatch.setattr(reading, "PORTION", 8)
    monkeypatch.setattr(reading, "WINDOW", 5)


@pytest.mark.usefixtures("small")
@given(content=BYTES, more=st.text("A=*\n é", max_size=3), at=st.integers(0, 300))
@settings(max_examples=at_depth(300), deadline=None)
def test_decoded_is_base64_whole(content: bytes, more: str, at: int) -> None:
    text = base64.b64encode(content).decode()
    text = text[:at] + more + text[at:]
    whole = len(text) % 4 == 0 and re.fullmatch("[A-Za-z0-9+/]*={0,2}", text)
    expected = base64.b64decode(text) if whole else None
    for given_text in (text, memoryview(text.encode())):
        if expected is None:
            with pytest.raises(ApiError, match="file is not valid base64"):
                decoded(given_text, "file")
        else:
            assert decoded(given_text, "file") == expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("escaped", [False, True])
@given(content=BYTES, before=st.text(max_size=20), behind=st.text(max_size=20))
@settings(max_examples=at_depth(200), deadline=None)
def test_read_with_file_is_the_json_without_the_text(
    escaped: bool, content: bytes, before: str, behind: str
) -> None:
    text = base64.b64encode(content).decode()
    for name in NAMES:
        for value in (text, [text]):
            body = {"other": before, "older": None, name: value, "last": behind}
            data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
            if escaped:
                data = data.replace(b"/", b"\\/")
            given, found = read_with_file(data, CONFIG, NAMES)
            assert found == content
            assert given == json.loads(data) | {name: [""]}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"file": None},
        {"file": ["QQ==", "QQ=="]},
        {"file": [1]},
        {"file": {"a": "A" * 40}},
        {"other": "A" * 40},
        {"A" * 40: 1},
        {"other": ["x" * 40], "file": 3},
    ],
)
def test_read_with_file_without_a_file_is_the_json(body: dict[str, Any]) -> None:
    assert read_with_file(json.dumps(body).encode(), CONFIG, NAMES) == (body, None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("body", [b"", b"  \n"])
def test_read_with_file_of_an_empty_body_says_nothing(body: bytes) -> None:
    assert read_with_file(body, CONFIG, NAMES) == ({}, None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "body", [b"[", b'{"file": "' + b"A" * 40, b'{"file": "' + b"A" * 40 + b'" "']
)
def test_read_with_file_names_invalid_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        read_with_file(body, CONFIG, NAMES)


def test_file_is_decoded_in_portions_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    on_loop: list[bool] = []
    decode = reading.binascii.a2b_base64

    class Watched:
        @staticmethod
        def a2b_base64(data: Any, **more: Any) -> bytes:
            sizes.append(len(data))
            try:
                asyncio.get_running_loop()
                on_loop.append(True)
            except RuntimeError:
                on_loop.append(False)
            return decode(data, **more)

    monkeypatch.setattr(reading, "binascii", Watched)
    content = bytes(3 * reading.PORTION)
    body = {"serialized_named_tensors": [base64.b64encode(content).decode()]}
    client = ScriptedClient()
    with running_server(client, ServerConfig(port=0, rl=True)) as url:
        reply = httpx.post(f"{url}/update_weights_from_tensor", json=body, timeout=60)
    assert "begin_update" in reply.text  # it was read
    assert sizes == [reading.PORTION] * 4
    assert not any(on_loop)


def test_file_is_not_searched_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send random bytes: they may contain a grammar keyword such as "ebnf" by chance."""
    monkeypatch.setattr("nano_inference.server.server.GRAMMAR_SECONDS", 0.0)
    ebnf = base64.b64decode("ebnf") * 30_000
    body = {"serialized_named_tensors": [base64.b64encode(ebnf).decode()]}
    raw = {"content": b"ebnf" * 30_000, "headers": {"content-type": "application/octet-stream"}}
    with running_server(ScriptedClient(), ServerConfig(port=0, rl=True)) as url:
        for form in ({"json": body}, raw):
            reply = httpx.post(f"{url}/update_weights_from_tensor", timeout=60, **form)
            assert "begin_update" in reply.text, reply.text
