"""Parsers of model output: results of well-formed answers, and no text that is lost, changed or
slow.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import ConfigError
from nano_inference.server.api.parsing import (
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
    ChatFormat,
    chat_format,
    make_parser,
)
from nano_inference.server.api.parsing.scanning import JsonMender, JsonScanner
from tests.depth import at_depth

FORMATS = ["hermes", "llama", "mistral"]  # a call is one JSON object
MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>"]


@dataclass
class Joined:
    """All pieces of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments


def parse(
    tools: str | None,
    pieces: Sequence[str],
    *,
    reasoning: str | None = "think",
    prompt_tail: str = "",
    cut_off: bool = True,
) -> Joined:
    parser = make_parser(
        ChatFormat(tools, reasoning), tools={}, reasoning=True, prompt_tail=prompt_tail
    )
    joined, broken = Joined(), set[int]()
    for parsed in [*map(parser.push, pieces), parser.finish(cut_off=cut_off)]:
        joined.content += parsed.content
        joined.reasoning += parsed.reasoning
        assert len({delta.index for delta in parsed.tool_calls}) == len(parsed.tool_calls)
        for delta in parsed.tool_calls:
            if delta.index == len(joined.calls):
                assert delta.id is not None
                assert re.fullmatch("call_[0-9a-f]{24}", delta.id)
                assert delta.name
                joined.calls.append([delta.name, ""])
            else:
                assert (delta.index, delta.id, delta.name) == (len(joined.calls) - 1, None, None)
            joined.calls[delta.index][1] += delta.arguments
            broken |= {delta.index} if delta.broken else set()
    joined.calls = [call for index, call in enumerate(joined.calls) if index not in broken]
    return joined


def cut(text: str, ends: Sequence[int]) -> list[str]:
    """Cut `text` into pieces, some of them empty."""
    places = [0, *sorted(end % (len(text) + 1) for end in ends), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 10_000), max_size=30)
OBJECTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda values: (
            st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
NAMES = st.sampled_from(["f", "get_weather", 'a"b', "é🙂"])
# Pieces of every format, whole and broken, so that random text resembles calls.
FRAGMENTS = [
    *MARKERS,
    *(
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {}}',
        '{"name": "f"',
        '"arguments": {"a": ',
    ),
    *(
        '{"arguments": [1], "name": "f"}',
        '{"arguments": {"b": "}"}, "name": "g"}',
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
    ),
    *(
        ";",
        "\n",
        " ",
        "\\",
        "\\u00",
        "1",
        "-1.5e",
        "true",
        "tru",
        "null",
        "<",
        "</",
        "<tool",
        "<th",
        "hello",
        "é",
        "🙂",
    ),
]
DOCUMENTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)


@given(st.sampled_from(FORMATS), DOCUMENTS | st.text(), CUTS, st.booleans())
@settings(max_examples=at_depth(400), deadline=None)
def test_parse_is_independent_of_the_split(
    tools: str, text: str, ends: list[int], inside: bool
) -> None:
    tail = "<think>\n" if inside else ""
    assert parse(tools, cut(text, ends), prompt_tail=tail) == parse(tools, [text], prompt_tail=tail)


@given(st.sampled_from(FORMATS), DOCUMENTS, st.booleans())
@settings(max_examples=at_depth(400), deadline=None)
def test_parser_loses_no_text(tools: str, text: str, inside: bool) -> None:
    # Letters that occur in no marker and in no call. Each must be emitted once, in order, in its
    # channel.
    marked = "".join(
        letter if letter in '{}[]":,;<>/|_tolcahinkmergusypTOLCAS\\ \n' else "Ж" for letter in text
    )
    for words in (text, re.sub("hello", "ЖЖ", text), marked):
        joined = parse(tools, [words], prompt_tail="<think>" if inside else "")
        out = [joined.content, joined.reasoning, *(part for call in joined.calls for part in call)]
        for letter in "Ж🙂é":
            assert sum(part.count(letter) for part in out) == words.count(letter)
        for part in out[:2]:
            rest = iter(words)
            assert all(letter in rest for letter in part)
        for part in out[2:]:  # repaired JSON has other characters
            rest = iter(words)
            assert all(letter in rest for letter in part if letter in "Ж🙂é")


