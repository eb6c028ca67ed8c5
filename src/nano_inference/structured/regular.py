"""Plain regular expressions, which every engine reads in the same way.

Engines differ in the meaning of `.`, `\\w`, `$` and `[[`. The plain form has only characters,
classes that list their members, groups, alternatives and repetitions. A pattern that cannot be
written in it is rejected.
"""

import re
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, ascending, ends included

ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
# characters that need no escape in a JSON string, without the control characters that JSON allows
OF_JSON: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, 0x10FFFF))
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: Ranges = ((0, 0x7F),)
_END_OF_LINE: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Engines disagree about members of these classes beyond ASCII, so the classes hold ASCII only.
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CHARACTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_REPETITION = re.compile(r"[*+?]|\{[0-9]+(,[0-9]*)?\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_][A-Za-z_0-9]*>|(?!\?))")


class NotPlain(Exception):
    """A pattern has a part that the plain form lacks."""


def plain_regex(pattern: str) -> str:
    """Return the plain form of a pattern for whole texts. Raises `NotPlain`."""
    body, _, _ = _parsed(pattern, ANY)
    return body


def plain_pattern(pattern: str) -> str:
    """Return the plain form of a pattern that may match anywhere in a JSON string, as a pattern for
    the whole text between the quotes. Raises `NotPlain`.
    """
    body, begins, ends = _parsed(pattern, OF_JSON)
    anything = _class(OF_JSON) + "*"
    return ("" if begins else anything) + body + ("" if ends else anything)


def characters(least: int, most: int | None) -> str:
    """Return a pattern for `least` to `most` unescaped characters of a JSON string."""
    return f"{_class(OF_JSON)}{{{least},{'' if most is None else most}}}"


def _parsed(pattern: str, allowed: Ranges) -> tuple[str, bool, bool]:
    """Return the plain form, and if the pattern is anchored at the beginning and at the end."""
    parser = _Parser(pattern, allowed)
    begins = pattern.startswith("^")
    body = parser.body(int(begins))
    if parser.has_choices:
        if begins or parser.ends:
            raise NotPlain("`^` or `$` next to `|`; put the alternatives in a group")
        body = f"({body})"
    return body, begins, parser.ends


