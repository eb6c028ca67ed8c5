"""Descriptions of operations for `/openapi.json`, from the models that read their requests."""

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
    """Return an operation's description, without references to other parts of the document.

    Args:
        request: Model of the body. None: there is no body.
        answer: JSON schema of the answer with status 200.
        summary: Summary, in a few words.
        streams: True if the answer may be a stream of events.
        error: JSON schema of an error's body.
        required: True if a body is required.
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
                    "description": "Error",
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
    """Return the JSON schema of a model with all references replaced. The model must not be
    recursive.
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
    """Return the schema of an object. `required` properties without a schema may be anything."""
    return {
        "type": "object",
        "required": [*required],
        "properties": {**{name: {} for name in required}, **properties},
    }


def list_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": dict(item)}


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null."""
    return {"anyOf": [dict(schema), {"type": "null"}]}


STRING: Mapping[str, Any] = {"type": "string"}
INTEGER: Mapping[str, Any] = {"type": "integer"}
NUMBER: Mapping[str, Any] = {"type": "number"}
