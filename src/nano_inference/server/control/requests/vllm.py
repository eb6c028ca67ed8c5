"""vLLM's control routes."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import WithJsonSchema, model_validator

from nano_inference.server.control.requests.field_types import (
    INTEGER,
    Anything,
    CheckFields,
    ControlRequest,
    Flag,
    Mapped,
    Port,
    Rank,
    RequiredText,
    Route,
    Seconds,
    TensorSpec,
    Texts,
    Version,
    WorldSize,
    among,
    only,
    part,
    read_by,
    read_fields,
    tensors_of,
    whole,
    word,
    words,
)
from nano_inference.server.errors import bad_request
from nano_inference.types import Memory, PauseMode

PACKED_BYTES = 1 << 30  # of a run, unless the trainer says otherwise
# What a memory part is called in `tags`; "scheduling" is what level 0 stops.
TAGS: tuple[str, ...] = (*get_args(Memory), "scheduling")
_MODES = get_args(PauseMode)
_ACTIONS = ("checksum", "reset", "compare")

Mode = Annotated[PauseMode, word(_MODES), words(_MODES)]


class Pause(ControlRequest):
    """`POST /pause`."""

    mode: Mode = "abort"
    clear_cache: Flag = True


class Abort(ControlRequest):
    """`POST /abort_requests`. vLLM's rule: none named, all meant."""

    request_ids: Texts = ()


class AbortNamed(ControlRequest):
    """`POST /inference/v1/abort_requests`."""

    missing: ClassVar = {"request_ids": "request_ids is missing; it must be a list of ids."}
    request_ids: Texts


class Packing(ControlRequest):
    """How tensors are packed. vLLM says it of the group; before 0.28 it did so of each update."""

    packed: Flag | None = None
    packed_buffer_size_bytes: Annotated[int, whole(1, 2**40), INTEGER] | None = None
    packed_num_buffers: Annotated[int, whole(1), INTEGER] | None = None  # the sender's own affair

    def packed_bytes(self, default: int | None) -> int | None:
        """Return the bytes of a packed run; None: one broadcast a tensor. `default`: the group's
        choice.
        """
        packed = self.packed if self.packed is not None else default is not None
        return (self.packed_buffer_size_bytes or default or PACKED_BYTES) if packed else None


class InitInfo(Packing):
    """`init_info` of `InitTransfer`."""

    nccl_unique_id_b64: Annotated[
        Anything,
        only(
            (),
            "nccl_unique_id_b64 is not supported: the trainer opens a torch.distributed group as "
            "rank 0, at master_address and master_port.",
            param="init_info.nccl_unique_id_b64",
        ),
    ] = None
    master_address: RequiredText
    master_port: Port
    world_size: WorldSize
    rank_offset: Rank


class InitTransfer(ControlRequest):
    """`POST /init_weight_transfer_engine`."""

    init_info: Annotated[InitInfo, part(InitInfo), WithJsonSchema(InitInfo.model_json_schema())]
    timeout: Seconds | None = None


class StartUpdate(CheckFields):
    """`POST /start_weight_update`."""

    is_checkpoint_format: Annotated[
        Flag,
        only(
            (True,),
            "is_checkpoint_format must be true: tensors are named as in the checkpoint.",
            status=400,
        ),
    ] = True


class UpdateInfo(Packing):
    """`update_info` of `Update`."""

    names: Texts | None = None
    dtype_names: Texts | None = None
    shapes: Anything = None
    num_updates_list: Annotated[
        Anything,
        only(
            (),
            "num_updates_list is not supported: tensors are sent whole.",
            status=400,
            param="num_updates_list",
        ),
    ] = None

    def tensors(self) -> list[TensorSpec]:
        """The tensors that the trainer is about to broadcast. Raises `ApiError`, 400."""
        return tensors_of(self.names, self.dtype_names, self.shapes, "dtype_names")


def _info(given: object) -> UpdateInfo | None:
    """One for all workers, or a list of one a worker; there is one worker."""
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    return read_fields(UpdateInfo, given, {}) if isinstance(given, dict) else None


