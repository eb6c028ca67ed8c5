"""Tool calls that a model writes as JSON objects between markers.

A call is announced, and streams, from the moment its name is known and its arguments begin. What
turns out to be no call before that is content; of a call that breaks later, the arguments so far
stand and the rest is content.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from nano_inference.serving.parsing.output import Parsed, ToolCallDelta
from nano_inference.serving.parsing.scanning import SPACE, JsonScanner, UntilMarker, begins


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes tool calls: a section of JSON objects. White space around all parts is
    ignored.

    Attributes:
        begin: opens a section.
        bare: an answer may be a section from its first character on, without `begin`.
        opener: stands between `begin` and the first call.
        separator: stands between calls. May be missing.
        end: closes a section. May be missing.
        no_arguments: a call may leave the arguments out.
    """

    begin: str
    bare: bool = False
    opener: str = ""
    separator: str = ""
    end: str = ""
    no_arguments: bool = False


TOOL_FORMATS = {
    "hermes": ToolFormat(begin="<tool_call>", end="</tool_call>", no_arguments=True),
    "llama": ToolFormat(begin="<|python_tag|>", bare=True, separator=";"),
    "mistral": ToolFormat(begin="[TOOL_CALLS]", bare=True, opener="[", separator=",", end="]"),
}

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = frozenset({"name", "id", "type"}) | _ARGUMENTS


class _Call:
    """One call's object.

    Attributes:
        name: of the function, once known.
        announced: it is a call.
        arguments: JSON text of the arguments, in pieces; the caller takes them out.
        has_arguments: `arguments` is whole.
        raw: what was taken and is not known to be a call's, or stands beside its arguments: content
            if the call fails.
        complete, failed: the object has ended, well or not.
    """

    def __init__(self, no_arguments: bool) -> None:
        self.name: str | None = None
        self.announced = False
        self.arguments: list[str] = []
        self.has_arguments = False
        self.raw: list[str] = []
        self.complete = False
        self.failed = False
        self._no_arguments = no_arguments
        self._state: Callable[[_Call, str, int], int] = _Call._brace
        self._scanner = JsonScanner()
        self._scanned: list[str] = []  # the key or value that the scanner is in
        self._key = ""
        self._seen: set[str] = set()

    def feed(self, text: str, begin: int) -> int:
        """Take `text[begin:]` as far as it belongs to the call. Returns where it stopped."""
        while begin < len(text) and not (self.complete or self.failed):
            if self._state is not _Call._scan and (space := SPACE.match(text, begin)):
                self.raw.append(space[0])
                begin = space.end()
            else:
                begin = self._state(self, text, begin)
        return begin

    def _take(
        self, text: str, begin: int, wanted: str, then: "Callable[[_Call, str, int], int]"
    ) -> int:
        if text[begin] != wanted:
            self.failed = True
            return begin
        self.raw.append(wanted)
        self._state = then
        return begin + 1

    def _brace(self, text: str, begin: int) -> int:
        return self._take(text, begin, "{", _Call._first_key)

    def _first_key(self, text: str, begin: int) -> int:
        return self._close(begin) if text[begin] == "}" else self._before_key(text, begin)

    def _before_key(self, text: str, begin: int) -> int:
        self._key = ""
        return self._start_scan(text, begin, '"')

    def _colon(self, text: str, begin: int) -> int:
        return self._take(text, begin, ":", _Call._before_value)

    def _before_value(self, text: str, begin: int) -> int:
        if self._key in _ARGUMENTS:
            if self.name is not None and text[begin] == "{":
                self._announce()
            return self._start_scan(text, begin, "{")
        return self._start_scan(text, begin, '"' if self._key == "name" else text[begin])

    def _comma(self, text: str, begin: int) -> int:
        return (
            self._close(begin)
            if text[begin] == "}"
            else self._take(text, begin, ",", _Call._before_key)
        )

    def _close(self, begin: int) -> int:
        self.raw.append("}")
        if not self.announced and self.name is not None and self._no_arguments:
            self._announce()
            self.arguments.append("{}")
            self.has_arguments = True
        if self.announced:
            self.raw.clear()
        self.complete = self.announced
        self.failed = not self.announced
        return begin + 1

    def _announce(self) -> None:
        self.announced = True
        self.raw.clear()

    def _start_scan(self, text: str, begin: int, wanted: str) -> int:
        self.failed = text[begin] != wanted
        self._scanner, self._scanned, self._state = JsonScanner(), [], _Call._scan
        return begin

    def _scan(self, text: str, begin: int) -> int:
        end = self._scanner.feed(text, begin)
        piece = text[begin:end]
        if self.announced and self._key in _ARGUMENTS:
            self.arguments.append(piece)
        else:
            self.raw.append(piece)
            self._scanned.append(piece)
        if self._scanner.complete:
            self._scanned_all()
        self.failed = self.failed or self._scanner.failed
        return end

    def _scanned_all(self) -> None:
        if not self._key:
            self._key_ended()
            return
        self._state = _Call._comma
        if self._key == "name":
            self._name_ended()
        elif self._key in _ARGUMENTS:
            self.has_arguments = True
            if not self.announced:  # the name comes later
                self.arguments = self._scanned

    def _key_ended(self) -> None:
        key = json.loads("".join(self._scanned))
        self.failed = key not in _KEYS or key in self._seen
        # two names for arguments, of which a call has one
        self._seen |= _ARGUMENTS if key in _ARGUMENTS else {key}
        self._key, self._state = key, _Call._colon

    def _name_ended(self) -> None:
        name = json.loads("".join(self._scanned))
        self.failed = not _is_text(name)
        self.name = name
        if self.has_arguments and not self.failed:
            self._announce()


