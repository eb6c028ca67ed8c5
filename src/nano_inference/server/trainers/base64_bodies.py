"""JSON bodies that bring a file of up to gigabytes as base64.

Reading one must not stop the event loop, and a thread that holds the interpreter's lock for seconds
would. So the text of the file is taken out before the JSON is parsed, and decoded in portions.
"""

import binascii
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.server.api.shared.json_limits import decode
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import bad_request

LONG = 1 << 16  # bytes of a string that is taken out
MOST_STRINGS = 1000  # that are looked at for a long one
WINDOW = 1 << 26  # bytes that are searched at a time
MOST_PADDING = 2  # characters at the end of base64, for a byte each
PORTION = 1 << 22  # characters of base64 that are decoded at a time; a multiple of four


def read_with_file(
    body: bytes, config: ServerConfig, names: Sequence[str]
) -> tuple[dict[str, Any], bytearray | None]:
    """The JSON object that a body holds, and the file that the first of the fields `names` that is
    there brings, whose text the object no longer has; None: that field holds no string, nor a list
    of one.

    Raises `ApiError`, 400.
    """
    if not body or body.isspace():
        return {}, None
    marker = f"file {secrets.token_hex(16)}"
    place = _long_string(body)
    text: memoryview | str | None = None
    if place is not None:
        short = body[: place.start] + marker.encode() + body[place.stop :]
        given = decode(short, config)
        name, found = _text_of(given, names)
        if found == marker:
            text = memoryview(body)[place]
        else:
            given = decode(body, config)  # the long string is another field's
    else:
        given = decode(body, config)
    name, found = _text_of(given, names)
    if name is None or found is None:
        return given, None
    content = decoded(found if text is None else text, name)
    return {**given, name: [""]}, content


def decoded(text: memoryview | str, name: str) -> bytearray:
    """What base64 says, decoded in portions. Raises `ApiError`, 400, which names the field."""
    problem = bad_request(f"{name} is not base64.", name)
    content = bytearray(len(text) // 4 * 3)
    written = 0
    for start in range(0, len(text), PORTION):
        try:
            piece = binascii.a2b_base64(text[start : start + PORTION], strict_mode=True)
        except ValueError:  # what is not ASCII, too
            raise problem from None
        if start + PORTION < len(text) and len(piece) != PORTION // 4 * 3:
            raise problem  # it ends in the middle
        content[written : written + len(piece)] = piece
        written += len(piece)
    if len(text) % 4 or len(content) - written > MOST_PADDING:
        raise problem
    del content[written:]
    return content


def _long_string(body: bytes) -> slice | None:
    """Where the first long string of a JSON text lies, without its quotes; None: there is none, or
    strings with escapes come first.
    """
    end = -1
    for _ in range(MOST_STRINGS):
        start = _find(body, b'"', end + 1, len(body)) + 1
        end = _find(body, b'"', start, len(body)) if start else -1
        if end < 0 or body[end - 1 : end] == b"\\":
            return None
        if end - start >= LONG:
            return None if _find(body, b"\\", start, end) >= 0 else slice(start, end)
    return None


def _find(body: bytes, byte: bytes, start: int, end: int) -> int:
    """As `bytes.find`, which lets no other thread run: in windows."""
    for place in range(start, end, WINDOW):
        if (found := body.find(byte, place, min(place + WINDOW, end))) >= 0:
            return found
    return -1


def _text_of(given: Mapping[str, Any], names: Sequence[str]) -> tuple[str | None, str | None]:
    """The first of these fields that is there, and its string."""
    name = next((each for each in names if given.get(each) is not None), None)
    if name is None:
        return None, None
    value = given[name]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return name, value if isinstance(value, str) else None
