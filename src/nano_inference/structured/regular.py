"""Regular expressions in a plain form, which every engine of them reads in the same way.

Engines differ in what `.`, `\\w`, `$` and `[[` mean. The plain form has characters, classes that
list what they hold, groups, alternatives and repetitions alone; what cannot be written in it is
refused.
"""

import re
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # of code points, ascending, both ends included

ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
# what stands unescaped in a string of JSON; control characters that JSON allows are left out
OF_JSON: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, 0x10FFFF))
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: Ranges = ((0, 0x7F),)
_END_OF_LINE: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Of what is not ASCII engines disagree about these: they hold none of it.
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CHARACTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_REPETITION = re.compile(r"[*+?]|\{[0-9]+(,[0-9]*)?\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_][A-Za-z_0-9]*>|(?!\?))")


class NotPlain(Exception):
    """A pattern has something that the plain form lacks."""


def plain_regex(pattern: str) -> str:
    """A pattern that has to match a whole text. Raises `NotPlain`."""
    body, _, _ = _parsed(pattern, ANY)
    return body


def plain_pattern(pattern: str) -> str:
    """A pattern that has to match somewhere in a string of JSON, as one that has to match all
    that stands between its quotes. Raises `NotPlain`.
    """
    body, begins, ends = _parsed(pattern, OF_JSON)
    anything = _class(OF_JSON) + "*"
    return ("" if begins else anything) + body + ("" if ends else anything)


def characters(least: int, most: int | None) -> str:
    """So many characters of a string of JSON, none of them escaped."""
    return f"{_class(OF_JSON)}{{{least},{'' if most is None else most}}}"


def _parsed(pattern: str, allowed: Ranges) -> tuple[str, bool, bool]:
    """The plain form, and whether the pattern said that it begins and ends the text."""
    parser = _Parser(pattern, allowed)
    begins = pattern.startswith("^")
    body = parser.body(int(begins))
    if parser.has_choices:
        if begins or parser.ends:
            raise NotPlain("`^` and `$` beside `|`; put the alternatives in a group")
        body = f"({body})"
    return body, begins, parser.ends


