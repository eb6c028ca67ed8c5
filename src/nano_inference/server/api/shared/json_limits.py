"""Strict JSON within limits: depth, values, keys."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import bad_request

MAX_CONTAINERS = 200_000  # `[],[],[]...` takes thirty times its length as Python objects
MAX_KEYS = 200_000  # of all objects together

# Every pattern takes about a megabyte at most: between two matches others run.
# Numbers, words, commas, colons and strings that are not long.
_RUN = re.compile(rb'(?:[^"\[\]{}]{1,1024}+|"(?:[^"\\]{1,256}+|\\.){0,64}+"){1,64}+', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# A piece of a longer string, and its end if the piece reaches it.
_PIECE = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){1,1024}+("?)|"', re.DOTALL)


def check_json(body: bytes, max_depth: int, max_values: int) -> None:
    """Refuse what nests deeper than `max_depth`, or has too many values, keys, or lists and
    objects.

    Raises `ApiError` 400.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers <= max_depth and body.count(b",") < max_values and body.count(b":") <= MAX_KEYS:
        return  # nearly always, and at once: what stands in strings is counted as well
    depth = containers = values = keys = 0
    for token in _tokens(body):
        if token in b"]}":
            depth -= 1
        elif token in b"[{":
            depth += 1
            containers += 1
            _require(depth, max_depth, "nests deeper than {} levels")
            _require(containers, MAX_CONTAINERS, "has more than {} lists and objects")
        else:
            values += token.count(b",")
            keys += token.count(b":")
            _require(keys, MAX_KEYS, "has more than {} keys")
            _require(values, max_values, "has more than {} values (max_values)")


def _require(number: int, most: int, what: str) -> None:
    if number > most:
        raise bad_request(f"the body {what.format(most)}.")


def _tokens(body: bytes) -> Iterator[bytes]:
    """Brackets, and runs of what stands between them, without the strings."""
    place = 0
    while place < len(body):
        if run := _RUN.match(body, place):
            place = run.end()
            if rest := _STRING.sub(b"", run[0]):
                yield rest
        elif body[place] != _QUOTE:
            yield body[place : place + 1]
            place += 1
        else:
            place = _end_of_string(body, place + 1)


def _end_of_string(body: bytes, place: int) -> int:
    while piece := _PIECE.match(body, place):
        place = piece.end()
        if piece[1] or piece[0] == b'"':
            return place
    return len(body)  # it has none


_QUOTE = ord('"')


def decode(body: bytes, config: ServerConfig) -> dict[str, Any]:
    """The JSON object that a body holds, within the server's limits. Raises `ApiError`, 400."""
    check_json(body, config.max_depth, config.max_values)
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise bad_request(f"the body is not valid JSON: {problem}") from None
    if not isinstance(given, dict):
        raise bad_request("the body must be a JSON object.")
    return given