class _Parser:
    """Writer of the plain form, one part after the other."""

    def __init__(self, pattern: str, allowed: Ranges) -> None:
        self._text, self._allowed = pattern, allowed
        self._out: list[str] = []
        self._depth = 0
        self._may_repeat = False
        self.has_choices = False  # outside of groups
        self.ends = False

    def body(self, start: int) -> str:
        """Return the plain form of the pattern from `start` on."""
        while start < len(self._text):
            if match := _REPETITION.match(self._text, start):
                start = self._repeat(match)
            elif self._text[start] == "(":
                start = self._open(start)
            elif self._text[start] in "|)":
                start = self._close(start)
            elif self._text[start:] == "$" and not self._depth:
                self.ends = True
                start += 1
            else:
                held, start = self._one(start)
                self._out.append(_class(_both(held, self._allowed)))
                self._may_repeat = True
        if self._depth:
            raise NotPlain("`(` without `)`")
        if self._out and self._out[-1] == "|":
            raise NotPlain("an empty alternative")
        return "".join(self._out)

    def _repeat(self, match: re.Match[str]) -> int:
        if not self._may_repeat:
            raise NotPlain(f"`{match[0]}` after nothing that it could repeat")
        self._out.append(match[0])
        self._may_repeat = False
        # lazy repetitions match the same texts
        return match.end() + (self._text[match.end() : match.end() + 1] == "?")

    def _open(self, start: int) -> int:
        match = _GROUP.match(self._text, start)
        if match is None:
            raise NotPlain(f"`{self._text[start : start + 3]}`")
        self._out.append("(")
        self._depth += 1
        self._may_repeat = False
        return match.end()

    def _close(self, start: int) -> int:
        """Close a group or an alternative."""
        sign = self._text[start]
        if not self._out or self._out[-1] in ("(", "|"):
            raise NotPlain("an empty alternative")
        self._out.append(sign)
        self._depth -= sign == ")"
        self._may_repeat = sign == ")"
        if self._depth < 0:
            raise NotPlain("`)` without `(`")
        self.has_choices |= sign == "|" and not self._depth
        return start + 1

    def _one(self, start: int) -> tuple[Ranges, int]:
        """Return the members of a character, an escape or a class, and the position of its end."""
        character = self._text[start]
        if character == "[":
            return self._listed(start + 1)
        if character == "\\":
            return self._escaped(start + 1)
        if character == ".":
            return _without(_END_OF_LINE if self._allowed == OF_JSON else ((10, 10),)), start + 1
        if character in "^$*+?{}]":
            raise NotPlain(f"`{character}` at position {start}")
        return ((ord(character), ord(character)),), start + 1

    def _escaped(self, start: int) -> tuple[Ranges, int]:
        letter = self._text[start : start + 1]
        if letter.lower() in _CLASSES and letter:
            held = _CLASSES[letter.lower()]
            return held if letter.islower() else _both(_without(held), _ASCII), start + 1
        if match := _CODE.match(self._text, start):
            code = int(match[1] or match[2] or match[3], 16)
            return _both(((code, code),), ANY), match.end()
        if letter in _CHARACTERS and letter:
            code = _CHARACTERS[letter]
            return ((code, code),), start + 1
        if not letter or letter.isalnum():
            raise NotPlain(f"`\\{letter}`")
        return ((ord(letter), ord(letter)),), start + 1

    def _listed(self, start: int) -> tuple[Ranges, int]:
        """Return the members of a class in brackets, and the position of its end."""
        text = self._text
        negated = text[start : start + 1] == "^"
        start += negated
        held: list[tuple[int, int]] = []
        begin, outside = start, ANY
        while text[start : start + 1] != "]" or start == begin:
            if start >= len(text) or text[start] in "[]" or text[start : start + 2] in _SETS:
                raise NotPlain(f"a class `{text[begin - 1 : start + 2]}`")
            if text[start] == "\\" and text[start + 1 : start + 2] in _CLASSES:
                outside = _ASCII  # engines disagree about the rest
            low, start = self._listed_one(start)
            if text[start : start + 1] == "-" and text[start + 1 : start + 2] not in ("]", ""):
                high, start = self._listed_one(start + 1)
                if not _is_one(low) or not _is_one(high) or low > high:
                    raise NotPlain(f"a class `{text[begin - 1 : start + 1]}`")
                low = ((low[0][0], high[0][1]),)
            held += low
        ranges = _joined(held)
        return (_both(_without(ranges), outside) if negated else ranges), start + 1

    def _listed_one(self, start: int) -> tuple[Ranges, int]:
        if self._text[start : start + 1] == "\\":
            held, end = self._escaped(start + 1)
            if self._text[start + 1] in "DWS":
                raise NotPlain(f"`{self._text[start:end]}` in a class")
            return held, end
        code = ord(self._text[start])
        return ((code, code),), start + 1


_SETS = ("&&", "--", "~~")  # operations on classes in some engines


def _is_one(ranges: Ranges) -> bool:
    """Return True for a range of one character."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise NotPlain("a character that is not allowed there")
    if _is_one(ranges) and chr(ranges[0][0]).isalnum():
        return chr(ranges[0][0])
    parts = (_written(a) if a == b else f"{_written(a)}-{_written(b)}" for a, b in ranges)
    return f"[{''.join(parts)}]"


def _written(code: int) -> str:
    """Return a character as written in a class."""
    if code > 0x7F or chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}"


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same characters as sorted ranges without overlaps."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return tuple(out)


def _both(one: Ranges, other: Ranges) -> Ranges:
    shared = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple((low, high) for low, high in shared if low <= high)


def _without(ranges: Ranges) -> Ranges:
    """Return all characters except these."""
    edges = [-1, *(edge for low, high in _joined(ranges) for edge in (low, high)), 0x110000]
    gaps = ((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2))
    return _both(tuple((low, high) for low, high in gaps if low <= high), ANY)