class _Parser:
    """Writes the plain form, piece by piece."""

    def __init__(self, pattern: str, allowed: Ranges) -> None:
        self._text, self._allowed = pattern, allowed
        self._out: list[str] = []
        self._depth = 0
        self._may_repeat = False
        self.has_choices = False  # outside of groups
        self.ends = False

    def body(self, place: int) -> str:
        """The plain form of what stands from there on."""
        while place < len(self._text):
            if found := _REPETITION.match(self._text, place):
                place = self._repeat(found)
            elif self._text[place] == "(":
                place = self._open(place)
            elif self._text[place] in "|)":
                place = self._close(place)
            elif self._text[place:] == "$" and not self._depth:
                self.ends = True
                place += 1
            else:
                held, place = self._one(place)
                self._out.append(_class(_both(held, self._allowed)))
                self._may_repeat = True
        if self._depth:
            raise NotPlain("`(` without `)`")
        if self._out and self._out[-1] == "|":
            raise NotPlain("an empty alternative")
        return "".join(self._out)

    def _repeat(self, found: re.Match[str]) -> int:
        if not self._may_repeat:
            raise NotPlain(f"`{found[0]}` behind nothing that it repeats")
        self._out.append(found[0])
        self._may_repeat = False
        # lazy ones match the same texts
        return found.end() + (self._text[found.end() : found.end() + 1] == "?")

    def _open(self, place: int) -> int:
        found = _GROUP.match(self._text, place)
        if found is None:
            raise NotPlain(f"`{self._text[place : place + 3]}`")
        self._out.append("(")
        self._depth += 1
        self._may_repeat = False
        return found.end()

    def _close(self, place: int) -> int:
        """A group, or an alternative."""
        sign = self._text[place]
        if not self._out or self._out[-1] in ("(", "|"):
            raise NotPlain("an empty alternative")
        self._out.append(sign)
        self._depth -= sign == ")"
        self._may_repeat = sign == ")"
        if self._depth < 0:
            raise NotPlain("`)` without `(`")
        self.has_choices |= sign == "|" and not self._depth
        return place + 1

    def _one(self, place: int) -> tuple[Ranges, int]:
        """What a character, an escape or a class holds, and where it ends."""
        character = self._text[place]
        if character == "[":
            return self._listed(place + 1)
        if character == "\\":
            return self._escaped(place + 1)
        if character == ".":
            return _without(_END_OF_LINE if self._allowed == OF_JSON else ((10, 10),)), place + 1
        if character in "^$*+?{}]":
            raise NotPlain(f"`{character}` at place {place}")
        return ((ord(character), ord(character)),), place + 1

    def _escaped(self, place: int) -> tuple[Ranges, int]:
        letter = self._text[place : place + 1]
        if letter.lower() in _CLASSES and letter:
            held = _CLASSES[letter.lower()]
            return held if letter.islower() else _both(_without(held), _ASCII), place + 1
        if found := _CODE.match(self._text, place):
            code = int(found[1] or found[2] or found[3], 16)
            return _both(((code, code),), ANY), found.end()
        if letter in _CHARACTERS and letter:
            code = _CHARACTERS[letter]
            return ((code, code),), place + 1
        if not letter or letter.isalnum():
            raise NotPlain(f"`\\{letter}`")
        return ((ord(letter), ord(letter)),), place + 1

    def _listed(self, place: int) -> tuple[Ranges, int]:
        """What a class in brackets holds."""
        text = self._text
        negated = text[place : place + 1] == "^"
        place += negated
        held: list[tuple[int, int]] = []
        begin, outside = place, ANY
        while text[place : place + 1] != "]" or place == begin:
            if place >= len(text) or text[place] in "[]" or text[place : place + 2] in _SETS:
                raise NotPlain(f"a class `{text[begin - 1 : place + 2]}`")
            if text[place] == "\\" and text[place + 1 : place + 2] in _CLASSES:
                outside = _ASCII  # engines disagree about the rest
            low, place = self._listed_one(place)
            if text[place : place + 1] == "-" and text[place + 1 : place + 2] not in ("]", ""):
                high, place = self._listed_one(place + 1)
                if not _is_one(low) or not _is_one(high) or low > high:
                    raise NotPlain(f"a class `{text[begin - 1 : place + 1]}`")
                low = ((low[0][0], high[0][1]),)
            held += low
        ranges = _joined(held)
        return (_both(_without(ranges), outside) if negated else ranges), place + 1

    def _listed_one(self, place: int) -> tuple[Ranges, int]:
        if self._text[place : place + 1] == "\\":
            held, end = self._escaped(place + 1)
            if self._text[place + 1] in "DWS":
                raise NotPlain(f"`{self._text[place:end]}` in a class")
            return held, end
        code = ord(self._text[place])
        return ((code, code),), place + 1


_SETS = ("&&", "--", "~~")  # some engines know operations on classes


def _is_one(ranges: Ranges) -> bool:
    """Whether it holds one character."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise NotPlain("a character that cannot stand there")
    if _is_one(ranges) and chr(ranges[0][0]).isalnum():
        return chr(ranges[0][0])
    parts = (_written(a) if a == b else f"{_written(a)}-{_written(b)}" for a, b in ranges)
    return f"[{''.join(parts)}]"


def _written(code: int) -> str:
    """A character in a class."""
    if code > 0x7F or chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}"


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Without overlaps."""
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
    """All characters but these."""
    edges = [-1, *(edge for low, high in _joined(ranges) for edge in (low, high)), 0x110000]
    gaps = ((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2))
    return _both(tuple((low, high) for low, high in gaps if low <= high), ANY)
