"""`ServerConfig`: how the server listens, whom it trusts, and what one client may ask for."""

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
    """Frozen. Unknown or contradictory options raise `ConfigError`.

    Options with `unset` have two defaults, the second with `rl`: a trainer asks for a whole batch
    at once, for the logprobs of as many tokens as it likes, and waits as long as its own step takes
    while requests are paused. They are None as given, never afterwards.

    Attributes:
        host: address to listen on; the default is reachable from this machine alone.
        port: TCP port; 0 takes a free one.
        uds: path of a socket file to listen on instead; a new one is its user's alone, an old one
            keeps its mode.
        root_path: what a proxy leaves before the paths, such as `/llm`; requests with and without
            it are served.
        served_model_name: the `model` that clients name, or several, of which answers name the
            first; None: the engine's `model_path`.
        chat_template: Jinja source, instead of the model's own.
        api_keys: any of them opens every route for clients; `/health`, `/ping`, `/liveness`,
            `/docs` and the page are open to all. None given: no key is needed.
        admin_key: opens the routes that change the engine; None: they are off.
        in_process: run the engine in the server's process instead of one of its own.
        restart_engine: start a new engine when the old one has died.
        replicas: engines, each of its own, behind this server. A request goes to one of them; when
            it dies, another one goes on with the same bits.
        prefill_replicas: of the replicas, how many only compute prompts; the others go on from the
            first token.
        share_prefixes: a replica that does not have a prompt's prefix fetches it from one that
            does, where that takes less time than computing it.
        stall_timeout: seconds after which one of several replicas that has something to do and gets
            nowhere is killed.
        max_queued_samples: samples that may wait beyond those that fit into a batch; more are
            refused with 429. This and some other defaults are larger with `rl`.
        max_samples: samples of one request: `n` times its prompts.
        max_logprobs: `top_logprobs` and `logprobs` of one request; -1: as many as there are tokens.
        max_stop: stop strings of one request.
        max_stop_length: characters of a stop string.
        max_logit_bias: entries of `logit_bias`.
        max_messages: messages of one chat.
        max_tools: tools of one chat.
        max_body_bytes: size of a request's body.
        max_pending_bytes: size of all bodies together that are being read; None: eight of the
            largest.
        max_stored_responses: size of all responses together that later ones may go on from; 0:
            none is kept.
        body_timeout: seconds that a client may be silent in the middle of a body.
        max_connections: connections at a time.
        max_header_bytes: size of all its headers.
        max_depth: how deep its JSON may nest.
        max_values: values that it may hold: numbers, texts and the like; prompts of token ids need
            the most.
        request_timeout: seconds after which a request is aborted.
        drain_timeout: seconds that running requests get to end when the server is told to stop.
        max_backlog: tokens that a stream may hold, a choice, for a client that does not read; then
            it is aborted.
        cors_origins: origins whose pages may call; `*`: all.
        tls_cert: PEM file of the certificate chain; with `tls_key` the server speaks HTTPS.
        tls_key: PEM file of its key.
        hide_cached_tokens: do not tell clients how much of a prompt was cached (others' prompts can
            be guessed by it).
        return_tokens_as_token_ids: logprobs name tokens "token_id:123" where a request does not say
            whether (trainers that speak OpenAI's protocol start their engines so).
        tool_format: name of the format of tool calls; None: found out from the chat template.
        reasoning_format: name of the format of reasoning; None: found out.
        generation_config: `"auto"`: what a request to OpenAI's and Anthropic's routes leaves out is
            as the model's generation_config.json recommends; `"none"`: it is neutral; else a
            folder, of which that file is read instead. None: auto, and none with `rl`.
        log_level: `"debug"`, `"info"`, `"warning"` or `"error"`.
        log_format: `"text"`, or `"json"`: one object a line.
        log_prompts: also log prompts and completions.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span of each generation.
        rl: serve the routes by which trainers pause the engine and change its weights
            (`server/trainers`).
        rl_open: ask for no admin key on those although other machines can reach them.
        rl_timeout: seconds that a weight group may take to form, and an update to arrive.
        rl_max_body_bytes: size of a body that holds weights (`/update_weights_from_tensor`).
        weight_update_group_init_method: "tcp://host:port" of a trainer whose weight group is joined
            from the start on (PipelineRL's way; the names are its own).
        weight_update_group_world_size: of that group: the trainer and all engines.
        actor_llm_idx: this engine's number among them; its rank is one more.
        disable_weight_updates: do not join that group; what the trainer says of it may be given all
            the same.
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
        unset=(1 << 20, 1 << 24),  # 128 prompts of 8,192 token ids; 4,096 of 4,096
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
        None, SERVER, "Format of tool calls. Default: detected from the chat template."
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
        unset=("auto", "none"),  # a trainer's logprobs are of what it asked for
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
                f"max_pending_bytes={self.max_pending_bytes} is less than "
                f"max_body_bytes={self.max_body_bytes}: the "
                "largest body would never be read."
            )
        self._check_replicas()
        self._check_keys()
        self._check_rl()
        self._check_weight_group()
        timeouts = ("request_timeout", "body_timeout", "rl_timeout", "stall_timeout")
        check_seconds(self, timeouts, ConfigError)
        if not is_number(self.drain_timeout) or not 0 <= self.drain_timeout < float("inf"):
            raise ConfigError(
                f"drain_timeout={self.drain_timeout!r} must be a number of seconds, 0 or more."
            )

    def _fill(self) -> None:
        """Set the defaults of what is unset."""
        for each in fields(self):
            if getattr(self, each.name) is None and "unset" in each.metadata:
                object.__setattr__(self, each.name, each.metadata["unset"][bool(self.rl)])
        if self.max_pending_bytes is None and is_whole(self.max_body_bytes):
            object.__setattr__(self, "max_pending_bytes", 8 * self.max_body_bytes)

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients may call the model, beside what the engine calls it."""
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
                f"root_path={self.root_path!r} must be like '/llm', without a slash at its end."
            )

    def _check_replicas(self) -> None:
        if not 0 <= self.prefill_replicas < self.replicas:
            raise ConfigError(
                f"prefill_replicas={self.prefill_replicas!r} must be in [0, {self.replicas}): of "
                "replicas="
                f"{self.replicas} at least one has to go on with the prompts that the others "
                "compute."
            )

    def _check_keys(self) -> None:
        keys: Any = self.api_keys
        if not isinstance(keys, tuple):
            # without the value: it may be a key
            raise ConfigError("api_keys must be a tuple of strings.")
        for key in (*keys, *(() if self.admin_key is None else (self.admin_key,))):
            if not (
                isinstance(key, str)
                and key.isascii()
                and key.isprintable()
                and key
                and " " not in key
            ):
                raise ConfigError(
                    "api_keys and admin_key must be printable ASCII without spaces, and not empty."
                )
        if self.admin_key in keys:
            raise ConfigError("admin_key is among api_keys; users would be administrators.")

    def _check_rl(self) -> None:
        if self.rl and not (self.rl_open or self.admin_key is not None or is_loopback(self.host)):
            raise ConfigError(
                f"rl=True with host={self.host!r}: all who reach it could change the weights. "
                "Give an admin_key, "
                "or rl_open=True if all who reach it are trusted."
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
        # A trainer in its debug mode, which disables updates, has no group and calls its size 1.
        if not 0 <= index < size - 1 and not self.disable_weight_updates:
            raise ConfigError(
                f"actor_llm_idx={index} must be in [0, {size - 1}): of {size} ranks one is the "
                "trainer's."
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if not host:
        return False
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(
        ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found
    )
