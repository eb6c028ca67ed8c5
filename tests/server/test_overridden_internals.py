"""The overridden internals of uvicorn and jinja2 exist and are still called. They are not public:
pyproject.toml caps both versions, and this test shows the changes if you raise a cap.
"""

import inspect
import re
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nano_inference.server.http.connection import Connection
from nano_inference.text import sandbox

ROOT = Path(__file__).parents[2]
PARAMETERS = {  # methods of uvicorn that `Connection` overrides or calls
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "send_400_response": ["self", "msg"],
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_uvicorn_has_the_methods_that_connection_overrides(name: str) -> None:
    parameters = inspect.signature(getattr(HttpToolsProtocol, name)).parameters
    assert list(parameters) == PARAMETERS[name], f"uvicorn {version('uvicorn')} changed {name}"


def test_connection_overrides_no_other_method_of_uvicorns() -> None:
    own = {name for name, value in vars(Connection).items() if inspect.isfunction(value)}
    theirs = {name for name, value in vars(HttpToolsProtocol).items() if inspect.isfunction(value)}
    assert own & theirs - {"__init__"} <= set(PARAMETERS)


def test_uvicorn_has_the_attributes_that_connection_reads() -> None:
    source = inspect.getsource(httptools_impl)
    for name in (
        *("parser", "cycle", "pipeline", "flow", "transport", "loop", "url", "headers", "scope"),
        *("timeout_keep_alive_task", "server_state"),
    ):
        assert re.search(rf"self\.{name}\b", source), f"uvicorn {version('uvicorn')}: {name}"
    assert httptools_impl.STATUS_LINE[200].startswith(b"HTTP/1.1 200 ")


def test_jinja2_has_the_methods_that_the_sandbox_overrides() -> None:
    for own, theirs in (
        (sandbox._CountedCode, CodeGenerator),  # pyright: ignore
        (sandbox._Environment, ImmutableSandboxedEnvironment),  # pyright: ignore
    ):
        extra = {"tick", "_bounded"}
        for name, value in vars(own).items():
            if inspect.isfunction(value) and name not in extra:
                assert hasattr(theirs, name), f"jinja2 {version('jinja2')} has no {name}"


@pytest.mark.parametrize(
    ("template", "guard"),
    [
        ("{% for a in b %}x{% endfor %}", "context.tick()"),
        ("{% for a in b if a %}x{% endfor %}", "environment.tick"),
        ("{% macro m() %}x{% endmacro %}", "context.tick()"),
        ("{{ a ~ b }}", "context.joined("),
        ("{{ a == b }}", "context.bounded("),
        ("{{ {a: b} }}", "context.bounded("),
        ("{{ a[1:2] }}", "context.charge("),
        ("{{ a * b }}", "call_binop"),
        ("{{ a(b) }}", "environment.call("),
    ],
)
def test_jinja2_calls_the_guards_in_the_code_that_it_makes(template: str, guard: str) -> None:
    environment: Any = sandbox._Environment()  # pyright: ignore
    assert guard in environment.compile(template, raw=True)


@pytest.mark.parametrize("name", ["uvicorn", "jinja2"])
def test_overridden_packages_have_version_caps(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    own = [each for each in rows if re.match(rf"{name}\b", each)]
    assert own
    assert all("<" in each for each in own), own
