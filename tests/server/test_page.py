"""The server's page and `/docs` over HTTP: loaded resources, names and access. `tests/server/page`
tests them in a browser.
"""

import ast
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from msgspec.structs import replace

from nano_inference.checkpoints.generation_defaults import generation_defaults
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.app import build_routes
from nano_inference.server.config import ServerConfig
from nano_inference.server.http.layers import LEVELS, RL_LEVELS, Level
from nano_inference.server.main import (
    PROTOCOLS,
    RL_PROTOCOLS,
    RL_ROUTES,
    ROUTES,
    running_server,
)
from nano_inference.server.page import api_docs
from nano_inference.server.page.api_docs import (
    FAMILIES,
    Example,
    Family,
    can_be_tried,
    curl,
    docs_page,
    python,
    routes_of,
)
from nano_inference.server.page.routes import FILES, page_settings
from nano_inference.server.paths import CHANGING, PAGE, PAGE_FILES
from nano_inference.server.server import Server
from nano_inference.types import SamplingParams
from tests.fleet.fleets import Made
from tests.server.engines import stats_with
from tests.server.scripted import Script, ScriptedClient, sources

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
KEY = "page-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    client = ScriptedClient()
    client.returns["stats"] = stats_with()
    config = ServerConfig(port=0, api_keys=(KEY,), served_model_name="secret-model", rl=True)
    with running_server(client, config) as url:
        yield url


