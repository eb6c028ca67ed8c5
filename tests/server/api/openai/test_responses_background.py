"""Responses in the background, stored ones of several clients, sealed reasoning and truncation,
through OpenAI's own client.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from nano_inference.server.api.openai.kept_responses import (
    MOST,
    MOST_SECONDS,
    KeptResponse,
    KeptResponses,
)
from nano_inference.server.api.openai.responses_reasoning import Seal
from nano_inference.server.api.shared.detached import Detached
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, THINKS_AND_CALLS, Script, ScriptedClient, with_template

ENCRYPTED: Any = ["reasoning.encrypted_content"]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
ENDLESS = Script("a b c d e f g", ends=False, delay=0.005)
NEVER = Script("a", delay=3600.0)


def prompt(script: ScriptedClient) -> str:
    return script.tokenizer.decode(script.requests[-1].prompt, skip_special_tokens=False)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- in the background -----------------------------------------------------------------------------


def test_background_response_is_polled(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script(THINKS_AND_CALLS)
    queued = client.responses.create(model="scripted", input="x", tools=TOOLS, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    until(lambda: client.responses.retrieve(queued.id).status not in ("queued", "in_progress"))
    done = client.responses.retrieve(queued.id)
    assert done.status == "completed"
    whole = client.responses.create(model="scripted", input="x", tools=TOOLS)
    assert [item.type for item in done.output] == [item.type for item in whole.output]
    assert done.usage == whole.usage
    assert client.responses.cancel(queued.id) == done
    following = client.responses.create(model="scripted", input="y", previous_response_id=done.id)
    assert following.status == "completed"
    assert '"city": "Köln"' in prompt(script)


def test_background_stream_resumes_anywhere(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script(THINKS_AND_CALLS)
    options: Any = {"model": "scripted", "input": "x", "tools": TOOLS, "background": True}
    events: list[Any] = list(client.responses.create(**options, stream=True))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    name = events[0].response.id
    assert list(client.responses.retrieve(name, stream=True)) == events
    for after in range(len(events)):
        rest = client.responses.retrieve(name, stream=True, starting_after=after)
        assert list(rest) == events[after + 1 :]


def test_lost_stream_goes_on_and_is_canceled(client: OpenAI, script: ScriptedClient) -> None:
    script.script = ENDLESS
    stream = client.responses.create(model="scripted", input="x", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    name = first.response.id
    resumed = client.responses.retrieve(name, stream=True, starting_after=0)
    seen: list[Any] = []
    for event in resumed:
        seen.append(event)
        if len(seen) == 9:
            assert client.responses.retrieve(name).status == "in_progress"
            assert client.responses.cancel(name).status == "cancelled"
    assert [event.sequence_number for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].type == "response.failed"
    assert (seen[-1].response.status, seen[-1].response.error) == ("cancelled", None)
    assert seen[-1].response.output
    until(lambda: bool(script.aborted))


def test_deleted_response_is_aborted(client: OpenAI, script: ScriptedClient) -> None:
    script.script, before = NEVER, len(script.aborted)
    queued = client.responses.create(model="scripted", input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="still being generated"):
        client.responses.create(model="scripted", input="y", previous_response_id=queued.id)
    client.responses.delete(queued.id)
    until(lambda: len(script.aborted) > before)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(queued.id)


def test_failed_background_response_says_so(client: OpenAI, script: ScriptedClient) -> None:
    script.script = Script("Hello there.", fail_after=2)
    queued = client.responses.create(model="scripted", input="x", background=True)
    until(lambda: client.responses.retrieve(queued.id).status == "failed")
    error = client.responses.retrieve(queued.id).error
    assert error is not None
    assert error.code == "server_error"


def test_rejected_background_request_stores_nothing(url: str, script: ScriptedClient) -> None:
    body = {"input": "x", "background": True, "max_output_tokens": 10**6}
    assert httpx.post(f"{url}/v1/responses", json=body).status_code == 400
    assert not script.requests


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("?stream=true", "background: true and stream: true"),
        ("?starting_after=1", "requires stream"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?after=b", "no item"),
        ("/input_items?order=up", "order"),
    ],
)
def test_bad_query_is_rejected(client: OpenAI, url: str, path: str, said: str) -> None:
    name = client.responses.create(model="scripted", input="x").id
    reply = httpx.get(f"{url}/v1/responses/{name}{path}")
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


def test_foreground_response_cannot_be_canceled(client: OpenAI) -> None:
    name = client.responses.create(model="scripted", input="x").id
    with pytest.raises(openai.BadRequestError, match="not created with background"):
        client.responses.cancel(name)


def test_input_items_come_in_pages(client: OpenAI) -> None:
    said: Any = [{"role": "user", "content": str(number)} for number in range(7)]
    name = client.responses.create(model="scripted", input=said).id

    def texts(**options: Any) -> list[str]:
        pages = client.responses.input_items.list(name, limit=2, **options)
        return [item.content[0].text for item in pages]  # pyright: ignore

    assert texts(order="asc") == list("0123456")
    assert texts() == list("6543210")


# -- the store -------------------------------------------------------------------------------------


def running(name: str, kept: KeptResponses) -> Detached:
    detached = Detached(
        dict[str, Any], keeps_events=True, grew=lambda num_bytes: kept.grow(name, num_bytes)
    )
    kept.put(KeptResponse({"id": name}, [], [], detached=detached))
    return detached


def test_running_responses_are_never_dropped() -> None:
    kept = KeptResponses(1000)
    first = running("a", kept)
    for number in range(20):
        kept.put(KeptResponse({"id": f"x{number}", "text": "x" * 200}, [], []))
    assert kept.get("a").is_running
    first.append(b"x" * 700 + b"\n\n")
    with pytest.raises(ApiError, match="max_stored_responses") as problem:
        first.append(b"x" * 700 + b"\n\n")
    assert problem.value.status == 429
    assert kept._bytes > 1000
    first.close()
    kept.put(KeptResponse({"id": "b"}, [], []))
    with pytest.raises(ApiError):
        kept.get("a")
    assert kept._bytes < 100


def test_full_store_rejects_running_responses() -> None:
    kept = KeptResponses(100)
    running("a", kept).append(b"x" * 60 + b"\n\n")
    with pytest.raises(ApiError, match="max_stored_responses"):
        running("b" * 40, kept)
    with pytest.raises(ApiError, match="does not exist"):
        kept.get("b" * 40)


def test_old_and_surplus_responses_are_dropped() -> None:
    now = 0.0
    kept = KeptResponses(1 << 30, lambda: now)
    kept.put(KeptResponse({"id": "old"}, [], []))
    now = MOST_SECONDS + 1
    with pytest.raises(ApiError):
        kept.get("old")
    assert kept._bytes == 0
    for number in range(MOST + 1):
        kept.put(KeptResponse({"id": str(number)}, [], []))
    with pytest.raises(ApiError):
        kept.get("0")
    assert kept.get(str(MOST))
    now *= 2
    kept.put(KeptResponse({"id": "new"}, [], []))
    assert list(kept._kept) == ["new"]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedClient, str]]:
    folder = with_template(tmp_path_factory.mktemp("keyed"), TEMPLATE)
    engine = ScriptedClient(Script(THINKS_AND_CALLS), tokenizer_folder=folder, max_model_len=512)
    config = ServerConfig(port=0, api_keys=("one", "two"))
    with running_server(engine, config) as url:
        yield engine, url


def test_response_belongs_to_its_key(keyed: tuple[ScriptedClient, str]) -> None:
    _, url = keyed
    one, two = (
        OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=True)
        for key in ("one", "two")
    )
    name = one.responses.create(model="scripted", input="x", background=True).id
    for forbidden in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            forbidden(name)
    with pytest.raises(openai.NotFoundError):
        two.responses.input_items.list(name)
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        two.responses.create(model="scripted", input="x", previous_response_id=name)
    until(lambda: one.responses.retrieve(name).status == "completed")
    one.responses.create(model="scripted", input="x", previous_response_id=name)


# -- reasoning -------------------------------------------------------------------------------------


@given(st.text(), st.text(max_size=4), st.data())
def test_seal_opens_only_what_it_closed(text: str, owner: str, data: Any) -> None:
    seal = Seal("key")
    sealed = seal.close(text, owner)
    assert Seal("key").open(sealed, owner) == text
    assert seal.open(sealed, owner + "x") is None
    assert Seal("other").open(sealed, owner) is None
    assert Seal().open(sealed, owner) is None
    at = data.draw(st.integers(0, len(sealed) - 1))
    damaged = sealed[:at] + data.draw(st.characters()) + sealed[at + 1 :]
    assert seal.open(damaged, owner) in (None, text)
    assert damaged == sealed or seal.open(sealed[:at], owner) is None


@pytest.mark.parametrize("stream", [False, True])
def test_sealed_thought_is_rendered_again(tmp_path: Path, stream: bool) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    )
    folder = with_template(tmp_path, template)
    engine = ScriptedClient(
        Script("<think>\nWhat?\n</think>\n\nYes."), tokenizer_folder=folder, max_model_len=512
    )
    with (
        running_server(engine) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client,
    ):
        options: Any = {"model": "scripted", "store": False, "include": ENCRYPTED}
        if stream:
            done: Any = list(client.responses.create(**options, input="x", stream=True))[-1]
            output = done.response.output
        else:
            output = client.responses.create(**options, input="x").output
        items: Any = [json.loads(item.model_dump_json()) for item in output]
        sealed = items[0]["encrypted_content"]
        items[0] = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        client.responses.create(**options, input=[{"role": "user", "content": "x"}, *items])
        assert "assistant:<think>What?</think>Yes." in prompt(engine)
        for wrong in ("gAAAAABo", sealed[:-4], 7):
            items[0]["encrypted_content"] = wrong
            with pytest.raises(openai.BadRequestError, match="is damaged") as problem:
                client.responses.create(**options, input=items)
            assert problem.value.param == "input.0.encrypted_content"
            assert problem.value.code == "invalid_encrypted_content"


def test_sealed_thought_of_another_key_is_rejected(keyed: tuple[ScriptedClient, str]) -> None:
    engine, url = keyed
    thinks = httpx.post(
        f"{url}/v1/responses",
        json={"input": "x", "include": ENCRYPTED},
        headers={"x-api-key": "one"},
    ).json()["output"]
    for key, status in (("one", 200), ("two", 400)):
        reply = httpx.post(
            f"{url}/v1/responses",
            json={"input": [{"role": "user", "content": "x"}, *thinks]},
            headers={"x-api-key": key},
        )
        assert reply.status_code == status, reply.text
    assert engine.requests


# -- fields ----------------------------------------------------------------------------------------


def test_long_conversation_loses_its_oldest_turns(client: OpenAI, script: ScriptedClient) -> None:
    said: Any = [{"role": "developer", "content": "Be kind."}]
    for number in range(40):
        said += [
            {"role": "user", "content": f"question {number} of many, all of them long"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    said += [{"role": "user", "content": "The last."}]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="scripted", input=said, max_output_tokens=99)
    reply = client.responses.create(
        model="scripted", input=said, truncation="auto", max_output_tokens=99
    )
    assert reply.truncation == "auto"
    asked = prompt(script)
    assert asked.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nquestion")
    assert "question 39" in asked
    assert "question 0 " not in asked
    left = 512 - 99 - len(script.requests[-1].prompt)
    assert 0 <= left < 40
    assert len(script.requests) == 1
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="scripted", input="a " * 600, truncation="auto")


def test_fields_are_echoed(client: OpenAI) -> None:
    sent: Any = {
        "max_tool_calls": 3,
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "user": "c",
        "metadata": {"d": "e"},
        "truncation": "disabled",
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "include": ["web_search_call.action.sources", "message.input_image.image_url"],
    }
    reply = client.responses.create(model="scripted", input="x", **sent).to_dict()
    for name in sent.keys() - {"include", "text", "service_tier"}:
        assert reply[name] == sent[name]
    assert reply["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert reply["service_tier"] == "default"
