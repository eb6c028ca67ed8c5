"""What is logged of requests and of the server itself. Keys are never in it."""

import json
import logging

from nano_inference.models.generation_defaults import as_text
from nano_inference.serving.config import ServerConfig, is_loopback
from nano_inference.serving.log_lines import send_to_stderr
from nano_inference.serving.protocols.generation import Generation, Served

log = logging.getLogger("nano_inference.serving")
prompts = logging.getLogger("nano_inference.prompts")


def set_up_logs(config: ServerConfig) -> None:
    """Send what this package and uvicorn log to stderr. For the command; a library leaves logging
    as it is.
    """
    for name in ("nano_inference", "uvicorn"):
        send_to_stderr(logging.getLogger(name), config.log_format)
    logging.getLogger("nano_inference").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")


def log_texts(generation: Generation, request_id: str) -> None:
    """What was asked and what was said; only where `log_prompts` is set."""
    tokenizer = generation.served.tokenizer
    asks = [
        ask.prompt if tokenizer is None else tokenizer.decode(ask.prompt)
        for ask in generation.builder.asks
    ]
    said = [choice.reasoning + choice.content for choice in generation.choices]
    fields = {"request_id": request_id, "prompts": asks, "completions": said}
    prompts.info("%s", json.dumps(fields), extra={"fields": fields})


def log_start(config: ServerConfig, url: str) -> None:
    """The server listens."""
    keys = f"{len(config.api_keys)} API key(s)" if config.api_keys else "no API key"
    without = "no admin key" if config.rl else "no admin key (its routes are off)"
    admin = "an admin key" if config.admin_key is not None else without
    log.info("listening on %s, with %s and %s; the engine is being built.", url, keys, admin)
    if not config.api_keys and not is_loopback(config.host):
        log.warning(
            "host=%s can be reached from other machines, and no API key is set: anybody who "
            "reaches it may use it.",
            config.host,
        )
    if config.rl:
        log.info(
            "routes for trainers are on (vLLM, SGLang, prime-rl, PipelineRL): %s.",
            _who_may_train(config),
        )


def _who_may_train(config: ServerConfig) -> str:
    """Who may pause the engine and change its weights."""
    if config.admin_key is not None:
        return "who has the admin key may change the weights"
    whoever = "whoever has an API key and" if config.api_keys else "whoever"
    if is_loopback(config.host):
        return f"{whoever} is on this machine may change the weights, web pages excepted"
    return f"{whoever} reaches {config.host} may change the weights (rl_open)"


def log_ready(config: ServerConfig, served: Served) -> None:
    """The engine is ready."""
    info = served.engine
    log.info(
        "serving %s (%s)%s: max_model_len=%d, max_batch_size=%d, max_queued_samples=%d, "
        "request_timeout=%g s.",
        served.name,
        info.numerics,
        ", which has no tokenizer: token ids alone, by /v1/completions"
        if served.tokenizer is None
        else "",
        info.max_model_len,
        info.max_batch_size,
        config.max_queued_samples,
        config.request_timeout,
    )
    if served.sampling_defaults:
        log.info(
            "what requests leave out is as generation_config.json recommends: %s; "
            "--generation-config none turns that "
            "off.",
            as_text(served.sampling_defaults),
        )