def test_browsers_get_the_page_and_others_the_routes(url: str) -> None:
    page = httpx.get(url + "/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>nano-inference</title>" in page.text
    about = httpx.get(url + "/")
    assert about.headers["content-type"] == "application/json"
    assert "POST /v1/chat/completions" in about.json()["routes"]
    assert page.headers["vary"] == about.headers["vary"] == "accept"
    for reply in (page, about, httpx.get(url + "/docs")):  # no key was given
        assert "secret-model" not in reply.text


@pytest.mark.parametrize("path", sorted(PAGE))
def test_page_runs_no_foreign_code(url: str, path: str) -> None:
    reply = httpx.get(url + path, headers=BROWSER)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(TYPES.get(Path(path).suffix, "text/html"))
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    assert policy == {
        "default-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "object-src": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    # The only foreign address is the name of SVG's elements, which loads nothing.
    matched = set(re.findall(r"(?:https?:)?//[\w.-]+[^\s\"'<>&]*", reply.text.replace(url, "")))
    assert {each for each in matched if "://" in each} <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|javascript:", reply.text)


def test_page_files_exist_and_are_used(url: str) -> None:
    assert {file.name for file in FILES.iterdir()} == {*PAGE_FILES, "index.html"}
    named = set[str]()
    for path in ("/", "/docs"):
        text = httpx.get(url + path, headers=BROWSER).text
        links = set(re.findall(r'(?:href|src)="(/[^"#]*)', text))
        named |= links
        routes = {link for link in links if not link.startswith("/page/")}
        assert routes <= {"/", "/docs", "/openapi.json"}
    for name in PAGE_FILES:
        text = (FILES / name).read_text(encoding="utf-8")
        named |= {f"/page/{other}" for other in re.findall(r'from "\./([^"]+)"', text)}
    assert {each for each in named if each.startswith("/page/")} == {
        f"/page/{n}" for n in PAGE_FILES
    }


def test_page_scripts_name_existing_elements() -> None:
    page = (FILES / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    scripts = "".join(
        (FILES / name).read_text(encoding="utf-8") for name in PAGE_FILES if ".js" in name
    )
    named = set(re.findall(r'byId\("([^"]+)"\)', scripts))
    assert named
    assert named <= set(ids)
    assert set(re.findall(r'aria-labelledby="([^"]+)"|\sfor="([^"]+)"', page)) - {("", "")}
    for pair in re.findall(r'aria-labelledby="([^"]+)"|\sfor="([^"]+)"', page):
        assert "".join(pair) in ids


def test_page_reads_no_text_as_html() -> None:
    for name in PAGE_FILES:
        text = (FILES / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|"
            r"createContextualFragment|setHTML|parseHTML|srcdoc|createPolicy|"
            r"setTimeout\([\"'`]|setInterval\([\"'`]",
            text,
        ), name


def test_links_of_answers_are_made_in_one_place() -> None:
    """Create links from a model's addresses in `anchor` only, which accepts http and https."""
    made = {
        name: count
        for name in PAGE_FILES
        if (count := (FILES / name).read_text(encoding="utf-8").count("href:"))
    }
    assert made == {"markdown.js": 1}
    text = (FILES / "markdown.js").read_text(encoding="utf-8")
    body = text.split("function anchor(")[1].split("\n}\n")[0]
    guard, _, link = body.partition("return null;")
    assert "/^https?:\\/\\//i.test(target)" in guard
    assert 'html("a", { href: target' in link
    assert "noopener" in link


def test_page_loads_before_the_engine_and_without_a_key(url: str) -> None:
    for path in ("/", "/docs", "/page/main.js"):
        assert httpx.get(url + path, headers=BROWSER).status_code == 200
    for path in ("/stats", "/metrics", "/v1/models"):
        assert httpx.get(url + path, headers=BROWSER).status_code == 401
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(url + path, headers=headers).status_code == 200
    assert httpx.get(url + "/page/none.js").status_code == 401


def test_page_settings_need_the_key_and_name_the_model(url: str) -> None:
    assert httpx.get(url + "/page/settings").status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    said = httpx.get(url + "/page/settings", headers=headers).json()
    assert said["model"] == "secret-model"
    assert said["max_model_len"] == 2048
    assert said["eos_token_ids"]
    assert said["sampling"]["temperature"] == SamplingParams().temperature


def test_page_settings_are_the_defaults_of_requests(tmp_path: Path) -> None:
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 12}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    client = ScriptedClient()
    config = ServerConfig(port=0, generation_config=str(tmp_path))
    with running_server(client, config) as url:
        said = httpx.get(url + "/page/settings").json()["sampling"]
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert httpx.post(url + "/v1/chat/completions", json=body).status_code == 200
    params = client.requests[0].params
    assert said == {name: getattr(params, name) for name in said}
    assert said.items() >= fields.items()


def neutral() -> dict[str, float]:
    """Return the engine's default sampling parameters."""
    names = ("temperature", "top_p", "top_k", "min_p")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(SamplingParams(), name) for name in (*names, *penalties)}


@pytest.mark.parametrize(
    ("model", "config", "told"),
    [
        ("scripted", {}, {"temperature": 0.7}),  # no recommended parameters
        ("smollm2-135m", {}, {"temperature": 0.2, "top_p": 0.9}),
        ("smollm2-135m", {"generation_config": "none"}, {}),
        ("scripted", {"rl": True}, {}),
    ],
)
def test_page_settings_are_the_defaults_of_generate_and_chat(
    model: str, config: dict[str, Any], told: dict[str, float], tmp_path: Path
) -> None:
    client = ScriptedClient()
    info = replace(client._engine_info(), sampling_defaults=generation_defaults(tmp_path, model))
    served = Served(model, info, client.tokenizer, ChatFormat(), ServerConfig(**config))
    assert page_settings(served)["sampling"] == neutral() | told


def test_proxys_prefix_is_before_every_link() -> None:
    with running_server(ScriptedClient(), ServerConfig(port=0, root_path="/llm")) as url:
        for path in ("/llm/", "/llm/docs"):
            text = httpx.get(url + path, headers=BROWSER).text
            links = re.findall(r'(?:href|src)="(/[^"]*)"', text)
            assert links
            assert all(link.startswith("/llm/") for link in links)
        assert f"{url}/llm/v1/models" in httpx.get(url + "/llm/docs").text


def test_strange_host_is_not_repeated(url: str) -> None:
    text = httpx.get(url + "/docs", headers={"host": "x$(reboot)"}).text
    assert "reboot" not in text
    assert "http://127.0.0.1:8000/v1/models" in text


# -- /docs -----------------------------------------------------------------------------------------


def all_routes() -> dict[str, dict[str, str]]:
    """Return the routes of a server with trainers' routes and replicas."""
    config = ServerConfig(rl=True, replicas=2)
    server = Server(config, sources(Made(2, Script()).client))
    app = build_routes(server, PROTOCOLS | RL_PROTOCOLS, (*ROUTES, *RL_ROUTES))
    shown = {r.path_format for r in app.routes if isinstance(r, APIRoute) and r.include_in_schema}
    found = {path: dict(methods) for path, methods in routes_of(app).items()}
    assert set(found) == shown
    return found


def test_route_table_matches_the_routes() -> None:
    named = [path for family in FAMILIES for path in family.paths]
    assert len(named) == len(set(named))
    assert set(named) == set(all_routes())


def test_routes_have_descriptions() -> None:
    for path, methods in all_routes().items():
        assert all(methods.values()), path


def test_page_lists_exactly_the_routes() -> None:
    routes = all_routes()
    for there in (routes, {path: routes[path] for path in ("/health", "/v1/completions")}):
        text = docs_page(there, "http://host")
        rows = set(re.findall(r"<td><code>(\w+ [^<]+)</code>", text))
        assert rows == {f"{method} {path}" for path in there for method in there[path]}
        called = set(re.findall(r"curl http://host(/[^ <]*)", text))
        assert called
        assert called <= set(there)


EXAMPLES = [(family, each) for family in FAMILIES for each in family.examples]


@pytest.mark.thorough(cases=["-/update_weights_from_disk"])
@pytest.mark.parametrize(
    ("family", "example"), EXAMPLES, ids=lambda each: getattr(each, "path", "")
)
def test_examples_can_be_run(url: str, family: Family, example: Example) -> None:
    assert example.path in family.paths
    method = "GET" if example.body is None else "POST"
    assert method in all_routes()[example.path]
    command = curl(example, "http://host")
    assert command.count("'") == (0 if example.body is None else 2)
    program = python(example, family, "http://host")
    ast.parse(program)
    assert "URL" not in program
    if example.path in PROTOCOLS | RL_PROTOCOLS or example.path in ("/tokenize", "/detokenize"):
        body = {name: value for name, value in (example.body or {}).items() if value != "MODEL"}
        model = {"model": "secret-model"} if "model" in (example.body or {}) else {}
        headers = {"authorization": f"Bearer {KEY}"}
        reply = httpx.post(url + example.path, json=body | model, headers=headers)
        assert reply.status_code == 200, reply.text


def test_docs_have_an_index() -> None:
    text = docs_page(all_routes(), "http://host")
    linked = re.findall(r"<a href='#([^']+)'>([^<]+)</a>", text)
    sections = re.findall(r"<section class='card' id='([^']+)'><h2>([^<]+)</h2>", text)
    assert linked == sections
    assert len({each for each, _ in sections}) == len(FAMILIES)
    few = docs_page({"/health": {"GET": ""}}, "http://host")
    assert re.findall(r"<a href='#([^']+)'>", few) == ["metrics-and-health"]


def test_docs_try_examples_that_change_nothing() -> None:
    tried = {each.path for _, each in EXAMPLES if can_be_tried(each)}
    assert {"/v1/chat/completions", "/v1/embeddings", "/tokenize", "/metrics"} <= tried
    assert not tried & CHANGING
    for path in tried:
        assert (LEVELS | RL_LEVELS).get(path, Level.KEY) is not Level.ADMIN
    text = docs_page(all_routes(), "http://host")
    assert set(re.findall(r"data-path='([^']+)'", text)) == tried
    bodies = [json.loads(unescape(each)) for each in re.findall(r"data-body='([^']+)'", text)]
    assert bodies == [each.body for _, each in EXAMPLES if each.body and each.path in tried]


def test_docs_escape_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "MODEL", "prompt": "</pre><script>alert(1)</script>' onclick='x"}
    hostile = Family("T", "a", ("/tokenize",), (Example("/tokenize", "<b>", body),))
    monkeypatch.setattr(api_docs, "FAMILIES", (hostile,))
    text = docs_page({"/tokenize": {"POST": ""}}, "http://host")
    assert "&lt;b&gt;" in text
    text = text.replace('<script type="module" src="/page/docs.js">', "")
    assert "<script" not in text
    assert "<b>" not in text
    assert "' onclick" not in text
