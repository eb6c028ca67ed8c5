"""Files of requests in OpenAI's batch format: input lines become output rows in the same order.

A line `{"custom_id", "method", "url", "body"}` becomes a row `{"id", "custom_id", "response",
"error"}`. The `id` contains the line number, so a later run can resume after the existing rows.
"""

import asyncio
import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nano_inference.errors import ConfigError, NanoInferenceError

MAX_LINE = 64 << 20  # maximum bytes of a line
AHEAD = 4  # rows that may wait for an earlier one, per request in flight
TRIES = 6  # attempts for a request while the server is unavailable
FIRST_WAIT = 0.5  # seconds between the first two attempts; each later wait is twice as long
LONGEST_WAIT = 60.0  # upper bound for the server's retry-after, in seconds
SEEDED = frozenset(("/v1/completions", "/v1/chat/completions"))  # routes that accept a seed
_LATER = frozenset((429, 502, 503))  # the server is unavailable; retry later


class Gone(NanoInferenceError):
    """The server or engine stopped replying."""


class Failed(NanoInferenceError):
    """A request without a reply. `code` is the error code of its row."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a request.

    Attributes:
        retry_after: Seconds to wait before a retry, from the header. None: no such header.
        may_retry: False if the server's headers forbid a retry.
    """

    status: int
    body: bytes
    request_id: str = ""
    retry_after: float | None = None
    may_retry: bool = True

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], body: bytes) -> "Answer":
        """Build it from a response. Header names must be in lower case."""
        wait = headers.get("retry-after", "")
        return cls(
            status,
            body,
            headers.get("x-request-id", ""),
            float(wait) if wait.isdecimal() else None,
            headers.get("x-should-retry") != "false",
        )


Ask = Callable[[str, bytes], Awaitable[Answer]]


async def patiently(ask: Ask, path: str, body: bytes) -> Answer:
    """Send a request with retries. Raises `Failed`, or `Gone` after `TRIES` attempts."""
    wait, why = FIRST_WAIT, ""
    for number in range(1, TRIES + 1):
        try:
            answer = await ask(path, body)
            if answer.status not in _LATER:
                return answer
            why = f"status {answer.status}: {answer.body[:200].decode(errors='replace')}"
        except Gone as problem:
            answer, why = None, str(problem)
        if number == TRIES or (answer is not None and not answer.may_retry):
            break
        asked = answer.retry_after if answer is not None else None
        await asyncio.sleep(max(wait, min(asked or 0.0, LONGEST_WAIT)))
        wait *= 2
    raise Gone(why)


# -- lines and rows --------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: its request, or the row of its error."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: Row | None = None


