"""The routes that two dialects have under one path."""

from typing import Annotated, ClassVar, Literal

from nano_inference.server.control.requests.field_types import (
    ControlRequest,
    Flag,
    RequiredText,
    Route,
    Version,
    word,
    words,
)

_FORMATS = ("json", "text")


class ServerInfo(ControlRequest):
    """`GET /server_info`."""

    config_format: Annotated[Literal["json", "text"], word(_FORMATS), words(_FORMATS)] = "json"


class LoadAdapter(ControlRequest):
    """SGLang's and prime-rl's `POST /load_lora_adapter`."""

    pinned: Flag = False  # every adapter stays until it is unloaded
    lora_name: RequiredText
    lora_path: RequiredText


class NameVersion(ControlRequest):
    """`POST /update_weight_version`."""

    missing: ClassVar = {"new_version": "new_version is missing; it must be a string."}
    new_version: Version
    abort_all_requests: Flag = False


ROUTES = (
    Route("GET /flush_cache", "Forget cached prefixes", family="administration"),
    Route("POST /flush_cache", "Forget cached prefixes", family="administration"),
    Route("GET /server_info", "Device, dtype, version and the like", ServerInfo, "user"),
    Route(
        "POST /load_lora_adapter",
        "Serve an adapter, or a new version of it",
        LoadAdapter,
        family="adapters",
    ),
    Route(
        "POST /update_weight_version",
        "Name the version that serves; no request notices",
        NameVersion,
        family="weights",
    ),
)
