"""The load tool's HTTP reader, with bytes cut at any place."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_bench.wire import Broken, Chunks, Connection, Events, Plain, Reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n\r\n"
EVENTS = (
    b'data: {"a": 1}\n\n: keep-alive\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
)
EVENT_DATA = [b'{"a": 1}', b"two\nlines", b"[DONE]"]
cuts = st.lists(st.integers(0, 400), max_size=30)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    """Cut `data` at these inner places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def chunked(body: bytes, places: list[int], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(
        b"%X%s\r\n%s\r\n" % (len(each), extension, each) for each in pieces(body, places) if each
    )
    return chunks + b"0" + extension + b"\r\n" + trailer + b"\r\n"


@given(
    st.binary(max_size=300),
    cuts,
    cuts,
    st.sampled_from([b"", b";q=1"]),
    st.sampled_from([b"", b"X: y\r\n"]),
)
def test_chunks_join_to_the_body(
    body: bytes, chunks: list[int], reads: list[int], extra: bytes, end: bytes
) -> None:
    reader, data = Chunks(), chunked(body, chunks, extra, end)
    *parts, last = pieces(data, reads)
    found = b"".join(reader.feed(part) for part in parts)
    assert not reader.done
    assert found + reader.feed(last) == body
    assert reader.done


@given(cuts)
def test_events_are_found_at_any_split(reads: list[int]) -> None:
    reader = Events()
    assert [event for part in pieces(EVENTS, reads) for event in reader.feed(part)] == EVENT_DATA


@pytest.mark.parametrize("data", [b"zz\r\n", b"-5\r\nabcdefgh\r\n", b"2\r\nabc\r\n", b"3" * 70_000])
def test_unchunked_body_is_rejected(data: bytes) -> None:
    with pytest.raises(Broken):
        Chunks().feed(data)


def test_bodies_that_end_early_or_late_are_refused() -> None:
    plain = Plain(3)
    plain.feed(b"ab")
    assert not plain.done
    with pytest.raises(Broken, match="1 bytes"):
        plain.at_end()
    with pytest.raises(Broken, match="2 bytes follow"):
        plain.feed(b"cde")


class Wire(asyncio.Transport):
    """Transport that records writes and is closed by `abort`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True


def exchange(parts: list[bytes], *, lost: bool = False) -> tuple[Reply, Connection, Wire]:
    """Send a request, feed these bytes as the reply, then optionally lose the connection."""

    async def main() -> tuple[Reply, Connection, Wire]:
        connection, wire = Connection(), Wire()
        connection.connection_made(wire)
        asking = asyncio.ensure_future(connection.ask(b"hello", 5.0))
        await asyncio.sleep(0)
        for part in parts:
            connection.data_received(part)
        if lost:
            connection.connection_lost(None)
        return await asking, connection, wire

    return asyncio.run(main())


@given(cuts, cuts, st.booleans())
def test_stream_is_read_at_any_split(chunks: list[int], reads: list[int], interim: bool) -> None:
    head = HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + head + chunked(EVENTS, chunks)
    reply, connection, wire = exchange(pieces(data, reads))
    assert (reply.status, [event for _, event in reply.events]) == (200, EVENT_DATA)
    times = [reply.sent, *(when for when, _ in reply.events), reply.ended]
    assert times == sorted(times)
    assert connection.is_open
    assert wire.written == b"hello"


@given(st.binary(max_size=300), cuts)
def test_body_of_known_length(body: bytes, reads: list[int]) -> None:
    data = HEAD % (b"application/json", b"Content-Length: %d" % len(body)) + body
    reply, connection, _ = exchange(pieces(data, reads))
    assert reply.body == body
    assert connection.is_open


def test_connection_that_closes_is_not_used_again() -> None:
    head = HEAD % (b"text/plain", b"Connection: close\r\nContent-Length: 2")
    _, connection, wire = exchange([head, b"ok"])
    assert not connection.is_open
    assert wire.aborted
    reply, _, _ = exchange(
        [HEAD % (b"text/plain", b"Server: old"), b"until ", b"the end"], lost=True
    )
    assert reply.body == b"until the end"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "before a reply"),
        ([b"SSH-2.0-x\r\n\r\n"], "begins with"),
        ([HEAD % (b"text/plain", b"Content-Length: 9"), b"half"], "5 bytes"),
        (
            [HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked"), b"4\r\nda"],
            "middle of a chunked",
        ),
    ],
)
def test_broken_reply_is_described(parts: list[bytes], words: str) -> None:
    with pytest.raises(Broken, match=words):
        exchange(parts, lost=True)


def test_answer_that_takes_too_long_closes_the_connection() -> None:
    async def main() -> tuple[Connection, Wire]:
        connection, wire = Connection(), Wire()
        connection.connection_made(wire)
        with pytest.raises(Broken, match=r"within 0\.01 s"):
            await connection.ask(b"hello", 0.01)
        return connection, wire

    connection, wire = asyncio.run(main())
    assert not connection.is_open
    assert wire.aborted
