"""Access to the engine's controls: levels of the trainers' routes, keys, web pages and disabled
routes.
"""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.errors import ConfigError
from nano_inference.server import paths
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.http.layers import Keys, host_name, is_address
from nano_inference.server.main import PROTOCOLS, RL_PROTOCOLS, RL_ROUTES, running_server
from nano_inference.server.runner import log_start
from nano_inference.server.server import Server
from tests.server.scripted import ScriptedClient, sources

# a key for administrators, for users, for everyone
SWAP, READ, ALIVE = "/update_weights", "/weight_info", "/liveness"
HERE = [(b"host", b"127.0.0.1:8000")]


def status(config: ServerConfig, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    try:
        Keys(config).require(path, headers)
    except ApiError as problem:
        return problem.status
    return 200


def test_dialect_routes_have_an_access_level() -> None:
    """Require a table entry for every route: without one it would be open to all users."""
    server = Server(ServerConfig(rl=True), sources(ScriptedClient()))
    router = APIRouter()
    for add in RL_ROUTES:
        add(router, server)
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes} == paths.CONTROL
    changed = {
        route.path for route in routes if (route.methods or set()) & {"POST", "PUT", "DELETE"}
    }
    only_read = {route.path for route in routes} - changed
    assert only_read == paths.READING | paths.OPEN
    assert set(RL_PROTOCOLS) == paths.GENERATION


def test_loopback_may_do_all_without_an_admin_key() -> None:
    assert status(ServerConfig(), "/flush_cache", HERE) == 403
    assert status(ServerConfig(rl=True), SWAP, HERE) == 200
    assert status(ServerConfig(rl=True), "/flush_cache", HERE) == 200
    assert status(ServerConfig(rl=True), SWAP, []) == 200  # HTTP/1.0


def test_keys_open_as_they_do_elsewhere() -> None:
    user, admin = (b"x-api-key", b"user"), (b"authorization", b"Bearer admin")
    only_users = ServerConfig(rl=True, api_keys=("user",))
    assert [status(only_users, path, HERE) for path in (SWAP, READ, ALIVE)] == [401, 401, 200]
    assert [status(only_users, path, [*HERE, user]) for path in (SWAP, READ, ALIVE)] == [
        200,
        200,
        200,
    ]
    both = ServerConfig(rl=True, api_keys=("user",), admin_key="admin")
    assert [status(both, path, [*HERE, user]) for path in (SWAP, READ, ALIVE)] == [403, 200, 200]
    assert [status(both, path, [*HERE, admin]) for path in (SWAP, READ, ALIVE)] == [200, 200, 200]
    # A page has no key. A reverse proxy with a key may forward any name.
    assert (
        status(both, SWAP, [(b"host", b"engine.example"), (b"origin", b"https://x.example"), admin])
        == 200
    )
    assert status(ServerConfig(rl=True, admin_key="admin"), SWAP, HERE) == 401


PAGES = [
    [*HERE, (b"origin", b"https://evil.example")],
    [*HERE, (b"origin", b"null")],
    [*HERE, (b"sec-fetch-site", b"cross-site")],
    [*HERE, (b"sec-fetch-site", b"same-site")],
    [*HERE, (b"sec-fetch-site", b"same-origin")],  # we serve none of these pages
    [(b"host", b"evil.example:8000")],
    [(b"host", b"localhost.evil.example")],
    [(b"host", b"127.0.0.1.evil.example")],
    [*HERE, (b"host", b"evil.example")],
    [(b"host", b"")],
]


@pytest.mark.parametrize("headers", PAGES)
def test_web_pages_may_not(headers: list[tuple[bytes, bytes]]) -> None:
    assert status(ServerConfig(rl=True), SWAP, headers) == 403
    assert status(ServerConfig(rl=True), READ, headers) == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.3:80", "mybox:1"]
)
def test_addresses_and_its_own_name_may(host: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nano_inference.server.config.is_loopback", lambda _: True)
        config = ServerConfig(rl=True, host="MyBox")
    assert status(config, SWAP, [(b"host", host.encode()), (b"sec-fetch-site", b"none")]) == 200


def test_trusting_server_accepts_any_host_name() -> None:
    config = ServerConfig(rl=True, rl_open=True, host="0.0.0.0")
    assert status(config, SWAP, [(b"host", b"node-3:8000")]) == 200
    assert (
        status(config, SWAP, [(b"host", b"node-3:8000"), (b"origin", b"https://evil.example")])
        == 403
    )


@pytest.mark.thorough
@given(st.text(st.characters(codec="latin-1"), max_size=40))
def test_host_name_is_never_taken_for_an_address(text: str) -> None:
    name = host_name(text)
    assert not is_address(name) or name == "localhost" or set(name) <= set("0123456789abcdef.:%")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl": True, "host": "0.0.0.0"}, "lets anyone who reaches it change the weights"),
        ({"rl": True, "host": "::"}, "lets anyone who reaches it"),
        ({"rl": True, "rl_open": True, "admin_key": "k"}, "omit one of the two"),
        ({"rl_open": True}, "needs rl=True"),
        ({"rl_timeout": 3.0}, "needs rl=True"),
        ({"disable_weight_updates": True}, "needs rl=True"),
        ({"weight_update_group_init_method": "tcp://a:1"}, "needs rl=True"),
        ({"rl": True, "disable_weight_updates": True}, "no group to stay out of"),
        ({"rl": True, "weight_update_group_init_method": "tcp://a:1"}, "belong together"),
        ({"rl": True, "rl_max_body_bytes": 0}, "rl_max_body_bytes=0"),
        ({"rl": True, "rl_timeout": float("nan")}, "rl_timeout=nan"),
    ],
)
def test_contradictory_access_options_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)


