"""Tool calls forced by a grammar: our parsers read back every text drawn under it."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from nano_inference.errors import InvalidRequest
from nano_inference.server.api.parsing import ChatFormat, make_parser
from nano_inference.server.api.parsing.tool_formats import TOOL_FORMATS
from nano_inference.server.api.parsing.tool_grammars import (
    OfferedTool,
    ToolDemand,
    require_carried,
    tool_grammar,
)
from nano_inference.structured.backend import backend_named
from nano_inference.structured.grammar import Grammar
from nano_inference.text.detokenizer import Detokenizer
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.server.api.parsing.rendering import rendered
from tests.structured.vocabularies import EOS, accepts, allowed, byte_tokenizer, state_of

# markers that models of the formats have as tokens
MARKERS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "[CALL_ID]"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>", "<|python_start|>"),
    *(each for each in TOOL_FORMATS["deepseek_v31"].markers),
    *(each for each in TOOL_FORMATS["kimi_k2"].markers),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
]
# Markers in the tokenizer: visible tokens, hidden tokens, or no tokens.
KINDS = ["bytes", "tokens", "special"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made: dict[str, Tokenizer] = {}
    for kind in KINDS:
        made[kind] = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
        if kind == "tokens":
            made[kind].backend.add_tokens([AddedToken(each, special=False) for each in MARKERS])
        elif kind == "special":
            made[kind].backend.add_special_tokens([each for each in MARKERS if "think" not in each])
    return {
        kind: Tokenizer(each.backend, each.backend.get_vocab_size(), EOS, {}, None)
        for kind, each in made.items()
    }


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WEATHER = OfferedTool("weather", object_of(city={"type": "string"}, days={"type": "integer"}))
TIME = OfferedTool("time", object_of(zone={"enum": ["UTC", "CET"]}))
NOW = OfferedTool("now")

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAMES = KEYS | st.sampled_from(["f", "get_weather", "mcp__fs-read"])
LEAVES = st.sampled_from(
    [
        {"type": "string", "maxLength": 5},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 'b "c"', 3]},
        {"anyOf": [{"type": "string", "pattern": "^[a-z]{2}$"}, {"type": "integer"}]},
        {"type": "object"},
        {},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda each: object_of(**each))
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    st.builds(
        OfferedTool,
        NAMES,
        st.none()
        | st.just({})
        | st.dictionaries(NAMES, SCHEMAS, max_size=3).map(lambda each: object_of(**each)),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda tool: tool.name,
)
# After `LONG` tokens these close the text if the mask allows them.
CLOSING = [*'"}])\n', *"0123456789aelrsuEnt", *"</_>ol;, ", *"cT:{["]
LONG = 60
CALLS = ['{"name": "a", "parameters": {}}', '[{"name": "a", "arguments": {"a": 1}}]', '{"name": "']


def drawn(grammar: Grammar, tokenizer: Tokenizer, seed: int) -> tuple[list[int], bool]:
    """Draw random tokens under the masks. Return them and whether the text has ended. Occasionally
    try to write the beginning of a call.
    """
    state = state_of(grammar, tokenizer)
    draw, ids = random.Random(seed), list[int]()
    closing = [EOS, *(tokenizer.encode(each)[0] for each in CLOSING)]
    tried = list[int]()
    while len(ids) < 1500:
        following = allowed(state.words)
        if tried and tried[0] in following:
            token_id = tried.pop(0)
        elif len(ids) < draw.randrange(1, LONG) or draw.random() < 0.1:
            token_id = draw.choice(sorted(following))
            text = draw.choice([*MARKERS, *CALLS, *"aaaaaa"])
            whole = tokenizer.backend.token_to_id(text)
            in_bytes = [each for byte in text for each in tokenizer.encode(byte)]
            tried = in_bytes if whole is None or draw.random() < 0.5 else [whole]
        elif state.changes is None:  # inside the thought
            tried = tokenizer.encode("</think>")
            token_id = tried.pop(0)
        else:
            ends = [each for each in closing if each in following]
            token_id = ends[0] if ends else draw.choice(sorted(following))
        if token_id == EOS:
            return ids, True
        state.accept(token_id)
        state.fill()
        ids.append(token_id)
    return ids, False


def read(
    text: str,
    name: str,
    reasoning: str | None = None,
    tail: str = "",
    tools: Mapping[str, Any] | None = None,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Parse the text into content, reasoning, and the names and arguments of calls."""
    parser = make_parser(
        ChatFormat(name, reasoning), tools=tools or {}, reasoning=True, prompt_tail=tail
    )
    content = thought = ""
    calls: list[list[str]] = []
    for parsed in [*map(parser.push, text), parser.finish()]:
        content, thought = content + parsed.content, thought + parsed.reasoning
        for call in parsed.tool_calls:
            if call.id is not None:
                calls.append([call.name or "", ""])
            calls[call.index][1] += call.arguments
    return content, thought, [(name, arguments) for name, arguments in calls]


