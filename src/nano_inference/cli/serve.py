"""`nano-inference serve`: a model behind OpenAI's and Anthropic's HTTP interfaces."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from nano_inference.budget import DEFAULT_ENTRIES, RL_ENTRIES
from nano_inference.cli import options
from nano_inference.cli.options import option, parse_size, read_keys, read_template
from nano_inference.config import Attention, Backend, EngineConfig
from nano_inference.errors import ConfigError
from nano_inference.models.embedded import install_command
from nano_inference.models.generation_defaults import GenerationConfig

if TYPE_CHECKING:
    from nano_inference.serving.config import ServerConfig

_SERVER, _KEYS, _LIMITS, _ENGINE, _LOGS = (
    "The server",
    "Keys and pages",
    "Limits",
    "The engine",
    "Logs",
)
_RL = "Training"
_NEEDED = ("fastapi", "msgspec", "prometheus_client", "pydantic", "uvicorn", "zmq")


def serve(
    model: options.Model,
    host: Annotated[
        str,
        option(
            _SERVER, "--host", help="Listen on this address. 0.0.0.0: other machines can reach it."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, option(_SERVER, "--port", min=0, max=65535, help="0 takes a free one.")
    ] = 8000,
    uds: Annotated[
        str | None,
        option(
            _SERVER,
            "--uds",
            metavar="FILE",
            help="Listen on this socket file, not on host and port.",
        ),
    ] = None,
    root_path: Annotated[
        str,
        option(
            _SERVER,
            "--root-path",
            metavar="PATH",
            help="What a proxy leaves before the paths, such as /llm.",
        ),
    ] = "",
    served_model_name: Annotated[
        list[str] | None,
        option(
            _SERVER,
            "--served-model-name",
            help="A name that clients use; may be repeated. Default: MODEL.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        option(_SERVER, "--chat-template", help="Jinja file, instead of the model's own template."),
    ] = None,
    in_process: Annotated[
        bool,
        option(
            _SERVER, "--in-process", help="Run the engine in the server's process, not in its own."
        ),
    ] = False,
    restart_engine: Annotated[
        bool,
        option(_SERVER, "--restart-engine", help="Start a new engine when the old one has died."),
    ] = False,
    replicas: Annotated[
        int,
        option(
            _SERVER, "--replicas", help="Engines; when one dies, another goes on with its requests."
        ),
    ] = 1,
    prefill_replicas: Annotated[
        int,
        option(
            _SERVER,
            "--prefill-replicas",
            help="So many of them compute prompts, the others go on from there.",
        ),
    ] = 0,
    on_ray: Annotated[
        bool, option(_SERVER, "--ray", help="Run the engines on the nodes of a Ray cluster.")
    ] = False,
    ray_address: Annotated[
        str | None,
        option(
            _SERVER,
            "--ray-address",
            metavar="HOST:PORT",
            help="Of the cluster. Default: RAY_ADDRESS, or a new one.",
        ),
    ] = None,
    share_prefixes: Annotated[
        bool,
        option(
            _SERVER,
            "--share-prefixes",
            help="Fetch cached prefixes from other replicas where it is faster.",
        ),
    ] = False,
    stall_timeout: Annotated[
        float,
        option(
            _SERVER,
            "--stall-timeout",
            help="Seconds until one of them that gets nowhere is killed.",
        ),
    ] = 60.0,
    tool_format: Annotated[
        str | None,
        option(
            _SERVER,
            "--tool-format",
            help="How the model writes tool calls. Default: by its template.",
        ),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        option(
            _SERVER, "--reasoning-format", help="How it writes reasoning. Default: by its template."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        option(
            _KEYS,
            "--api-key",
            metavar="KEY",
            help="Ask for this key; may be repeated. Others can see it with `ps`.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(_KEYS, "--api-key-file", help="Ask for one of the keys in this file, one a line."),
    ] = None,
    admin_key: Annotated[
        str | None,
        option(
            _KEYS, "--admin-key", metavar="KEY", help="Opens the routes that change the engine."
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None, option(_KEYS, "--admin-key-file", help="The same, from the line in this file.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            _KEYS,
            "--cors-origin",
            metavar="URL",
            help="Pages from here may call; may be repeated. *: all.",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        option(_KEYS, "--tls-cert", help="PEM file of the certificate chain: speak HTTPS."),
    ] = None,
    tls_key: Annotated[str | None, option(_KEYS, "--tls-key", help="PEM file of its key.")] = None,
    hide_cached_tokens: Annotated[
        bool,
        option(_KEYS, "--hide-cached-tokens", help="Do not tell how much of a prompt was cached."),
    ] = False,
    max_queued_samples: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-queued-samples",
            help="Samples that may wait; others are refused with 429. Default: 1024, or 65536 "
            "with --rl.",
        ),
    ] = None,
    max_samples: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-samples",
            help="Of one request: n times its prompts. Default: 128, or 4096 with --rl.",
        ),
    ] = None,
    max_logprobs: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-logprobs",
            help="top_logprobs of one request; -1: all. Default: 20, or -1 with --rl.",
        ),
    ] = None,
    max_request_entries: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-request-entries",
            help="Numbers that a request may ask for in all. Default: 5 million, or 40 million "
            "with --rl.",
        ),
    ] = None,
    max_stop: Annotated[
        int, option(_LIMITS, "--max-stop", help="Stop strings of one request.")
    ] = 16,
    max_stop_length: Annotated[
        int, option(_LIMITS, "--max-stop-length", help="Characters of each.")
    ] = 256,
    max_logit_bias: Annotated[
        int, option(_LIMITS, "--max-logit-bias", help="Entries of logit_bias.")
    ] = 1024,
    max_messages: Annotated[
        int, option(_LIMITS, "--max-messages", help="Messages of one chat.")
    ] = 4096,
    max_tools: Annotated[int, option(_LIMITS, "--max-tools", help="Tools of one chat.")] = 128,
    max_body_bytes: Annotated[
        int,
        option(
            _LIMITS,
            "--max-body-bytes",
            parser=parse_size,
            metavar="SIZE",
            help="Of a request's body.",
        ),
    ] = 32 << 20,
    max_pending_bytes: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-pending-bytes",
            parser=parse_size,
            metavar="SIZE",
            help="Of all bodies that are being read. Default: eight of the largest.",
        ),
    ] = None,
    body_timeout: Annotated[
        float,
        option(
            _LIMITS, "--body-timeout", help="Seconds that a client may be silent within a body."
        ),
    ] = 30.0,
    max_connections: Annotated[
        int | None,
        option(_LIMITS, "--max-connections", help="At a time. Default: 4096, or 131072 with --rl."),
    ] = None,
    max_header_bytes: Annotated[
        int,
        option(
            _LIMITS,
            "--max-header-bytes",
            parser=parse_size,
            metavar="SIZE",
            help="Of all its headers.",
        ),
    ] = 64 << 10,
    max_depth: Annotated[
        int, option(_LIMITS, "--max-depth", help="How deep its JSON may nest.")
    ] = 64,
    max_values: Annotated[
        int | None,
        option(
            _LIMITS,
            "--max-values",
            help="Numbers, texts and the like in it. Default: 2^20, or 2^24 with --rl.",
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        option(
            _LIMITS,
            "--request-timeout",
            help="Seconds until a request is aborted. Default: 600, or six hours with --rl.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        option(
            _LIMITS,
            "--drain-timeout",
            help="Seconds that running requests get when the server ends.",
        ),
    ] = 30.0,
    max_backlog: Annotated[
        int,
        option(
            _LIMITS,
            "--max-backlog",
            help="Tokens of a choice kept for a client that does not read.",
        ),
    ] = 4096,
    rl: Annotated[
        bool,
        option(
            _RL, "--rl", help="Serve the routes by which trainers pause it and change its weights."
        ),
    ] = False,
    rl_open: Annotated[
        bool,
        option(
            _RL, "--rl-open", help="Without an admin key, although other machines can reach it."
        ),
    ] = False,
    rl_timeout: Annotated[
        float,
        option(_RL, "--rl-timeout", help="Seconds for a weight group to form, and for an update."),
    ] = 300.0,
    rl_max_body_bytes: Annotated[
        int,
        option(
            _RL,
            "--rl-max-body-bytes",
            parser=parse_size,
            metavar="SIZE",
            help="Of a body that holds weights.",
        ),
    ] = 4 << 30,
    weight_update_group_init_method: Annotated[
        str | None,
        option(
            _RL,
            "--weight-update-group-init-method",
            metavar="URL",
            help="tcp://host:port of PipelineRL's group.",
        ),
    ] = None,
    weight_update_group_world_size: Annotated[
        int | None,
        option(_RL, "--weight-update-group-world-size", help="Its trainer and all engines."),
    ] = None,
    actor_llm_idx: Annotated[
        int | None, option(_RL, "--actor-llm-idx", help="Which of them this is, from 0.")
    ] = None,
    disable_weight_updates: Annotated[
        bool, option(_RL, "--disable-weight-updates", help="Do not join that group.")
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool,
        option(
            _RL,
            "--return-tokens-as-token-ids",
            help="Logprobs name tokens token_id:123 unless asked not to.",
        ),
    ] = False,
    tokenizer: options.Tokenizer = None,
    ref_model: options.RefModel = None,
    cache_type: options.Cache = "paged",
    block_size: options.BlockSize = 16,
    max_batch_size: Annotated[
        int, option(_ENGINE, "--max-batch-size", help="Sequences in a step.")
    ] = 256,
    max_tokens_per_batch: Annotated[
        int,
        option(
            _ENGINE,
            "--max-tokens-per-batch",
            help="Tokens in a step: less keeps running streams smooth.",
        ),
    ] = 8192,
    max_chunk_tokens: Annotated[
        int | None, option(_ENGINE, "--max-chunk-tokens", help="Tokens of one prompt in a step.")
    ] = None,
    prefix_caching: Annotated[
        bool,
        option(
            _ENGINE,
            "--prefix-caching/--no-prefix-caching",
            help="Reuse what prompts have in common.",
        ),
    ] = True,
    chunked_prefill: Annotated[
        bool,
        option(
            _ENGINE,
            "--chunked-prefill/--no-chunked-prefill",
            help="Compute a prompt over several steps.",
        ),
    ] = True,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: Annotated[
        Backend, option(_ENGINE, "--backend", help="Whose operations run.")
    ] = "auto",
    attention: Annotated[
        Attention, option(_ENGINE, "--attention", help="Whose attention, where there is a choice.")
    ] = "auto",
    batch_invariant: Annotated[
        bool | None,
        option(
            _ENGINE,
            "--batch-invariant/--no-batch-invariant",
            help="The same bits whatever else runs.",
        ),
    ] = None,
    lookahead: Annotated[
        int | None,
        option(_ENGINE, "--lookahead", help="Steps planned ahead, 0 or 1. Default: 1 on a GPU."),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        option(
            _ENGINE,
            "--cuda-graphs/--no-cuda-graphs",
            help="Replay decode steps from captured graphs.",
        ),
    ] = True,
    gpu_memory_utilization: Annotated[
        float,
        option(
            _ENGINE, "--gpu-memory-utilization", help="Share of a GPU's memory that may be taken."
        ),
    ] = 0.9,
    kv_cache_memory: options.KVCacheMemory = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    context_parallel: options.ContextParallel = 1,
    expert_parallel: options.ExpertParallel = 1,
    rank_timeout: options.RankTimeout = 60.0,
    seed: Annotated[
        int | None, option(_ENGINE, "--seed", help="Where seeds of requests without one come from.")
    ] = None,
    generation_config: Annotated[
        GenerationConfig | None,
        option(
            _LIMITS,
            "--generation-config",
            help="auto: what requests leave out is as the model's generation_config.json "
            "recommends. Default: auto; "
            "none with --rl.",
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        option(_LOGS, "--log-level", help="What is logged."),
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], option(_LOGS, "--log-format", help="json: one object a line.")
    ] = "text",
    log_prompts: Annotated[
        bool,
        option(_LOGS, "--log-prompts", help="Also log prompts and completions, which are private."),
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP.

    OpenAI's and Anthropic's routes, until Ctrl-C or SIGTERM; docs/server.md has a quick start for
    each client.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the server needs {', '.join(missing)}, which this installation lacks; all that is "
            "missing comes with: "
            f"{install_command(model, 'server')}"
        )
    from nano_inference.serving.config import ServerConfig
    from nano_inference.serving.main import serve as run
    from nano_inference.serving.parsing import chat_format

    # a name that is not known is refused before anything starts
    chat_format(None, tool_format, reasoning_format)
    engine = EngineConfig(
        model,
        tokenizer_path=tokenizer,
        ref_model_path=ref_model,
        cache_type=cache_type,
        block_size=block_size,
        max_batch_size=max_batch_size,
        max_tokens_per_batch=max_tokens_per_batch,
        max_chunk_tokens=max_chunk_tokens,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        dtype=dtype,
        device=device,
        backend=backend,
        attention=attention,
        batch_invariant=batch_invariant,
        lookahead=lookahead,
        cuda_graphs=cuda_graphs,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=chunked_prefill,
        num_threads=threads,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        rank_timeout=rank_timeout,
        max_request_entries=_entries(max_request_entries, rl),
        seed=seed,
    )
    config = ServerConfig(
        host=host,
        port=port,
        uds=uds,
        root_path=root_path,
        served_model_name=tuple(served_model_name) if served_model_name else None,
        chat_template=None if chat_template is None else read_template(chat_template),
        api_keys=(*(api_key or ()), *(read_keys(api_key_file) if api_key_file else ())),
        admin_key=_one_key(admin_key, admin_key_file),
        in_process=in_process,
        restart_engine=restart_engine,
        replicas=replicas,
        prefill_replicas=prefill_replicas,
        share_prefixes=share_prefixes,
        stall_timeout=stall_timeout,
        max_queued_samples=cast(int, max_queued_samples),
        max_samples=cast(int, max_samples),
        max_logprobs=cast(int, max_logprobs),
        max_stop=max_stop,
        max_stop_length=max_stop_length,
        max_logit_bias=max_logit_bias,
        max_messages=max_messages,
        max_tools=max_tools,
        max_body_bytes=max_body_bytes,
        max_pending_bytes=cast(int, max_pending_bytes),
        body_timeout=body_timeout,
        max_connections=cast(int, max_connections),
        max_header_bytes=max_header_bytes,
        max_depth=max_depth,
        max_values=cast(int, max_values),
        request_timeout=cast(float, request_timeout),
        drain_timeout=drain_timeout,
        max_backlog=max_backlog,
        cors_origins=tuple(cors_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        hide_cached_tokens=hide_cached_tokens,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        generation_config=generation_config,
        log_level=log_level,
        log_format=log_format,
        log_prompts=log_prompts,
        rl=rl,
        rl_open=rl_open,
        rl_timeout=rl_timeout,
        rl_max_body_bytes=rl_max_body_bytes,
        weight_update_group_init_method=weight_update_group_init_method,
        weight_update_group_world_size=weight_update_group_world_size,
        actor_llm_idx=actor_llm_idx,
        disable_weight_updates=disable_weight_updates,
    )
    if on_ray:
        _serve_on_ray(engine, config, ray_address)
        return
    if ray_address is not None:
        raise ConfigError(f"--ray-address={ray_address} means nothing without --ray.")
    run(engine, config)


def _serve_on_ray(engine: EngineConfig, config: "ServerConfig", address: str | None) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--ray needs Ray, which this installation lacks; pip install 'nano-inference[ray]' "
            "brings it."
        )
    from nano_inference.ray.serving import serve_on_ray

    serve_on_ray(engine, config, address)


def _entries(given: int | None, rl: bool) -> int:
    """A trainer may ask for a whole batch in one request."""
    return given if given is not None else RL_ENTRIES if rl else DEFAULT_ENTRIES


def _one_key(key: str | None, file: Path | None) -> str | None:
    """A key, or the one of a file. Raises `ConfigError`."""
    if file is None:
        return key
    keys = read_keys(file)
    if key is not None or len(keys) != 1:
        raise ConfigError(
            "there is one admin key: give --admin-key, or --admin-key-file with one line."
        )
    return keys[0]
