"""Control routes that prime-rl adds to vLLM's."""

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
    """Body of `POST /init_broadcaster`."""

    quantize_in_weight_transfer: Annotated[
        Flag,
        only(
            (False,),
            "quantized weight transfer is not supported; leave quantize_in_weight_transfer off.",
        ),
    ] = False
    session_id: Annotated[
        Text,
        only(
            ("default",),
            "NIXL (session_id) is not supported; use the filesystem or NCCL broadcasts.",
        ),
    ] = "default"
    inference_world_size: Annotated[int, whole(1, _MOST_RANKS), INTEGER]
    rank_offset: Annotated[int, whole(0, _MOST_RANKS), INTEGER]
    host: RequiredText
    port: Port
    pynccl: Flag = True
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
    """Body of `POST /update_weights` with a `weight_dir`, which is null if a broadcaster sends."""

    weight_dir: Text | None = None
    timeout: Seconds | None = None


ROUTES = (
    Route("POST /init_broadcaster", "Join the trainer's group", Join, family="weights"),
    Route(
        "GET /liveness",
        "Check the engine: 503 if it is dead or stalled",
        access="all",
    ),
)
# served by vLLM's route with this path
UPDATE = Route(
    "POST /update_weights",
    "Read a step's folder once it has its STABLE marker, or receive from a joined broadcaster",
    Update,
    family="weights",
)
