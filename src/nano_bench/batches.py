"""Files of requests in OpenAI's batch form: lines in, rows out, in the same order.

A line `{"custom_id", "method", "url", "body"}` becomes a row `{"id", "custom_id", "response",
"error"}`. The `id` counts lines, so what a run has left can be told from its rows, and a later run
goes on behind them.
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

MAX_LINE = 64 << 20  # bytes of a line
AHEAD = 4  # rows that may wait for an earlier one, for each request under way
TRIES = 6  # of a request that the server cannot take now
FIRST_WAIT = 0.5  # seconds between the first two; each later wait is twice as long
LONGEST_WAIT = 60.0  # seconds that a server may ask for
SEEDED = frozenset(("/v1/completions", "/v1/chat/completions"))  # whose bodies know a seed
_LATER = frozenset((429, 502, 503))  # the server cannot take it now; another time it may


class Gone(NanoInferenceError):
    """A server, or an engine, that answers no more."""


class Failed(NanoInferenceError):
    """One request got no answer. `code` is that of its row."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered with.

    Attributes:
        retry_after: seconds that the server wants to be left alone; None: it says nothing.
        may_retry: it does not say that another try is in vain.
    """

    status: int
    body: bytes
    request_id: str = ""
    retry_after: float | None = None
    may_retry: bool = True

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], body: bytes) -> "Answer":
        """From a response; names of headers in lower case."""
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
    """Ask, and again where the server cannot take it now. Raises `Gone` after `TRIES`, `Failed`."""
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
    """A line of the input: where to send what, or the row of its error."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: Row | None = None