def text_of(ids: Sequence[int], name: str, tokenizer: Tokenizer) -> str:
    """Return the text that the parser sees: with the format's markers, without other specials."""
    detokenizer = Detokenizer(tokenizer, shown=frozenset(TOOL_FORMATS[name].markers))
    return detokenizer.push(ids) + detokenizer.finish()


def carried(tool: OfferedTool, name: str) -> OfferedTool:
    """Return the tool with names that calls of the format can carry."""
    for candidate in (tool, replace(tool, name="f")):
        try:
            require_carried(ToolDemand([candidate], forced=True), ChatFormat(name))
        except InvalidRequest:
            continue
        return candidate
    return OfferedTool("f", None, tool.strict)


def require_valid(calls: Sequence[tuple[str, str]], tools: Sequence[OfferedTool]) -> None:
    by_name = {tool.name: tool for tool in tools}
    for name, arguments in calls:
        tool = by_name[name]
        empty = {"type": "object", "additionalProperties": False}
        jsonschema.validate(
            json.loads(arguments), empty if tool.parameters is None else tool.parameters
        )


PROMPTS = ["<|im_start|>assistant\n", "<think>\n", "<think>\n\n</think>\n\n"]


@pytest.mark.thorough
@settings(max_examples=at_depth(400), deadline=None, derandomize=True)
@given(
    tools=TOOLS,
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    kind=st.sampled_from(KINDS),
    forced=st.booleans(),
    parallel=st.booleans(),
    reasoning=st.sampled_from([None, "think"]),
    tail=st.sampled_from(PROMPTS),
    seed=st.integers(0, 2**32),
)
def test_tool_grammar_draws_are_parsed_as_valid_calls(
    tools: list[OfferedTool],
    name: str,
    kind: str,
    forced: bool,
    parallel: bool,
    reasoning: str | None,
    tail: str,
    seed: int,
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers[kind]
    tools = [carried(tool, name) for tool in tools]
    if len({tool.name for tool in tools}) < len(tools):
        tools = tools[:1]
    demand = ToolDemand(tools, forced, parallel)
    try:
        grammar = tool_grammar(demand, ChatFormat(name, reasoning), tokenizer, prompt_tail=tail)
        backend_named("llguidance").check(grammar)
    except InvalidRequest:
        assert any(tool.strict for tool in tools)
        return
    ids, ended = drawn(grammar, tokenizer, seed)
    text = text_of(ids, name, tokenizer)
    content, thought, calls = read(text, name, reasoning, tail, demand.schemas)
    if ended or len(calls) > 1:
        require_valid(calls if ended else calls[:-1], tools)
    if ended and forced:
        assert calls
        assert not content.strip()
    if not parallel:
        assert len(calls) <= 1
    if not grammar.after:
        assert not thought


STRICT_NOW = OfferedTool("now", None, strict=True)
# formats whose calls may begin an answer without a marker, and the marker
BARE = {name: TOOL_FORMATS[name].begin for name in ("llama", "mistral", "pythonic")}
# format -> a call, a call with wrong arguments, and the notation of several calls
WRITTEN = {
    name: tuple(
        rendered(name, calls).removeprefix(BARE.get(name, ""))
        for calls in ([("now", {})], [("now", {"a": 1})], [("now", {}), ("now", {})])
    )
    for name in TOOL_FORMATS
}


def marked(name: str, call: str) -> str:
    return BARE.get(name, "") + call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_text_is_free_until_a_call_begins(
    name: str, kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    good, bad, several = WRITTEN[name]

    def all_of(texts: Sequence[str], *, parallel: bool = True, after: str = "") -> list[bool]:
        grammar = tool_grammar(
            ToolDemand([STRICT_NOW], forced=False, parallel=parallel),
            ChatFormat(name, "think"),
            tokenizers[kind],
            prompt_tail="",
        )
        return [accepts(grammar, after + text, tokenizers[kind]) for text in texts]

    thought = "<think>{[ <|python_tag|</think>\n\n"
    yes = ["", "Hello, {you}!", "[a](b)", "\n", good, f"\n{good}", marked(name, good), several]
    no = [bad, marked(name, bad), f"\n{bad}", good + "x", f"{good[:-1]}"]
    if name not in ("mistral", "pythonic"):
        yes.remove("[a](b)")
        yes += ["[]"]
    elif name == "pythonic":  # a list may be calls
        yes.remove("[a](b)")
    else:
        no += ["[ {", "\n[{"]
    for after in ("", thought):
        assert all_of(yes, after=after) == [True] * len(yes)
        assert all_of(no, after=after) == [False] * len(no)
    assert all_of([f"Let me see. {marked(name, good)}"]) == [True]
    assert all_of([f"Let me see. {marked(name, bad)}"]) == [False]
    assert all_of([several, good], parallel=False) == [False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_forced_answer_is_a_call(name: str, kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    good, bad, several = WRITTEN[name]
    for reasoning in (None, "think"):
        grammar = tool_grammar(
            ToolDemand([NOW, WEATHER], forced=True),
            ChatFormat(name, reasoning),
            tokenizers[kind],
            prompt_tail="",
        )
        yes = [good, marked(name, good), f"\n{good}", several]
        no = ["", "Hello", f"Hello {marked(name, good)}", bad, good + "\n", good.replace("w", "x")]
        thoughtful = [f"<think>a</think>\n\n{good}"]
        assert [accepts(grammar, each, tokenizers[kind]) for each in yes] == [True] * len(yes)
        assert [accepts(grammar, each, tokenizers[kind]) for each in no] == [False] * len(no)
        assert [accepts(grammar, each, tokenizers[kind]) for each in thoughtful] == [
            reasoning is not None
        ]


def test_text_may_have_to_be_json(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tokens"]
    for name in TOOL_FORMATS:
        grammar = tool_grammar(
            ToolDemand([NOW], forced=False),
            ChatFormat(name),
            tokenizer,
            prompt_tail="",
            content=Grammar.json_schema(object_of(a={"type": "integer"})),
        )
        assert accepts(grammar, '{"a": 1}', tokenizer)
        assert accepts(grammar, marked(name, WRITTEN[name][0]), tokenizer)
        assert not accepts(grammar, "text", tokenizer)
        assert not accepts(grammar, marked(name, WRITTEN[name][1]), tokenizer)


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "granite"])
def test_name_may_hold_any_character(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tool = OfferedTool(
        '\x7f"\\\n\x00é\u2028😀/', object_of(**{"\x7f": {"enum": ["\x7f", 1]}}), True
    )
    demand = ToolDemand([tool], forced=True)
    grammar = tool_grammar(demand, ChatFormat(name), tokenizers["bytes"], prompt_tail="")
    ids, ended = drawn(grammar, tokenizers["bytes"], 1)
    content, _, calls = read(tokenizers["bytes"].decode(ids), name)
    assert ended
    assert calls
    assert not content.strip()
    for called, arguments in calls:
        assert called == tool.name
        assert json.loads(arguments)["\x7f"] in ("\x7f", 1)


def test_text_may_be_json_of_a_lenient_schema(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    tool = OfferedTool("now", object_of(), strict=True)
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for lenient in (True, False):
        grammar = tool_grammar(
            ToolDemand([tool], forced=False),
            ChatFormat("hermes"),
            tokenizer,
            prompt_tail="",
            content=Grammar.json_schema(schema, lenient=lenient),
        )
        assert grammar.lenient == lenient
        if lenient:
            assert accepts(grammar, "[1, 1]", tokenizer)
            assert not accepts(grammar, '["a"]', tokenizer)
        else:
            with pytest.raises(InvalidRequest, match="uniqueItems"):
                backend_named("llguidance").check(grammar)


def test_unforceable_call_is_rejected_by_name(tokenizers: dict[str, Tokenizer]) -> None:
    odd = OfferedTool("f", object_of(**{"a>\n": {"type": "integer"}}))
    marked = OfferedTool("f", object_of(a={"enum": ["</parameter>"]}))
    composed = OfferedTool("f", {"type": "object", "anyOf": [{"required": ["a"]}]}, strict=True)
    for demand, format, tokenizer, reason in [
        (ToolDemand([NOW], True), ChatFormat(), tokenizers["bytes"], "--tool-format"),
        *(
            (ToolDemand([tool], True), ChatFormat(name), tokenizers["bytes"], reason)
            for tool, name, reason in [
                (OfferedTool("a b"), "qwen3_coder", "qwen3_coder cannot carry the name 'a b'"),
                (odd, "qwen3_coder", "cannot carry the parameter 'a>"),
                (odd, "pythonic", "cannot carry the parameter 'a>"),
                (marked, "minimax_m2", "cannot carry the value '</parameter>'"),
                (composed, "glm45", "`anyOf` of a tool's parameters cannot be enforced"),
            ]
        ),
        (
            ToolDemand([OfferedTool("f", {"type": "array"})], True),
            ChatFormat("hermes"),
            tokenizers["bytes"],
            "parameters of tool 'f' must be those of an object, not 'array'",
        ),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            tool_grammar(demand, format, tokenizer, prompt_tail="")


@pytest.mark.parametrize("strict", [True, False])
def test_unenforceable_schema_is_rejected_only_for_strict_tools(
    strict: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tags = object_of(tags={"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    grammar = tool_grammar(
        ToolDemand([OfferedTool("f", tags, strict)], forced=True),
        ChatFormat("hermes"),
        tokenizers["bytes"],
        prompt_tail="",
    )
    check = backend_named("llguidance").check
    if strict:
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            check(grammar)
    else:
        check(grammar)


def test_tool_grammar_of_many_tools_takes_bounded_time(tokenizers: dict[str, Tokenizer]) -> None:
    tools = [
        OfferedTool(
            f"tool_{number}",
            object_of(
                **{f"field_{at}": {"enum": [f"v{n}" for n in range(20)]} for at in range(20)}
            ),
            strict=True,
        )
        for number in range(32)
    ]
    began = time.thread_time()
    grammar = tool_grammar(
        ToolDemand(tools, forced=True), ChatFormat("hermes"), tokenizers["tokens"], prompt_tail=""
    )
    backend_named("llguidance").check(grammar)
    state_of(grammar, tokenizers["tokens"])
    assert time.thread_time() - began < 2
