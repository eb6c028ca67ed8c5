"""Probes of `/health_generate`: many callers cost one token per second."""

import asyncio
import time

import httpx
import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.server.trainers.shared_answer import SharedAnswer
from tests.server import virtual_time
from tests.server.scripted import Script, ScriptedClient


class Question:
    """Probe of two seconds that counts its runs."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.problem: Exception | None = None

    async def __call__(self) -> int:
        self.num_asked += 1
        number = self.num_asked
        await asyncio.sleep(2.0)
        if self.problem is not None:
            raise self.problem
        return number


def test_shared_answer_asks_once_for_all_callers_and_once_more() -> None:
    question = Question()

    async def run() -> None:
        shared = SharedAnswer(question, fresh=1.0)
        assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
        await asyncio.sleep(0.9)
        assert await shared.get() == 1
        await asyncio.sleep(0.2)
        assert await shared.get() == 2

    virtual_time.run(run())
    assert question.num_asked == 2


def test_shared_answer_outlives_a_caller_that_leaves() -> None:
    question = Question()

    async def run() -> None:
        shared = SharedAnswer(question, fresh=0.0)
        first = asyncio.create_task(shared.get())
        await asyncio.sleep(1.0)
        second = asyncio.create_task(shared.get())
        await asyncio.sleep(0.1)
        first.cancel()
        assert await second == 1
        assert first.cancelled()
        assert await shared.get() == 2  # a second probe runs after the first one expires

    virtual_time.run(run())


def test_shared_answer_raises_to_all() -> None:
    question = Question()
    question.problem = ValueError("no token")

    async def run() -> None:
        shared = SharedAnswer(question, fresh=1.0)
        told = await asyncio.gather(*(shared.get() for _ in range(3)), return_exceptions=True)
        assert told == [question.problem] * 3
        with pytest.raises(ValueError, match="no token"):
            await shared.get()

    virtual_time.run(run())
    assert question.num_asked == 1


def test_health_generate_draws_one_token_a_second_for_all() -> None:
    client = ScriptedClient(Script())
    client.returns["is_paused"] = False

    async def probe(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            results: list[int] = []
            for _ in range(5):
                replies = [http.get("/health_generate") for _ in range(20)]
                results += [each.status_code for each in await asyncio.gather(*replies)]
            return results

    with running_server(client, ServerConfig(port=0, rl=True)) as url:
        begun = time.monotonic()
        assert asyncio.run(probe(url)) == [200] * 100
        seconds = time.monotonic() - begun
    assert 1 <= len(client.requests) <= 1 + seconds  # a second passes between the two
    assert len(client.calls) <= 100
