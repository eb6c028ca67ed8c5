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

GROUP = "weight_update_group"  # where a trainer gives it no name
MOST_NAME = 256  # characters
MODES = ("abort", "retract", "in_place")
_PARTS: tuple[str, ...] = get_args(Memory)
_NOTHING_TO_RELEASE = "cuda_graph"  # a tag of SGLang's; here its memory goes with the cache's
_SELECTED = ("target", "all")
_ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")
_BACKENDS = ("gloo", "nccl")


def _named(given: str) -> str:
    if len(given) > MOST_NAME:
        raise bad_request(
            f"group_name must have at most {MOST_NAME} characters, not {len(given)}.", "group_name"
        )
    return given or GROUP


def _format(*known: str) -> PlainValidator:
    def check(given: Any, info: ValidationInfo) -> str:
        text: str = checked(
            given, info, "a string", lambda given: given if isinstance(given, str) else None
        )
        if text in ("auto", *known):
            return text
        hint = (
            "; flattened buckets come pickled, and pickles are not read"
            if text == "flattened_bucket"
            else ""
        )
        raise bad_request(
            f"load_format={shown(text)} is not supported: leave it out, or say "
            f"{' or '.join(known)}{hint}.",
            "load_format",
        )

    return PlainValidator(check)


Group = Annotated[Text, AfterValidator(_named)]
Selector = Annotated[Literal["target", "all"], word(_SELECTED), words(_SELECTED)]  # no draft model


class Rows(ControlRequest):
    """`/get_weights_by_name`."""

    name: RequiredText
    truncate_size: Annotated[int, whole(1, 2**31), INTEGER] = 100


class Loads(ControlRequest):
    """`GET /v1/loads`."""

    dp_rank: Annotated[int, whole(0), INTEGER] = 0


class Pause(ControlRequest):
    """`POST /pause_generation`."""

    mode: Annotated[Literal["abort", "retract", "in_place"], word(MODES), words(MODES)] = "abort"
    timeout: Seconds | None = None


class Abort(ControlRequest):
    """`POST /abort_request`."""

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
            raise bad_request("rid is missing; or send abort_all as true.", "rid")
        return self


class ChangeMemory(ControlRequest):
    """`POST /release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[Texts, among((*_PARTS, _NOTHING_TO_RELEASE), _PARTS)] | None = None

    @property
    def parts(self) -> list[Memory]:
        """The parts that sleep or wake."""
        return [part for part in get_args(Memory) if self.tags is None or part in self.tags]


class JoinGroup(ControlRequest):
    """`POST /init_weights_update_group`."""

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
    """`POST /destroy_weights_update_group`."""

    group_name: Group = GROUP


class BeginUpdate(CheckFields):
    """`POST /begin_weight_update`."""

    selector: Selector = "all"


class CheckWeights(ControlRequest):
    """`/weights_checker`."""

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
    allow_quant_error: Flag = False  # nothing is quantized
    skip_tensor_list: Texts = ()


class UnloadAdapter(ControlRequest):
    """`POST /unload_lora_adapter`."""

    lora_name: RequiredText


class UpdateFields(CheckFields):
    """Fields of the three requests that bring weights."""

    selector: Selector = "all"
    flush_cache: Flag = False  # says: the last of several
    weight_version: Version | None = None
    abort_all_requests: Flag = False


class UpdateFromGroup(UpdateFields):
    """`POST /update_weights_from_distributed`."""

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
        """The tensors that the trainer is about to broadcast. Raises `ApiError`, 400."""
        return tensors_of(self.names, self.dtypes, self.shapes, "dtypes")


class UpdateFromTensor(UpdateFields):
    """`POST /update_weights_from_tensor`."""

    serialized_named_tensors: Texts | None = None
    load_format: Annotated[str, _format("safetensors"), words(("auto", "safetensors"))] = "auto"


class UpdateFromDisk(UpdateFields):
    """`POST /update_weights_from_disk`. It is a whole update: slime deletes the folder while the
    engine is paused.
    """

    model_path: RequiredText
    timeout: Seconds | None = None
    load_format: Annotated[str, _format("safetensors"), words(("auto", "safetensors"))] = "auto"
    manifest: Annotated[
        Anything, only((), "manifest is not supported; leave it out.", param="manifest")
    ] = None


_CONFIG = "config_dict must be an object, what PEFT's adapter_config.json says (r, lora_alpha)"


def _as_config(given: object) -> Mapping[str, Any]:
    """PEFT's configuration: an object of the JSON, or JSON in the query."""
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    if not isinstance(given, dict):
        raise bad_request(f"{_CONFIG}, not {shown(given)}.", "config_dict")
    return given


