"""What `/openapi.json` says of an operation, from the models that read its requests."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def operation(
    request: type[BaseModel] | None,
    answer: Mapping[str, Any],
    *,
    summary: str,
    streams: bool = False,
    error: Mapping[str, Any] = _ERROR,
    required: bool = True,
) -> dict[str, Any]:
    """An operation's description, complete in itself.

    Args:
        request: model of the body; None: there is no body.
        answer: JSON schema of what is answered with 200.
        summary: in a few words.
        streams: the answer may be a stream of events instead.
        error: JSON schema of an error's body.
        required: whether there must be a body.
    """
    content: dict[str, Any] = {"application/json": {"schema": dict(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{
                str(each): {
                    "description": "Refused",
                    "content": {"application/json": {"schema": dict(error)}},
                }
                for each in ERRORS
            },
        },
    }
    if request is not None:
        body = {"application/json": {"schema": schema_of(request)}}
        described["requestBody"] = {"required": required, "content": body}
    return described


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, its parts written out where they stand. The model must not hold
    itself.
    """
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})
    return _written_out(schema, parts)


def _written_out(value: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_written_out(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    if isinstance(reference := value.get("$ref"), str):
        return _written_out(parts[reference.rpartition("/")[2]], parts)
    return {key: _written_out(each, parts) for key, each in value.items()}


def thing(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object. Properties that are `required` and not described may be anything."""
    return {
        "type": "object",
        "required": [*required],
        "properties": {**{name: {} for name in required}, **properties},
    }


def list_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a list."""
    return {"type": "array", "items": dict(item)}


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    return {"anyOf": [dict(schema), {"type": "null"}]}


STRING: Mapping[str, Any] = {"type": "string"}
INTEGER: Mapping[str, Any] = {"type": "integer"}
NUMBER: Mapping[str, Any] = {"type": "number"}
