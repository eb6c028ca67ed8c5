"""SGLang's control routes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from nano_inference.server.control.requests.field_types import (
    INTEGER,
    Anything,
    CheckFields,
    ControlRequest,
    Flag,
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
    checked,
    only,
    read_by,
    tensors_of,
    whole,
    word,
    words,
)
from nano_inference.server.errors import bad_request, shown
from nano_inference.types import Memory

GROUP = "weight_update_group"  # default name
MOST_NAME = 256  # characters
MODES = ("abort", "retract", "in_place")
_PARTS: tuple[str, ...] = get_args(Memory)
_NOTHING_TO_RELEASE = "cuda_graph"  # a tag of SGLang; here its memory is part of the KV cache's
_SELECTED = ("target", "all")
_ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")
_BACKENDS = ("gloo", "nccl")
_TENSOR_FORMATS = ("safetensors", "direct", "flattened_bucket")


def _named(name: str) -> str:
    if len(name) > MOST_NAME:
        raise bad_request(
            f"group_name must have at most {MOST_NAME} characters, not {len(name)}.", "group_name"
        )
    return name or GROUP


def _format(*known: str) -> PlainValidator:
    def check(value: Any, info: ValidationInfo) -> str:
        text: str = checked(
            value, info, "a string", lambda value: value if isinstance(value, str) else None
        )
        if text in ("auto", *known):
            return text
        raise bad_request(
            f"load_format={shown(text)} is not supported: leave it out, or use "
            f"{' or '.join(known)}.",
            "load_format",
        )

    return PlainValidator(check)


Group = Annotated[Text, AfterValidator(_named)]
Selector = Annotated[
    Literal["target", "all"], word(_SELECTED), words(_SELECTED)
]  # there is no draft model to select


class Rows(ControlRequest):
    """Fields of `/get_weights_by_name`."""

    name: RequiredText
    truncate_size: Annotated[int, whole(1, 2**31), INTEGER] = 100


class Loads(ControlRequest):
    """Query of `GET /v1/loads`."""

    dp_rank: Annotated[int, whole(0), INTEGER] = 0


class Pause(ControlRequest):
    """Body of `POST /pause_generation`."""

    mode: Annotated[Literal["abort", "retract", "in_place"], word(MODES), words(MODES)] = "abort"
    timeout: Seconds | None = None


class Abort(ControlRequest):
    """Body of `POST /abort_request`."""

    prefix: Annotated[
        Flag,
        only(
            (False,),
            "prefix is not supported: name each request by its rid, or send abort_all.",
            param="prefix",
        ),
    ] = False
    rid: Text = ""
    abort_all: Flag = False

    @model_validator(mode="after")
    def _names_some(self) -> "Abort":
        if not self.abort_all and not self.rid:
            raise bad_request("rid is missing; set it, or set abort_all to true.", "rid")
        return self


class ChangeMemory(ControlRequest):
    """Body of `POST /release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[Texts, among((*_PARTS, _NOTHING_TO_RELEASE), _PARTS)] | None = None

    @property
    def parts(self) -> list[Memory]:
        """Parts of the memory to sleep or wake."""
        return [part for part in get_args(Memory) if self.tags is None or part in self.tags]


class JoinGroup(ControlRequest):
    """Body of `POST /init_weights_update_group`."""

    master_address: RequiredText
    master_port: Port
    world_size: WorldSize
    rank_offset: Rank
    backend: (
        Annotated[Literal["gloo", "nccl"], word(_BACKENDS, "gloo or nccl"), words(_BACKENDS)] | None
    ) = None
    group_name: Group = GROUP
    timeout: Seconds | None = None


class LeaveGroup(ControlRequest):
    """Body of `POST /destroy_weights_update_group`."""

    group_name: Group = GROUP


class BeginUpdate(CheckFields):
    """Body of `POST /begin_weight_update`."""

    selector: Selector = "all"


class CheckWeights(ControlRequest):
    """Fields of `/weights_checker`."""

    action: Annotated[
        Literal["checksum", "snapshot", "compare"],
        word(_ACTIONS),
        only(
            _ACTIONS[:3],
            "action=reset_tensors, which would overwrite the weights, is not supported.",
            param="action",
        ),
        words(_ACTIONS[:3]),
    ] = "checksum"
    selector: Selector = "all"
    allow_quant_error: Flag = False  # no effect: nothing is quantized
    skip_tensor_list: Texts = ()


class UnloadAdapter(ControlRequest):
    """Body of `POST /unload_lora_adapter`."""

    lora_name: RequiredText


class UpdateFields(CheckFields):
    """Fields shared by the three requests that bring weights."""

    selector: Selector = "all"
    flush_cache: Flag = False  # True marks the last of several requests
    weight_version: Version | None = None
    abort_all_requests: Flag = False


class UpdateFromGroup(UpdateFields):
    """Body of `POST /update_weights_from_distributed`."""

    names: Texts | None = None
    dtypes: Texts | None = None
    shapes: Anything = None
    group_name: Group = GROUP
    timeout: Seconds | None = None
    load_format: Annotated[
        str, _format("flattened_bucket"), words(("auto", "flattened_bucket"))
    ] = "auto"

    @model_validator(mode="after")
    def _has_tensors(self) -> "UpdateFromGroup":
        self.tensors()
        return self

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors of the trainer's broadcasts. Raises `ApiError` 400."""
        return tensors_of(self.names, self.dtypes, self.shapes, "dtypes")


class UpdateFromTensor(UpdateFields):
    """Body of `POST /update_weights_from_tensor`."""

    serialized_named_tensors: Texts | None = None
    load_format: Annotated[str, _format(*_TENSOR_FORMATS), words(("auto", *_TENSOR_FORMATS))] = (
        "auto"
    )

    @property
    def is_flattened(self) -> bool:
        """True if each file is a pickled flattened bucket."""
        return self.load_format == "flattened_bucket"

    @property
    def may_lend(self) -> bool:
        """True unless the files must be safetensors."""
        return self.load_format != "safetensors"


class UpdateFromIpc(UpdateFields):
    """Body of `POST /update_weights_from_ipc`."""

    missing: ClassVar = {
        "offers": "offers is missing; make it with nano_inference.weights.transports.lending.lend."
    }
    zmq_handles: Annotated[
        Anything,
        only(
            (),
            "zmq_handles is not supported, since its sockets carry pickles; send offers.",
            param="zmq_handles",
        ),
    ] = None
    offers: Anything


class UpdateFromDisk(UpdateFields):
    """Body of `POST /update_weights_from_disk`. It is a whole update: slime deletes the folder
    while the engine is paused.
    """

    model_path: RequiredText
    timeout: Seconds | None = None
    load_format: Annotated[str, _format("safetensors"), words(("auto", "safetensors"))] = "auto"
    manifest: Annotated[
        Anything, only((), "manifest is not supported; leave it out.", param="manifest")
    ] = None


_CONFIG = "config_dict must be an object like PEFT's adapter_config.json (r, lora_alpha)"


def _as_config(value: object) -> Mapping[str, Any]:
    """Read PEFT's configuration: an object of the JSON, or JSON in the query."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise bad_request(f"{_CONFIG}, not {shown(value)}.", "config_dict")
    return value


class LoadTensors(ControlRequest):
    """Body of `POST /load_lora_adapter_from_tensors`. A loaded name gets a new version."""

    missing: ClassVar = {"config_dict": f"{_CONFIG}, not null."}
    lora_name: RequiredText
    pinned: Flag = False  # no effect: adapters stay until they are unloaded
    added_tokens_config: Annotated[
        Anything,
        only(
            ({}, [], "", 0),
            "added_tokens_config is not supported: adapters cannot add tokens; leave it out.",
            status=400,
            param="added_tokens_config",
        ),
    ] = None
    version: Annotated[int, whole(0), INTEGER] | None = None
    config_dict: Annotated[
        Mapping[str, Any], read_by("an object", _as_config), WithJsonSchema({"type": "object"})
    ]
    load_format: Annotated[str, _format("safetensors"), words(("auto", "safetensors"))] = "auto"
    serialized_tensors: Texts | None = None
    serialized_named_tensors: Texts | None = None


# Unsupported routes, and the alternative to each.
NOT_HERE: Mapping[str, str] = {
    "POST /post_process_weights": "weights are not repacked; send them as in a checkpoint.",
    "POST /pull_weights": "the engine does not fetch weights; send them, or give a folder to "
    "/update_weights_from_disk.",
}
_ROWS = "Get the first rows of a tensor, at most a million numbers"
_CHECKS = "Get checksums (first 16 digits of SHA-256), take a snapshot, or compare with it"

ROUTES = (
    Route(
        "POST /pause_generation",
        "Pause between steps: abort, retract (context is recomputed) or in_place (context is kept)",
        Pause,
        family="weights",
    ),
    Route("POST /continue_generation", "Resume after a pause", family="weights"),
    Route("POST /abort_request", "End one request, or all", Abort),
    Route("GET /v1/loads", "Get the running and waiting samples", Loads, "user"),
    Route("POST /init_weights_update_group", "Join a trainer's group", JoinGroup, family="weights"),
    Route(
        "POST /destroy_weights_update_group",
        "Leave a trainer's group",
        LeaveGroup,
        family="weights",
    ),
    Route(
        "POST /begin_weight_update",
        "Begin an update: all weights sent until its end take effect together",
        BeginUpdate,
        family="weights",
    ),
    Route("POST /end_weight_update", "Apply the update", family="weights"),
    Route(
        "POST /update_weights_from_distributed",
        "Receive one broadcast per tensor, or buckets",
        UpdateFromGroup,
        family="weights",
    ),
    Route(
        "POST /update_weights_from_tensor",
        "Update from safetensors, sent as the body or as base64 in JSON, or from CUDA IPC handles",
        UpdateFromTensor,
        family="weights",
        files=("serialized_named_tensors",),
    ),
    Route(
        "POST /update_weights_from_ipc",
        "Copy weights that a trainer lends on the engine's card",
        UpdateFromIpc,
        family="weights",
    ),
    Route(
        "POST /update_weights_from_disk",
        "Load the safetensors of a folder on the engine's machine",
        UpdateFromDisk,
        family="weights",
    ),
    Route("GET /weights_checker", _CHECKS, CheckWeights, family="weights"),
    Route("POST /weights_checker", _CHECKS, CheckWeights, family="weights"),
    Route("GET /get_weights_by_name", _ROWS, Rows, family="weights"),
    Route("POST /get_weights_by_name", _ROWS, Rows, family="weights"),
    Route(
        "GET /get_weight_version",
        "Get the served weight version",
        access="user",
        family="weights",
    ),
    Route("POST /release_memory_occupation", "Release memory, by tags", ChangeMemory),
    Route("POST /resume_memory_occupation", "Reallocate memory, by tags", ChangeMemory),
    Route("GET /model_info", "Describe the served model", access="user"),
    Route("GET /get_model_info", "Describe the served model", access="user"),
    Route("GET /get_server_info", "Get device, dtype, version and more", access="user"),
    Route("GET /health_generate", "Generate one token (at most once a second)", access="user"),
    Route("POST /unload_lora_adapter", "Unload an adapter", UnloadAdapter, family="adapters"),
    Route(
        "POST /load_lora_adapter_from_tensors",
        "Load an adapter from safetensors, sent as the body or as base64 in JSON",
        LoadTensors,
        family="adapters",
        files=("serialized_tensors", "serialized_named_tensors"),
    ),
    *(Route(call, "501: the error names an alternative", family="weights") for call in NOT_HERE),
)