class LoadTensors(ControlRequest):
    """`POST /load_lora_adapter_from_tensors`; a name that is loaded gets a new version."""

    missing: ClassVar = {"config_dict": f"{_CONFIG}, not null."}
    lora_name: RequiredText
    pinned: Flag = False  # all stay until they are unloaded
    added_tokens_config: Annotated[
        Anything,
        only(
            ({}, [], "", 0),
            "added_tokens_config is not supported: adapters add no tokens; leave it out.",
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


# What is not here -> what to do instead.
NOT_HERE: Mapping[str, str] = {
    "POST /post_process_weights": "weights are not repacked here; send them as they stand in a "
    "checkpoint.",
    "POST /pull_weights": "the engine fetches no weights; send them, or give a folder to "
    "/update_weights_from_disk.",
    "POST /update_weights_from_ipc": "weights are not shared between processes; send them by a "
    "group, or as safetensors.",
}
_ROWS = "The first rows of a tensor, a million numbers at most"
_CHECKS = "Checksums (the first 16 digits of SHA-256), snapshot and compare"

ROUTES = (
    Route(
        "POST /pause_generation",
        "Stop between two steps: abort, retract (context computed again) or in_place (kept)",
        Pause,
        family="weights",
    ),
    Route("POST /continue_generation", "Resume", family="weights"),
    Route("POST /abort_request", "End one request, or all", Abort),
    Route("GET /v1/loads", "What runs and waits", Loads, "user"),
    Route("POST /init_weights_update_group", "Join a trainer's group", JoinGroup, family="weights"),
    Route("POST /destroy_weights_update_group", "Leave it", LeaveGroup, family="weights"),
    Route(
        "POST /begin_weight_update",
        "What comes up to the end takes effect as one",
        BeginUpdate,
        family="weights",
    ),
    Route("POST /end_weight_update", "Now it takes effect", family="weights"),
    Route(
        "POST /update_weights_from_distributed",
        "One broadcast a tensor, or in buckets",
        UpdateFromGroup,
        family="weights",
    ),
    Route(
        "POST /update_weights_from_tensor",
        "An update of safetensors: as the body, or as base64 in JSON",
        UpdateFromTensor,
        family="weights",
        files=("serialized_named_tensors",),
    ),
    Route(
        "POST /update_weights_from_disk",
        "Serve the safetensors of a folder on the engine's machine",
        UpdateFromDisk,
        family="weights",
    ),
    Route("GET /weights_checker", _CHECKS, CheckWeights, family="weights"),
    Route("POST /weights_checker", _CHECKS, CheckWeights, family="weights"),
    Route("GET /get_weights_by_name", _ROWS, Rows, family="weights"),
    Route("POST /get_weights_by_name", _ROWS, Rows, family="weights"),
    Route(
        "GET /get_weight_version",
        "The weight version that serves",
        access="user",
        family="weights",
    ),
    Route("POST /release_memory_occupation", "Give memory back, by tags", ChangeMemory),
    Route("POST /resume_memory_occupation", "Take memory again, by tags", ChangeMemory),
    Route("GET /model_info", "What serves", access="user"),
    Route("GET /get_model_info", "What serves", access="user"),
    Route("GET /get_server_info", "Device, dtype, version and the like", access="user"),
    Route("GET /health_generate", "Whether it draws a token (one a second for all)", access="user"),
    Route("POST /unload_lora_adapter", "Unload an adapter", UnloadAdapter, family="adapters"),
    Route(
        "POST /load_lora_adapter_from_tensors",
        "An adapter of safetensors: as the body, or as base64 in JSON",
        LoadTensors,
        family="adapters",
        files=("serialized_tensors", "serialized_named_tensors"),
    ),
    *(Route(call, "501: says what to do instead", family="weights") for call in NOT_HERE),
)
