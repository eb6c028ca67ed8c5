"""The control routes that prime-rl adds to vLLM's."""

from typing import Annotated

from pydantic import model_validator

from nano_inference.server.control.requests.field_types import (
    INTEGER,
    CheckFields,
    ControlRequest,
    Flag,
    Port,
    RequiredText,
    Route,
    Seconds,
    Text,
    only,
    whole,
)
from nano_inference.server.errors import bad_request

_MOST_RANKS = 2**20


class Join(ControlRequest):
    """`POST /init_broadcaster`."""

    quantize_in_weight_transfer: Annotated[
        Flag,
        only(
            (False,),
            "weights cannot be sent quantized; leave quantize_in_weight_transfer off.",
        ),
    ] = False
    session_id: Annotated[
        Text,
        only(
            ("default",),
            "NIXL (session_id) is not spoken; use the filesystem or a group of torch.distributed.",
        ),
    ] = "default"
    inference_world_size: Annotated[int, whole(1, _MOST_RANKS), INTEGER]
    rank_offset: Annotated[int, whole(0, _MOST_RANKS), INTEGER]
    host: RequiredText
    port: Port
    timeout: Seconds | None = None

    @model_validator(mode="after")
    def _has_rank(self) -> "Join":
        if self.rank_offset >= self.inference_world_size:
            raise bad_request(
                f"rank_offset must be below inference_world_size ({self.inference_world_size}), "
                f"not {self.rank_offset}.",
                "rank_offset",
            )
        return self


class Update(CheckFields):
    """`POST /update_weights` with a `weight_dir`, which is null where a broadcaster sends."""

    weight_dir: Text | None = None
    timeout: Seconds | None = None


ROUTES = (
    Route("POST /init_broadcaster", "Join the trainer's group", Join, family="weights"),
    Route(
        "GET /liveness",
        "Whether the engine lives: 503 when it is dead or has stalled",
        access="all",
    ),
)
# vLLM's route of this path serves it.
UPDATE = Route(
    "POST /update_weights",
    "The folder of a step, once it has its STABLE marker; from the broadcaster, if one was joined",
    Update,
    family="weights",
)