class Update(ControlRequest):
    """`POST /update_weights`, without a `weight_dir`."""

    update_info: Annotated[
        UpdateInfo, read_by("an object", _info), WithJsonSchema(UpdateInfo.model_json_schema())
    ]
    timeout: Seconds | None = None


class FinishUpdate(ControlRequest):
    """`POST /finish_weight_update`."""

    weight_version: Version | None = None


class CheckWeights(ControlRequest):
    """`POST /weight_checker`."""

    missing: ClassVar = {"action": "action is missing; it must be checksum, reset or compare."}
    action: Annotated[
        Literal["checksum", "compare"],
        word(_ACTIONS),
        only(
            ("checksum", "compare"),
            "action=reset, which overwrites the weights with noise, is not supported.",
            param="action",
        ),
        words(("checksum", "compare")),
    ]
    baseline: Mapped | None = None

    @model_validator(mode="after")
    def _has_baseline(self) -> "CheckWeights":
        if self.action == "compare" and self.baseline is None:
            raise bad_request(
                "action=compare needs a baseline: tensor name -> checksum.", "baseline"
            )
        return self


class ResetPrefixCache(ControlRequest):
    """`POST /reset_prefix_cache`."""

    reset_running_requests: Flag = False
    reset_external: Flag = False  # there is no cache outside


class Sleep(ControlRequest):
    """`POST /sleep`."""

    level: Annotated[int, whole(0, 2), INTEGER] = 1
    mode: Mode = "abort"


class Wake(ControlRequest):
    """`POST /wake_up`."""

    tags: Annotated[Texts, among(TAGS, TAGS)] | None = None


class LoadAdapter(ControlRequest):
    """`POST /v1/load_lora_adapter`."""

    needs: ClassVar[str] = "Both 'lora_name' and 'lora_path' must be provided."
    lora_name: RequiredText
    lora_path: RequiredText
    load_inplace: Flag = False


class UnloadAdapter(ControlRequest):
    """`POST /v1/unload_lora_adapter`."""

    needs: ClassVar[str] = "'lora_name' needs to be provided to unload a LoRA adapter."
    lora_name: RequiredText


ROUTES = (
    Route(
        "POST /pause",
        "Stop: keep, wait or abort; clear_cache: an update computes the context again",
        Pause,
        family="weights",
    ),
    Route("POST /resume", "Resume", family="weights"),
    Route("GET /is_paused", "Whether it is paused", access="user", family="weights"),
    Route("POST /abort_requests", "End requests, which are answered with what they have", Abort),
    Route("POST /inference/v1/abort_requests", "End the requests that it names", AbortNamed),
    Route(
        "POST /init_weight_transfer_engine",
        "Join the trainer's group",
        InitTransfer,
        family="weights",
    ),
    Route("POST /shutdown_weight_transfer_engine", "Leave it", family="weights"),
    Route("POST /start_weight_update", "An update begins", StartUpdate, family="weights"),
    Route(
        "POST /update_weights",
        "Take part in a transfer of weights: one broadcast a tensor, or packed",
        Update,
        family="weights",
    ),
    Route("POST /finish_weight_update", "It takes effect", FinishUpdate, family="weights"),
    Route("GET /weight_info", "The weight version that serves", access="user", family="weights"),
    Route(
        "POST /weight_checker",
        "SHA-256 of every tensor, or what has changed",
        CheckWeights,
        family="weights",
    ),
    Route("POST /reset_prefix_cache", "Forget cached prefixes", ResetPrefixCache),
    Route("POST /sleep", "Give memory back, by level", Sleep),
    Route("POST /wake_up", "Take memory again, by tags", Wake),
    Route("GET /is_sleeping", "Whether it sleeps", access="user"),
    Route(
        "GET /get_world_size",
        "How many ranks of a weight group it takes: its number of engines",
        access="user",
    ),
    Route(
        "POST /v1/load_lora_adapter",
        "Serve an adapter, or a new version of it",
        LoadAdapter,
        family="adapters",
    ),
    Route(
        "POST /v1/unload_lora_adapter",
        "No new request may ask for an adapter",
        UnloadAdapter,
        family="adapters",
    ),
)
