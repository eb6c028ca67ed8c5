"""Every format of tool calls: what its models write is read back, however the text is cut."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.server.api.parsing import ChatFormat, chat_format, make_parser
from nano_inference.server.api.parsing.tool_formats import (
    PARSER_NAMES,
    TOOL_FORMATS,
    KeywordArguments,
    NamedCall,
    TaggedArguments,
)
from nano_inference.server.api.parsing.typed_values import json_of, kinds_of
from tests.depth import at_depth
from tests.server.api.parsing.rendering import rendered
from tests.server.api.parsing.test_parsing import CUTS, cut

FORMATS = sorted(TOOL_FORMATS)
MARKERS = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers})


def read(
    name: str, pieces: Sequence[str], schemas: Mapping[str, Any], *, cut_off: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Parse the pieces into content, and the names and arguments of calls."""
    parser = make_parser(ChatFormat(name), tools=schemas, reasoning=False, prompt_tail="")
    content, calls, broken = "", list[list[str]](), set[int]()
    for parsed in [*map(parser.push, pieces), parser.finish(cut_off=cut_off)]:
        content += parsed.content
        for delta in parsed.tool_calls:
            if delta.id is not None:
                assert (delta.index, bool(delta.name)) == (len(calls), True)
                calls.append([delta.name or "", ""])
            calls[delta.index][1] += delta.arguments
            broken |= {delta.index} if delta.broken else set()
    kept = [(one, two) for index, (one, two) in enumerate(calls) if index not in broken]
    return content, kept


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.lists(
    st.sampled_from(
        [*MARKERS, *"\n\\\"'<>/{}[]()", "true", "null", "12", '{"a": 1}', " ", "é🙂", "x"]
    ),
    max_size=6,
).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc_é <>:", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
PARAMETERS = st.sampled_from(["a", "city", "new_string", "x1", "é"])
ARGUMENTS = st.dictionaries(PARAMETERS, VALUES, max_size=4)
NAMES = st.sampled_from(["f", "get_weather", "mcp__fs-read", "é"])
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


def schema_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that has the types of the arguments."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    kinds |= {dict: "object", type(None): "null"}
    return {
        "type": "object",
        "properties": {name: {"type": kinds[type(value)]} for name, value in arguments.items()},
    }


def carries(name: str, value: object) -> bool:
    """Return True if the format can carry the text of a value: it has no marker that ends it."""
    call = TOOL_FORMATS[name].call
    if not isinstance(call, NamedCall):
        return True
    match call.arguments:
        case TaggedArguments() as tags:
            stops = "|".join(
                re.escape(stop) for stop in (tags.key, call.close, TOOL_FORMATS[name].end) if stop
            )
            # the end of a value, before a key or an end
            text = str(value) + tags.end + tags.key
            pattern = rf"{re.escape(tags.end)}\s*({stops})"
            return not isinstance(value, str) or (
                len(re.findall(pattern, text)) == 1
                and not re.search(rf"{re.escape(tags.end)}\s*$", value)
            )
        case KeywordArguments(notation=notation) if not notation.escapes:
            return notation.quotes[0] not in repr(value) and _no_overlap(value, notation.quotes[0])
        case _:
            return True


def _no_overlap(value: object, quote: str) -> bool:
    """Return True if no text ends with a beginning of the quote, so that both would form one."""
    if isinstance(value, str):
        return (value + quote).find(quote) == len(value)
    if isinstance(value, dict):
        return all(_no_overlap(each, quote) for pair in value.items() for each in pair)
    return not isinstance(value, list) or all(_no_overlap(each, quote) for each in value)


