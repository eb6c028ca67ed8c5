"""`/v1/embeddings` through OpenAI's client, on an engine process of a tiny model and on a fleet of
two.
"""

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from nano_inference import InferenceEngine
from nano_inference.remote.messages import Failed, Returned
from nano_inference.server.api.openai.embeddings import EmbeddingsAsked
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.models.tiny import tiny_llama
from tests.server.engines import config_of
from tests.server.scripted import ScriptedClient

INPUTS = [[3, 4, 5], [6, 7], *([place, 9] for place in range(10, 20))]


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two replicas"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OpenAI, list[np.ndarray]]]:
    """Yield a client and the engine's own embeddings."""
    folder = tiny_llama(tmp_path_factory.mktemp("model"), seed=0)
    with InferenceEngine(config_of(folder)) as engine:
        rows = [row.numpy() for row in engine.embed(INPUTS)]
        limit = engine.max_model_len
    config = ServerConfig(
        port=0, in_process=request.param == 1, replicas=request.param, max_samples=limit
    )
    with (
        running_server(config_of(folder), config) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made, rows


@pytest.mark.thorough(cases=["two replicas"])
def test_embeddings_are_the_engines(client: tuple[OpenAI, list[np.ndarray]]) -> None:
    openai_client, rows = client
    for form in ("base64", "float"):
        for _ in range(2):
            reply = openai_client.embeddings.create(
                model="", input=INPUTS, encoding_format=form, extra_body={"model": None}
            )
            assert [each.index for each in reply.data] == list(range(len(INPUTS)))
            assert reply.usage.prompt_tokens == sum(map(len, INPUTS))
            for each, row in zip(reply.data, rows, strict=True):
                told = each.embedding
                if isinstance(told, str):
                    told = np.frombuffer(__import__("base64").b64decode(told), "<f4")
                assert np.array_equal(np.asarray(told, np.float32), row)


@pytest.mark.thorough(cases=["two replicas"])
def test_concurrent_embeddings_clients_wait_for_each_other(
    client: tuple[OpenAI, list[np.ndarray]],
) -> None:
    openai_client, _ = client

    async def ask_all() -> list[int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=str(openai_client.base_url), timeout=60, limits=limits
        ) as http:
            body = {"input": [list(range(40))] * 8}
            asked = [http.post("embeddings", json=body) for _ in range(120)]
            return [each.status_code for each in await asyncio.gather(*asked)]

    assert set(asyncio.run(ask_all())) == {200}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "input is empty"),
        ([[]], "input"),
        ([3.5], "input holds 3.5"),
        ([[10**6]], "input"),
        ([3] * 5000, "maximum context length"),
    ],
    ids=["none", "empty", "float", "beyond", "long"],
)
@pytest.mark.thorough(
    cases=[f"two replicas-{each}" for each in ("none", "empty", "float", "beyond", "long")]
)
def test_invalid_embedding_input_is_named(
    client: tuple[OpenAI, list[np.ndarray]], given: object, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as problem:
        client[0].post("/embeddings", body={"input": given}, cast_to=object)
    assert problem.value.param == "input"


class StandingClient(ScriptedClient):
    """Client that answers calls only once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = False
        self.returns["embed"] = [bytes(8)] * 8

    def _later(self, message: Returned | Failed) -> None:
        def answer() -> None:
            self._receive(message) if self.go else self._later(message)

        asyncio.get_running_loop().call_later(0.01, answer)


def test_queued_inputs_count_against_max_queued_samples() -> None:
    client = StandingClient()  # runs 32 samples concurrently
    config = ServerConfig(port=0, in_process=True, max_queued_samples=8)

    async def ask(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:

            def embed(num_inputs: int) -> asyncio.Task[httpx.Response]:
                body = {"input": [[7]] * num_inputs}
                return asyncio.create_task(http.post("/v1/embeddings", json=body))

            first = embed(40)
            while not client.calls:
                await asyncio.sleep(0.01)
            refused = await asyncio.wait_for(embed(8), 30)
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            completion = {"prompt": "Hi", "max_tokens": 1}
            generation = await http.post("/v1/completions", json=completion)
            client.go = True
            answered = await first
            after = await embed(40)
            return [each.status_code for each in (refused, generation, answered, after)]

    with running_server(client, config) as url:
        try:
            assert asyncio.run(ask(url)) == [429, 429, 200, 200]
        finally:
            client.go = True


class SlowClient(ScriptedClient):
    """Client whose calls take a while."""

    def _later(self, message: Returned | Failed) -> None:
        asyncio.get_running_loop().call_later(0.2, self._receive, message)


def test_deadline_is_that_of_the_whole_request() -> None:
    client = SlowClient()
    client.returns["embed"] = [bytes(8)] * 8
    config = ServerConfig(port=0, in_process=True, request_timeout=0.5)
    with running_server(client, config) as url:
        reply = httpx.post(f"{url}/v1/embeddings", json={"input": [[7]] * 40}, timeout=60)
    assert reply.status_code == 504
    assert len(client.calls) <= 3


def test_large_answer_is_not_made_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    told = EmbeddingsAsked._told  # pyright: ignore[reportPrivateUsage]

    def watched(asked: EmbeddingsAsked, row: bytes) -> str | list[float]:
        try:
            asyncio.get_running_loop()
            on_loop.append(True)
        except RuntimeError:
            on_loop.append(False)
        return told(asked, row)

    monkeypatch.setattr(EmbeddingsAsked, "_told", watched)
    client = ScriptedClient()
    client.returns["embed"] = [np.arange(50_000, dtype="<f4").tobytes()] * 8
    with running_server(client, ServerConfig(port=0, in_process=True)) as url:
        reply = httpx.post(f"{url}/v1/embeddings", json={"input": [[7]] * 8}, timeout=60)
    rows = [each["embedding"] for each in reply.json()["data"]]
    assert [row[-1] for row in rows] == [49_999.0] * 8
    assert on_loop == [False] * 8
