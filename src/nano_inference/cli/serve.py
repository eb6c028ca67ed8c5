"""`nano-inference serve`: models behind OpenAI's, Anthropic's and Ollama's HTTP interfaces."""

import importlib.util
import logging
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
    from nano_inference.remote.log_lines import set_up_logs
    from nano_inference.server.api.parsing import chat_format
    from nano_inference.server.listening import require_free

    # reject unknown names before anything starts
    options.checked(chat_format, None, server["tool_format"], server["reasoning_format"])
    if engine["max_request_entries"] is None:
        engine["max_request_entries"] = RL_ENTRIES if server["rl"] else DEFAULT_ENTRIES
    server["api_keys"] += tuple(read_keys(api_key_file)) if api_key_file else ()
    server["admin_key"] = _one_key(server["admin_key"], admin_key_file)
    server["chat_template"] = read_template(chat_template) if chat_template else None
    config = options.checked(ServerConfig, **server)
    engines = [options.engine_config(model, engine) for model in models]
    if ray_address is not None and not on_ray:
        raise typer.BadParameter(f"--ray-address {ray_address} requires --ray.")
    if config.uds is None:
        require_free(config.host, config.port)
    set_up_logs(config.log_level, config.log_format)
    if on_ray:
        if len(engines) > 1:
            raise typer.BadParameter("--ray serves one model.")
        engine_config = with_plain_weights(engines[0]) if config.rl else engines[0]
        logging.getLogger("nano_inference.server").info("loading %s", models[0])
        _serve_on_ray(engine_config, config, ray_address)
        return
    from nano_inference.server.main import serve as run
    from nano_inference.server.main import sources_of

    options.checked(sources_of, engines, config)  # rejects options that cannot be combined
    if len(engines) == 1:
        logging.getLogger("nano_inference.server").info("loading %s", models[0])
    run(engines[0] if len(engines) == 1 else engines, config)


def _serve_on_ray(engine: EngineConfig, config: ServerConfig, address: str | None) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray requires Ray, not installed here; run: pip install 'nano-inference[ray]'"
        )
    # a package above this one
    import_module("nano_ray.serving").serve_on_ray(engine, config, address)


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