@given(st.sampled_from(FORMATS), st.text())
@settings(max_examples=at_depth(100), deadline=None)
def test_plain_text_stays_as_it_is(tools: str, text: str) -> None:
    assert parse(tools, list(text)).content == text
    parser = make_parser(
        ChatFormat(tools, "think"), tools=None, reasoning=False, prompt_tail="<think>"
    )
    for marker in MARKERS:
        assert parser.push(marker + text).content == marker + text
    assert parser.finish().content == ""


def write(tools: str, calls: Sequence[tuple[str, str]], newline: str) -> str:
    """Write the calls in the format of a model family."""
    if tools == "hermes":
        blocks = [
            f'<tool_call>{newline}{{"name": {name}, "arguments": {text}}}{newline}</tool_call>'
            for name, text in calls
        ]
        return newline.join(blocks)
    if tools == "llama":
        return f";{newline}".join(
            f'{{"name": {name},{newline} "parameters": {text}}}' for name, text in calls
        )
    return (
        "[TOOL_CALLS]"
        + newline
        + "["
        + ", ".join(f'{{"name": {n}, "arguments": {t}}}' for n, t in calls)
        + "]"
    )


@pytest.mark.thorough
@given(
    tools=st.sampled_from(FORMATS),
    thought=st.none() | st.sampled_from(["", "I see.", "a < b </thin", "use <tool_call>"]),
    before=st.sampled_from(["", "Let me look.", "1 < 2", "<tool"]),
    calls=st.lists(st.tuples(NAMES, OBJECTS), min_size=1, max_size=3),
    newline=st.sampled_from(["", "\n", " \n\n"]),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    ends=CUTS,
)
@settings(max_examples=at_depth(200), deadline=None)
def test_calls_as_the_family_writes_them(
    tools: str,
    thought: str | None,
    before: str,
    calls: list[tuple[str, dict[str, object]]],
    newline: str,
    indent: int | None,
    ascii_only: bool,
    ends: list[int],
) -> None:
    before = "" if tools == "llama" else before  # the whole answer is calls
    texts = [
        (name, json.dumps(value, indent=indent, ensure_ascii=ascii_only)) for name, value in calls
    ]
    said = write(tools, [(json.dumps(name), text) for name, text in texts], newline)
    text = (
        ("" if thought is None else f"<think>{newline}{thought}{newline}</think>{newline}")
        + before
        + newline
        + said
    )
    joined = parse(tools, cut(text + newline, ends))
    assert joined == Joined(before, thought or "", [list(call) for call in texts])
    assert [json.loads(arguments) for _, arguments in joined.calls] == [value for _, value in calls]


