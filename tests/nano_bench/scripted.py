"""A scripted server for load clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
Script = Callable[["Server", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Server that answers each request by the script and counts requests in flight."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = self.under_way = self.most = 0
        self.listening: asyncio.Server | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                fields = [each async for each in head_fields(reader)]
                length = int(dict(fields).get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.seen.append((line.decode().strip(), dict(fields), body))
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                await self.script(self, body, writer)
                self.under_way -= 1
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def head_fields(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, str]]:
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        yield name.lower(), value.strip()


def respond(writer: asyncio.StreamWriter, content: Any, status: str = "200 OK") -> None:
    body = json.dumps(content).encode()
    writer.write(
        b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
    )


def begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def event(writer: asyncio.StreamWriter, content: Any) -> None:
    data = b"data: %s\n\n" % (
        content.encode() if isinstance(content, str) else json.dumps(content).encode()
    )
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None} | fields]}


async def whole(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    del server, body
    await asyncio.sleep(0.005)
    respond(writer, {"choices": [{"text": "abc"}], "usage": USAGE})


async def streamed(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Wait 30, 10 and 20 ms before the three pieces."""
    del server
    begin_stream(writer)
    if "messages" in body:
        event(writer, choice(delta={"role": "assistant", "content": ""}))
    for wait in (0.03, 0.01, 0.02):
        for _ in range(10):  # a client on this loop must read a piece early in the next wait,
            await asyncio.sleep(wait / 10)  # even if the loop is late
        event(writer, choice(delta={"content": "x"}) if "messages" in body else choice(text="x"))
    event(writer, choice(text="", delta={}, finish_reason="length"))
    event(writer, {"choices": [], "usage": USAGE})
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


@contextmanager
def in_a_thread(script: Script) -> Iterator[str]:
    """Run a server on another thread, for a client with its own event loop."""
    loop, places = asyncio.new_event_loop(), list[int]()

    async def start() -> asyncio.Server:
        server = Server(script)
        listening = server.listening = await asyncio.start_server(server, "127.0.0.1", 0)
        places.append(listening.sockets[0].getsockname()[1])
        return listening

    listening = loop.run_until_complete(start())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{places[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


async def our_server(server: Server, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if not body:
        respond(writer, {"data": [{"id": "the-model"}]})
    elif body["model"] != "the-model":
        respond(writer, {}, "404 Not Found")
    else:
        await streamed(server, body, writer)
