"""OpenAI's own client, with strict validation, on a scripted engine whose model thinks and
calls.
"""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, Script, ScriptedClient, with_template


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ScriptedClient:
    folder = with_template(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)
    return ScriptedClient(tokenizer_folder=folder, max_model_len=512)


@pytest.fixture(scope="module")
def url(engine: ScriptedClient) -> Iterator[str]:
    with running_server(engine) as url:
        yield url


@pytest.fixture
def script(engine: ScriptedClient) -> ScriptedClient:
    engine.script = Script("Hello there, 🙂!", cached_tokens=3)
    engine.requests.clear()
    return engine


@pytest.fixture(scope="module")
def shared_client(url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
def client(shared_client: OpenAI, script: ScriptedClient) -> OpenAI:
    """Return a client of a server whose engine has served no requests yet."""
    return shared_client
