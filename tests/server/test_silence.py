"""An engine whose process is stopped is silent: the server's monitors notice it soon."""

import asyncio
import time

import httpx
import pytest

from nano_inference.remote import client as client_module
from nano_inference.remote import time_limits
from nano_inference.remote.messages import Call, Dead, Heartbeat, Outputs, ToEngine
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.server.trainers.sglang import routes as sglang_routes
from nano_inference.types import SamplingParams
from tests.server.scripted import Script, ScriptedClient


class Silent(ScriptedClient):
    """Client that answers no call."""

    def _send(self, message: ToEngine) -> None:
        if not isinstance(message, Call):
            super()._send(message)


def test_missing_heartbeats_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now)

    async def test() -> None:
        nonlocal now
        client = Silent(Script(ends=False, delay=60.0))
        await client.start()
        assert not client.is_silent  # no heartbeat is due yet
        client._receive(Heartbeat(None, 0, False))
        now += time_limits.SILENCE - 1  # an idle engine sends one every ten seconds
        assert not client.is_silent
        client.submit([1], SamplingParams(), stream=True)  # from now on one every second
        assert not client.is_silent
        client._receive(Heartbeat(None, 0, True))
        now += time_limits.BUSY_SILENCE - 1
        assert not client.is_silent
        client._receive(Outputs([], []))  # any message counts
        now += time_limits.BUSY_SILENCE - 1
        assert not client.is_silent
        now += 1
        assert client.is_silent
        client._receive(Heartbeat(None, 0, True))
        assert not client.is_silent
        now += time_limits.SILENCE
        client._receive(Dead("gone", ""))  # death supersedes silence
        assert not client.is_silent
        await client.close()

    asyncio.run(test())


def test_request_hides_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now)

    async def test() -> None:
        nonlocal now
        client = Silent(Script(ends=False, delay=60.0))
        await client.start()
        client._receive(Heartbeat(None, 0, False))
        now += time_limits.SILENCE
        assert client.is_silent
        client.submit([1], SamplingParams(), stream=True)
        assert client.is_silent
        await client.close()

    asyncio.run(test())


@pytest.mark.thorough
def test_health_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Silent()
    monkeypatch.setattr(sglang_routes, "ANSWER_PATIENCE", 0.2)
    with running_server(client, ServerConfig(port=0, rl=True)) as url:
        late = httpx.get(url + "/health_generate", timeout=30.0)
        assert late.status_code == 503
        assert "does not answer" in late.json()["error"]["message"]
        assert httpx.get(url + "/health").status_code == 200
        client._heard = time.monotonic() - time_limits.SILENCE
        monkeypatch.setattr(sglang_routes, "ANSWER_PATIENCE", 60.0)
        assert httpx.get(url + "/health_generate", timeout=30.0).status_code == 503  # immediately
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "stalled")
        assert httpx.get(url + "/metrics", timeout=30.0).status_code == 200
