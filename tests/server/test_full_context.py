"""A prompt that fills the context has the same scores and embedding over HTTP as in process."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nano_inference import InferenceEngine
from nano_inference.errors import RequestTooLarge
from nano_inference.rl import score
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.types import SamplingParams
from tests.models.tiny import tiny_llama
from tests.server.engines import config_of
from tests.server.streams import post


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[int], Any, Any]]:
    """Yield a server, a prompt as long as its context, and the engine's own scores and
    embedding.
    """
    folder = tiny_llama(tmp_path_factory.mktemp("model"), seed=0)
    with InferenceEngine(config_of(folder)) as engine:
        prompt = [3 + place % 50 for place in range(engine.max_model_len)]
        (scored,) = score(engine, [prompt])
        (row,) = engine.embed([prompt])
        with pytest.raises(RequestTooLarge):
            engine.generate([prompt], SamplingParams(max_tokens=2))
        with pytest.raises(RequestTooLarge):
            engine.embed([[*prompt, 3]])
    with running_server(config_of(folder), ServerConfig(port=0, in_process=True, rl=True)) as url:
        yield url, prompt, scored, row.numpy()


def test_completions_scores_a_prompt_that_fills_the_context(given: Any) -> None:
    url, prompt, scored, _ = given
    body = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0, "temperature": 0}
    reply = post(f"{url}/v1/completions", body)["choices"][0]["prompt_logprobs"]
    values = [
        each[str(token)]["logprob"] for each, token in zip(reply[1:], prompt[1:], strict=True)
    ]
    assert np.array_equal(np.float32(values), np.float32(list(scored)[-len(values) :]))
    for more in ({"max_tokens": 1}, {"max_tokens": None}):
        error = post(f"{url}/v1/completions", {**body, **more}, 400)["error"]
        assert error["code"] == "context_length_exceeded"
    error = post(f"{url}/v1/completions", {**body, "prompt": [*prompt, 3]}, 400)["error"]
    assert error["code"] == "context_length_exceeded"


def test_generate_scores_a_prompt_that_fills_the_context(given: Any) -> None:
    url, prompt, scored, _ = given
    sampling = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling}
    reply = post(f"{url}/generate", body | {"return_logprob": True, "logprob_start_len": 0})
    values = [each[0] for each in reply["meta_info"]["input_token_logprobs"][1:]]
    assert np.array_equal(np.float32(values), np.float32(list(scored)[-len(values) :]))
    for more in ({"max_new_tokens": 1}, {"max_new_tokens": None}):
        post(f"{url}/generate", body | {"sampling_params": sampling | more}, 400)
    post(f"{url}/generate", body | {"input_ids": [*prompt, 3]}, 400)


def test_embeddings_takes_a_prompt_that_fills_the_context(given: Any) -> None:
    url, prompt, _, row = given
    reply = post(f"{url}/v1/embeddings", {"input": prompt})["data"][0]["embedding"]
    assert np.array_equal(np.float32(reply), row)
    post(f"{url}/v1/embeddings", {"input": [*prompt, 3]}, 400)
