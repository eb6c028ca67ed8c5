"""Bounds on a service's memory and waits: bodies, their parsing and results."""

import asyncio
import threading
from typing import Any

import pytest

from nano_training_service import routes
from nano_training_service.errors import Refused
from nano_training_service.futures import Futures
from nano_training_service.protobuf import forward_backward_request
from nano_training_service.routes import Gate
from tests.nano_training_service.asking import Asker, batch
from tests.nano_training_service.conftest import Services
from tests.nano_training_service.test_service import TOKENS, sequences


def test_batch_parsing_blocks_no_other_request(
    service: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, running, most = threading.Event(), threading.Event(), [0], [0]

    def slow(body: bytes) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        begun.set()
        assert gate.wait(60)
        running[0] -= 1
        return forward_backward_request(body)

    monkeypatch.setattr(routes, "forward_backward_request", slow)
    with service() as url:
        asker, other = Asker(url, timeout=60), Asker(url, timeout=60)
        asker.create()
        bodies = [batch(asker.model, number, sequences(number)) for number in (1, 2)]
        results: list[str] = []
        senders = [
            threading.Thread(target=lambda body=body: results.append(asker.send_bytes(body)))
            for body in bodies
        ]
        for sender in senders:
            sender.start()
        try:
            assert begun.wait(60)
            assert other.post("/session_heartbeat", session_id=other.session)
        finally:
            gate.set()
            for sender in senders:
                sender.join()
        assert all(isinstance(asker.result(each), bytes) for each in results)
        assert most == [1]  # one body at a time


def test_large_body_of_json_is_not_parsed_on_the_event_loop(
    service: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: dict[bool, list[bool]] = {True: [], False: []}
    parse = routes._parsed

    def watched(body: bytes, kind: Any) -> Any:
        try:
            asyncio.get_running_loop()
            is_on_it = True
        except RuntimeError:
            is_on_it = False
        on_loop[len(body) > 1 << 20].append(is_on_it)
        return parse(body, kind)

    monkeypatch.setattr(routes, "_parsed", watched)
    with service() as url:
        asker = Asker(url)
        large = b'{"sdk_version": "%b"}' % (b"x" * (2 << 20))
        assert asker.http.post("/create_session", content=large).is_success
    assert on_loop[True] == [False]
    assert on_loop[False]


def test_body_of_json_is_bounded(service: Services) -> None:
    with service() as url:
        asker = Asker(url)
        large = b'{"sdk_version": "%b"}'
        assert asker.http.post("/create_session", content=large % (b"x" * 100_000)).is_success
        answer = asker.http.post("/create_session", content=large % (b"x" * (8 << 20)))
        assert answer.status_code == 413
        assert "the JSON body exceeds the limit" in answer.text


def test_bodies_in_memory_are_bounded_together() -> None:
    async def story() -> list[str]:
        answers: list[str] = []
        arrived, done = asyncio.Event(), asyncio.Event()
        count = 0

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            nonlocal count
            try:
                await receive()
                count += 1
                if count == 4:
                    arrived.set()
                await done.wait()
                answers.append("read")
            except Refused as problem:
                answers.append(f"{problem.status} {problem}")

        gate = Gate(app, (), 100, "127.0.0.1")

        async def receive() -> Any:
            return {"type": "http.request", "body": b"x" * 100}

        async def ask() -> None:
            scope = {"type": "http", "path": "/", "headers": [(b"host", b"127.0.0.1")]}
            await gate(scope, receive, lambda _: asyncio.sleep(0))

        first = [asyncio.create_task(ask()) for _ in range(4)]
        await arrived.wait()
        await ask()
        done.set()
        await asyncio.gather(*first)
        await ask()  # the held bytes are released
        return answers

    answers = asyncio.run(story())
    assert answers[1:] == ["read"] * 5
    assert answers[0].startswith("429 the bodies being received exceed 4 times max_body_bytes=100")


def test_results_are_bounded_in_bytes_and_kept_until_fetched() -> None:
    async def story() -> None:
        futures = Futures(max_pending=8, max_bytes=10_000, keep=600.0)
        for name in ("a", "b"):
            futures.new(name).finish(bytes(3000))
        assert await futures.fetch("a", 1) == bytes(3000)
        assert await futures.fetch("a", 1) == bytes(3000)  # still kept, because there is room
        futures.new("c").finish(bytes(3000))
        with pytest.raises(Refused, match=r"fetched and deleted to free memory .*max_result_bytes"):
            await futures.fetch("a", 1)
        futures.new("d").finish(bytes(3000))
        with pytest.raises(Refused, match=r"exceeds the limit of 10,000 \(max_result_bytes\)"):
            futures.new("e")
        for name in ("b", "c", "d"):
            assert await futures.fetch(name, 1) == bytes(3000)
        futures.new("e")

    asyncio.run(story())


def test_unfetched_results_block_new_requests(service: Services) -> None:
    with service(max_result_bytes=4000) as url:
        asker = Asker(url)
        asker.create()
        waiting = [asker.send_batch([(TOKENS * 7, {})] * 3) for _ in range(2)]
        asker.seq += 1
        body = batch(asker.model, asker.seq, sequences(1))
        while asker.http.post("/forward_backward", content=body).status_code != 429:
            asker.seq += 1
            body = batch(asker.model, asker.seq, sequences(1))
        for waiter in waiting:
            assert isinstance(asker.result(waiter), bytes)
        for number in range(3, asker.seq):
            asker.result(f"{asker.model}:{number}")
        assert isinstance(asker.result(asker.send_bytes(body)), bytes)
