"""`nano-inference train-service`: LoRA training over HTTP, by the API of the client `tinker`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nano_inference.cli import (
    Debug,
    FieldOptions,
    OneModel,
    Values,
    from_fields,
    read_keys,
    require_packages,
)
from nano_inference.config import EngineConfig
from nano_training_service.config import KEYS, TrainServiceConfig

_NEEDED = ("fastapi", "google.protobuf", "httptools", "pydantic", "uvicorn")
_ENGINE = (
    *("tokenizer_path", "cache_type", "dtype", "device", "kv_cache_memory"),
    *("max_model_len", "num_threads"),
)


@from_fields
def train_service(
    model: OneModel,
    *,
    service: Annotated[Values, FieldOptions(TrainServiceConfig)],
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            rich_help_panel=KEYS,
            help="Require one of the keys in this file, one per line.",
        ),
    ] = None,
    engine: Annotated[Values, FieldOptions(EngineConfig, _ENGINE)],
    debug: Debug = False,
) -> None:
    """Train LoRA adapters of a model over HTTP.

    Serves the API of the client `tinker` until Ctrl-C or SIGTERM. docs/training-service.md has a
    quick start.

    Examples:

    nano-inference train-service smollm2-135m --state-dir state/
    """
    require_packages(_NEEDED, "the training service", model, "tinker")
    from nano_training_service.main import serve

    config = TrainServiceConfig(**service)
    if api_key_file is not None:
        config = replace(config, api_keys=(*config.api_keys, *read_keys(api_key_file)))
    serve(EngineConfig(model, **engine), config)