def _is_text(name: str) -> bool:
    """JSON can write half of a character, which no reply can carry."""
    return bool(name) and not any("\ud800" <= character <= "\udfff" for character in name)


class ToolCallParser:
    """Content and tool calls. White space around a section of calls belongs to its markers.

    Args:
        format: how the model writes calls.
    """

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._state: Callable[[ToolCallParser, str, int], int] = (
            ToolCallParser._start if format.bare else ToolCallParser._text
        )
        self._marker = UntilMarker(format.begin)
        self._call = _Call(format.no_arguments)
        self._tail = ""  # may be the beginning of a marker
        self._held: list[str] = []  # markers and space before a call, content if it is none
        self._num_calls = 0
        self._content: list[str] = []  # these two: what the next `Parsed` will hold
        self._calls: dict[int, list[str]] = {}
        self._first: dict[int, tuple[str, str]] = {}

    def push(self, text: str) -> Parsed:
        """Take the next text."""
        text = self._tail + text
        begin = 0
        while begin < len(text):
            state, end = self._state, self._state(self, text, begin)
            if end == begin and self._state is state:
                break  # more text decides
            begin = end
        self._tail = text[begin:]
        return self._parsed()

    def finish(self) -> Parsed:
        """The sample ended."""
        if self._state is ToolCallParser._in_call:
            self._call_failed()
        space = self._marker.release()
        if not self._tail and self._state in (
            ToolCallParser._after_call,
            ToolCallParser._after_section,
        ):
            space = []
        self._content += [*self._held, *space, self._tail]
        self._held, self._tail = [], ""
        return self._parsed()

    def _parsed(self) -> Parsed:
        calls = tuple(
            ToolCallDelta(index, *self._first.get(index, (None, None)), "".join(arguments))
            for index, arguments in self._calls.items()
        )
        parsed = Parsed(content="".join(self._content), tool_calls=calls)
        self._content, self._calls, self._first = [], {}, {}
        return parsed

    def _start(self, text: str, begin: int) -> int:
        """Nothing but white space so far."""
        if space := SPACE.match(text, begin):
            self._marker.space.append(space[0])
            return space.end()
        if begins(self._format.begin, text, begin):
            return begin
        if text.startswith(self._format.begin, begin) or text[begin] != (
            self._format.opener or "{"
        ):
            self._state = ToolCallParser._text
        else:
            self._held, self._state = self._marker.release(), ToolCallParser._opener
        return begin

    def _text(self, text: str, begin: int) -> int:
        end = self._marker.feed(text, begin, self._content)
        if self._marker.found:
            self._marker.found = False
            self._held = [*self._marker.release(), self._format.begin]
            self._state = ToolCallParser._opener
        return end

    def _opener(self, text: str, begin: int) -> int:
        if not self._format.opener:
            self._state = ToolCallParser._next_call
            return begin
        if space := self._hold_space(text, begin):
            return space
        if text[begin] != self._format.opener:
            return self._no_call(begin)
        self._held.append(text[begin])
        self._state = ToolCallParser._next_call
        return begin + 1

    def _next_call(self, text: str, begin: int) -> int:
        if space := self._hold_space(text, begin):
            return space
        if text[begin] != "{":
            return self._no_call(begin)
        self._call = _Call(self._format.no_arguments)
        self._state = ToolCallParser._in_call
        return begin

    def _hold_space(self, text: str, begin: int) -> int:
        space = SPACE.match(text, begin)
        if not space:
            return 0
        self._held.append(space[0])
        return space.end()

    def _no_call(self, begin: int) -> int:
        self._content += self._held
        self._held = []
        self._state = ToolCallParser._text
        return begin

    def _in_call(self, text: str, begin: int) -> int:
        announced = self._call.announced
        end = self._call.feed(text, begin)
        if self._call.announced:
            if not announced:
                self._first[self._num_calls] = (
                    f"call_{secrets.token_hex(12)}",
                    self._call.name or "",
                )
                self._calls[self._num_calls] = []
                self._num_calls += 1
                self._held = []
            if self._call.arguments:
                self._calls.setdefault(self._num_calls - 1, []).extend(self._call.arguments)
                self._call.arguments = []
        if self._call.complete:
            self._state = ToolCallParser._after_call
        elif self._call.failed:
            self._call_failed()
        return end

    def _call_failed(self) -> None:
        raw = "".join(self._call.raw)
        # only its closing brace is missing
        if self._call.announced and self._call.has_arguments and not raw.strip():
            self._state = ToolCallParser._after_call
        else:
            self._held.append(raw)
            self._no_call(0)

    def _after_call(self, text: str, begin: int) -> int:
        end, separator = self._format.end, self._format.separator
        if space := SPACE.match(text, begin):
            self._marker.space.append(space[0])
            return space.end()
        if end and begins(end, text, begin):
            return begin
        if end and text.startswith(end, begin):
            self._marker.release()
            self._state = ToolCallParser._after_section
            return begin + len(end)
        if separator and text[begin] == separator:
            self._held = [*self._marker.release(), separator]
            self._state = ToolCallParser._next_call
            return begin + 1
        if text[begin] == "{":
            self._held, self._state = self._marker.release(), ToolCallParser._next_call
        else:
            self._state = ToolCallParser._text
        return begin

    def _after_section(self, text: str, begin: int) -> int:
        if space := SPACE.match(text, begin):
            self._marker.space.append(space[0])
            return space.end()
        self._state = ToolCallParser._text
        return begin
