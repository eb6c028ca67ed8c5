"""A Qwen3.5 of random weights in the server, with state layers and thoughts: both protocols report
its tokens, and its logprobs match transformers, also after a cached prefix.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI
from tokenizers import Tokenizer

from nano_inference import EngineConfig
from nano_inference.server.main import running_server
from nano_inference.text.tokenizer import load_tokenizer
from tests.models.strong import TOLERANCE, strong_model
from tests.models.test_states import DELTA
from tests.server.scripted import smollm2

# As in Qwen3.5's: the answer begins inside of a thought, unless thoughts are off.
TEMPLATE = """\
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n<think>\\n" -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- "\\n</think>\\n\\n" -}}
{%- endif -%}
{%- endif -%}
"""
ASKED: list[dict[str, str]] = [{"role": "user", "content": "What is the weather in the north?"}]
MOST = 24  # tokens of an answer
PLAIN: Any = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Create the model's folder and the one for transformers."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    tokenizer = Tokenizer.from_file(str(smollm2() / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    size = tokenizer.get_vocab_size()
    oracle = strong_model(folder, "Qwen3_5ForCausalLM", **DELTA | {"vocab_size": size})
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, oracle


@pytest.fixture(scope="module")
def url(model: tuple[Path, Any]) -> Iterator[str]:
    config = EngineConfig(str(model[0]), device="cpu", num_threads=1, kv_cache_memory=2**24)
    with running_server(config) as url:
        yield url


@pytest.fixture
def chat(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def require_logprobs_of(oracle: Any, answer: Any) -> None:
    """Compare the logprobs of an answer's tokens with one pass of transformers."""
    (choice,) = answer.choices
    prompt, made = answer.prompt_token_ids, choice.token_ids
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([[*prompt, *made]]), use_cache=False).logits[0]
    theirs = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
    expected = theirs.gather(1, torch.tensor(made)[:, None])[:, 0]
    own = torch.tensor([token.logprob for token in choice.logprobs.content], dtype=torch.float64)
    assert (own - expected).abs().max() < TOLERANCE


@pytest.mark.thorough
def test_chat_matches_its_tokens(model: tuple[Path, Any], chat: OpenAI) -> None:
    folder, oracle = model
    asked: Any = {"model": str(folder), "messages": ASKED, "max_tokens": MOST, "seed": 5}
    fields = {"return_token_ids": True}
    whole: Any = chat.chat.completions.create(**asked, logprobs=True, extra_body=fields | PLAIN)
    (choice,) = whole.choices
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.decode(whole.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert choice.message.content == tokenizer.decode(choice.token_ids)
    assert len(choice.token_ids) == MOST
    require_logprobs_of(oracle, whole)
    chunks = list(chat.chat.completions.create(**asked, stream=True, extra_body=PLAIN))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content


@pytest.mark.thorough
def test_second_turn_finds_the_states_of_the_first(model: tuple[Path, Any], chat: OpenAI) -> None:
    folder, oracle = model
    fields = {"return_token_ids": True} | PLAIN
    asked: Any = {"model": str(folder), "max_tokens": MOST, "logprobs": True, "seed": 9}
    before: Any = ASKED
    first = chat.chat.completions.create(messages=before, **asked, extra_body=fields)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more: Any = [*ASKED, said, {"role": "user", "content": "And in the south?"}]
    second: Any = chat.chat.completions.create(messages=more, **asked, extra_body=fields)
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    require_logprobs_of(oracle, second)


@pytest.mark.thorough
def test_message_of_anthropic_is_the_same_answer(
    model: tuple[Path, Any], url: str, chat: OpenAI
) -> None:
    """The template opens a thought, which random weights do not close."""
    asked: Any = {"model": str(model[0]), "max_tokens": MOST, "messages": ASKED}
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        thinking: Any = {"type": "adaptive"}  # no budget closes the thought
        message = client.messages.create(
            **asked, thinking=thinking, extra_body={"temperature": 0.0}
        )
    answer: Any = chat.chat.completions.create(**asked, temperature=0.0)
    assert message.stop_reason == "max_tokens"
    (thought,) = message.content
    assert thought.type == "thinking"
    assert thought.thinking == answer.choices[0].message.reasoning_content
    assert not answer.choices[0].message.content