@pytest.mark.parametrize("tools", FORMATS)
def test_arguments_stream(tools: str) -> None:
    text = write(tools, [('"f"', '{"city": "Paris", "days": [1, 2]}')], "\n")
    parser = make_parser(ChatFormat(tools), tools={}, reasoning=False, prompt_tail="")
    deltas = [delta for letter in text for delta in parser.push(letter).tool_calls]
    whole = '{"city": "Paris", "days": [1, 2]}'
    waiting = re.findall(r", .|.", whole)  # a comma waits for the next character
    assert [delta.arguments for delta in deltas if delta.arguments] == waiting
    assert deltas[0].name == "f"


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "<", "<tool", "_call", "<tool_call", "{", "<<"])).map(
        "".join
    )
)
@settings(deadline=None)
def test_parser_holds_back_only_possible_markers(text: str) -> None:
    parser = make_parser(ChatFormat("hermes"), tools={}, reasoning=False, prompt_tail="")
    shown = ""
    for end, letter in enumerate(text, 1):
        shown += parser.push(letter).content
        waiting = re.search(r"[ \t\r\n]*(<(t(o(o(l(_(c(a(l(l)?)?)?)?)?)?)?)?)?)?\Z", text[:end])
        assert waiting is not None
        assert shown + waiting[0] == text[:end]
        assert not shown.endswith((" ", "\n"))


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        # Not a call: emitted as written, with spaces and markers.
        ("hermes", 'a\n<tool_call>\n{"nome": "f"}\n</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "argum', None, []),
        ("hermes", "<tool_call></tool_call> ", None, []),
        ("hermes", '{"name": "f", "arguments": {}}', None, []),
        ("llama", '{"name": "Bob", "age": 5}', None, []),
        ("llama", '{"name": "Bob"}', None, []),
        ("llama", 'I call {"name": "f", "parameters": {}}', None, []),
        ("llama", '<|python_tag|>search(query="x")', None, []),
        ("mistral", "[1] says", None, []),
        ("mistral", "[TOOL_CALLS] none", None, []),
        ("mistral", '[{"name": "f", "age": {}}]', None, []),
        # A marker in the broken part is recognized at the fault.
        (
            "hermes",
            '<tool_call> <tool_call>{"name": "f"}</tool_call>',
            "<tool_call> ",
            [["f", "{}"]],
        ),
        # Faults inside the arguments.
        (
            "hermes",
            'a <tool_call>{"name": "f", "arguments": {"a": oops}}',
            None,
            [],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
            '<tool_call>{"name": "g"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
            [["g", "{}"]],
        ),
        (
            "hermes",
            '<tool_call>{"name": "g"}</tool_call>\n<tool_call>{"name": "f", "arguments": {1}}',
            '\n<tool_call>{"name": "f", "arguments": {1}}',
            [["g", "{}"]],
        ),
        ("llama", '{"name": "f", "parameters": {"a": b}}', None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a" 1}}]', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [["f", '{"a": 1']]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": 1}', ', "x": 1}', [["f", "{}"]]),
        # Small, unambiguous mistakes.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\n',
            "",
            [["f", '{"a": 1}']],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}',
            "",
            [["f", "{}"], ["g", "{}"]],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>',
            "",
            [["f", "{}"], ["g", "{}"]],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [["f", '{"a": 1}']]),
        ("llama", '{"type": "function", "name": "f", "parameters": {}}', "", [["f", "{}"]]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
        (
            "llama",
            '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}',
            "",
            [["f", "{}"], ["g", "{}"]],
        ),
        ("mistral", ' [{"name": "f", "arguments": {}}]', "", [["f", "{}"]]),
        # Text around calls keeps its whitespace.
        ("hermes", 'a b\n<tool_call>{"name": "f"}</tool_call>\nc ', "a b\nc ", [["f", "{}"]]),
        ("llama", '{"name": "f", "parameters": {}} done', " done", [["f", "{}"]]),
    ],
)
def test_calls_that_are_none_or_nearly(
    tools: str, text: str, content: str | None, calls: list[list[str]]
) -> None:
    assert parse(tools, [text]) == Joined(text if content is None else content, "", calls)


@pytest.mark.parametrize("tools", FORMATS)
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"text": "line one\nline two"}', {"text": "line one\nline two"}),
        ('{"text": "a\tb\r\n\x00"}', {"text": "a\tb\r\n\x00"}),
        ('{"a\tb": 1}', {"a\tb": 1}),
        (
            r'{"path": "C:\dir\users\x", "y": "\u00e9\u12"}',
            {"path": r"C:\dir\users\x", "y": "é\\u12"},
        ),
        (r'{"it": "it\'s"}', {"it": "it's"}),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
        ('{"a": [1, 2, ], "b": {"c": 1,\n},}', {"a": [1, 2], "b": {"c": 1}}),
        ('{"a": ",]", "b": ",}"}', {"a": ",]", "b": ",}"}),
    ],
)
def test_small_mistakes_in_arguments_are_mended(
    tools: str, written: str, meant: dict[str, object]
) -> None:
    text = write(tools, [('"f"', written)], "\n")
    whole = parse(tools, [text], cut_off=False)
    assert whole == parse(tools, list(text), cut_off=False)
    assert whole.content == ""
    assert [json.loads(arguments) for _, arguments in whole.calls] == [meant]


@pytest.mark.parametrize("tools", FORMATS)
@pytest.mark.parametrize(
    "written",
    ["{'a': 1}", '{"a": 1 "b": 2}', "{a: 1}", '{"a": NaN}', '{"a": Tru}', '{"a": [1,,2]}'],
)
def test_unrepairable_call_is_text(tools: str, written: str) -> None:
    text = write(tools, [('"f"', written)], "\n")
    for pieces in ([text], list(text)):
        assert parse(tools, pieces) == Joined(text)


