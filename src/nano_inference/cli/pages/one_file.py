"""A page as one HTML file. Its policy permits its own style and script, and nothing else."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def html_page(title: str, *, body: str, style: str, script: str, data: Mapping[str, str]) -> str:
    """Return a complete HTML file.

    Args:
        title: Title of the page, plain text.
        body: HTML, without values from outside.
        style, script: CSS and JavaScript.
        data: Contents of JSON, as `encoded` returns them, by the id of their element.
    """
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    elements = (
        f'<script type="application/json" id="{name}">{text}</script>\n'
        for name, text in data.items()
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "body": body,
        "data": "".join(elements),
        "script": script,
    }
    head, *rest = text_of("page.html").split("{{")
    return head + "".join(
        parts[name] + behind for name, _, behind in (part.partition("}}") for part in rest)
    )


def text_of(*names: str, package: str = "nano_inference.cli.pages") -> str:
    """Return the texts of files of a package, joined."""
    return "".join((files(package) / name).read_text(encoding="utf-8") for name in names)


def encoded(content: Any) -> str:
    """Return JSON in ASCII, without characters that could end the enclosing element or begin
    another one. Raises `ValueError` for nan and infinities.
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
