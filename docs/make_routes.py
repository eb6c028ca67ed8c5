"""`python docs/make_routes.py`: writes the table of control routes in docs/routes.md between its
markers, from the routes' own rows. A test holds it current.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nano_inference.server.api.shared.openapi import schema_of
from nano_inference.server.control.requests.field_types import ControlRequest
from nano_inference.server.control.requests.table import DIALECTS

TARGET = Path(__file__).parent / "routes.md"
BEGIN, END = "<!-- control routes -->\n", "<!-- end of control routes -->"
KEYS = {"admin": "admin", "user": "API", "all": "none"}


def page(text: str) -> str:
    """Return the page with the current table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(table()) + "\n" + END + rest.partition(END)[2]


def table() -> Iterator[str]:
    """Return the lines of the table."""
    yield "| route | what it does | fields | key |"
    yield "|---|---|---|---|"
    for dialect, routes in DIALECTS.items():
        yield f"| **{dialect}** | | | |"
        for route in routes:
            key = KEYS[route.access]
            yield f"| `{route.call}` | {route.about} | {fields(route.body)} | {key} |"


def fields(model: type[ControlRequest]) -> str:
    """Return the fields of a request in one line. A question mark marks optional fields."""
    schema = schema_of(model)
    return ", ".join(_fields(schema))


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, each in schema.get("properties", {}).items():
        mark = "" if name in schema.get("required", ()) else "?"
        kinds = [kind for kind in each.get("anyOf", [each]) if kind.get("type") != "null"]
        (kind,) = kinds
        said = ""
        if "properties" in kind:
            said = " {" + ", ".join(_fields(kind)) + "}"
        elif "enum" in kind:
            said = " " + " / ".join(f'"{word}"' for word in kind["enum"])
        elif kind.get("type") == "boolean":
            said = f" {str(each['default']).lower()}" if each.get("default") is not None else ""
        elif kind.get("type") == "array":
            said = " […]"
        elif kind.get("type") == "integer" and each.get("default") is not None:
            said = f" {each['default']}"
        yield f"`{name}{mark}{said}`" if "properties" not in kind else f"`{name}`{mark}{said}"


def main() -> None:
    """Write the page."""
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
