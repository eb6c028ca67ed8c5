"""Routes about the model: `/v1/models`, `/tokenize` and `/detokenize`. The engine is not asked."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from nano_inference.serving.edge.exchange import read_request
from nano_inference.serving.edge.replies import json_reply
from nano_inference.serving.errors import bad_request
from nano_inference.serving.protocols import chats
from nano_inference.serving.protocols.fields import (
    TokenIds,
    need_tokenizer,
    require_model,
    require_possible_length,
)
from nano_inference.serving.protocols.interface import Served
from nano_inference.serving.protocols.openai_chat import chat_prompt
from nano_inference.serving.protocols.openai_requests import ChatTemplateFields, Message
from nano_inference.serving.protocols.openai_schemas import MODEL, MODELS, TEXT, TOKENS
from nano_inference.serving.protocols.openapi import operation
from nano_inference.serving.protocols.reading import Strict, read_body
from nano_inference.serving.server import Server


class TokenizeRequest(ChatTemplateFields):
    """The body of `POST /tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="of a text; true by default")
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def tokenize(body: bytes, served: Served) -> dict[str, Any]:
    """Token ids of a text or a chat. Raises `ApiError` and `InvalidRequest`."""
    request = read_body(body, TokenizeRequest, served.config, chats.UNSUPPORTED)
    require_model(request.model, served)
    tokenizer = need_tokenizer(served)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give a prompt or messages, and not both.", "prompt")
    if request.messages is not None:
        token_ids = chat_prompt(request, request.messages, served)
    else:
        assert request.prompt is not None
        require_possible_length(request.prompt, served, "prompt")
        token_ids = tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
    strings = (
        list(map(served.token_texts.text, token_ids))
        if request.return_token_strs and served.token_texts
        else None
    )
    return {
        "count": len(token_ids),
        "max_model_len": served.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def detokenize(body: bytes, served: Served) -> dict[str, Any]:
    """The text of token ids, special tokens written out. Raises `ApiError`."""
    request = read_body(body, DetokenizeRequest, served.config, {})
    require_model(request.model, served)
    tokenizer = need_tokenizer(served)
    if max(request.tokens, default=0) >= served.engine.vocab_size:
        raise bad_request(
            f"tokens holds {max(request.tokens)}; token ids are in [0, "
            f"{served.engine.vocab_size}).",
            "tokens",
        )
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}


def model_row(served: Served, name: str, created: float) -> dict[str, Any]:
    """The model as OpenAI's clients know it."""
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "nano-inference",
        "root": served.name,
        "parent": None,
        "max_model_len": served.engine.max_model_len,
    }


def anthropic_model_row(served: Served, name: str, created: float) -> dict[str, Any]:
    """The model as Anthropic's clients know it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": served.engine.max_model_len,
        "max_tokens": served.engine.max_model_len,
    }


def model_routes(server: Server) -> APIRouter:
    """The routes."""
    router = APIRouter()

    def row(request: Request, name: str) -> dict[str, Any]:
        make = anthropic_model_row if "anthropic-version" in request.headers else model_row
        return make(server.require_served(), name, server.started)

    @router.get(
        "/v1/models", openapi_extra=operation(None, MODELS, summary="The models that are served")
    )
    async def models(request: Request) -> Response:
        served = server.require_served()
        rows = [row(request, name) for name in (served.name, *served.other_names)]
        if "anthropic-version" in request.headers:
            ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]}
            return json_reply(200, {"data": rows, "has_more": False, **ends})
        return json_reply(200, {"object": "list", "data": rows})

    @router.get(
        "/v1/models/{name:path}", openapi_extra=operation(None, MODEL, summary="One of them")
    )
    async def model(name: str, request: Request) -> Response:
        require_model(name, server.require_served())
        return json_reply(200, row(request, name))

    @router.post(
        "/tokenize",
        openapi_extra=operation(TokenizeRequest, TOKENS, summary="Token ids of a text or a chat"),
    )
    async def tokens(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, tokenize))

    @router.post(
        "/detokenize",
        openapi_extra=operation(DetokenizeRequest, TEXT, summary="The text of token ids"),
    )
    async def text(request: Request) -> Response:
        return json_reply(200, await read_request(request, server, detokenize))

    return router
