"""vLLM's control routes."""

import binascii
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import WithJsonSchema, model_validator

from nano_inference.server.control.requests.field_types import (
    INTEGER,
    STRING,
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
    Text,
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

PACKED_BYTES = 1 << 30  # default size of a packed run
# Names of memory parts in `tags`. "scheduling" is the part that level 0 stops.
TAGS: tuple[str, ...] = (*get_args(Memory), "scheduling")
_MODES = get_args(PauseMode)
_ACTIONS = ("checksum", "reset", "compare")

Mode = Annotated[PauseMode, word(_MODES), words(_MODES)]


class Pause(ControlRequest):
    """Body of `POST /pause`."""

    mode: Mode = "abort"
    clear_cache: Flag = True


class Abort(ControlRequest):
    """Body of `POST /abort_requests`. As in vLLM, no ids means all requests."""

    request_ids: Texts = ()


class AbortNamed(ControlRequest):
    """Body of `POST /inference/v1/abort_requests`."""

    missing: ClassVar = {"request_ids": "request_ids is missing; it must be a list of ids."}
    request_ids: Texts


class Packing(ControlRequest):
    """Packing of tensors. vLLM sets it for the group; before 0.28, for each update."""

    packed: Flag | None = None
    packed_buffer_size_bytes: Annotated[int, whole(1, 2**40), INTEGER] | None = None
    packed_num_buffers: Annotated[int, whole(1), INTEGER] | None = None  # only for the sender

    def packed_bytes(self, default: int | None) -> int | None:
        """Return the bytes of a packed run. None: one broadcast per tensor. `default` is the
        group's setting.
        """
        packed = self.packed if self.packed is not None else default is not None
        return (self.packed_buffer_size_bytes or default or PACKED_BYTES) if packed else None


_STORE = ("master_address", "master_port")
_PLACE = ("world_size", "rank_offset")
UNIQUE_ID_BYTES = 128  # length of an id of NCCL
_UNIQUE_ID = f"standard base64 of {UNIQUE_ID_BYTES} bytes"


def _unique_id(value: object) -> bytes | None:
    if not isinstance(value, str):
        return None
    with suppress(ValueError):  # also for text that is not ASCII
        content = binascii.a2b_base64(value, strict_mode=True)
        return content if len(content) == UNIQUE_ID_BYTES else None
    return None


class InitInfo(Packing):
    """`init_info` of `InitTransfer`. Without a group, as of vLLM's IPC engine, updates bring
    handles of memory.
    """

    missing: ClassVar = {
        "master_address": "master_address is missing; it must be a string.",
        "master_port": "master_port is missing; it must be an integer.",
        "world_size": "world_size is missing; it must be an integer.",
        "rank_offset": "rank_offset is missing; it must be an integer.",
    }
    nccl_unique_id_b64: Annotated[bytes, read_by(_UNIQUE_ID, _unique_id), STRING] | None = None
    master_address: RequiredText | None = None
    master_port: Port | None = None
    world_size: WorldSize | None = None
    rank_offset: Rank | None = None
    # False: an ordinary torch.distributed group also on cards, where vLLM's trainers use PyNccl
    pynccl: Flag = True

    @property
    def has_group(self) -> bool:
        """True if the trainer makes a group."""
        return not self.model_fields_set.isdisjoint((*_STORE, *_PLACE, "nccl_unique_id_b64"))

    @model_validator(mode="after")
    def _is_one_group(self) -> "InitInfo":
        if not self.has_group:
            return self
        has_id = self.nccl_unique_id_b64 is not None
        for name in (*(() if has_id else _STORE), *_PLACE):
            if getattr(self, name) is None:
                raise bad_request(self.missing[name], name)
        if has_id and not self.model_fields_set.isdisjoint(_STORE):
            raise bad_request(
                "set nccl_unique_id_b64, or master_address and master_port, but not both.",
                "init_info.nccl_unique_id_b64",
            )
        return self


class InitTransfer(ControlRequest):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: Annotated[InitInfo, part(InitInfo), WithJsonSchema(InitInfo.model_json_schema())]
    timeout: Seconds | None = None


class StartUpdate(CheckFields):
    """Body of `POST /start_weight_update`."""

    is_checkpoint_format: Annotated[
        Flag,
        only(
            (True,),
            "is_checkpoint_format must be true: use the checkpoint's tensor names.",
            status=400,
        ),
    ] = True


class UpdateInfo(Packing):
    """`update_info` of `Update`."""

    ipc_handles: Annotated[
        Anything,
        only(
            (),
            "ipc_handles is not supported in JSON; send ipc_handles_pickled, or use "
            "/update_weights_from_ipc.",
            status=400,
            param="ipc_handles",
        ),
    ] = None
    ipc_handles_pickled: Text | None = None
    tensor_sizes: Anything = None  # only for a packed buffer
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
        """Return the tensors of the trainer's broadcasts. Raises `ApiError` 400."""
        return tensors_of(self.names, self.dtype_names, self.shapes, "dtype_names")


def _info(value: object) -> UpdateInfo | None:
    """Read the update's info: an object, or a list with one object for the only worker."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return read_fields(UpdateInfo, value, {}) if isinstance(value, dict) else None


class Update(ControlRequest):
    """Body of `POST /update_weights` without a `weight_dir`."""

    update_info: Annotated[
        UpdateInfo, read_by("an object", _info), WithJsonSchema(UpdateInfo.model_json_schema())
    ]
    timeout: Seconds | None = None


class FinishUpdate(ControlRequest):
    """Body of `POST /finish_weight_update`."""

    weight_version: Version | None = None


class CheckWeights(ControlRequest):
    """Body of `POST /weight_checker`."""

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
                "action=compare requires a baseline: tensor name -> checksum.", "baseline"
            )
        return self


class ResetPrefixCache(ControlRequest):
    """Body of `POST /reset_prefix_cache`."""

    reset_running_requests: Flag = False
    reset_external: Flag = False  # no effect: there is no external cache


class Sleep(ControlRequest):
    """Body of `POST /sleep`."""

    level: Annotated[int, whole(0, 2), INTEGER] = 1
    mode: Mode = "abort"


class Wake(ControlRequest):
    """Query of `POST /wake_up`."""

    tags: Annotated[Texts, among(TAGS, TAGS)] | None = None


class LoadAdapter(ControlRequest):
    """Body of `POST /v1/load_lora_adapter`."""

    needs: ClassVar[str] = "Both 'lora_name' and 'lora_path' must be provided."
    lora_name: RequiredText
    lora_path: RequiredText
    load_inplace: Flag = False


class UnloadAdapter(ControlRequest):
    """Body of `POST /v1/unload_lora_adapter`."""

    needs: ClassVar[str] = "'lora_name' needs to be provided to unload a LoRA adapter."
    lora_name: RequiredText


ROUTES = (
    Route(
        "POST /pause",
        "Pause: keep, wait or abort requests. With clear_cache, an update recomputes their context",
        Pause,
        family="weights",
    ),
    Route("POST /resume", "Resume after a pause", family="weights"),
    Route("GET /is_paused", "Check if the engine is paused", access="user", family="weights"),
    Route("POST /abort_requests", "End requests and return their partial samples", Abort),
    Route("POST /inference/v1/abort_requests", "End the requests with these ids", AbortNamed),
    Route(
        "POST /init_weight_transfer_engine",
        "Join the trainer's group, or expect CUDA IPC handles",
        InitTransfer,
        family="weights",
    ),
    Route("POST /shutdown_weight_transfer_engine", "Leave the trainer's group", family="weights"),
    Route("POST /start_weight_update", "Begin a weight update", StartUpdate, family="weights"),
    Route(
        "POST /update_weights",
        "Receive weights: one broadcast per tensor, packed, or from CUDA IPC handles",
        Update,
        family="weights",
    ),
    Route("POST /finish_weight_update", "Apply the update", FinishUpdate, family="weights"),
    Route("GET /weight_info", "Get the served weight version", access="user", family="weights"),
    Route(
        "POST /weight_checker",
        "Get the SHA-256 of every tensor, or the changed tensors",
        CheckWeights,
        family="weights",
    ),
    Route("POST /reset_prefix_cache", "Drop cached prefixes", ResetPrefixCache),
    Route("POST /sleep", "Release memory, by level", Sleep),
    Route("POST /wake_up", "Reallocate memory, by tags", Wake),
    Route("GET /is_sleeping", "Check if the engine is asleep or paused", access="user"),
    Route(
        "GET /get_world_size",
        "Get the number of ranks for a weight group: one per engine",
        access="user",
    ),
    Route(
        "POST /v1/load_lora_adapter",
        "Load an adapter, or a new version of it",
        LoadAdapter,
        family="adapters",
    ),
    Route(
        "POST /v1/unload_lora_adapter",
        "Unload an adapter for new requests",
        UnloadAdapter,
        family="adapters",
    ),
)