def unique(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Give each call a tool of its own, since one tool has one schema."""
    return [(f"{name}_{index}", arguments) for index, (name, arguments) in enumerate(calls)]


@pytest.mark.thorough
@given(
    name=st.sampled_from(FORMATS),
    drawn=CALLS,
    before=st.sampled_from(["", "Let me look.", "1 < 2", "[a](b)", "<tool", "é🙂\n\n- a"]),
    after=st.sampled_from(["", "\n", " Done.", "\n\n[x] <b>"]),
    ends=CUTS,
)
@settings(max_examples=at_depth(500), deadline=None)
def test_calls_are_read_as_written(
    name: str,
    drawn: list[tuple[str, dict[str, Any]]],
    before: str,
    after: str,
    ends: list[int],
) -> None:
    calls = [
        (called, {key: value for key, value in arguments.items() if carries(name, value)})
        for called, arguments in unique(drawn)
    ]
    schemas = {called: schema_of(arguments) for called, arguments in calls}
    text = before + rendered(name, calls)
    for last in {"", after}:
        content, calls_read = read(name, cut(text + last, ends), schemas)
        assert [(called, json.loads(each)) for called, each in calls_read] == calls
        assert content == before.rstrip() + (last if last.strip() else "")


@pytest.mark.thorough
@given(
    name=st.sampled_from(FORMATS),
    drawn=CALLS,
    length=st.integers(0, 10_000),
    ends=CUTS,
)
@settings(max_examples=at_depth(300), deadline=None)
def test_cut_call_is_read_as_far_as_it_got(
    name: str, drawn: list[tuple[str, dict[str, Any]]], length: int, ends: list[int]
) -> None:
    calls = [
        (called, {key: value for key, value in arguments.items() if carries(name, value)})
        for called, arguments in unique(drawn)
    ]
    schemas = {called: schema_of(arguments) for called, arguments in calls}
    text = rendered(name, calls)
    _, whole = read(name, [text], schemas)
    part = text[: length % (len(text) + 1)]
    content, calls_read = read(name, cut(part, ends), schemas, cut_off=True)
    assert (content, calls_read) == read(name, [part], schemas, cut_off=True)
    assert len(calls_read) <= len(whole)
    for (called, arguments), (wanted, complete) in zip(calls_read, whole, strict=False):
        assert called == wanted
        assert complete.startswith(arguments) or calls_read[-1] == (called, arguments)
    for (called, arguments), (wanted, complete) in zip(calls_read[:-1], whole, strict=False):
        assert (called, arguments) == (wanted, complete)


FRAGMENTS = st.sampled_from(
    [*MARKERS, *"\n\\\"'<>/{}[]():,= ", "f", "call:", "functions.f:0", "1", "true", "é", '{"a": 1}']
)


@given(st.sampled_from(FORMATS), st.lists(FRAGMENTS, max_size=25), CUTS, st.booleans())
@settings(max_examples=at_depth(400), deadline=None)
def test_reading_does_not_depend_on_the_split(
    name: str, parts: list[str], ends: list[int], cut_off: bool
) -> None:
    text = "".join(parts)
    whole = read(name, [text], {}, cut_off=cut_off)
    assert read(name, cut(text, ends), {}, cut_off=cut_off) == whole
    assert read(name, text, {}, cut_off=cut_off) == whole


@given(st.sampled_from(FORMATS), st.lists(FRAGMENTS | st.just("Ж"), max_size=25))
@settings(max_examples=at_depth(300), deadline=None)
def test_malformed_calls_lose_no_text(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = read(name, [text], {})
    reported = content + "".join(called + arguments for called, arguments in calls)
    assert reported.count("Ж") == text.count("Ж")


WEATHER = [("weather", {"city": "Rome", "days": 2, "tags": ["a", "b"]})]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
    },
}
DSML = "\uff5cDSML\uff5c"
V3 = [f"<\uff5ctool▁{word}\uff5c>" for word in ("calls▁begin", "call▁begin", "sep")]
V3_ENDS = [f"<\uff5ctool▁{word}\uff5c>" for word in ("call▁end", "calls▁end")]
JSON = '{"city": "Rome", "days": 2, "tags": ["a", "b"]}'
# a call as the chat template of a model renders it (llama.cpp's models/templates, August 2026)
WRITTEN = [
    (
        "qwen3_coder",
        "\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=tags>\n"
        '["a", "b"]\n</parameter>\n</function>\n</tool_call>',
    ),
    (
        "glm45",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a", "b"]</arg_value>\n</tool_call>',
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days"
        "</arg_key><arg_value>2</arg_value><arg_key>tags</arg_key>"
        '<arg_value>["a", "b"]</arg_value></tool_call>',
    ),
    (
        "deepseek_v3",
        f"{V3[0]}{V3[1]}function{V3[2]}weather\n```json\n{JSON}\n```{V3_ENDS[0]}{V3_ENDS[1]}",
    ),
    ("deepseek_v3", f"{V3[0]}{V3[1]}function{V3[2]}weather\n{JSON}{V3_ENDS[0]}{V3_ENDS[1]}"),
    ("deepseek_v31", f"{V3[0]}{V3[1]}weather{V3[2]}{JSON}{V3_ENDS[0]}{V3_ENDS[1]}"),
    (
        "deepseek_v32",
        f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">Rome</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n'
        f'<{DSML}parameter name="tags" string="false">["a", "b"]</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "minimax_m2",
        '\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}, "id": "abcdefghi"}}]'),
    ("mistral_args", f"[TOOL_CALLS]weather[ARGS]{JSON}"),
    ("mistral_args", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{JSON}"),
    ("llama", f'{{"name": "weather", "parameters": {JSON}}}'),
    ("pythonic", "[weather(city='Rome', days=2, tags=['a', \"b\"])]"),
    ("pythonic", '<|python_start|>[weather(city="Rome", days=2, tags=["a", "b"])]'),
    ("lfm2", '<|tool_call_start|>[weather(city="Rome", days=2, tags=["a", "b"])]<|tool_call_end|>'),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}'
        "<tool_call|>",
    ),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]'),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
    ),
    (
        "seed_oss",
        "\n<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n"
        "<parameter=days>2</parameter>\n"
        '<parameter=tags>["a", "b"]</parameter>\n</function>\n</seed:tool_call>',
    ),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_rendered_history_is_read(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        for schemas in ({"weather": SCHEMA}, {}):
            content, calls = read(name, pieces, schemas)
            assert content == ""
            assert [(called, json.loads(each)) for called, each in calls] == WEATHER


def test_call_keeps_the_id_that_its_model_wrote() -> None:
    for name, text, ids in [
        (
            "kimi_k2",
            rendered("kimi_k2", [("f", {}), ("f", {})]),
            ["functions.f:0", "functions.f:1"],
        ),
        ("mistral_args", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", ["abcdefghi"]),
    ]:
        parser = make_parser(ChatFormat(name), tools={}, reasoning=False, prompt_tail="")
        parsed = [parser.push(text), parser.finish()]
        assert [each.id for one in parsed for each in one.tool_calls] == ids


@pytest.mark.parametrize("name", FORMATS)
def test_long_string_streams(name: str) -> None:
    text = rendered(name, [("f", {"a": "word " * 50})])
    parser = make_parser(
        ChatFormat(name), tools={"f": schema_of({"a": ""})}, reasoning=False, prompt_tail=""
    )
    parts = [each.arguments for letter in text for each in parser.push(letter).tool_calls]
    assert len([part for part in parts if part]) > 200


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "12.0", 12.0),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1, 'a']", "[1, 'a']"),
        ({"type": "object"}, '{"a": None,}', {"a": None}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullable", "nullable"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"12"', "12"),
        ({"$ref": "#/$defs/a"}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"items": {}}, "[]", []),
        ({}, "12", 12),
        ({}, "twelve", "twelve"),
        (True, "[1]", [1]),
    ],
)
def test_value_has_a_type_of_its_schema(schema: Any, text: str, value: object) -> None:
    kinds = kinds_of(schema, {"$defs": {"a": {"type": "string"}}})
    assert json.loads(json_of(text, kinds)) == value


def test_bare_list_is_a_call_only_of_a_known_tool() -> None:
    text = "[see(a=1)]"
    assert read("pythonic", [text], {"f": None}) == (text, [])
    assert read("pythonic", [text], {"see": None}) == ("", [("see", '{"a": 1}')])
    assert read("pythonic", ["[a](b) and [f(x)]"], {"f": None}) == ("[a](b) and [f(x)]", [])


def test_names_of_other_systems_are_known() -> None:
    old, new = "[TOOL_CALLS] [", "[TOOL_CALLS]{{ name }}[ARGS]{}"
    assert chat_format(old, "mistral").tools == "mistral"
    assert chat_format(new, "mistral").tools == "mistral_args"
    assert chat_format("<tool_call>", "granite").tools == "hermes"
    for name, formats in PARSER_NAMES.items():
        tools = chat_format(None, name).tools
        assert tools == (None if name == "none" else formats[0])
