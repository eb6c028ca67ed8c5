"""`nano-inference serve`: models behind OpenAI's, Anthropic's and Ollama's HTTP interfaces."""

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from nano_inference.cli import options
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.help_texts import HelpAll
from nano_inference.cli.options import read_keys, read_template, require_packages
from nano_inference.config import DEFAULT_ENTRIES, EngineConfig, with_plain_weights
from nano_inference.core.budget import RL_ENTRIES
from nano_inference.errors import ConfigError
from nano_inference.server.config import KEYS, SERVER, ServerConfig
from nano_inference.server.door import Door

_NEEDED = ("fastapi", "msgspec", "prometheus_client", "pydantic", "uvicorn", "zmq")


_Server = Annotated[options.Values, FieldOptions(ServerConfig)]
# None: larger with --rl, since a trainer may send a whole batch in one request
_Engine = Annotated[
    options.Values,
    FieldOptions(EngineConfig, defaults={"dtype": "fast", "max_request_entries": None}),
]


@options.from_fields
def serve(
    models: options.ModelsToServe,
    *,
    server: _Server,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template",
            rich_help_panel=SERVER,
            help="Use this Jinja file as the chat template.",
        ),
    ] = None,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            rich_help_panel=SERVER,
            help="Run the engines on the nodes of a Ray cluster.",
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            rich_help_panel=SERVER,
            metavar="HOST:PORT",
            help="Address of the Ray cluster. Default: RAY_ADDRESS, or a new cluster.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            rich_help_panel=KEYS,
            help="Require one of the keys in this file, one per line.",
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            rich_help_panel=KEYS,
            help="Read the admin key from this file.",
        ),
    ] = None,
    engine: _Engine,
    debug: options.Debug = False,
    help_all: HelpAll = False,
) -> None:
    """Serve models over HTTP.

    Serves OpenAI's, Anthropic's and Ollama's routes until Ctrl-C or SIGTERM. Several models are
    loaded when requests name them. docs/server.md has a quick start for each client.

    Examples:

    nano-inference serve smollm2-135m --port 8000
    nano-inference serve smollm2-135m --rl --replicas 2

    nano-inference serve smollm2-135m gemma3-270m --max-loaded 1 --idle-unload 10m
    """
    require_packages(_NEEDED, "the server", models[0], "server")
    if engine["max_request_entries"] is None:
        engine["max_request_entries"] = RL_ENTRIES if server["rl"] else DEFAULT_ENTRIES
    server["api_keys"] += tuple(read_keys(api_key_file)) if api_key_file else ()
    server["admin_key"] = _one_key(server["admin_key"], admin_key_file)
    server["chat_template"] = read_template(chat_template) if chat_template else None
    config = options.checked(ServerConfig, **server)
    engines = [options.engine_config(model, engine) for model in models]
    if ray_address is not None and not on_ray:
        raise typer.BadParameter(f"--ray-address {ray_address} requires --ray.")
    with closing(Door(config)) as door:  # before the server's modules are imported
        _serve(engines, config, door, on_ray, ray_address)


def _serve(
    engines: Sequence[EngineConfig],
    config: ServerConfig,
    door: Door,
    on_ray: bool,
    ray_address: str | None,
) -> None:
    from nano_inference.remote.log_lines import set_up_logs
    from nano_inference.server.api.parsing import chat_format

    # reject unknown names before anything starts
    options.checked(chat_format, None, config.tool_format, config.reasoning_format)
    if on_ray and len(engines) > 1:
        raise typer.BadParameter("--ray serves one model.")
    set_up_logs(config.log_level, config.log_format)
    if len(engines) == 1:
        logging.getLogger("nano_inference.server").info("loading %s", engines[0].model_path)
    if on_ray:
        engine = with_plain_weights(engines[0]) if config.rl else engines[0]
        _serve_on_ray(engine, config, ray_address, door)
        return
    from nano_inference.server import main

    options.checked(main.sources_of, engines, config)  # rejects options that cannot be combined
    main.serve(engines[0] if len(engines) == 1 else engines, config, door)


def _serve_on_ray(
    engine: EngineConfig, config: ServerConfig, address: str | None, door: Door
) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray requires Ray, not installed here; run: pip install 'nano-inference[ray]'"
        )
    # a package above this one
    import_module("nano_ray.serving").serve_on_ray(engine, config, address, door)


def _one_key(key: str | None, file: Path | None) -> str | None:
    """Return a key, or the only key in a file. Raises `ConfigError`."""
    if file is None:
        return key
    keys = read_keys(file)
    if key is not None or len(keys) != 1:
        raise typer.BadParameter(
            "the server has one admin key; give --admin-key, or --admin-key-file with one line."
        )
    return keys[0]
