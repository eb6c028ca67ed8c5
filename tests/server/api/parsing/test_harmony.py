"""The Harmony parser: channels, calls by recipient, any cut, and no lost text."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nano_inference.errors import ConfigError
from nano_inference.server.api.parsing import ChatFormat, chat_format, reasoning_before
from nano_inference.server.api.parsing.formats import AT_ONCE, Behind
from nano_inference.server.api.parsing.harmony import HarmonyParser
from tests.depth import at_depth

TURN = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Think."
FINAL = "<|channel|>final<|message|>Hello."

Said = tuple[str, str, list[list[str]]]  # reasoning, content, calls


def parse(
    *pieces: str,
    tail: str = "<|end|><|start|>assistant",
    tools: bool = True,
    reasoning: bool = True,
    mark: str = "",
    cut_off: bool = True,
) -> Said:
    parser = HarmonyParser(tools=tools, reasoning=reasoning, prompt_tail=tail, mark=mark)
    thought, content, calls, broken = "", "", list[list[str]](), set[int]()
    for parsed in [*map(parser.push, pieces), parser.finish(cut_off=cut_off)]:
        thought, content = thought + parsed.reasoning, content + parsed.content
        for delta in parsed.tool_calls:
            if delta.index == len(calls):
                assert delta.id is not None
                calls.append([delta.name or "", ""])
            else:
                assert (delta.index, delta.id, delta.name) == (len(calls) - 1, None, None)
            calls[delta.index][1] += delta.arguments
            broken |= {delta.index} if delta.broken else set()
    return thought, content, [each for index, each in enumerate(calls) if index not in broken]


JSON = '{"city": "Köln"}'
MARKER = r"<\|(start|channel|message|constrain|end|return|call)\|>"
ANSWERS: dict[str, tuple[str, Said]] = {
    "final": (FINAL + "<|return|>", ("", "Hello.", [])),
    "reasoning": (THOUGHT + TURN + FINAL + "<|return|>", ("Think.", "Hello.", [])),
    "a call": (
        f"{THOUGHT}{TURN}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{JSON}<|call|>",
        ("Think.", "", [["weather", JSON]]),
    ),
    "its recipient beside the role": (
        f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>",
        ("", "", [["weather", JSON]]),
    ),
    "in the role of a later message": (
        f"{THOUGHT}{TURN} to=functions.a.b<|channel|>commentary<|message|>{JSON}<|call|>",
        ("Think.", "", [["a.b", JSON]]),
    ),
    "without space": (
        f"<|channel|>commentary to=functions.f<|constrain|>json<|message|>{JSON}",
        ("", "", [["f", JSON]]),
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        ("", "", [["now", "{}"]]),
    ),
    "two calls": (
        f"<|channel|>commentary to=functions.f<|message|>{JSON}<|call|><|start|>assistant"
        "<|channel|>commentary to=functions.g<|message|>{}<|call|>",
        ("", "", [["f", JSON], ["g", "{}"]]),
    ),
    "a preamble": (
        f"<|channel|>commentary<|message|>I will look.{TURN}"
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        ("", "I will look.", [["f", "{}"]]),
    ),
    "two thoughts": (THOUGHT + TURN + THOUGHT + TURN + FINAL, ("Think.\nThink.", "Hello.", [])),
    "a tool of the model's own": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        ("print(1)", "", []),
    ),
    "cut within a thought": (THOUGHT, ("Think.", "", [])),
    "cut within arguments": (
        '<|channel|>commentary to=functions.f<|message|>{"a": ',
        ("", "", [["f", '{"a": ']]),
    ),
    "arguments with small mistakes": (
        '<|channel|>commentary to=functions.f<|message|> {"a": "b\nc", "d": True,}\n<|call|>',
        ("", "", [["f", '{"a": "b\\nc", "d": true}']]),
    ),
    "arguments that break": (
        "<|channel|>commentary to=functions.f<|message|>{'a': 1}<|call|>",
        ("", "{'a': 1}", []),
    ),
    "arguments that are no object": (
        "<|channel|>commentary to=functions.f<|message|>print(1)<|call|>",
        ("", "print(1)", []),
    ),
    "arguments with more behind them": (
        "<|channel|>commentary to=functions.f<|message|>{} and<|call|>",
        ("", "{} and", []),
    ),
    "arguments that end too early": (
        '<|channel|>commentary to=functions.f<|message|>{"a": <|call|>',
        ("", '{"a": ', []),
    ),
    "cut within a header": ("<|channel|>anal", ("", "", [])),
    "no format": ("Hello.", ("", "Hello.", [])),
    "no format, words like a header": (" to be or not", ("", " to be or not", [])),
    "what looks like a marker": ("<|channel|>final<|message|>a < b <| c", ("", "a < b <| c", [])),
    "a marker out of place": (
        "<|channel|>final<|message|>a<|message|>b",
        ("", "a<|message|>b", []),
    ),
    "a header without an end before it": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
        ("a", "b", []),
    ),
    "behind an end": ("<|channel|>final<|message|>a<|end|>b", ("", "a\nb", [])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answer(name: str) -> None:
    text, said = ANSWERS[name]
    assert parse(text) == said
    assert parse(*text) == said


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_by_its_special_tokens(name: str) -> None:
    text, said = ANSWERS[name]
    marked, tail = re.sub(MARKER, "§$\\g<0>", text), "§$<|end|>§$<|start|>assistant"
    assert parse(marked, tail=tail, mark="§$") == said
    assert parse(*marked, tail=tail, mark="§$") == said


def test_markers_in_ordinary_letters_are_text() -> None:
    answer = re.sub(MARKER, "§$\\g<0>", "<|channel|>final<|message|>")
    tail = "§$<|end|>§$<|start|>assistant"
    for said in (
        "Write <|end|> to close a message.",
        "Say <|start|>assistant<|channel|>analysis<|message|>secret",
        "half <|e",
    ):
        assert parse(answer + said, tail=tail, mark="§$") == ("", said, [])
        assert parse(*(answer + said), tail=tail, mark="§$") == ("", said, [])
    call = "<|channel|>commentary to=functions.f<|message|>"
    arguments = '{"y": "<|end|> no"}'
    text = re.sub(MARKER, "§$\\g<0>", call) + arguments + "§$<|call|>"
    assert parse(*text, tail=tail, mark="§$") == ("", "", [["f", arguments]])
    # a special token outside of the format
    assert parse(answer + "a§$<|pad|>b", tail=tail, mark="§$") == ("", "a<|pad|>b", [])
    # also at the prompt's end, which a client may have written
    written = f"{tail}§$<|channel|>final§$<|message|>a <|start|>b"
    assert parse("c", tail=written, mark="§$") == ("", "c", [])


def test_unfinished_call_is_not_a_call() -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"a": '
    assert parse(text, cut_off=False) == ("", '{"a": ', [])


def test_unseparated_output_is_content() -> None:
    call = f"<|channel|>commentary to=functions.f<|message|>{JSON}<|call|>"
    assert parse(THOUGHT + TURN + call, tools=False) == ("Think.", JSON, [])
    assert parse(THOUGHT + TURN + FINAL, reasoning=False) == ("", "Think.\nHello.", [])


def test_answer_that_the_prompt_has_begun() -> None:
    begun = "<|end|><|start|>assistant<|channel|>"
    assert parse(" there.", tail=begun + "final<|message|>Hello") == ("", " there.", [])
    assert parse("So." + TURN + FINAL, tail=begun + "analysis<|message|>") == ("So.", "Hello.", [])
    assert parse(" there.", tail="a long beginning of an answer") == ("", " there.", [])
    assert parse("<|message|>Hello.", tail=begun + "final") == ("", "Hello.", [])


@pytest.mark.parametrize(
    "text",
    [" to=" + "x" * 2000, " " * 2000 + "x", "<|channel|>" + "x" * 2000, "<|channel|>" * 91 + "x"],
)
def test_header_that_never_ends_is_text(text: str) -> None:
    """Write an endless header: the parser must not rescan it with every token."""
    parser = HarmonyParser(tools=True, reasoning=True, prompt_tail="<|start|>assistant")
    assert parser.push(text[:-1]).content == text[:-1]
    assert parser.push(text[-1]).content == "x"


PARTS = [
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>"),
    *("<|call|>", "assistant", "analysis", "final", "commentary", " to=functions.f", " to=python"),
    *("{}", "json", " ", "\n", "<", "<|", "|>", "<|en", "hello", "é🙂"),
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=25).map("".join)


@pytest.mark.thorough
@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=30), st.booleans())
@settings(max_examples=at_depth(400), deadline=None)
def test_parse_is_independent_of_the_split(text: str, ends: list[int], tools: bool) -> None:
    places = [0, *sorted(end % (len(text) + 1) for end in ends), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert parse(*pieces, tools=tools) == parse(text, tools=tools)


# An unfinished header gives no text.
BEGUN = re.compile(r"\s*(t(o(=\S*)?)?)?\s*")


@given(st.text())
@example(" ")
@example(" to")
@example("\nx")
def test_text_without_markers_is_content(text: str) -> None:
    if not any(marker in text for marker in PARTS[:7]):
        assert parse(*text) == ("", "" if BEGUN.fullmatch(text) else text, [])


def test_format_is_recognised_and_goes_with_no_other() -> None:
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    assert chat_format(template) == ChatFormat("harmony", "harmony")
    assert chat_format(template, "none") == ChatFormat(None, "harmony")
    assert chat_format(template, "none", "none") == ChatFormat()
    with pytest.raises(ConfigError, match="hermes and reasoning format harmony cannot be combined"):
        chat_format(template, "hermes")


def test_grammar_begins_behind_the_final_channel() -> None:
    format = ChatFormat("harmony", "harmony")
    behind = Behind("<|channel|>final<|message|>")
    assert reasoning_before(format, prompt_tail="<|start|>assistant") == behind
    assert reasoning_before(format, prompt_tail="x", goes_on=True) == AT_ONCE