@pytest.mark.parametrize("tools", FORMATS)
def test_unfinished_call_is_not_a_call(tools: str) -> None:
    text = write(tools, [('"f"', '{"a": "b')], "\n").partition("b")[0] + "b"
    for pieces in ([text], list(text)):
        assert parse(tools, pieces, cut_off=False) == Joined(text)
        assert parse(tools, pieces, cut_off=True) == Joined("", "", [["f", '{"a": "b']])


@pytest.mark.parametrize(
    ("text", "prompt_tail", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nHi", "", "hm", "Hi"),
        ("hm\n</think>\n\nHi", "<|im_start|>assistant\n<think>\n", "hm", "Hi"),
        ("<think>\n\n</think>\n\nHi", "", "", "Hi"),
        ("Hi", "<think>\n\n</think>\n\n", "", "Hi"),
        ("Hi <think>x</think>", "", "", "Hi <think>x</think>"),
        ("<think>a <think> b</think>c</think>", "", "a <think> b", "c</think>"),
        ("<think>cut off </thi", "", "cut off </thi", ""),
        ("\n <thin", "", "", "\n <thin"),
        (" <think>a", "", "a", ""),
    ],
)
def test_reasoning(text: str, prompt_tail: str, reasoning: str, content: str) -> None:
    assert parse(None, [text], prompt_tail=prompt_tail) == Joined(content, reasoning)
    assert parse("hermes", list(text), prompt_tail=prompt_tail) == Joined(content, reasoning)


@given(OBJECTS | st.sampled_from([-0.0, 1e300, -12, 0, "x\\"]), st.sampled_from([None, 1]), CUTS)
@settings(deadline=None)
def test_scanner_finds_the_end_of_a_value(
    value: object, indent: int | None, ends: list[int]
) -> None:
    text = json.dumps(value, indent=indent)
    scanner = JsonScanner()
    taken = sum(scanner.feed(piece, 0) for piece in cut(text + " x", ends) if not scanner.complete)
    assert (taken, scanner.complete, scanner.failed) == (len(text), True, False)


@given(
    st.lists(
        st.sampled_from([*'{}[]",:01-+.eE tfn\\uaq\n', "true", "null", '"a"', '"a":']), max_size=12
    )
)
@settings(max_examples=at_depth(500), deadline=None)
def test_scanner_takes_what_json_takes(parts: list[str]) -> None:
    text = "".join(parts)
    scanner = JsonScanner()
    end = scanner.feed(text + ",", 0)  # a number ends only at the next character
    try:
        assert not text.startswith((" ", "\n", "\t"))  # not part of the value
        expected = json.JSONDecoder(parse_constant=lambda name: pytest.fail(name)).raw_decode(text)[
            1
        ]
    except (ValueError, AssertionError):
        # A cut may split a number if the library gives up the rest: it reads `1.` as 1 and a point.
        assert not scanner.complete
    else:
        assert (end == expected) == scanner.complete


@given(OBJECTS, st.sampled_from([None, 1]), CUTS)
@settings(deadline=None)
def test_mender_keeps_valid_json(value: object, indent: int | None, ends: list[int]) -> None:
    text = json.dumps(value, indent=indent)
    mender, out = JsonMender(), ""
    for piece in cut(text, ends):
        mender.feed(piece, 0)
        out += mender.taken()
    assert (out, mender.complete, mender.failed) == (text, True, False)


@given(
    st.lists(
        st.sampled_from(
            [*"{}[]\",:01-.e \\u'\n\t", "True", "None", "nul", '"a"', '"a":', '{"a":', "\\d", ",]"]
        ),
        max_size=12,
    ).map("".join),
    CUTS,
)
@settings(max_examples=at_depth(500), deadline=None)
def test_mender_writes_json(text: str, ends: list[int]) -> None:
    whole, mender, out, at = JsonMender(), JsonMender(), "", 0
    end = whole.feed(text, 0)
    for piece in cut(text, ends):
        if not (mender.complete or mender.failed):
            at += mender.feed(piece, 0)
            out += mender.taken()
    assert (out, at, mender.complete, mender.failed) == (
        *(whole.taken(), end, whole.complete, whole.failed),
    )
    if whole.complete:
        json.loads(out)
    try:  # inputs that the library accepts leniently are accepted too
        if text.startswith(("{", "[")):
            expected, stopped = json.JSONDecoder(strict=False, parse_constant=_fail).raw_decode(
                text
            )
            assert (json.loads(out), end) == (expected, stopped)
    except ValueError:
        pass


