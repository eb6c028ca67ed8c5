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

_WANTED = "parameters_info must be a nonempty list of {name, shape, dtype}."


def _as_tensors(value: Any) -> list[TensorSpec]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise bad_request(_WANTED, "parameters_info")
    return [_as_tensor(f"parameters_info.{index}", row) for index, row in enumerate(value)]


def _as_tensor(where: str, value: object) -> TensorSpec:
    if not isinstance(value, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(value)}.", where)
    name, dtype = value.get("name"), value.get("dtype")
    if not (isinstance(name, str) and name and isinstance(dtype, str) and dtype):
        raise bad_request(f"{where} must have a name and a dtype.", where)
    return TensorSpec(name, dtype, shape_of(value.get("shape"), f"{where}.shape", f"{where}.shape"))


class ReceiveUpdate(CheckFields):
    """Body of `POST /receive_weight_update`."""

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
        "Receive broadcasts in the group named on the command line, while decoding continues",
        ReceiveUpdate,
        family="weights",
    ),
)
