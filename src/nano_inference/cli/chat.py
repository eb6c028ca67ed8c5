"""`nano-inference chat`: a conversation in the terminal with a model, here or on a server."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nano_inference.cli import options
from nano_inference.cli.conversation import Messages, Pieces, Session
from nano_inference.cli.field_options import FieldOptions
from nano_inference.cli.help_texts import HelpAll
from nano_inference.cli.terminal import errors, load_engine
from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.system.http_client import HttpClient, Piece, ServerError, Usage
from nano_inference.types import SamplingParams

if TYPE_CHECKING:
    from nano_inference.engine.engine import InferenceEngine

_Sampling = Annotated[
    options.Values,
    FieldOptions(
        SamplingParams,
        (*options.PARAMS, "adapter"),
        {"max_tokens": 1024},
        options.AS_RECOMMENDED,
    ),
]
_Engine = Annotated[
    options.Values, FieldOptions(EngineConfig, options.ONE_ENGINE, defaults={"dtype": "fast"})
]
_SERVER_OPTIONS = ("api_key", "api_key_file")


@options.from_fields
def chat(
    ctx: typer.Context,
    *,
    model: options.ModelOrServed = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Talk to a model on this server, such as http://127.0.0.1:8000."
        ),
    ] = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    system: Annotated[str | None, typer.Option(help="Set the system message.")] = None,
    sampling: _Sampling,
    generation_config: options.GenerationDefaults = "auto",
    engine: _Engine,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    help_all: HelpAll = False,
) -> None:
    """Talk to a model, here or on a server.

    Press Ctrl-C to stop an answer and Ctrl-D to leave. Type /help for the commands. If standard
    input is not a terminal, each line is a message.

    Examples:

    nano-inference chat smollm2-135m
    nano-inference chat --url http://127.0.0.1:8000
    """
    params = options.checked(SamplingParams, **sampling)
    _check_given(ctx, model, url)
    chosen = {name for name in options.PARAMS if options.is_given(ctx, name)}
    if url is not None:
        client = HttpClient(url, options.key_of(api_key, api_key_file))
        answer = partial(_ask_server, client, model or client.default_model())
        Session(answer, params, chosen, system).run()
        return
    assert model is not None
    config = options.engine_config(options.checked_model(model), engine, max_batch_size=1)
    _require_template(config.model_path, config.tokenizer_path)
    with load_engine(config) as built:
        params = options.with_recommended(
            ctx, params, built.model_folder, config.model_path, generation_config
        )
        Session(partial(_ask_engine, built), params, chosen, system).run()


def _check_given(ctx: typer.Context, model: str | None, url: str | None) -> None:
    """Reject options that would have no effect."""
    if model is None and url is None:
        raise typer.BadParameter("MODEL is missing; give one, or a server with --url.")
    unused, owner = (
        (_SERVER_OPTIONS, "a server (--url)")
        if url is None
        else ((*options.ONE_ENGINE, "generation_config", "adapter"), "a local engine")
    )
    if (flag := options.first_given(ctx, unused)) is not None:
        raise typer.BadParameter(f"{flag} requires {owner}; leave it out.")


def _require_template(model: str, tokenizer: str | None) -> None:
    """Raise `InvalidRequest` if the model has no chat template, before reading its weights."""
    with errors.status(f"reading {model}"):
        from nano_inference.checkpoints.loading import resolve_model
        from nano_inference.text.tokenizer import load_tokenizer

        if load_tokenizer(resolve_model(tokenizer or model)).chat_template is None:
            raise InvalidRequest(
                f"{tokenizer or model} has no chat template; use `nano-inference generate {model} "
                "-p TEXT`, or pass --tokenizer with a folder that has one."
            )


def _ask_engine(engine: "InferenceEngine", messages: Messages, session: Session) -> Pieces:
    from nano_inference.text.chat import encode_chat

    length = len(encode_chat(engine.tokenizer, messages))
    params = _fitting(session.params, length, engine.max_model_len)
    before = engine.stats().num_steps
    for delta in engine.generate(messages, params, stream=True, progress=False):
        sample = delta.finished
        if sample is None:
            yield Piece(delta.text or "")
        else:
            usage = Usage(
                len(sample.prompt_tokens),
                len(sample.completion_tokens),
                sample.cached_tokens,
                engine.stats().num_steps - before if engine.config.drafts else None,
            )
            yield Piece(delta.text or "", finish_reason=sample.finish_reason, usage=usage)


def _ask_server(client: HttpClient, model: str, messages: Messages, session: Session) -> Pieces:
    params = session.params
    body: dict[str, Any] = {"model": model, "messages": messages}
    counted: dict[str, Any] = {}
    # some servers have no such route, but reject a conversation that is too long
    with suppress(InvalidRequest, ServerError):
        counted = client.post("/tokenize", body)
    if isinstance(counted.get("count"), int) and isinstance(counted.get("max_model_len"), int):
        params = _fitting(params, counted["count"], counted["max_model_len"])
    yield from client.chat(body | options.request_body(session.chosen, params))


def _fitting(params: SamplingParams, length: int, limit: int) -> SamplingParams:
    """Return the parameters with `max_tokens` lowered to the room that is left. Raises
    `InvalidRequest` if there is none.
    """
    if limit - length < 1:
        raise InvalidRequest(
            f"the conversation has {length} tokens of at most {limit}, which leaves no room for an "
            "answer; /clear starts a new one."
        )
    return replace(params, max_tokens=min(params.max_tokens, limit - length))
