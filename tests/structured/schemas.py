"""Random JSON schemas within the features that all backends enforce, and documents for them."""

import json
import random
from typing import Any

NAMES = ("a", "b", 'c"\\', "é")
WORDS = ("", "x", "yes", "ja ü", 'a"b', "a/b\\n", "2020-02-28")
FORMATS = ("date", "ipv4", "uuid")


def schema_of(rng: random.Random, depth: int = 2, bounds: bool = True) -> dict[str, Any]:
    """Return a random schema.

    Args:
        rng: Source of randomness.
        depth: Greatest depth of arrays and objects.
        bounds: True if numbers have bounds.
    """
    kinds = ["string", "integer", "number", "enum", "boolean", "null"]
    if depth:
        kinds += ["object", "array", "anyOf", "object", "array", "tuple"]
    match rng.choice(kinds):
        case "string":
            return _string(rng)
        case "integer" if bounds and rng.random() < 0.7:
            low = rng.randint(-120, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1200)}
        case "number" if bounds and rng.random() < 0.7:
            low = rng.randint(-300, 300) / rng.choice((1, 4, 10))
            return {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, [1, {"k": "v"}]], 3)}
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: schema_of(rng, depth - 1, bounds) for name in names},
                "required": [name for name in names if rng.random() < 0.5],
                "additionalProperties": False,
            }
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": schema_of(rng, depth - 1, bounds),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "tuple":
            number = rng.randint(1, 3)
            return {
                "type": "array",
                "prefixItems": [schema_of(rng, depth - 1, bounds) for _ in range(number)],
                "minItems": number,
                "maxItems": number,
            }
        case "anyOf":
            return {"anyOf": [schema_of(rng, depth - 1, bounds) for _ in range(2)]}
        case kind:
            return {"type": kind}


def _string(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    match rng.randint(0, 3):
        case 0:
            schema["maxLength"] = rng.randint(0, 6)
        case 1:
            schema["pattern"] = rng.choice(("^[a-c]+$", "^a.?b$", r"^\d{1,3}(x|yz)?$", "b{2}"))
        case 2:
            schema["format"] = rng.choice(FORMATS)
        case _:
            pass
    return schema


def document_of(schema: dict[str, Any], rng: random.Random) -> Any:
    """Return a document that is often valid, with properties in the schema's order."""
    if rng.random() < 0.04:
        return rng.choice((None, -1, "zz", [], {}, 10**6, 0.5, True))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return document_of(rng.choice(schema["anyOf"]), rng)
    match schema["type"]:
        case "object":
            return {
                name: document_of(own, rng)
                for name, own in schema["properties"].items()
                if name in schema["required"] or rng.random() < 0.5
            }
        case "array":
            return _items_of(schema, rng)
        case "string":
            return rng.choice(
                (
                    *WORDS,
                    "ab",
                    "axb",
                    "abc",
                    "12yz",
                    "1x",
                    "xbbx",
                    "a\nb",
                    "2023-02-30",
                    "10.0.0.255",
                )
            )
        case "integer":
            edge = rng.choice((schema.get("minimum", 0), schema.get("maximum", 7)))
            return edge + rng.choice((-1, 0, 0, 1, 17))
        case "number":
            edge = schema.get("minimum", schema.get("exclusiveMinimum", 1))
            return edge + rng.choice((-1, 0, 0.5, 3, -0.001, 0.25))
        case "boolean":
            return rng.random() < 0.5
        case _:
            return None


def _items_of(schema: dict[str, Any], rng: random.Random) -> list[Any]:
    if "prefixItems" in schema:
        first = schema["prefixItems"]
        items = [document_of(own, rng) for own in first[: rng.choice((9, 9, 9, len(first) - 1))]]
        return items + [0] * (rng.random() < 0.1)
    number = schema["minItems"] + rng.choice((0, 0, 1, 2, 3))
    return [document_of(schema["items"], rng) for _ in range(number)]


def text_of(document: Any) -> str:
    """Serialize without whitespace."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