def _fail(name: str) -> None:
    raise ValueError(name)


UNITS = [
    *(
        "word ",
        " ",
        "<",
        "<tool_call>",
        "<tool_call>{",
        "[",
        "{",
        '{"',
        '"',
        '{"name": "f", ',
        "</think>",
        "1",
    ),
    *(
        "[TOOL_CALLS][",
        '{"parameters":"\\\\',
        '{"name":"f","parameters":{}};',
        "<tool_call>\n\n\n\n",
        '{"parameters":[[',
        '<tool_call>{"name": "f", "arguments": {"a": "\n',
        '<tool_call>{"name": "f", "arguments": [oops ',
    ),
    *(
        '<tool_call>{"name": "f", "arguments": {"a": "',
        '<tool_call>{"name":"f"}</tool_call>\n',
        "<|python_tag|>",
    ),
]


@pytest.mark.thorough(
    cases=[
        "<-hermes",
        "<-llama",
        "[-mistral",
        '{"name":"f","parameters":{}};-llama',
        '<tool_call>{"name": "f", "arguments": {"a": "-hermes',
    ]
)
@pytest.mark.parametrize("tools", FORMATS)
@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_with_the_text(tools: str, unit: str) -> None:
    def seconds(length: int, step: int) -> float:
        text = (unit * (length // len(unit) + 1))[:length]
        pieces = [text[begin : begin + step] for begin in range(0, length, step)]
        parser = make_parser(ChatFormat(tools, "think"), tools={}, reasoning=True, prompt_tail="")
        begin = time.process_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        return time.process_time() - begin

    for step in (8, 10**6):
        # Four times the text: quadratic work takes sixteen times as long. The machine may be
        # busy, so try three times.
        assert any(seconds(200_000, step) < 9 * max(seconds(50_000, step), 0.01) for _ in range(3))


TEMPLATES = {
    "{{ '<tool_call>' }}{{ tool_call | tojson }}</tool_call>": ChatFormat("hermes"),
    "{%- if '</think>' in content %} <tool_call> {{ name }}": ChatFormat("hermes", "think"),
    "<tool_call>\n<function={{ name }}>": ChatFormat("qwen3_coder"),
    "<tool_call>{{ name }}<arg_key>": ChatFormat("glm45"),
    '<|start_header_id|>{{ role }} {"name": x, "parameters": y}': ChatFormat("llama"),
    "{{- '\"parameters\": ' }}<|start_header_id|>": ChatFormat(),
    "{{ '<|python_tag|>' }}": ChatFormat("llama"),
    "[INST] [TOOL_CALLS] [": ChatFormat("mistral"),
    "[INST] [TOOL_CALLS]f[ARGS]{}": ChatFormat("mistral_args"),
    "{{ '<|tool_call>call:' + name }}": ChatFormat("gemma4"),
    "[func_name1(params_name1=params_value1)]<|start_header_id|>": ChatFormat("pythonic"),
    "<minimax:tool_call>{{ name }}": ChatFormat("minimax_m2"),
    "<|tool_calls_section_begin|>": ChatFormat("kimi_k2"),
    "respond with <|tool_call|> and a list": ChatFormat("granite"),
    "<|im_start|>{{ content }}<|im_end|>": ChatFormat(),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items())
def test_formats_are_recognised(template: str, expected: ChatFormat) -> None:
    assert chat_format(template) == expected
    assert chat_format(template, "none", "none") == ChatFormat()
    assert chat_format(template, "llama", "think") == ChatFormat("llama", "think")


def test_names_of_formats() -> None:
    assert chat_format(None) == ChatFormat()
    for name in TOOL_FORMAT_NAMES:
        assert chat_format(None, name).tools == (None if name == "none" else name)
    for name in REASONING_FORMAT_NAMES:
        assert chat_format(None, None, name).reasoning == (None if name == "none" else name)
    with pytest.raises(
        ConfigError,
        match=r"tool format 'hermés' does not exist; choose one of none, hermes, qwen3_coder",
    ):
        chat_format(None, "hermés")
    with pytest.raises(
        ConfigError, match="reasoning format 'x' does not exist; choose one of none, think"
    ):
        chat_format(None, None, "x")
