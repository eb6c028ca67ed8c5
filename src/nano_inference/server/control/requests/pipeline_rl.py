"""PipelineRL's control route."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, WithJsonSchema

from nano_inference.server.control.requests.field_types import (
    CheckFields,
    Route,
    TensorSpec,
    Version,
    shape_of,
)
from nano_inference.server.errors import bad_request, shown

_WANTED = "parameters_info must be a list of {name, shape, dtype}, and not empty."


def _as_tensors(given: Any) -> list[TensorSpec]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise bad_request(_WANTED, "parameters_info")
    return [_as_tensor(f"parameters_info.{place}", each) for place, each in enumerate(given)]


def _as_tensor(where: str, given: object) -> TensorSpec:
    if not isinstance(given, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(given)}.", where)
    name, dtype = given.get("name"), given.get("dtype")
    if not (isinstance(name, str) and name and isinstance(dtype, str) and dtype):
        raise bad_request(f"{where} must have a name and a dtype.", where)
    return TensorSpec(name, dtype, shape_of(given.get("shape"), f"{where}.shape", f"{where}.shape"))


class ReceiveUpdate(CheckFields):
    """`POST /receive_weight_update`."""

    missing: ClassVar = {"parameters_info": _WANTED}
    version: Version | None = None
    parameters_info: Annotated[
        list[TensorSpec],
        PlainValidator(_as_tensors),
        WithJsonSchema({"type": "array", "items": {"type": "object"}}),
    ]


ROUTES = (
    Route(
        "POST /receive_weight_update",
        "Take part in the broadcasts of the group that the command line names; decoding goes on",
        ReceiveUpdate,
        family="weights",
    ),
)