GROUP = {
    "rl": True,
    "weight_update_group_init_method": "tcp://10.0.0.1:9000",
    "weight_update_group_world_size": 3,
    "actor_llm_idx": 1,
}


@pytest.mark.parametrize(
    "options",
    [
        {"weight_update_group_init_method": "10.0.0.1:9000"},
        {"weight_update_group_init_method": "tcp://10.0.0.1"},
        {"weight_update_group_init_method": "tcp://10.0.0.1:99999"},
        {"weight_update_group_init_method": "file:///tmp/x"},
        {"weight_update_group_init_method": "tcp://h:1/x"},
        {"weight_update_group_init_method": 3},
        {"actor_llm_idx": 2},
        {"actor_llm_idx": -1},
        {"actor_llm_idx": True},
        {"weight_update_group_world_size": "3"},
    ],
)
def test_group_of_the_start_is_checked(options: Mapping[str, Any]) -> None:
    ServerConfig(**GROUP)
    ServerConfig(
        **{
            **GROUP,
            "weight_update_group_world_size": 1,
            "actor_llm_idx": 0,
            "disable_weight_updates": True,
        }
    )
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**{**GROUP, **options})


@pytest.mark.thorough
def test_disabled_route_names_its_option() -> None:
    with (
        running_server(ScriptedClient(), ServerConfig(port=0)) as url,
        httpx.Client(base_url=url) as client,
    ):
        for path in (paths.CONTROL | paths.GENERATION) - {"/flush_cache"}:
            for method in ("GET", "POST"):
                reply = client.request(method, path)
                assert (reply.status_code, "--rl" in reply.json()["error"]["message"]) == (
                    404,
                    True,
                ), path
        assert "--rl" not in client.get("/no/such/route").text


@pytest.mark.thorough
def test_changing_routes_reject_web_pages_over_http() -> None:
    config = ServerConfig(port=0, rl=True, cors_origins=("*",))
    with running_server(ScriptedClient(), config) as url, httpx.Client(base_url=url) as client:
        for path in paths.CONTROL:
            reply = client.post(path, json={}, headers={"origin": "https://evil.example"})
            assert (reply.status_code == 403) == (path in paths.CHANGING), path


@pytest.mark.thorough
def test_bodies_of_weights_may_be_larger() -> None:
    config = ServerConfig(port=0, rl=True, max_body_bytes=1000, rl_max_body_bytes=5000)
    with running_server(ScriptedClient(), config) as url:

        def post(path: str, size: int) -> httpx.Response:
            return httpx.post(
                url + path, content=b" " * size, headers={"content-type": "application/json"}
            )

        for path in ("/update_weights_from_distributed", "/v1/completions"):
            assert post(path, 1001).status_code == 413
        assert post("/update_weights_from_tensor", 4000).status_code != 413
        assert "rl_max_body_bytes" in post("/update_weights_from_tensor", 5001).text
        bytes_ = {"content-type": "application/octet-stream"}
        assert (
            httpx.post(
                url + "/update_weights_from_tensor", content=b"x", headers=bytes_
            ).status_code
            != 415
        )
        assert (
            httpx.post(url + "/update_weights_from_disk", content=b"x", headers=bytes_).status_code
            == 415
        )
    with running_server(ScriptedClient(), ServerConfig(port=0, max_body_bytes=1000)) as url:
        assert post("/update_weights_from_tensor", 1001).status_code == 413


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl": True}, "on this machine"),
        ({"rl": True, "api_keys": ("secret",)}, "clients with an API key"),
        ({"rl": True, "admin_key": "secret"}, "holders of the admin key"),
        ({"rl": True, "host": "0.0.0.0", "rl_open": True}, "reach 0.0.0.0"),
    ],
)
def test_log_says_who_may_train(options: dict[str, Any], words: str, caplog) -> None:
    with caplog.at_level("INFO", "nano_inference.server"):
        log_start(ServerConfig(**options), "http://x:1")
    assert words in caplog.text
    assert "secret" not in caplog.text


def test_protocols_of_trainers_do_not_shadow_others() -> None:
    assert not set(RL_PROTOCOLS) & set(PROTOCOLS)
