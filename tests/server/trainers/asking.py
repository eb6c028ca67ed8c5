"""Requests for RL tests: concurrent, with their tokens read on arrival."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.standing import dawdling

PATIENCE = 60.0
GENERATE = "/inference/v1/generate"


def ask(
    url: str, path: str, body: dict[str, Any] | None = None, status: int = 200, **headers: str
) -> Any:
    """Send a POST and return the reply. Without `body` none is sent."""
    reply = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == status, reply.text
    return reply.json()


def look(url: str, path: str, status: int = 200) -> Any:
    reply = httpx.get(f"{url}{path}", timeout=PATIENCE)
    assert reply.status_code == status, reply.text
    return reply.json()


def body(prompt: list[int], max_tokens: int, **sampling: Any) -> dict[str, Any]:
    """Return a `GENERATE` body for a sample of exactly this many tokens."""
    params = {"max_tokens": max_tokens, "seed": 5, "logprobs": 1, "ignore_eos": True} | sampling
    return {"token_ids": prompt, "sampling_params": params}


@dataclass
class Running:
    """A streaming request.

    Attributes:
        token_ids: Tokens received so far.
        last: Choice in the last piece.
        usage: Usage at the end.
        dawdles: Slows the request until the test waits for its end.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    last: dict[str, Any] = field(default_factory=dict[str, Any])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    thread: threading.Thread | None = None
    grown: threading.Condition = field(default_factory=threading.Condition)
    dawdles: ExitStack = field(default_factory=ExitStack)

    def until(self, count: int) -> None:
        """Wait for `count` tokens."""
        with self.grown:
            assert self.grown.wait_for(lambda: len(self.token_ids) >= count or self.last, PATIENCE)
            assert len(self.token_ids) >= count

    def end(self) -> dict[str, Any]:
        """Wait for the end and return the last choice."""
        assert self.thread is not None
        self.dawdles.close()
        self.thread.join(PATIENCE)
        assert self.last.get("finish_reason"), "it did not end in time"
        assert len(self.token_ids) == len(self.logprobs)
        return self.last

    def read(self, url: str, given: dict[str, Any], headers: dict[str, str]) -> None:
        streamed = given | {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream(
            "POST", url + GENERATE, json=streamed, headers=headers, timeout=PATIENCE
        ) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        with self.grown:
            self.usage = event["usage"] or self.usage
            for choice in event["choices"]:
                self.token_ids += choice["token_ids"]
                self.logprobs += [each["logprob"] for each in choice["logprobs"]["content"]]
                self.last = choice if choice["finish_reason"] else self.last
            self.grown.notify_all()


@contextmanager
def running(url: str, given: dict[str, Any], **headers: str) -> Iterator[Running]:
    """Start a request, wait for its first tokens, and abort it at the end if it still runs."""
    it = Running()
    it.thread = threading.Thread(target=it.read, args=(url, given, headers))
    with it.dawdles:
        it.dawdles.enter_context(dawdling())
        it.thread.start()
        try:
            it.until(2)
            yield it
        finally:
            ask(url, "/abort_requests", {})
            it.thread.join(PATIENCE)