def lines_of(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1. One that is too long is cut."""
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
    """Checks lines.

    Attributes:
        urls: that a line may name.
        seed: with it a line without a seed gets one that follows from this and its `custom_id`.
    """

    urls: frozenset[str]
    seed: int | None = None
    _seen: set[bytes] = field(default_factory=set[bytes])

    def read(self, number: int, line: bytes) -> Line:
        """A line. Its `error` says what is wrong with it."""
        try:
            if len(line) > MAX_LINE:
                raise Failed("line_too_long", f"line {number} has more than {MAX_LINE} bytes.")
            given = _object(number, line)
        except Failed as problem:
            return Line(number, None, error=_refused(number, None, problem))
        custom_id = custom_id_of(given)
        try:
            return self._checked(number, given, custom_id)
        except Failed as problem:
            return Line(number, custom_id, error=_refused(number, custom_id, problem))

    def _checked(self, number: int, given: Row, custom_id: str | None) -> Line:
        if not custom_id:
            raise Failed("missing_custom_id", f"line {number} has no custom_id, which is a text.")
        if self._is_known(custom_id):
            raise Failed(
                "duplicate_custom_id", f"line {number}: an earlier line has the same custom_id."
            )
        if given.get("method", "POST") != "POST":
            raise Failed("invalid_method", f"line {number}: method must be POST.")
        if (url := given.get("url")) not in self.urls:
            known = ", ".join(sorted(self.urls))
            raise Failed("invalid_url", f"line {number}: url must be one of {known}.")
        body = given.get("body")
        if not isinstance(body, dict):
            raise Failed("invalid_body", f"line {number}: body must be an object.")
        if body.get("stream"):
            raise Failed("invalid_body", f"line {number}: an answer in a file cannot be streamed.")
        if self.seed is not None and url in SEEDED and body.get("seed") is None:
            body = {**body, "seed": _seed(self.seed, custom_id)}
        return Line(number, custom_id, url, json.dumps(body).encode())

    def _is_known(self, custom_id: str) -> bool:
        """Whether an earlier line has it. 16 bytes of each are kept."""
        short = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if short in self._seen:
            return True
        self._seen.add(short)
        return False


def _object(number: int, line: bytes) -> Row:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise Failed("invalid_json_line", f"line {number} is not JSON: {problem}.") from None
    if not isinstance(given, dict):
        raise Failed("invalid_json_line", f"line {number} is not an object.")
    return given


def custom_id_of(given: Row) -> str | None:
    found = given.get("custom_id")
    return found if isinstance(found, str) else None


def _seed(seed: int, custom_id: str) -> int:
    text = f"{seed} {custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:6])


def row_id(number: int) -> str:
    """Of the row that line `number` becomes."""
    return f"batch_req_{number:08d}"


def _refused(number: int, custom_id: str | None, problem: Failed) -> Row:
    error = {"code": problem.code, "message": str(problem)}
    return {"id": row_id(number), "custom_id": custom_id, "response": None, "error": error}


def _answered(line: Line, answer: Answer) -> Row:
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        what = f"status {answer.status}, and no JSON: {answer.body[:200].decode(errors='replace')}"
        return _refused(line.number, line.custom_id, Failed("invalid_response", what))
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return {
        "id": row_id(line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def is_good(row: Row) -> bool:
    """Whether a row holds an answer."""
    response = row.get("response")
    return (
        row.get("error") is None
        and isinstance(response, dict)
        and (response.get("status_code") == 200)
    )


# -- the output ------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Attributes:
    rows: written, also by earlier runs.
    failed: of them, those without an answer.
    found: that were there before.
    tokens: that this run's answers hold, by their usage.
    """

    rows: int = 0
    failed: int = 0
    found: int = 0
    tokens: int = 0


class Output:
    """The file of rows, for one run at a time. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError`: it cannot be written, or another run writes it."""
        self.path = path
        self.counts = Counts()
        self._whole = 0  # bytes of whole rows
        try:
            self._file = open(path, "a+b")  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"{path} cannot be written: {problem}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"another run writes {path}.") from None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def pass_over(self, lines: Iterator[tuple[int, bytes]], reader: Reader) -> None:
        """Take the lines whose rows are there. A last row that is half written is cut off.

        Raises `ConfigError` where a row is not that of its line: it is the output of other input.
        """
        self._file.seek(0)
        whole, place = 0, 0
        while row := self._file.readline():
            place += 1
            given = _row(row)
            if not row.endswith(b"\n") or (given is None and not self._file.read(1)):
                break
            number, line = next(lines, (0, b""))
            expected = reader.read(number, line) if number else None
            if (
                given is None
                or expected is None
                or (given.get("id"), given.get("custom_id")) != (row_id(number), expected.custom_id)
            ):
                raise ConfigError(
                    f"{self.path}, row {place}: it is not the row of its line in the input; name "
                    "another output, or move this file away."
                )
            whole = self._file.tell()
            self.counts.rows += 1
            self.counts.failed += not is_good(given)
        self._file.truncate(whole)
        self._whole = whole
        self.counts.found = self.counts.rows

    def write(self, row: Row) -> None:
        """A whole row, handed to the system. Raises `NanoInferenceError`; the file then ends with
        the row before.
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
        """All that was written is on the disk."""
        os.fsync(self._file.fileno())


def _row(line: bytes) -> Row | None:
    try:
        given = json.loads(line)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def _tokens(row: Row) -> int:
    body = (row["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    found = usage.get("completion_tokens", usage.get("output_tokens"))
    return found if isinstance(found, int) else 0


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
    told: Callable[[], None] = lambda: None,
) -> None:
    """Ask for every line, and write the rows in the lines' order.

    So many requests are under way, and `AHEAD` times as many lines are held, whatever the file's
    size. Raises `Gone` where the server is gone; the rows until then are written.
    """
    room = asyncio.Semaphore(concurrency)
    under_way: deque[asyncio.Task[Row]] = deque()

    async def write_first() -> None:
        row = await under_way[0]
        output.write(row)  # at once: nothing may come between a row's begin and its end
        under_way.popleft()
        told()

    try:
        for number, line in lines:
            under_way.append(asyncio.create_task(_row_of(reader.read(number, line), ask, room)))
            while under_way and (len(under_way) > AHEAD * concurrency or under_way[0].done()):
                await write_first()
        while under_way:
            await write_first()
    finally:
        try:
            while under_way and _is_done(under_way[0]):  # whatever ends the run, these are answered
                output.write(under_way.popleft().result())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            output.end()
