"""A gpt-oss of random weights in the server: both protocols report its tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from nano_inference import EngineConfig
from nano_inference.server.api.parsing.harmony import HarmonyParser
from nano_inference.server.main import running_server
from nano_inference.text.tokenizer import load_tokenizer
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.server.harmony import harmony_tokenizer

ASKED: Any = [{"role": "user", "content": "What is the weather?"}]
MOST = 24  # tokens of an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model whose windows are shorter than any prompt."""
    folder = harmony_tokenizer(tmp_path_factory.mktemp("gpt-oss"))
    tokenizer, case = load_tokenizer(folder), CASES["gpt-oss"]
    strong_model(folder, case.class_name, **case.config | {"vocab_size": tokenizer.vocab_size})
    ends = [tokenizer.backend.token_to_id(each) for each in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = EngineConfig(str(folder), device="cpu", num_threads=1, kv_cache_memory=2**24)
    with running_server(config) as url:
        yield url


@pytest.mark.thorough
def test_chat_matches_its_tokens(folder: Path, url: str) -> None:
    tokenizer = load_tokenizer(folder)
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": str(folder), "messages": ASKED, "max_tokens": MOST, "seed": 5}
        whole: Any = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        (choice,) = whole.choices
        prompt = tokenizer.decode(whole.prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith(
            "<|start|>user<|message|>What is the weather?<|end|><|start|>assistant"
        )
        parser = HarmonyParser(tools=False, reasoning=True, prompt_tail="<|start|>assistant")
        said = parser.push(tokenizer.decode(choice.token_ids, skip_special_tokens=False))
        last = parser.finish()
        assert choice.message.content == said.content + last.content
        assert (choice.message.reasoning_content or "") == said.reasoning + last.reasoning
        assert len(choice.token_ids) == MOST
        chunks = list(client.chat.completions.create(**asked, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == choice.message.content


@pytest.mark.thorough
def test_message_of_anthropic_is_the_same_answer(folder: Path, url: str) -> None:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=str(folder), max_tokens=MOST, messages=ASKED, extra_body={"temperature": 0.0}
        )
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as chat:
        asked: Any = {"model": str(folder), "messages": ASKED, "max_tokens": MOST}
        answer = chat.chat.completions.create(**asked, temperature=0.0)
    assert message.stop_reason == "max_tokens"
    texts = [block.text for block in message.content if block.type == "text"]
    assert texts == [answer.choices[0].message.content]
