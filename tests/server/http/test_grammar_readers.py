"""Slow grammars fail only their own request and delay no others."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.http import grammar_readers
from nano_inference.server.http.grammar_readers import SMALL, THREADS, GrammarReaders
from nano_inference.server.main import running_server
from nano_inference.structured.llguidance_backend import LlguidanceBackend
from tests.server.scripted import ScriptedClient

LARGE = SMALL + 1


class Standing:
    """Jobs that block until they are released."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        assert self.go.wait(30)
        return "made"


def run(test: Callable[[Standing], Coroutine[Any, Any, None]]) -> None:
    standing = Standing()
    try:
        asyncio.run(asyncio.wait_for(test(standing), 60))
    finally:
        standing.go.set()


async def busy(readers: GrammarReaders, job: Standing, size: int) -> list[asyncio.Task[str]]:
    """Occupy all threads of a lane."""
    tasks = [asyncio.create_task(readers.read(job, size)) for _ in range(THREADS)]
    for _ in tasks:
        assert await asyncio.to_thread(job.begun.acquire, timeout=30)
    return tasks


def test_read_returns_the_grammar_or_raises_its_error() -> None:
    async def test(_: Standing) -> None:
        readers = GrammarReaders(20.0)
        assert await readers.read(lambda: 3, 10) == 3
        for _number in range(2 * THREADS):  # a thread whose job raised is free again
            with pytest.raises(ZeroDivisionError):
                await readers.read(lambda: 1 // 0, 10)

    run(test)


def test_read_of_a_small_body_does_not_wait_for_large_ones() -> None:
    async def test(job: Standing) -> None:
        readers = GrammarReaders(20.0)
        tasks = await busy(readers, job, LARGE)
        assert await readers.read(lambda: 3, SMALL) == 3
        job.go.set()
        assert await asyncio.gather(*tasks) == ["made"] * THREADS

    run(test)


def test_read_starts_its_clock_with_its_thread() -> None:
    async def test(job: Standing) -> None:
        readers = GrammarReaders(0.05)
        tasks = await busy(readers, job, LARGE)
        waiting = asyncio.create_task(readers.read(lambda: 3, LARGE))
        await asyncio.sleep(0.2)  # several times the limit
        assert not waiting.done()
        job.go.set()
        assert await waiting == 3
        assert await asyncio.gather(*tasks) == ["made"] * THREADS  # they used no processor time

    run(test)


@pytest.mark.parametrize(("name", "value"), [("MOST_WAITING", 0), ("WAIT", 0.05)])
def test_read_without_a_free_thread_is_503_with_a_retry(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(job: Standing) -> None:
        readers = GrammarReaders(20.0)
        tasks = await busy(readers, job, 10)
        with monkeypatch.context() as patch:
            patch.setattr(grammar_readers, name, value)
            with pytest.raises(ApiError) as raised:
                await readers.read(lambda: 3, 10)
        assert (raised.value.status, raised.value.code) == (503, "overloaded")
        assert "retry-after" in raised.value.headers
        assert "x-should-retry" not in raised.value.headers
        job.go.set()
        await asyncio.gather(*tasks)
        assert await readers.read(lambda: 3, 10) == 3

    if name == "MOST_WAITING":
        # a free thread is used immediately
        monkeypatch.setattr(grammar_readers, "MOST_WAITING", 128)
    run(test)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="not told here")
def test_read_replaces_a_thread_that_works_too_long() -> None:
    async def test(job: Standing) -> None:
        readers = GrammarReaders(0.05)

        def spin() -> None:
            while not job.go.is_set():
                pass

        for _ in range(THREADS):
            with pytest.raises(ApiError, match=r"took longer than 0\.05 seconds") as raised:
                await readers.read(spin, 10)
            assert raised.value.status == 400
            assert raised.value.headers["x-should-retry"] == "false"
        assert await readers.read(lambda: 3, 10) == 3
        job.go.set()

    run(test)


def test_slow_grammars_do_not_reject_other_users_of_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)
    check = LlguidanceBackend.check

    def slow(backend: LlguidanceBackend, grammar: Any) -> None:
        if "slow" in grammar.text:
            begun.release()
            go.wait(60)
        check(backend, grammar)

    monkeypatch.setattr(LlguidanceBackend, "check", slow)

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            def post(regex: str) -> asyncio.Task[httpx.Response]:
                body = {"prompt": "Hi", "max_tokens": 1, "regex": regex}
                return asyncio.create_task(http.post("/v1/completions", json=body))

            held = [post(f"slow{each}" + "a" * SMALL) for each in range(THREADS)]
            for _ in held:
                assert await asyncio.to_thread(begun.acquire, timeout=30)
            assert (await post("quick")).status_code == 200
            go.set()
            replies = [await each for each in held]
            assert [each.status_code for each in replies] == [200] * THREADS, replies[-1].text

    with running_server(ScriptedClient(), ServerConfig(port=0)) as url:
        try:
            asyncio.run(ask(url))
        finally:
            go.set()
