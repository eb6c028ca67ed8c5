"""Unmodified clients of OpenAI, Anthropic and LangChain request structured output of a real engine
with random weights: the objects they parse are valid.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


class Pet(BaseModel):
    """A pet."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    tame: bool


ASK: Any = [{"role": "user", "content": "A pet, please."}]


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("sdks"), seed=0, max_position=4096)
    write_tokenizer(folder, TEMPLATE)
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**24, seed=0)
    server = ServerConfig(port=0, in_process=True, tool_format=request.param)
    with running_server(config, server) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def name(url: str) -> str:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return client.models.list().data[0].id


@pytest.mark.parametrize("seed", range(3))
def test_openai_parses_a_model(client: OpenAI, name: str, seed: int) -> None:
    reply = client.chat.completions.parse(
        model=name, messages=ASK, response_format=Pet, seed=seed, max_tokens=300
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Pet)


def test_openai_streams_a_model(client: OpenAI, name: str) -> None:
    with client.chat.completions.stream(
        model=name, messages=ASK, response_format=Pet, seed=1, max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Pet"}}])
def test_openai_parses_a_tool_s_arguments(client: OpenAI, name: str, choice: Any) -> None:
    reply = client.chat.completions.parse(
        model=name,
        messages=ASK,
        tools=[pydantic_function_tool(Pet)],
        tool_choice=choice,
        parallel_tool_calls=False,
        seed=2,
        max_tokens=400,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.function.name == "Pet"
    assert isinstance(call.function.parsed_arguments, Pet)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "pet"}])
def test_anthropic_calls_a_tool(url: str, name: str, choice: Any) -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tool: Any = {"name": "pet", "description": "A pet.", "input_schema": Pet.model_json_schema()}
    choice = choice | {"disable_parallel_tool_use": True}
    reply = client.messages.create(
        model=name, max_tokens=400, messages=ASK, tools=[tool], tool_choice=choice
    )
    assert reply.stop_reason == "tool_use"
    (used,) = [block for block in reply.content if block.type == "tool_use"]
    assert used.name == "pet"
    Pet.model_validate(used.input)


# importing and using langchain-core raises its own deprecation warnings
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_a_model(url: str, name: str, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0)  # pyright: ignore
    structured = model.with_structured_output(Pet, method=method)
    assert isinstance(structured.invoke("A pet, please."), Pet)
