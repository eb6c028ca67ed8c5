"""Reader of literals in Python's or Gemma's notation, which reports JSON while they come."""

import json
import math
import re
from collections.abc import Callable, Generator

from nano_inference.server.api.parsing.scanning import Steps, TextReader
from nano_inference.server.api.parsing.tool_formats import Notation
from nano_inference.server.api.parsing.typed_values import quoted

Say = Callable[[str], None]

_MOST_DEPTH = 64  # limit for lists and objects within each other
_MOST_WORD = 4096  # characters
_BARE_KEY = re.compile(r"[^\s:=(){}\[\],'\"]+")
_WORD = re.compile(r"[\w.+\-]+")
_BARE_TEXT = re.compile(r"[^,{}\[\]]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_RUN = re.compile(r"[^\\\"']+")
_MARKED_RUN = re.compile(r"[^<]+")
# escapes of one letter -> JSON. An unknown escape is a backslash and its letter.
_ESCAPES = {
    **{letter: "\\" + letter for letter in 'bfnrt\\"'},
    "'": "'",
    "/": "/",
    "\n": "",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
}
_DIGITS = {"x": 2, "u": 4, "U": 8}  # letter of an escape -> hexadecimal digits


class LiteralReader(TextReader):
    """Reader of literals. Each method reports JSON to `say`, and returns False if the text breaks
    off or is no literal.
    """

    def _literal(self, notation: Notation, say: Say, depth: int = 0) -> Steps:
        """Read a value, after whitespace."""
        if depth > _MOST_DEPTH or not (yield from self._space([])):
            return False
        for quote in notation.quotes:
            if (yield from self._take(quote)):
                return (yield from self._string(notation, quote, say))
        if (yield from self._take("[")):
            return (yield from self._items(notation, "]", say, depth))
        if notation.escapes and (yield from self._take("(")):
            return (yield from self._items(notation, ")", say, depth))
        if (yield from self._take("{")):
            return (
                yield from self._members(
                    notation, "}", ":", say, bare_keys=notation.bare_keys, depth=depth + 1
                )
            )
        return (yield from self._plain(notation, say))

    def _items(self, notation: Notation, close: str, say: Say, depth: int) -> Steps:
        """Read the values of a list, up to its end."""
        say("[")
        if not (
            yield from self._separated(close, say, lambda: self._literal(notation, say, depth + 1))
        ):
            return False
        say("]")
        return True

    def _members(
        self,
        notation: Notation,
        close: str,
        assign: str,
        say: Say,
        *,
        bare_keys: bool,
        depth: int = 0,
    ) -> Steps:
        """Read keys and values, up to the text that closes them."""

        def member() -> Steps:
            if not (yield from self._key(notation, say, bare=bare_keys)):
                return False
            yield from self._space([])
            if not (yield from self._take(assign)):
                return False
            say(": ")
            return (yield from self._literal(notation, say, depth))

        say("{")
        if not (yield from self._separated(close, say, member)):
            return False
        say("}")
        return True

    def _separated(self, close: str, say: Say, item: Callable[[], Steps]) -> Steps:
        """Read items with commas between them, up to `close`. A comma may follow the last item."""
        is_first = True
        while (yield from self._space([])):
            if (yield from self._take(close)):
                return True
            if not is_first:
                if not (yield from self._take(",")):
                    return False
                yield from self._space([])
                if (yield from self._sees(close)):
                    continue
                say(", ")
            is_first = False
            if not (yield from item()):
                return False
        return False

    def _key(self, notation: Notation, say: Say, *, bare: bool) -> Steps:
        for quote in notation.quotes:
            if (yield from self._take(quote)):
                return (yield from self._string(notation, quote, say))
        key = (yield from self._run(_BARE_KEY)) if bare else ""
        if key:
            say(quoted(key))
        return bool(key)

    def _string(self, notation: Notation, quote: str, say: Say) -> Steps:
        """Read a string up to its closing quote."""
        say('"')
        run = _PYTHON_RUN if notation.escapes else _MARKED_RUN
        while (yield from self._more()):
            if text := run.match(self._text, self._at):
                say(quoted(text[0])[1:-1])
                self._at = text.end()
            elif (yield from self._take(quote)):
                say('"')
                return True
            elif notation.escapes and (yield from self._take("\\")):
                if not (yield from self._escape(say)):
                    return False
            else:
                say(quoted(self._text[self._at])[1:-1])
                self._at += 1
        return False

    def _escape(self, say: Say) -> Steps:
        """Read an escape, after its backslash."""
        if not (yield from self._more()):
            return False
        letter, self._at = self._text[self._at], self._at + 1
        count = _DIGITS.get(letter)
        if count is None:
            say(_ESCAPES.get(letter, "\\\\" + quoted(letter)[1:-1]))
            return True
        digits = ""
        while len(digits) < count and (yield from self._more()):
            if self._text[self._at] not in "0123456789abcdefABCDEF":
                break
            digits += self._text[self._at]
            self._at += 1
        if len(digits) < count or int(digits, 16) > 0x10FFFF:
            say("\\\\" + letter + digits)
        elif letter == "U" and int(digits, 16) > 0xFFFF:
            say(chr(int(digits, 16)))
        else:
            say(f"\\u{int(digits, 16):04x}")
        return True

    def _plain(self, notation: Notation, say: Say) -> Steps:
        """Read a word or a number. In a notation with marked strings, other text is a string."""
        pattern = _WORD if notation.escapes else _BARE_TEXT
        text = (yield from self._run(pattern)).strip()
        written = notation.words.get(text) or _number(text)
        if written is None and text and not notation.escapes:
            written = quoted(text)
        say(written or "")
        return written is not None

    def _run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read text that matches a pattern of single characters, which another must end."""
        parts, length = list[str](), 0
        while length <= _MOST_WORD and (yield from self._more()):
            run = pattern.match(self._text, self._at)
            if run is None:
                return "".join(parts)
            parts.append(run[0])
            length += len(run[0])
            self._at = run.end()
        return ""  # the text breaks off, perhaps within the word


def is_bare_key(text: str) -> bool:
    """Return True if a key can be written without quotes."""
    return _BARE_KEY.fullmatch(text) is not None


def _number(text: str) -> str | None:
    """Return a number of Python as JSON, or None."""
    if _NUMBER.fullmatch(text):
        return text
    try:
        value = float(text)
    except ValueError:
        try:
            return str(int(text, 0))
        except ValueError:
            return None
    return json.dumps(value) if math.isfinite(value) else None
