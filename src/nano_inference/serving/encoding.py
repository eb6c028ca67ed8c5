"""Messages as bytes, and what is said of such as cannot be."""

import logging

import msgspec

from nano_inference.errors import InvalidRequest, NanoInferenceError
from nano_inference.serving.messages import Failed, FromEngine, Outputs, Refused, Returned

log = logging.getLogger("nano_inference.serving")


def encoded(encoder: msgspec.msgpack.Encoder, message: FromEngine) -> list[bytes]:
    """A message on the wire. One that cannot be said fails those who wait for it."""
    try:
        return [encoder.encode(message)]
    except Exception as problem:
        log.exception("an answer could not be told")
        error, text = (
            NanoInferenceError.__name__,
            f"an answer could not be told: {type(problem).__name__}: {problem}",
        )
        match message:
            case Returned(call_id):
                return [encoder.encode(Failed(call_id, error, text))]
            case Outputs([_], [request_id]):
                return [encoder.encode(Refused(request_id, error, text))]
            case Outputs(deltas, request_ids):  # it is one request's
                each = [
                    Outputs([delta], [request_id])
                    for delta, request_id in zip(deltas, request_ids, strict=True)
                ]
                return [data for one in each for data in encoded(encoder, one)]
            case _:
                return []


def refusal(data: bytes, problem: Exception) -> FromEngine | None:
    """The answer to a message that was not understood, where it can be known who waits for one."""
    text = f"the engine does not understand this request: {problem}"
    try:
        match msgspec.msgpack.decode(data):
            case {"type": "Generate" | "Resume", "request_id": int(request_id)}:
                return Refused(request_id, InvalidRequest.__name__, text)
            case {"type": "Call", "call_id": int(call_id)}:
                return Failed(call_id, InvalidRequest.__name__, text)
            case _:
                return None
    except Exception:
        return None
