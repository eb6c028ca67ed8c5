"""How deep and how branched a body of JSON may be, checked before it is parsed."""

import re

from nano_inference.serving.errors import bad_request

# A string (also one without an end: no second try starts within it, so that the scan is linear), or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)

MAX_CONTAINERS = 200_000  # `[],[],[]...` takes thirty times its length as Python objects


def check_json(body: bytes, max_depth: int) -> None:
    """Refuse what nests deeper than `max_depth`, or has too many lists and objects. Raises `ApiError` 400."""
    if body.count(b"[") + body.count(b"{") <= max_depth:  # nearly always, and at once
        return
    depth = containers = 0
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            containers += 1
            if depth > max_depth:
                raise bad_request(f"the body nests deeper than {max_depth} levels.")
            if containers > MAX_CONTAINERS:
                raise bad_request(f"the body has more than {MAX_CONTAINERS} lists and objects.")
        elif first in b"]}":
            depth -= 1
