"""Parser of tool calls that a model writes as JSON objects between markers.

A call is announced, and streams, once its name is known and its arguments begin. Small mistakes in
its JSON are mended (`JsonMender`). If a call breaks, all of its text is content.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nano_inference.server.api.parsing.output import Parsed, ToolCallDelta
from nano_inference.server.api.parsing.scanning import JsonMender, Steps, TextReader


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Notation of tool calls in a model family: a section of JSON objects. Whitespace around all
    parts is ignored.

    Attributes:
        begin: Marker that opens a section.
        sign: Regular expression that matches the family's chat templates.
        other_sign: Regular expression that matches templates of other formats with the same
            markers, but none of this family.
        bare: True if an answer may begin with a section without `begin`.
        opener: Text that the parser requires between `begin` and the first call.
        separator: Text between calls. Optional in the output.
        end: Marker that closes a section. Optional in the output.
        no_arguments: True if a call may omit its arguments.
        opening, joint, closing: Text that a grammar writes between `begin` and the first call,
            between calls, and after the last.
        arguments: Key of the arguments, as models write it.
    """

    begin: str
    sign: str
    other_sign: str
    bare: bool = False
    opener: str = ""
    separator: str = ""
    end: str = ""
    no_arguments: bool = False
    opening: str = ""
    joint: str = ""
    closing: str = ""
    arguments: str = "arguments"


TOOL_FORMATS = {
    "hermes": ToolFormat(
        begin="<tool_call>",
        sign=r"<tool_call>",
        other_sign=r"<function=|<arg_key>",
        end="</tool_call>",
        no_arguments=True,
        opening="\n",
        joint="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    "llama": ToolFormat(
        begin="<|python_tag|>",
        sign=r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*[\"']parameters\\?[\"']",
        other_sign=r"<function=",
        bare=True,
        separator=";",
        joint="; ",
        arguments="parameters",
    ),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]",
        sign=r"\[TOOL_CALLS\]",
        other_sign=r"\[ARGS\]|\[CALL_ID\]",
        bare=True,
        opener="[",
        separator=",",
        end="]",
        opening="[",
        joint=", ",
        closing="]",
    ),
}

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = frozenset({"name", "id", "type"}) | _ARGUMENTS


@dataclass(slots=True)
class _CallObject:
    """Received part of one call's object.

    Attributes:
        name: Name of the function.
        arguments: JSON text of arguments that came before the name.
        has_arguments: True if the arguments are complete.
        is_announced: True if the object is known to be a call.
        raw: Text that may not belong to a call, or that is next to its arguments. Content if the
            call breaks.
        text: Text that was reported as a call. Also content if the arguments break.
        keys: Keys so far.
    """

    name: str | None = None
    arguments: str = ""
    has_arguments: bool = False
    is_announced: bool = False
    raw: list[str] = field(default_factory=list[str])
    text: list[str] = field(default_factory=list[str])
    keys: set[str] = field(default_factory=set[str])


