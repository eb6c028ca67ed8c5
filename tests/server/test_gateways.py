"""Servers after a gateway: path prefixes, socket files, model names, probes and proxies."""

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nano_inference.cli.options import read_template
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.http.test_edge import check_error
from tests.server.scripted import Script, ScriptedClient

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def client() -> ScriptedClient:
    return ScriptedClient(Script("one two three"))


@pytest.fixture(scope="module")
def url(client: ScriptedClient) -> Iterator[str]:
    config = ServerConfig(
        port=0,
        root_path="/llm/one",
        served_model_name=("first", "second"),
        admin_key="admin",
        chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )
    with running_server(client, config) as url:
        yield url


@pytest.mark.thorough
def test_paths_are_served_with_a_proxys_prefix_and_without(url: str) -> None:
    for prefix in ("", "/llm/one"):
        assert httpx.get(url + prefix + "/health").json()["status"] == "ok"
        assert httpx.post(url + prefix + "/v1/chat/completions", json=CHAT).status_code == 200
        assert httpx.post(url + prefix + "/flush_cache").status_code == 401  # the same keys
        bad = httpx.post(url + prefix + "/v1/messages", json={})
        assert (bad.status_code, bad.json()["type"]) == (400, "error")  # the same form of errors
    for other in ("/llm", "/llm/onex/health", "/llm/one/llm/one/health", "/other/health"):
        check_error(httpx.get(url + other), 404)
    assert httpx.get(url + "/llm/one/openapi.json").json()["servers"] == [{"url": "/llm/one"}]
    assert httpx.get(url + "/llm/one").json() == httpx.get(url + "/").json()


@pytest.mark.thorough
def test_several_names(url: str) -> None:
    rows = httpx.get(url + "/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["first", "second"]
    both = httpx.get(url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (both["first_id"], both["last_id"]) == ("first", "second")
    assert httpx.get(url + "/v1/models/second").json()["id"] == "second"
    for name in ("first", "second", "scripted"):
        assert (
            httpx.post(url + "/v1/chat/completions", json=CHAT | {"model": name}).json()["model"]
            == "first"
        )
    check_error(httpx.post(url + "/v1/chat/completions", json=CHAT | {"model": "third"}), 404)


def test_chat_template_option_replaces_the_models(
    url: str, client: ScriptedClient, tmp_path: Path
) -> None:
    httpx.post(url + "/v1/chat/completions", json=CHAT)
    assert client.tokenizer.decode(client.requests[-1].prompt) == "<Hi>"
    file = tmp_path / "template.jinja"
    file.write_text("{{ x }}")
    assert read_template(file) == "{{ x }}"
    with pytest.raises(InvalidRequest, match=r"cannot read .*: no such file"):
        read_template(tmp_path / "none.jinja")


def test_probes(url: str) -> None:
    for reply in (httpx.get(url + "/ping"), httpx.post(url + "/ping")):
        assert (reply.status_code, reply.json()) == (200, httpx.get(url + "/health").json())
    assert httpx.get(url + "/load").json() == {"server_load": 0}


@pytest.mark.thorough
def test_first_page_and_404s_list_the_routes(url: str) -> None:
    about = httpx.get(url + "/").json()
    assert (about["name"], about["status"]) == ("nano-inference", "ok")
    paths = httpx.get(url + "/openapi.json").json()["paths"]
    for route in about["routes"]:
        method, path = route.split()
        assert method.lower() in paths[path]
    assert '"/no/such/route"' in check_error(httpx.get(url + "/no/such/route"), 404)
    assert '"/v1/x\\n"' in check_error(httpx.get(url + "/v1/x%0A"), 404)
    assert "/v1/completions" in check_error(httpx.get(url + "/v1/completions"), 405)


@pytest.mark.thorough
def test_socket_file(tmp_path: Path) -> None:
    file = tmp_path / "nano.sock"
    for mode in (0o600, 0o660):
        if mode != 0o600:  # a leftover socket that belongs to a group
            with socket.socket(socket.AF_UNIX) as old:
                old.bind(str(file))
            file.chmod(mode)
        with running_server(ScriptedClient(), ServerConfig(uds=str(file))) as url:
            assert url == f"unix:{file}"
            assert stat.S_IMODE(file.stat().st_mode) == mode
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(file)), base_url="http://nano"
            ) as http:
                assert (
                    http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code
                    == 200
                )
            with (
                pytest.raises(ConfigError, match="another server is listening"),
                running_server(ScriptedClient(), ServerConfig(uds=str(file))),
            ):
                pass
        assert not file.exists()
    file.write_text("mine")
    with (
        pytest.raises(ConfigError, match="not a socket"),
        running_server(ScriptedClient(), ServerConfig(uds=str(file))),
    ):
        pass
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "wrong",
    [
        {"root_path": "llm"},
        {"root_path": "/llm/"},
        {"root_path": "/"},
        {"root_path": "/a b"},
        {"served_model_name": ("a", "")},
        {"served_model_name": 3},
        {"uds": "x", "port": 9},
    ],
)
def test_options_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


HEADERS = [
    {"x-forwarded-for": "10.0.0.7"},
    {"forwarded": "for=10.0.0.7"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "10.0.0.7"},
    {"x-forwarded-host": "llm.example"},
]


@pytest.mark.thorough
@pytest.mark.parametrize("headers", HEADERS)
def test_forwarded_headers_are_not_trusted(
    trainers: tuple[str, str, str], headers: dict[str, str]
) -> None:
    trusting, open_, keyed = trainers
    assert httpx.post(trusting + "/flush_cache").status_code == 200
    assert "proxy" in check_error(httpx.post(trusting + "/flush_cache", headers=headers), 403)
    assert (
        httpx.post(trusting + "/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code
        == 200
    )
    assert httpx.post(open_ + "/flush_cache", headers=headers).status_code == 200
    assert (
        httpx.post(keyed + "/flush_cache", headers=headers | {"x-api-key": "admin"}).status_code
        == 200
    )


@pytest.fixture(scope="module")
def trainers() -> Iterator[tuple[str, str, str]]:
    def running(**options):
        client = ScriptedClient()
        client.returns |= {"flush_cache": None, "is_paused": False}
        return running_server(client, ServerConfig(port=0, rl=True, **options))

    with running() as one, running(rl_open=True) as two, running(admin_key="admin") as three:
        yield one, two, three
