"""Control routes that vLLM's and SGLang's dialects share."""

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
    """Query of `GET /server_info`."""

    config_format: Annotated[Literal["json", "text"], word(_FORMATS), words(_FORMATS)] = "json"


class LoadAdapter(ControlRequest):
    """Body of SGLang's and prime-rl's `POST /load_lora_adapter`."""

    pinned: Flag = False  # no effect: adapters stay until they are unloaded
    lora_name: RequiredText
    lora_path: RequiredText


class NameVersion(ControlRequest):
    """Body of `POST /update_weight_version`."""

    missing: ClassVar = {"new_version": "new_version is missing; it must be a string."}
    new_version: Version
    abort_all_requests: Flag = False


ROUTES = (
    Route("GET /flush_cache", "Drop cached prefixes", family="administration"),
    Route("POST /flush_cache", "Drop cached prefixes", family="administration"),
    Route("GET /server_info", "Get device, dtype, version and more", ServerInfo, "user"),
    Route(
        "POST /load_lora_adapter",
        "Load an adapter, or a new version of it",
        LoadAdapter,
        family="adapters",
    ),
    Route(
        "POST /update_weight_version",
        "Rename the served weight version, without affecting requests",
        NameVersion,
        family="weights",
    ),
)
