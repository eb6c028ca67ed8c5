"""The scripted engine behaves like an engine over HTTP, with and without streaming."""

import asyncio
import json

import httpx
import pytest

from nano_inference.remote.errors import ReaderTooSlow
from nano_inference.remote.messages import Outputs
from nano_inference.server.main import running_server
from nano_inference.types import Delta, SamplingParams
from tests.server.scripted import Script, ScriptedClient


@pytest.mark.thorough
@pytest.mark.parametrize("portion", [1, 3])
def test_scripted_engine_follows_its_script(portion: int) -> None:
    client = ScriptedClient(Script("One two three.", portion=portion))
    with running_server(client) as url:
        body = {"model": "scripted", "prompt": "x", "max_tokens": 50}
        whole = httpx.post(f"{url}/v1/completions", json=body).json()
        assert whole["choices"][0]["text"] == "One two three."
        assert whole["choices"][0]["finish_reason"] == "stop"
        lines = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "One two three."
    assert lines[-2] == "data: [DONE]"
    assert len(client.requests) == 2


def test_backlog_is_bounded_by_the_sample() -> None:
    """Pause this process: wide streams must not end sooner than narrow ones."""

    async def test() -> None:
        client = ScriptedClient(Script(delay=1000.0), max_backlog=10)
        await client.start()
        stream = client.submit([1], SamplingParams(), 4, stream=True)
        unread = [Delta(0, place % 4, (1,), (0.0,), "") for place in range(40)]
        client._receive(Outputs(unread, [0] * 40))
        assert await stream.next() == unread
        client._receive(Outputs([*unread, unread[0]], [0] * 41))
        with pytest.raises(ReaderTooSlow, match="41 tokens unread"):
            await stream.next()
        assert client.num_samples == 0
        await client.close()

    asyncio.run(test())


@pytest.mark.thorough
def test_stop_strings_and_failures() -> None:
    client = ScriptedClient(Script("One two three."))
    with running_server(client) as url:
        body = {"model": "scripted", "prompt": "x", "max_tokens": 50}
        choice = httpx.post(f"{url}/v1/completions", json=body | {"stop": [" two"]}).json()[
            "choices"
        ][0]
        assert (choice["text"], choice["finish_reason"]) == ("One", "stop")
        client.script = Script(fail_after=2)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 500
        client.script = Script(die_after=1)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503


def test_session_s_server_answers(server: str) -> None:
    reply = httpx.post(
        f"{server}/v1/completions", json={"model": "smollm2", "prompt": "Hello", "max_tokens": 3}
    )
    assert reply.json()["usage"]["completion_tokens"] == 3