def lines_of(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield nonempty lines with their numbers from 1. Lines beyond the limit are truncated."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
        if line.strip():
            yield number, line


@dataclass
class Reader:
    """Parser and checker of lines.

    Attributes:
        urls: Routes that a line may use.
        seed: Base seed. A request without a seed gets one derived from it and the `custom_id`.
            None: such requests stay unchanged.
    """

    urls: frozenset[str]
    seed: int | None = None
    _seen: set[bytes] = field(default_factory=set[bytes])

    def read(self, number: int, line: bytes) -> Line:
        """Parse a line. If it is invalid, its `error` is set."""
        try:
            if len(line) > MAX_LINE:
                raise Failed("line_too_long", f"line {number} has more than {MAX_LINE} bytes.")
            content = _object(number, line)
        except Failed as problem:
            return Line(number, None, error=_refused(number, None, problem))
        custom_id = custom_id_of(content)
        try:
            return self._checked(number, content, custom_id)
        except Failed as problem:
            return Line(number, custom_id, error=_refused(number, custom_id, problem))

    def _checked(self, number: int, content: Row, custom_id: str | None) -> Line:
        if not custom_id:
            raise Failed("missing_custom_id", f"line {number} has no custom_id; add a string.")
        if self._is_known(custom_id):
            raise Failed(
                "duplicate_custom_id", f"line {number}: an earlier line has the same custom_id."
            )
        if content.get("method", "POST") != "POST":
            raise Failed("invalid_method", f"line {number}: method must be POST.")
        if (url := content.get("url")) not in self.urls:
            known = ", ".join(sorted(self.urls))
            raise Failed("invalid_url", f"line {number}: url must be one of {known}.")
        body = content.get("body")
        if not isinstance(body, dict):
            raise Failed("invalid_body", f"line {number}: body must be an object.")
        for name in ("stream", "background"):
            if body.get(name):
                raise Failed(
                    "invalid_body", f"line {number}: {name} is not supported; leave it out."
                )
        if self.seed is not None and url in SEEDED and body.get("seed") is None:
            body = {**body, "seed": _seed(self.seed, custom_id)}
        return Line(number, custom_id, url, json.dumps(body).encode())

    def _is_known(self, custom_id: str) -> bool:
        """Return True if an earlier line has this id. Only 16-byte digests are kept."""
        short = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if short in self._seen:
            return True
        self._seen.add(short)
        return False


def _object(number: int, line: bytes) -> Row:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise Failed("invalid_json_line", f"line {number} is not JSON: {problem}.") from None
    if not isinstance(content, dict):
        raise Failed("invalid_json_line", f"line {number} is not an object.")
    return content


def custom_id_of(content: Row) -> str | None:
    custom_id = content.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


def _seed(seed: int, custom_id: str) -> int:
    text = f"{seed} {custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:6])


def row_id(number: int) -> str:
    """Return the id of the row for a line."""
    return f"batch_req_{number:08d}"


def _refused(number: int, custom_id: str | None, problem: Failed) -> Row:
    error = {"code": problem.code, "message": str(problem)}
    return {"id": row_id(number), "custom_id": custom_id, "response": None, "error": error}


def _answered(line: Line, answer: Answer) -> Row:
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        start = answer.body[:200].decode(errors="replace")
        what = f"status {answer.status}, but the body is not JSON: {start}"
        return _refused(line.number, line.custom_id, Failed("invalid_response", what))
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return {
        "id": row_id(line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def is_good(row: Row) -> bool:
    """Return True if a row contains a successful response."""
    response = row.get("response")
    return (
        row.get("error") is None
        and isinstance(response, dict)
        and (response.get("status_code") == 200)
    )


# -- the output ------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Counts of the output.

    Attributes:
        rows: Rows in the file, including those of earlier runs.
        failed: Failed rows among them.
        earlier: Rows of earlier runs.
        tokens: Output tokens of this run, from the usage of the responses.
    """

    rows: int = 0
    failed: int = 0
    earlier: int = 0
    tokens: int = 0


class Output:
    """The output file, locked for one run. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file. Raises `ConfigError` if that fails."""
        self.path = path
        self.counts = Counts()
        self._whole = 0  # bytes of complete rows
        try:
            self._file = open(path, "a+b")  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"{path} cannot be written: {problem}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                f"{path} is in use by another run; wait for it, or choose another output."
            ) from None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def pass_over(self, lines: Iterator[tuple[int, bytes]], reader: Reader) -> None:
        """Skip the lines that already have rows. An incomplete last row is removed.

        Raises `ConfigError` if a row does not match its line: the file belongs to another input.
        """
        self._file.seek(0)
        whole, position = 0, 0
        while row := self._file.readline():
            position += 1
            old = _row(row)
            if not row.endswith(b"\n") or (old is None and not self._file.read(1)):
                break
            number, line = next(lines, (0, b""))
            expected = reader.read(number, line) if number else None
            if (
                old is None
                or expected is None
                or (old.get("id"), old.get("custom_id")) != (row_id(number), expected.custom_id)
            ):
                raise ConfigError(
                    f"{self.path}, row {position} does not match its line in the input; choose "
                    "another output, or move this file away."
                )
            whole = self._file.tell()
            self.counts.rows += 1
            self.counts.failed += not is_good(old)
        self._file.truncate(whole)
        self._whole = whole
        self.counts.earlier = self.counts.rows

    def write(self, row: Row) -> None:
        """Write a complete row. If that fails, remove the partial row and raise
        `NanoInferenceError`.
        """
        data = json.dumps(row).encode() + b"\n"
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as problem:
            self._file.truncate(self._whole)
            raise NanoInferenceError(f"{self.path} cannot be written: {problem}.") from None
        self._whole += len(data)
        self.counts.rows += 1
        self.counts.failed += not is_good(row)
        self.counts.tokens += _tokens(row)

    def end(self) -> None:
        """Flush all rows to disk."""
        os.fsync(self._file.fileno())


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _tokens(row: Row) -> int:
    body = (row["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) else 0


async def _row_of(line: Line, ask: Ask, room: asyncio.Semaphore) -> Row:
    if line.error is not None:
        return line.error
    async with room:
        try:
            return _answered(line, await patiently(ask, line.url, line.body))
        except Failed as problem:
            return _refused(line.number, line.custom_id, problem)
        except Gone as problem:
            raise Gone(f"{line.custom_id}: {problem}") from None


def _is_done(task: "asyncio.Task[Row]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def run_lines(
    lines: Iterator[tuple[int, bytes]],
    reader: Reader,
    ask: Ask,
    output: Output,
    concurrency: int,
    on_row: Callable[[], None] = lambda: None,
) -> None:
    """Send the requests of all lines, and write the rows in the order of the lines.

    At most `concurrency` requests are in flight, and `AHEAD` times as many lines are in memory.
    `on_row` is called after each row. Raises `Gone` if the server is gone, after writing the rows
    of all earlier lines that have a reply.
    """
    room = asyncio.Semaphore(concurrency)
    under_way: deque[asyncio.Task[Row]] = deque()

    async def write_first() -> None:
        row = await under_way[0]
        output.write(row)  # no `await` while a row is written
        under_way.popleft()
        on_row()

    try:
        for number, line in lines:
            under_way.append(asyncio.create_task(_row_of(reader.read(number, line), ask, room)))
            while under_way and (len(under_way) > AHEAD * concurrency or under_way[0].done()):
                await write_first()
        while under_way:
            await write_first()
    finally:
        try:
            while under_way and _is_done(under_way[0]):  # these have replies even if the run fails
                output.write(under_way.popleft().result())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            output.end()
