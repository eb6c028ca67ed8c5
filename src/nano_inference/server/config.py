"""`ServerConfig`: listening, access, and limits of the server."""

import ipaddress
import re
import socket
from dataclasses import dataclass, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from nano_inference.checkpoints.generation_defaults import check_generation_config
from nano_inference.errors import ConfigError
from nano_inference.features import SERVER_LIMITS, Setting, require
from nano_inference.fields.options import (
    check_least,
    check_seconds,
    is_number,
    is_whole,
    option,
    strict_options,
)
from nano_inference.remote.log_lines import LogFormat

MIB = 1 << 20
# groups of options in `--help`
SERVER, KEYS, LIMITS, TRAINING, LOGS = (
    "The server",
    "Keys and pages",
    "Limits",
    "Training",
    "Logs",
)


@strict_options(ConfigError)
@dataclass(frozen=True)
class ServerConfig:
    """Configuration of the server. Unknown or contradictory options raise `ConfigError`.

    Options with `unset` have two defaults, the second one for `rl`: trainers send whole batches,
    request logprobs of any number of tokens, and wait through pauses as long as a training step.
    Such an option may be None only as an argument, never afterwards.

    Attributes:
        host: Address to listen on. The default is reachable only from this machine.
        port: TCP port. 0: any free one.
        uds: Path of a Unix socket to listen on instead. A new one is private to its user; an
            existing one keeps its mode.
        root_path: Path prefix that a proxy adds, such as `/llm`. Requests with and without it are
            served.
        served_model_name: Model name that clients use, or several; replies contain the first. With
            several models, one name for each. None: the engine's `model_path`.
        max_loaded: Maximum number of models that are loaded at a time. The server starts with so
            many. None: all that fit, of which it starts with the first.
        idle_unload: Seconds without requests after which a model is unloaded. None: a model stays
            until another needs its room.
        chat_template: Jinja source that replaces the model's chat template.
        api_keys: Keys that open every client route. `/health`, `/ping`, `/liveness`, `/docs` and
            the page need no key. Empty: no key is needed.
        admin_key: Key of the routes that change the engine. None: these routes are off.
        reasoning_key: Key that signs `encrypted_content` of reasoning. Servers with the same key
            accept each other's. None: a random key, which a restart forgets.
        in_process: Run the engine in the server's process instead of its own.
        restart_engine: Start a new engine when the old one dies.
        replicas: Number of independent engines. If one dies, another continues its requests with
            the same bits.
        prefill_replicas: Number of replicas that only compute prompts. Others continue from the
            first token.
        share_prefixes: Fetch a prompt's cached prefix from another replica if that is faster than
            computing it.
        stall_timeout: Seconds without progress after which a busy replica is killed, if there are
            several.
        max_queued_samples: Maximum samples waiting beyond a full batch. More are rejected with 429.
            This and some other defaults are larger with `rl`.
        max_samples: Maximum samples of a request: `n` times its prompts.
        max_logprobs: Maximum `top_logprobs` and `logprobs` of a request. -1: no limit.
        max_stop: Maximum stop strings of a request.
        max_stop_length: Maximum characters of a stop string.
        max_logit_bias: Maximum entries of `logit_bias`.
        max_messages: Maximum messages of a chat.
        max_tools: Maximum tools of a chat.
        max_body_bytes: Maximum size of a request's body.
        max_pending_bytes: Maximum total size of the bodies being read. None: 8 times
            `max_body_bytes`.
        max_stored_responses: Maximum total size of responses stored for later ones to continue. 0:
            store none.
        max_sessions: Maximum open sessions of an API key. 0: none.
        max_session_bytes: Maximum total size of an API key's sessions.
        session_timeout: Seconds after which an unused session is closed.
        body_timeout: Seconds to wait for the next part of a body.
        max_connections: Maximum open connections.
        max_header_bytes: Maximum total size of a request's headers.
        max_depth: Maximum nesting depth of a JSON body.
        max_values: Maximum values (numbers, strings and so on) of a JSON body. Prompts of token ids
            need the most.
        request_timeout: Seconds after which a request is aborted.
        drain_timeout: Seconds to wait for running requests at shutdown.
        max_backlog: Maximum unread tokens per choice of a stream. A slower client is cut off.
        cors_origins: Origins whose pages may call the server. `*`: all.
        tls_cert: PEM file of the certificate chain. With `tls_key`, the server speaks HTTPS.
        tls_key: PEM file of the certificate's key.
        hide_cached_tokens: Hide from clients how much of a prompt was cached, since that can reveal
            others' prompts.
        return_tokens_as_token_ids: By default, name tokens in logprobs "token_id:123". Some
            trainers start their engines this way.
        tool_format: Format of tool calls. None: detected from the chat template.
        reasoning_format: Format of reasoning. None: detected from the chat template.
        generation_config: Source of sampling defaults for OpenAI's and Anthropic's routes.
            `"auto"`: the model's generation_config.json; `"none"`: temperature 1, no filters;
            otherwise a folder with such a file. None: auto, or none with `rl`.
        log_level: `"debug"`, `"info"`, `"warning"` or `"error"`.
        log_format: `"text"`, or `"json"` for one object per line.
        log_prompts: Also log prompts and completions.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that receives a span per generation.
        rl: Serve the routes that trainers use to pause the engine and change its weights
            (`server/trainers`).
        rl_open: Allow `rl` without an admin key on an address that other machines can reach.
        rl_timeout: Seconds for a weight group to form, and for an update to arrive.
        rl_max_body_bytes: Maximum size of a body with weights (`/update_weights_from_tensor`).
        weight_update_group_init_method: Address "tcp://host:port" of a trainer whose weight group
            the engine joins at its start. This and the next three names are PipelineRL's.
        weight_update_group_world_size: Size of that group: the trainer and all engines.
        actor_llm_idx: Number of this engine in that group. Its rank is one more.
        disable_weight_updates: Do not join that group, even if its other options are set.
    """

    host: str = option(
        "127.0.0.1", SERVER, "Address to listen on. 0.0.0.0: reachable from other machines."
    )
    port: int = option(8000, SERVER, "Port to listen on. 0: any free one.", min=0, max=65535)
    uds: str | None = option(
        None, SERVER, "Listen on this Unix socket instead of host and port.", metavar="FILE"
    )
    root_path: str = option(
        "", SERVER, "Path prefix that a proxy adds, such as /llm.", metavar="PATH"
    )
    served_model_name: str | tuple[str, ...] | None = option(
        None, SERVER, "Name that clients use. May be repeated. Default: MODEL.", each=str
    )
    max_loaded: int | None = option(
        None,
        SERVER,
        "Maximum loaded models. Load so many at the start. Default: all that fit, first the first.",
        least=1,
    )
    idle_unload: float | None = option(
        None,
        SERVER,
        "Unload a model after this time without requests, such as 10m. Default: never.",
        duration=True,
    )
    chat_template: str | None = None
    api_keys: tuple[str, ...] = option(
        (),
        KEYS,
        "Require this key. May be repeated. `ps` shows it to other users.",
        "--api-key",
        each=str,
        metavar="KEY",
    )
    admin_key: str | None = option(
        None, KEYS, "Enable the routes that change the engine, with this key.", metavar="KEY"
    )
    reasoning_key: str | None = option(
        None,
        KEYS,
        "Sign encrypted_content with this key (/v1/responses). Default: a random one.",
        metavar="KEY",
    )
    in_process: bool = option(False, SERVER, "Run the engine in the server's process.")
    restart_engine: bool = option(False, SERVER, "Start a new engine if the old one dies.")
    replicas: int = option(
        1, SERVER, "Number of engines. If one dies, another continues its requests.", least=1
    )
    prefill_replicas: int = option(
        0, SERVER, "Replicas that only compute prompts; the others continue from there.", least=0
    )
    share_prefixes: bool = option(
        False, SERVER, "Fetch cached prefixes from other replicas if that is faster."
    )
    stall_timeout: float = option(
        60.0, SERVER, "Kill a replica that makes no progress for this many seconds."
    )
    max_queued_samples: int = option(
        None,
        LIMITS,
        "Maximum waiting samples; more get 429. Default: 1024; 65536 with --rl.",
        unset=(1024, 65536),
        least=0,
    )
    max_samples: int = option(
        None,
        LIMITS,
        "Maximum samples per request (n x prompts). Default: 128; 4096 with --rl.",
        unset=(128, 4096),
        least=1,
    )
    max_logprobs: int = option(
        None,
        LIMITS,
        "Maximum top_logprobs per request; -1: all. Default: 20; -1 with --rl.",
        unset=(20, -1),
        least=-1,
    )
    max_stop: int = option(16, LIMITS, "Maximum stop strings per request.", least=1)
    max_stop_length: int = option(256, LIMITS, "Maximum characters per stop string.", least=1)
    max_logit_bias: int = option(1024, LIMITS, "Maximum entries of logit_bias.", least=1)
    max_messages: int = option(4096, LIMITS, "Maximum messages per chat.", least=1)
    max_tools: int = option(128, LIMITS, "Maximum tools per chat.", least=1)
    max_body_bytes: int = option(
        32 * MIB, LIMITS, "Maximum size of a request's body.", size=True, least=1
    )
    max_pending_bytes: int = option(
        None,
        LIMITS,
        "Maximum size of all bodies being read. Default: 8 x --max-body-bytes.",
        size=True,
        least=1,
    )
    max_stored_responses: int = option(
        64 * MIB,
        LIMITS,
        "Memory for stored responses (/v1/responses). 0: store none.",
        size=True,
        least=0,
    )
    max_sessions: int = option(
        None,
        LIMITS,
        "Maximum open sessions (/sessions) of an API key. Default: 256; 65536 with --rl.",
        unset=(256, 1 << 16),
        least=0,
    )
    max_session_bytes: int = option(
        256 * MIB, LIMITS, "Memory for the sessions of an API key.", size=True, least=1
    )
    session_timeout: float = option(
        3600.0, LIMITS, "Seconds after which an unused session is closed."
    )
    body_timeout: float = option(30.0, LIMITS, "Seconds to wait for the next part of a body.")
    max_connections: int = option(
        None,
        LIMITS,
        "Maximum open connections. Default: 4096; 131072 with --rl.",
        unset=(4096, 1 << 17),
        least=1,
    )
    max_header_bytes: int = option(
        64 << 10, LIMITS, "Maximum size of a request's headers.", size=True, least=1
    )
    max_depth: int = option(64, LIMITS, "Maximum nesting depth of JSON.", least=1)
    max_values: int = option(
        None,
        LIMITS,
        "Maximum values in a JSON body. Default: 2^20; 2^24 with --rl.",
        unset=(1 << 20, 1 << 24),  # enough for 128 prompts of 8,192 token ids; 4,096 of 4,096
        least=1,
    )
    request_timeout: float = option(
        None,
        LIMITS,
        "Abort a request after this many seconds. Default: 600; 21600 with --rl.",
        unset=(600.0, 6 * 3600.0),
    )
    drain_timeout: float = option(30.0, LIMITS, "Seconds to wait for running requests at shutdown.")
    max_backlog: int = option(
        4096, LIMITS, "Maximum unread tokens per choice; a slower client is cut off.", least=1
    )
    cors_origins: tuple[str, ...] = option(
        (),
        KEYS,
        "Allow pages of this origin. May be repeated. *: all.",
        "--cors-origin",
        each=str,
        metavar="URL",
    )
    tls_cert: str | None = option(None, KEYS, "Serve HTTPS with this PEM certificate chain.")
    tls_key: str | None = option(None, KEYS, "PEM file of the certificate's key.")
    hide_cached_tokens: bool = option(
        False, KEYS, "Hide from clients how much of a prompt was cached."
    )
    return_tokens_as_token_ids: bool = option(
        False, TRAINING, "Name tokens in logprobs token_id:123 by default."
    )
    tool_format: str | None = option(
        None,
        SERVER,
        "Format of tool calls, by our name, vLLM's or SGLang's. Default: detected from the chat "
        "template.",
        "--tool-format",
        "--tool-parser",
        "--tool-call-parser",
    )
    reasoning_format: str | None = option(
        None, SERVER, "Format of reasoning. Default: detected from the chat template."
    )
    generation_config: str | None = option(
        None,
        LIMITS,
        "Sampling defaults for requests. auto: the model's generation_config.json; none: "
        "temperature 1, no filters; FOLDER: read it from there. Default: auto; none with --rl.",
        metavar="auto|none|FOLDER",
        unset=("auto", "none"),  # trainers expect logprobs of exactly what they requested
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", LOGS, "Lowest level to log."
    )
    log_format: LogFormat = option("text", LOGS, "text, or json: one object per line.")
    log_prompts: bool = option(False, LOGS, "Also log prompts and completions (private data).")
    otlp_traces_endpoint: str | None = option(
        None,
        LOGS,
        "Send a trace span per generation to this OpenTelemetry collector.",
        metavar="URL",
    )
    rl: bool = option(
        False, TRAINING, "Enable the routes that trainers use to pause and update the engine."
    )
    rl_open: bool = option(
        False, TRAINING, "Allow --rl without an admin key on a reachable address."
    )
    rl_timeout: float = option(
        300.0, TRAINING, "Seconds for a weight group to form, and for an update to arrive."
    )
    rl_max_body_bytes: int = option(
        4096 * MIB, TRAINING, "Maximum size of a body with weights.", size=True, least=1
    )
    weight_update_group_init_method: str | None = option(
        None, TRAINING, "Join PipelineRL's weight group at tcp://host:port.", metavar="URL"
    )
    weight_update_group_world_size: int | None = option(
        None, TRAINING, "Size of that group: the trainer and all engines."
    )
    actor_llm_idx: int | None = option(
        None, TRAINING, "Number of this engine in that group, from 0."
    )
    disable_weight_updates: bool = option(False, TRAINING, "Do not join that group.")

    def __post_init__(self) -> None:
        self._fill()
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port!r} must be in [0, 65535].")
        require(SERVER_LIMITS, Setting(self))
        check_generation_config(self.generation_config)
        self._check_names()
        check_least(self, ConfigError)
        if self.max_pending_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_pending_bytes={self.max_pending_bytes} must be at least "
                f"max_body_bytes={self.max_body_bytes}, or the largest body could not be read."
            )
        self._check_replicas()
        self._check_keys()
        self._check_rl()
        self._check_weight_group()
        timeouts = ("request_timeout", "body_timeout", "rl_timeout", "stall_timeout")
        check_seconds(self, timeouts, ConfigError)
        if self.idle_unload is not None:
            check_seconds(self, ("idle_unload",), ConfigError)
        if not is_number(self.drain_timeout) or not 0 <= self.drain_timeout < float("inf"):
            raise ConfigError(
                f"drain_timeout={self.drain_timeout!r} must be a number of seconds of at least 0."
            )

    def _fill(self) -> None:
        """Set the defaults of unset options."""
        for option_field in fields(self):
            if getattr(self, option_field.name) is None and "unset" in option_field.metadata:
                object.__setattr__(
                    self, option_field.name, option_field.metadata["unset"][bool(self.rl)]
                )
        if self.max_pending_bytes is None and is_whole(self.max_body_bytes):
            object.__setattr__(self, "max_pending_bytes", 8 * self.max_body_bytes)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may use for the model, in addition to the engine's own."""
        names = self.served_model_name
        return () if names is None else (names,) if isinstance(names, str) else names

    def _check_names(self) -> None:
        names: Any = self.served_model_name
        if not isinstance(names, str | tuple | None) or not all(
            isinstance(each, str) and each for each in self.served_names
        ):
            raise ConfigError(
                f"served_model_name={self.served_model_name!r} must be a name, or a tuple of names."
            )
        if self.root_path and re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII) is None:
            raise ConfigError(
                f"root_path={self.root_path!r} must be like '/llm', without a trailing slash."
            )

    def _check_replicas(self) -> None:
        if not 0 <= self.prefill_replicas < self.replicas:
            raise ConfigError(
                f"prefill_replicas={self.prefill_replicas!r} must be in [0, {self.replicas}): "
                f"of replicas={self.replicas}, at least one must continue computed prompts."
            )

    def _check_keys(self) -> None:
        keys: Any = self.api_keys
        if not isinstance(keys, tuple):
            # the message omits the value, which may be a key
            raise ConfigError("api_keys must be a tuple of strings.")
        secrets = (*keys, self.admin_key, self.reasoning_key)
        for key in (secret for secret in secrets if secret is not None):
            if not (
                isinstance(key, str)
                and key.isascii()
                and key.isprintable()
                and key
                and " " not in key
            ):
                raise ConfigError(
                    "api_keys, admin_key and reasoning_key must be nonempty, printable ASCII "
                    "without spaces."
                )
        if self.admin_key in keys:
            raise ConfigError("admin_key must differ from all api_keys.")

    def _check_rl(self) -> None:
        if self.rl and not (self.rl_open or self.admin_key is not None or is_loopback(self.host)):
            raise ConfigError(
                f"rl=True with host={self.host!r} lets anyone who reaches it change the weights. "
                "Set an admin_key, or rl_open=True if you trust all who reach it."
            )

    def _check_weight_group(self) -> None:
        url: Any = self.weight_update_group_init_method
        size: Any = self.weight_update_group_world_size
        index: Any = self.actor_llm_idx
        if url is None:
            return
        try:
            address = urlsplit(url)
            is_address = (
                address.scheme == "tcp" and address.hostname and address.port and not address.path
            )
        except (ValueError, AttributeError, TypeError):
            is_address = False
        if not is_address:
            raise ConfigError(
                f"weight_update_group_init_method={url!r} must be like 'tcp://10.0.0.1:9000'."
            )
        for name, value in (("weight_update_group_world_size", size), ("actor_llm_idx", index)):
            if not is_whole(value):
                raise ConfigError(f"{name}={value!r} must be an integer.")
        # In debug mode, PipelineRL's trainer disables updates, has no group and sets its size to 1.
        if not 0 <= index < size - 1 and not self.disable_weight_updates:
            raise ConfigError(
                f"actor_llm_idx={index} must be in [0, {size - 1}): one of the {size} ranks is the "
                "trainer's."
            )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    if not host:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(
        ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses
    )
