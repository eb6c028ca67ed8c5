"""A minimal client of the service's API, for tests without `tinker`."""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx
import numpy as np

PREFIX = "/api/v1"
SECONDS = 120  # for a result, which takes a few
Inputs = Mapping[str, Any]


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3, *_varint(value)])
    return bytes([number << 3 | 2, *_varint(len(value))]) + value


def _varint(value: int) -> list[int]:
    return [value] if value < 128 else [value & 127 | 128, *_varint(value >> 7)]


def batch(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Sequence[int], Inputs]],
    loss_fn: str = "cross_entropy",
    *,
    forward_only: bool = False,
    config: Mapping[str, float] | None = None,
) -> bytes:
    """Return a `forward_backward` request with each sequence's tokens and loss inputs. Without
    `target_tokens` in the inputs, the targets are the tokens shifted by one. Otherwise all tokens
    are input.
    """
    body = _field(1, model_id.encode()) + _field(2, seq_id) + _field(4, loss_fn.encode())
    for tokens, inputs in data:
        given: dict[str, Any] = {"target_tokens": np.asarray(tokens[1:], "<i8"), **inputs}
        text = tokens if "target_tokens" in inputs else tokens[:-1]
        text = _field(1, np.asarray(text, "<i4").tobytes())
        datum = _field(1, _field(1, text))
        for name, values in given.items():
            is_whole = name == "target_tokens"
            array = np.asarray(values, "<i8" if is_whole else "<f4")
            tensor = _field(1, array.tobytes()) + _field(3, 2 if is_whole else 1)
            tensor += b"".join(_field(4, size) for size in array.shape)
            datum += _field(2, _field(1, name.encode()) + _field(2, tensor))
        body += _field(3, datum)
    for name, value in (config or {}).items():
        body += _field(5, _field(1, name.encode()) + b"\x11" + struct.pack("<d", value))
    return body + (_field(6, 1) if forward_only else b"")


def fields(body: bytes) -> dict[int, list[Any]]:
    """Return the fields of a message: varints as numbers, all others as bytes."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (body[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if body[at - 1] < 128:
                return value

    while at < len(body):
        key = number()
        value: Any = 0
        if key & 7 == 0:
            value = number()
        else:
            size = 8 if key & 7 == 1 else number()
            value, at = body[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def drawn(sample: bytes) -> list[tuple[list[int], bytes]]:
    """Return the tokens and the raw logprobs of each sequence of a `SampleResponse`."""
    found = [fields(each) for each in fields(sample)[1]]
    return [(np.frombuffer(each[2][0], "<i4").tolist(), each[3][0]) for each in found]


def scored(output: bytes) -> bytes:
    """Return the concatenated logprobs of all datums of a `ForwardBackwardOutput`."""
    records = [fields(each) for each in fields(output)[2]]
    return b"".join(fields(fields(record[2][0])[2][0])[1][0] for record in records)


def loss_of(output: bytes) -> float:
    """Return the metric `loss:sum` of a `ForwardBackwardOutput`."""
    (metric,) = (fields(each) for each in fields(output)[3])
    return struct.unpack("<d", metric[2][0])[0] if 2 in metric else 0.0


class Asker:
    """A session with one model at a time. The fixture `service` closes its connections."""

    opened: ClassVar[list[httpx.Client]] = []

    def __init__(self, url: str, *, key: str = "", timeout: float = 30.0) -> None:
        self.http = httpx.Client(
            base_url=url + PREFIX, timeout=timeout, headers={"X-API-Key": key} if key else {}
        )
        self.opened.append(self.http)
        self.session = self.post("/create_session", tags=[], sdk_version="0")["session_id"]
        self.model = ""
        self.seq = 0

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        """Return the reply of a POST. Raise `httpx.HTTPStatusError` for an error status."""
        return _json(self.http.post(path, json=body))

    def get(self, path: str) -> dict[str, Any]:
        """Return the reply of a GET. Raise `httpx.HTTPStatusError` for an error status."""
        return _json(self.http.get(path))

    def send(self, path: str, /, **body: Any) -> str:
        """Send a request with the next number in the model's order and return its id."""
        self.seq += 1
        asked = self.post(path, model_id=self.model, seq_id=self.seq, **body)
        return asked["request_id"]

    def send_batch(self, data: Sequence[tuple[Sequence[int], Inputs]], *args: Any, **options: Any):
        """Send a `forward_backward` request and return its id."""
        self.seq += 1
        return self.send_bytes(batch(self.model, self.seq, data, *args, **options))

    def send_bytes(self, body: bytes) -> str:
        """Send a body of bytes as `send_batch` does."""
        headers = {"content-type": "application/x-protobuf"}
        return _json(self.http.post("/forward_backward", content=body, headers=headers))[
            "request_id"
        ]

    def result(self, request_id: str) -> Any:
        """Wait for the result: a mapping, which may hold `error`, or bytes."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            answer = self.http.post("/retrieve_future", json={"request_id": request_id})
            if answer.headers["content-type"] == "application/x-protobuf":
                return answer.content
            found = _json(answer)
            if found.get("type") != "try_again":
                return found
        raise TimeoutError(f"request {request_id} has no result after {SECONDS} s.")

    def create(self, number: int = 0, base_model: str = "bigrams", **lora: Any) -> Any:
        """Create a model and return the result."""
        asked = self.post(
            "/create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=base_model,
            lora_config={"rank": 4, "seed": 1, **lora},
        )
        reply = self.result(asked["request_id"])
        self.model, self.seq = reply.get("model_id", ""), 0
        return reply

    def step(self, learning_rate: float = 0.1, **params: float) -> Any:
        """Run `optim_step` and return its result."""
        adam = {"learning_rate": learning_rate, **params}
        return self.result(self.send("/optim_step", adam_params=adam))

    def save(self, name: str, **options: Any) -> Any:
        """Run `save_weights` and return its result."""
        return self.result(self.send("/save_weights", path=name, **options))

    def sampler(self, number: int = 0, **options: Any) -> str:
        """Create a sampling session of the model's current weights."""
        asked = {"sampling_session_seq_id": number, **options}
        return self.result(self.send("/save_weights_for_sampler", **asked))["sampling_session_id"]

    def sample(
        self,
        sampler: str,
        prompt: Sequence[int],
        seq_id: int = 0,
        num_samples: int = 1,
        **params: Any,
    ) -> Any:
        """Sample and return the result."""
        asked = self.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={"max_tokens": 8, "seed": 5, **params},
        )
        return self.result(asked["request_id"])


def _json(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
    return answer.json() if answer.content else {}