class ToolCallParser(TextReader):
    """Parser of content and tool calls. Whitespace around a section of calls belongs to its
    markers.

    Args:
        format: Notation of the model.
    """

    def __init__(self, format: ToolFormat) -> None:
        super().__init__()
        self._format = format
        self._num_calls = 0
        self._cut_off = False
        # whitespace, markers and parts of a call; content if they do not become a call
        self._held: list[str] = []
        self._content: list[str] = []  # like `_calls`, for the next `Parsed`
        self._calls: dict[int, ToolCallDelta] = {}

    def push(self, text: str) -> Parsed:
        """Parse the next text."""
        self._go_on(text)
        return self._parsed()

    def finish(self, *, cut_off: bool = True) -> Parsed:
        """Parse the rest at the end of the sample."""
        self._cut_off = cut_off
        self._go_on(ended=True)
        return self._parsed()

    def _parsed(self) -> Parsed:
        parsed = Parsed(content="".join(self._content), tool_calls=tuple(self._calls.values()))
        self._content.clear()
        self._calls.clear()
        return parsed

    def _read(self) -> Steps:
        held, marker = self._held, self._format.begin
        if self._format.bare and (yield from self._begins_bare()):
            yield from self._section()
        while (yield from self._until(marker, self._content.append, held)):
            held.append(marker)
            yield from self._section()
        self._content += held
        return True

    def _begins_bare(self) -> Steps:
        """Return True if the answer begins with a section without a marker."""
        if not (yield from self._space(self._held)) or (yield from self._sees(self._format.begin)):
            return False
        return self._text.startswith(self._format.opener or "{", self._at)

    def _section(self) -> Steps:
        """Read calls up to the end of the section. Other text is content."""
        held, opener = self._held, self._format.opener
        is_section = not opener or (yield from self._token(opener, held))
        while is_section and (yield from self._call()):
            if (yield from self._ends()):
                return True
        self._content += held
        held.clear()
        return False

    def _ends(self) -> Steps:
        """Return True if no other call follows the last one."""
        held, format = self._held, self._format
        goes_on = yield from self._space(held)
        if goes_on and format.end and (yield from self._take(format.end)):
            held.clear()
            goes_on = yield from self._space(held)
        elif goes_on and (
            self._text.startswith("{", self._at)
            or (format.separator and (yield from self._token(format.separator, held)))
        ):
            return False
        if not goes_on:
            held.clear()
        return True

    def _call(self) -> Steps:
        """Read one call. False: it is not a call or it breaks, and `_held` has its content."""
        yield from self._space(self._held)
        call = _CallObject()
        if (yield from self._object(call)):
            return True
        raw = "".join(call.raw)
        if call.has_arguments and call.is_announced and not raw.strip():
            return True  # only its closing brace is missing
        if call.is_announced and not call.has_arguments:
            at_end = self._at == len(self._text)
            if at_end and self._ended and self._cut_off:
                return False
            self._tell("", broken=True)
            raw = "".join(call.text)
        self._held.append(raw)
        return False

    def _object(self, call: _CallObject) -> Steps:
        if not (yield from self._token("{", call.raw)):
            return False
        is_open = not (yield from self._token("}", call.raw))
        while is_open:
            if not (yield from self._member(call)):
                return False
            is_open = not (yield from self._token("}", call.raw))
            if is_open and not (yield from self._token(",", call.raw)):
                return False
            is_open = is_open and not (yield from self._token("}", call.raw))
        if not call.is_announced and call.name is not None and self._format.no_arguments:
            self._announce(call, "{}")
        return call.is_announced

    def _member(self, call: _CallObject) -> Steps:
        """Read a key and its value. False: the key is unknown or repeated, or the value invalid."""
        raw, parts = call.raw, list[str]()
        if not (yield from self._json('"', raw, parts.append)):
            return False
        key = json.loads("".join(parts))
        if key not in _KEYS or key in call.keys:
            return False
        # arguments have two names, of which a call has one
        call.keys |= _ARGUMENTS if key in _ARGUMENTS else {key}
        if not (yield from self._token(":", raw)):
            return False
        if key in _ARGUMENTS:
            return (yield from self._arguments(call))
        parts.clear()
        if not (yield from self._json('"' if key == "name" else "", raw, parts.append)):
            return False
        if key == "name":
            name: str = json.loads("".join(parts))
            if not _is_text(name):
                return False
            call.name = name
            if call.has_arguments:
                self._announce(call, call.arguments)
        return True

    def _arguments(self, call: _CallObject) -> Steps:
        if not (yield from self._space(call.raw)) or self._text[self._at] != "{":
            return False
        parts = list[str]()
        if call.name is not None:
            self._announce(call)
            call.has_arguments = yield from self._json("{", call.text, self._tell)
        else:
            call.has_arguments = yield from self._json("{", call.raw, parts.append)
        call.arguments = "".join(parts)
        return call.has_arguments

    def _json(self, first: str, raw: list[str], say: Callable[[str], None]) -> Steps:
        """Report one mended JSON value that begins with `first`. `raw` gets its original text, and
        the whitespace before it.
        """
        if not (yield from self._space(raw)):
            return False
        scanner = JsonMender()
        scanner.failed = not self._text.startswith(first, self._at)
        while not (scanner.complete or scanner.failed) and (yield from self._more()):
            begin, self._at = self._at, scanner.feed(self._text, self._at)
            raw.append(self._text[begin : self._at])
            if new := scanner.taken():
                say(new)
        return scanner.complete

    def _token(self, token: str, held: list[str]) -> Steps:
        """Read a character, and whitespace before it."""
        is_there = (yield from self._space(held)) and (yield from self._take(token))
        if is_there:
            held.append(token)
        return is_there

    def _announce(self, call: _CallObject, arguments: str = "") -> None:
        """Report the object as a call, which it stays unless its arguments break."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = f"call_{secrets.token_hex(12)}"
        self._calls[index] = ToolCallDelta(index, call_id, call.name or "", arguments)
        call.is_announced = True
        call.text += [*self._held, *call.raw]
        call.raw.clear()
        self._held.clear()

    def _tell(self, arguments: str, *, broken: bool = False) -> None:
        """Report the next part of the last call's arguments, or that the call is broken."""
        index = self._num_calls - 1
        delta = self._calls.get(index) or ToolCallDelta(index, None, None, "")
        self._calls[index] = replace(delta, arguments=delta.arguments + arguments, broken=broken)


def _is_text(name: str) -> bool:
    """Return True for a name that a reply can carry: not empty, no half of a surrogate pair."""
    return bool(name) and not any("\ud800" <= character <= "\udfff" for character in name)
