"""Parser of tool calls, by the row of their format.

A call is announced, and streams, once its name is known and its arguments begin. Small mistakes in
its JSON are mended (`JsonMender`). If a call breaks, all of its text is content.
"""

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nano_inference.server.api.parsing.literals import LiteralReader
from nano_inference.server.api.parsing.output import Parsed, ToolCallDelta
from nano_inference.server.api.parsing.scanning import JsonMender, Steps
from nano_inference.server.api.parsing.tool_formats import (
    NAME,
    JsonArguments,
    KeywordArguments,
    NamedCall,
    ObjectCall,
    TaggedArguments,
    ToolFormat,
)
from nano_inference.server.api.parsing.typed_values import (
    ANY,
    TEXT,
    json_of,
    kinds_of,
    properties_of,
    quoted,
)

_MOST_NAME = 256  # characters of a name
MOST_KEY = 1000  # characters of a parameter's name
_MOST_SPACE = 64  # characters of whitespace between a value's end and the next marker
_VALUE_RUN = re.compile(r"[^<\n]+")
_LINE_FREE_RUN = re.compile(r"[^<]+")
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


Schemas = Mapping[str, Mapping[str, Any] | None]  # schemas of arguments, by the name of the tool


class ToolCallParser(LiteralReader):
    """Parser of content and tool calls. Whitespace around a section of calls belongs to its
    markers.

    Args:
        format: Notation of the model.
        schemas: Schemas of the tools, by which values without quotes get their types. The value of
            an unknown parameter is JSON if it can be read as JSON, else a string.
    """

    def __init__(self, format: ToolFormat, schemas: Schemas | None = None) -> None:
        super().__init__()
        self._format = format
        self._schemas = schemas or {}
        self._num_calls = 0
        self._cut_off = False
        self._is_bare = False  # True in a section without a marker, which text may resemble
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
            self._is_bare = True
            yield from self._section()
            self._is_bare = False
        while (yield from self._until(marker, self._content.append, held)):
            held.append(marker)
            yield from self._section()
        self._content += held
        return True

    def _begins_bare(self) -> Steps:
        """Return True if the answer begins with a section without a marker."""
        if not (yield from self._space(self._held)) or (yield from self._sees(self._format.begin)):
            return False
        return (yield from self._sees(self._format.bare))

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
        elif goes_on and (yield from self._sees_next()):
            return False
        elif goes_on and format.end:
            self._skip_cut(format.end)
            goes_on = self._at < len(self._text)
        if not goes_on:
            held.clear()
        return True

    def _sees_next(self) -> Steps:
        """Return True if another call follows, after its separator."""
        format = self._format
        before = format.call.before if isinstance(format.call, NamedCall) else "{"
        if before and (yield from self._sees(before)):
            return True
        return bool(format.separator) and (yield from self._token(format.separator, self._held))

    def _call(self) -> Steps:
        """Read one call. False: it is not a call or it breaks, and `_held` has its content."""
        yield from self._space(self._held)
        call, form = _CallObject(), self._format.call
        if isinstance(form, NamedCall):
            self._record()
            if (yield from self._named(call, form)):
                return True
            call.raw = [self._recorded()]
            call.text += call.raw if call.is_announced else ()
        elif (yield from self._object(call, form)):
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

    def _object(self, call: _CallObject, form: ObjectCall) -> Steps:
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
        if not call.is_announced and call.name is not None and form.optional:
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

    # -- a call whose name precedes its arguments --------------------------------------------------

    def _named(self, call: _CallObject, form: NamedCall) -> Steps:
        """Read a call whose arguments follow its name. False: it is not a call, or it breaks."""
        if not (yield from self._take(form.before)):
            return False
        name = yield from self._word()
        call_id = name if form.numbered else ""
        if form.numbered:
            name = re.sub(r":[0-9]+$", "", name)
        name = name.removeprefix(form.prefix)
        yield from self._space([])
        if form.id and (yield from self._take(form.id)):
            call_id = yield from self._word()
            yield from self._space([])
        is_known = name in self._schemas or not (self._is_bare and self._schemas)
        if not (is_known and _is_text(name) and (yield from self._take(form.after))):
            return False
        call.name = name
        match form.arguments:
            case JsonArguments() as arguments:
                is_whole = yield from self._json_arguments(call, arguments, form.close, call_id)
            case TaggedArguments() as arguments:
                is_whole = yield from self._tagged(call, form, arguments, call_id)
            case KeywordArguments() as arguments:
                is_whole = yield from self._keywords(call, form, arguments, call_id)
        return is_whole

    def _word(self) -> Generator[None, None, str]:
        """Read a name or an id."""
        parts, length = list[str](), 0
        while (yield from self._more()) and length <= _MOST_NAME:
            run = NAME.match(self._text, self._at)
            if run is None:
                break
            parts.append(run[0])
            length += len(run[0])
            self._at = run.end()
        return "".join(parts) if length <= _MOST_NAME else ""

    def _json_arguments(
        self, call: _CallObject, form: JsonArguments, close: str, call_id: str
    ) -> Steps:
        """Read arguments that are a JSON object, and the call's end."""
        yield from self._space([])
        if form.fenced and (yield from self._take("```json")):
            yield from self._space([])
        if not (yield from self._sees("{")):
            return False
        self._announce(call, call_id=call_id)
        if not (yield from self._json("{", [], self._tell)):
            return False
        if form.fenced:
            yield from self._close("```")
        if close:
            yield from self._close(close)
        return True

    def _close(self, close: str) -> Steps:
        """Read the end of a call, which may be missing, after whitespace."""
        yield from self._space([])
        if not (yield from self._take(close)):
            self._skip_cut(close)
        return True

    def _tagged(
        self, call: _CallObject, form: NamedCall, tags: TaggedArguments, call_id: str
    ) -> Steps:
        """Read arguments between markers, and the call's end."""
        root = self._schemas.get(call.name or "") or {}
        schemas, is_first = properties_of(root), True
        ends = [end for end in (form.close, self._format.end) if end]
        if form.after:
            self._announce(call, call_id=call_id)
        while (yield from self._space([])):
            if (yield from self._take(tags.key)):
                key = yield from self._key_until(tags.key_end)
                if key is None:
                    return False
                if not call.is_announced:
                    self._announce(call, call_id=call_id)
                self._tell(f"{'{' if is_first else ', '}{quoted(key)}: ")
                is_first = False
                kinds = kinds_of(schemas[key], root) if key in schemas else ANY
                if not (yield from self._tagged_value(form, tags, kinds)):
                    return False
            elif (yield from self._sees_any(ends)):
                if not call.is_announced:
                    self._announce(call, call_id=call_id)
                self._tell("{}" if is_first else "}")
                yield from self._close(form.close)
                return True
            else:
                self._skip_cut(tags.key, *ends)
                return False
        if self._cut_off or is_first:
            return False
        self._tell("}")
        return True

    def _sees_any(self, markers: Iterable[str]) -> Steps:
        """Return True if one of the markers comes next."""
        for marker in markers:
            if (yield from self._sees(marker)):
                return True
        return False

    def _skip_cut(self, *markers: str) -> None:
        """Skip the beginning of a marker at which `max_tokens` ended the text."""
        rest = self._text[self._at :]
        if self._ended and self._cut_off and any(each.startswith(rest) for each in markers):
            self._at = len(self._text)

    def _key_until(self, marker: str) -> Generator[None, None, str | None]:
        """Read a key and the marker after it. None: the text has no marker there."""
        parts, length = list[str](), 0
        while length <= MOST_KEY and (yield from self._more()):
            if (yield from self._take(marker)):
                return "".join(parts).strip()
            end = self._text.find(marker[0], self._at + 1)
            end = len(self._text) if end < 0 else end
            parts.append(self._text[self._at : end])
            length += end - self._at
            self._at = end
        return None

    def _tagged_value(self, form: NamedCall, tags: TaggedArguments, kinds: frozenset[str]) -> Steps:
        """Report a value. A string streams, and any other value comes at once."""
        if tags.typed:
            if (yield from self._take(tags.typed[0])):
                kinds = TEXT
            elif (yield from self._take(tags.typed[1])):
                kinds = ANY
            else:
                return False
        if tags.value:
            yield from self._space([])
            if not (yield from self._take(tags.value)):
                return False
        parts = list[str]()
        if kinds == TEXT:
            self._tell('"')
        say = (lambda text: self._tell(quoted(text)[1:-1])) if kinds == TEXT else parts.append
        if not (yield from self._value_text(form, tags, say)):
            return False
        self._tell('"' if kinds == TEXT else json_of("".join(parts), kinds))
        return True

    def _value_text(
        self, form: NamedCall, tags: TaggedArguments, say: Callable[[str], None]
    ) -> Steps:
        """Report the text of a value, and read the marker after it. False: the text has ended."""
        first = tags.end[0]
        run = _VALUE_RUN if tags.lines else _LINE_FREE_RUN
        if tags.lines:
            yield from self._take("\n")
        while (yield from self._more()):
            if text := run.match(self._text, self._at):
                say(text[0])
                self._at = text.end()
                continue
            line = tags.lines and (yield from self._take("\n"))
            if (yield from self._ends_value(form, tags)):
                return True
            if self._ended and self._cut_off and tags.end.startswith(self._text[self._at :]):
                self._at = len(self._text)  # within the marker after the value
            elif line:
                say("\n")
            elif self._text.startswith(first, self._at):
                say(first)
                self._at += 1
        return False

    def _ends_value(self, form: NamedCall, tags: TaggedArguments) -> Steps:
        """Read the marker after a value, if a key or an end follows it."""
        if not (yield from self._sees(tags.end)):
            return False
        stops = [stop for stop in (tags.key, form.close, self._format.end) if stop]
        while True:
            begin = self._at + len(tags.end)
            behind = self._text[begin : begin + _MOST_SPACE + max(map(len, stops))]
            rest = behind.lstrip(" \t\r\n")
            is_open = any(stop.startswith(rest) for stop in stops)
            if any(map(rest.startswith, stops)) or (self._ended and is_open):
                self._at = begin
                return True
            if not is_open or len(behind) - len(rest) >= _MOST_SPACE:
                return False
            yield

    def _keywords(
        self, call: _CallObject, form: NamedCall, keywords: KeywordArguments, call_id: str
    ) -> Steps:
        """Read literals with keywords, and the call's end."""
        self._announce(call, call_id=call_id)
        return (
            yield from self._members(
                keywords.notation, form.close, keywords.assign, self._tell, bare_keys=True
            )
        )

    # -- a call that is one JSON object ------------------------------------------------------------

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

    def _announce(self, call: _CallObject, arguments: str = "", *, call_id: str = "") -> None:
        """Report a call, which it stays unless its arguments break. `call_id`: the model's."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = call_id or f"call_{secrets.token_hex(12)}"
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
