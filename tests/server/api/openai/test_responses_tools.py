"""Tools of the Responses API through OpenAI's own client: custom tools, the client's shells and
patches, namespaces, searches, and requests as Codex CLI 0.171 sends them.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from nano_inference.config import EngineConfig
from nano_inference.errors import InvalidRequest
from nano_inference.server.api.openai.responses_grammars import pattern_of
from nano_inference.server.api.openai.responses_items import ItemStream
from nano_inference.server.api.openai.responses_tools import FORMS, InputText, Offered, in_order
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.choices import ChoiceDelta
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.scripted import Script, ScriptedClient, with_template

RECORDED = Path(__file__).with_name("recorded")
PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete
add: "*** Add File: " name LF line+
delete: "*** Delete File: " name LF
name: /[a-z]{1,4}/
line: "+" /[a-z"]{0,4}/ LF
%import common.LF
"""
CUSTOM: Any = {"type": "custom", "name": "run_sql", "description": "Run a statement."}
PLAIN: Any = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}


def calling(name: str, **arguments: Any) -> Script:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return Script(f"<tool_call>\n{call}\n</tool_call>")


def prompt(script: ScriptedClient) -> str:
    return script.tokenizer.decode(script.requests[-1].prompt, skip_special_tokens=False)


# -- custom tools ----------------------------------------------------------------------------------


@given(st.text(), st.booleans(), st.data())
def test_input_is_decoded_from_any_split(text: str, is_ascii: bool, data: Any) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    decoder = InputText()
    parts = [
        decoder.push(whole[begin:end])
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)
    ]
    assert "".join([*parts, decoder.finish()]) == decoder.text == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"query": "a"}', "a"), ('{"x": 1}', '{"x": 1}'), ("SELECT 1", "SELECT 1"), ("", "")],
)
def test_input_of_another_shape_is_kept(arguments: str, text: str) -> None:
    decoder = InputText()
    assert decoder.push(arguments) + decoder.finish() == decoder.text == text


def test_custom_call_makes_the_round(client: OpenAI, script: ScriptedClient) -> None:
    said = 'SELECT "a\\b"\nFROM 🙂'
    script.script = calling("run_sql", input=said)
    events = list(client.responses.create(model="scripted", input="x", tools=[CUSTOM], stream=True))
    kinds = [event.type for event in events]
    first = kinds.index("response.output_item.added")
    assert set(kinds[first + 1 : -3]) == {"response.custom_tool_call_input.delta"}
    assert kinds[-3:] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == said
    call: Any = events[-1].response.output[0]  # pyright: ignore
    assert (call.type, call.name, call.input, call.status) == (
        *("custom_tool_call", "run_sql", said),
        "completed",
    )
    whole = client.responses.create(model="scripted", input="x", tools=[CUSTOM]).output[0]
    assert whole.model_dump(exclude={"id", "call_id"}) == call.model_dump(exclude={"id", "call_id"})
    script.script = Script("Done.")
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3 rows"}
    sent: Any = [{"role": "user", "content": "x"}, call.model_dump(), output]
    client.responses.create(model="scripted", input=sent, tools=[CUSTOM])
    assert (
        f'{{"name": "run_sql", "arguments": {json.dumps({"input": said}, ensure_ascii=False)}'
        in (prompt(script))
    )
    assert "tool\n3 rows" in prompt(script)


def test_grammar_is_shown_to_the_model(client: OpenAI, script: ScriptedClient) -> None:
    format_ = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    client.responses.create(model="scripted", input="x", tools=[CUSTOM | {"format": format_}])
    assert "The input must match this lark grammar" in prompt(script)
    assert script.requests[-1].params.grammar is None


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1))
def test_pattern_of_a_literal_matches_it_alone(text: str) -> None:
    pattern = pattern_of("lark", f"start: {json.dumps(text, ensure_ascii=False)}")
    assert re.match(pattern.replace("$", r"\Z"), text) or "$" in text
    assert not re.match(pattern, text + "x")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, "*** Begin Patch\n*** Add File: a\n+b\n*** End Patch", "*** Begin Patch\n"),
        ('start: ("a" | B)~2..3\nB.1: /b+/i // comment\n', "aBb", "abbbab!"),
        ('?start: [x "-"] x -> pair\nx: INT\n%import common (INT, WS)', "1-22", "1-"),
        ("start: WS_INLINE N\n%import common.WS_INLINE\n%import common.INT -> N", " 5", "5"),
    ],
)
def test_lark_becomes_a_pattern(grammar: str, good: str, bad: str) -> None:
    pattern = pattern_of("lark", grammar)
    assert re.fullmatch(pattern, good)
    assert not re.fullmatch(pattern, bad)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "(" start ")" | "a"', "recursive"),
        ("start: other", "no rule 'other'"),
        ('start: "a', "cannot be read"),
        ('start: ("a"', "lacks a closing"),
        ("start: WORDS\n%import common.WORDS", "no terminal"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: " + "a a\na: b b\nb: " + "/x{9}/ " * 8000, "shorten"),
    ],
)
def test_grammar_that_cannot_be_forced_is_rejected(grammar: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pattern_of("lark", grammar)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tiny_llama(tmp_path_factory.mktemp("forced"), seed=0)
    write_tokenizer(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, seed=0)
    served = ServerConfig(port=0, in_process=True, tool_format="hermes")
    with (
        running_server(config, served) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", PATCH), ("regex", r'SELECT [a-z"\\]{1,5}\n')]
)
def test_forced_call_matches_the_grammar(tiny: OpenAI, syntax: str, definition: str) -> None:
    format_ = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools: Any = [CUSTOM | {"format": format_}, PLAIN]
    model = tiny.models.list().data[0].id
    ends = 0
    for seed in range(4):
        reply = tiny.responses.create(
            model=model,
            input="Hello",
            tools=tools,
            tool_choice={"type": "custom", "name": "run_sql"},
            max_output_tokens=400,
            extra_body={"seed": seed},
        )
        (call,) = reply.output
        assert call.type == "custom_tool_call"
        if reply.status == "completed":
            ends += 1
            assert re.fullmatch(pattern_of(syntax, definition), call.input), call.input
    assert ends


# -- tools that the client runs --------------------------------------------------------------------

BUILT_IN: Any = [
    (
        {"type": "local_shell"},
        {"command": ["ls", "-l"], "working_directory": "/a"},
        {"output": "a.txt"},
        "tool\na.txt",
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        {"commands": ["ls", "pwd"], "timeout_ms": 5},
        {"output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        '[{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]',
    ),
    (
        {"type": "apply_patch"},
        {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b"},
        {"status": "failed", "output": "no such file"},
        "tool\nfailed: no such file",
    ),
    (
        {"type": "tool_search", "execution": "client"},
        {"query": "mail"},
        {"tools": [PLAIN | {"name": "send_mail"}], "status": "completed", "execution": "client"},
        '"name": "send_mail"',
    ),
]


@pytest.mark.parametrize(("tool", "arguments", "output", "shown"), BUILT_IN)
@pytest.mark.parametrize("stream", [False, True])
def test_built_in_call_makes_the_round(
    client: OpenAI,
    script: ScriptedClient,
    *,
    tool: Any,
    arguments: Any,
    output: Any,
    shown: str,
    stream: bool,
) -> None:
    form = FORMS[tool["type"]]
    script.script = calling(tool["type"], **arguments)
    create = client.responses.create
    if stream:
        events = list(create(model="scripted", input="x", tools=[tool], stream=True))
        assert [event.type for event in events[-3:]] == [
            "response.output_item.added",
            "response.output_item.done",
            "response.completed",
        ]
        reply = events[-1].response  # pyright: ignore
    else:
        reply = create(model="scripted", input="x", tools=[tool])
    (call,) = reply.output
    assert call.type == form.call
    assert in_order(form, form.arguments(call.model_dump())) == arguments
    sent: Any = [
        {"role": "user", "content": "x"},
        call.model_dump(),
        {"type": f"{form.call}_output".replace("search_call_", "search_")}
        | {"call_id": call.call_id}  # pyright: ignore
        | output,
    ]
    again = create(model="scripted", input=sent, tools=[tool])
    called = json.dumps({"name": tool["type"], "arguments": arguments})[1:-1]
    assert called in prompt(script)
    assert shown in prompt(script)
    assert [each.type for each in client.responses.input_items.list(again.id, order="asc")] == [
        *("message", form.call),
        sent[2]["type"],
    ]


def test_call_that_does_not_fit_is_one_of_a_function(
    client: OpenAI, script: ScriptedClient
) -> None:
    script.script = calling("shell", commands="ls")
    tools: Any = [{"type": "shell"}]
    events = list(client.responses.create(model="scripted", input="x", tools=tools, stream=True))
    call: Any = events[-1].response.output[0]  # pyright: ignore
    assert (call.type, call.name) == ("function_call", "shell")
    assert json.loads(call.arguments) == {"commands": "ls"}
    assert "response.function_call_arguments.done" in [event.type for event in events]


def test_broken_call_of_a_shell_sends_no_item() -> None:
    stream = ItemStream({"shell": Offered("shell", "shell", "", {})}, None, None, one_call=False)
    stream.push(ChoiceDelta(0, tool_calls=(ToolCallDelta(0, "id", "shell", '{"a'),)))
    stream.push(ChoiceDelta(0, tool_calls=(ToolCallDelta(0, None, None, "", broken=True),)))
    stream.push(ChoiceDelta(0, content="text"))
    stream.end()
    assert [item["type"] for item in stream.items] == ["message"]


def test_namespace_is_named_in_calls(client: OpenAI, script: ScriptedClient) -> None:
    tools: Any = [
        {
            "type": "namespace",
            "name": "crm",
            "description": "Customers.",
            "tools": [PLAIN | {"name": "find"}, CUSTOM],
        },
        PLAIN | {"name": "find"},
    ]
    script.script = calling("crm.find", id=3)
    reply = client.responses.create(model="scripted", input="x", tools=tools)
    (call,) = reply.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("crm", "find")
    script.script = calling("crm.run_sql", input="a")
    client.responses.create(
        model="scripted",
        previous_response_id=reply.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "none"}],
        tools=tools,
        tool_choice={"type": "function", "name": "crm.find"},
    )
    assert '{"name": "crm.find", "arguments": {"id": 3}}' in prompt(script)
    grammar = script.requests[-1].params.grammar
    assert grammar is not None
    assert '\\"crm.find\\"' in grammar.text


def test_found_tools_leave_the_prompt_as_it_was(client: OpenAI, script: ScriptedClient) -> None:
    search: Any = [{"type": "tool_search", "execution": "client"}]
    namespace: Any = {"type": "namespace", "name": "crm", "description": "", "tools": [CUSTOM]}
    hidden: Any = PLAIN | {"defer_loading": True}
    script.script = calling("tool_search", query="sql")
    first = client.responses.create(model="scripted", input="x", tools=[*search, hidden])
    asked = prompt(script)
    assert "now" not in asked
    output: Any = {
        "type": "tool_search_output",
        "call_id": first.output[0].call_id,  # pyright: ignore
        "tools": [namespace],
    }
    script.script = calling("crm.run_sql", input="a")
    second = client.responses.create(
        model="scripted", previous_response_id=first.id, input=[output], tools=search
    )
    assert prompt(script).startswith(asked)
    third = client.responses.create(
        model="scripted",
        previous_response_id=second.id,
        input=[{"type": "custom_tool_call_output", "call_id": "a", "output": "b"}],  # pyright: ignore
        tools=search,
    )
    for reply in (second, third):
        (call,) = reply.output
        assert call.type == "custom_tool_call"
        assert (call.namespace, call.name) == ("crm", "run_sql")


@pytest.mark.parametrize(
    "kind", ["file_search", "code_interpreter", "image_generation", "mcp", "computer_use_preview"]
)
def test_tool_of_a_server_is_rejected_by_name(client: OpenAI, kind: str) -> None:
    body = {"input": "x", "tools": [PLAIN, {"type": kind}]}
    with pytest.raises(openai.BadRequestError, match=f"{kind}.*accepts tools that the client"):
        client.post("/responses", body=body, cast_to=object)


def test_web_search_next_to_others_is_left_out(client: OpenAI, script: ScriptedClient) -> None:
    tools: Any = [PLAIN, {"type": "web_search", "external_web_access": False}]
    reply = client.responses.create(model="scripted", input="x", tools=tools)
    assert [tool.type for tool in reply.tools] == ["function"]
    assert "web_search" not in prompt(script)
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(
            model="scripted",
            input="x",
            tools=tools,
            tool_choice={"type": "web_search_preview"},
        )


GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: start "a"'}


@pytest.mark.parametrize(
    ("tools", "param", "said"),
    [
        ([{"type": "custom"}], "tools.0", "has no name"),
        ([PLAIN, PLAIN], "tools.1", "like tools.0"),
        ([CUSTOM | {"format": {"type": "xml"}}], "tools.0.format", "lark or regex"),
        ([CUSTOM | {"format": GRAMMAR | {"syntax": "abnf"}}], "tools.0.format", "lark or regex"),
        (
            [CUSTOM | {"format": GRAMMAR | {"definition": ""}}],
            "tools.0.format.definition",
            "missing",
        ),
        ([CUSTOM | {"format": GRAMMAR}], "tools.0.format.definition", "recursive"),
        ([{"type": "namespace", "name": "a", "tools": []}], "tools.0.tools", "at least one"),
        (
            [{"type": "namespace", "name": "a", "tools": [{"type": "shell"}]}],
            "tools.0.tools.0",
            "holds functions",
        ),
        (
            [{"type": "shell", "environment": {"type": "container_auto"}}],
            "tools.0.environment",
            "only local",
        ),
        ([{"type": "tool_search"}], "tools.0", "client"),
        ([PLAIN | {"defer_loading": True}], "tools.0.defer_loading", "tool_search"),
        ([PLAIN | {"async": True}], "tools.0.async", "not supported"),
    ],
)
def test_malformed_tool_is_rejected(
    client: OpenAI, script: ScriptedClient, tools: Any, param: str, said: str
) -> None:
    body = {"input": "x", "tools": tools, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match=said) as problem:
        client.post("/responses", body=body, cast_to=object)
    assert problem.value.param == param
    assert not script.requests


# -- Codex -----------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call><think>"
    "</think>{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = {
    "codex": [
        ("exec_command", {"cmd": "ls"}),
        ("multi_agent_v1.close_agent", {"target": "a"}),
        ("write_stdin", {"session_id": 1, "chars": "a"}),
        ("get_goal", {}),
        ("exec_command", {"cmd": "cat a"}),
    ],
    "codex_freeform": [
        ("exec_command", {"cmd": "ls"}),
        ("apply_patch", {"input": "*** Begin Patch\n*** Add File: a\n+b\n*** End Patch"}),
        ("tool_search", {"query": "agents"}),
        ("crm.find", {"id": 1}),
        ("exec_command", {"cmd": "cat a"}),
    ],
}


def codex_output(call: Any) -> dict[str, Any]:
    """Return the output of a call as Codex sends it."""
    if call["type"] == "tool_search_call":
        inner = PLAIN | {"name": "find", "defer_loading": True}
        namespace = {
            "type": "namespace",
            "name": "crm",
            "description": "Customers.",
            "tools": [inner],
        }
        return {
            "type": "tool_search_output",
            "call_id": call["call_id"],
            "status": "completed",
            "execution": "client",
            "tools": [namespace],
        }
    kind = f"{call['type']}_output"
    return {"type": kind, "id": "fco_1", "call_id": call["call_id"], "output": "Exit code: 0"}


@pytest.mark.parametrize("name", TURNS)
def test_codex_loop_runs_to_its_end(name: str, tmp_path: Path) -> None:
    body = json.loads((RECORDED / f"{name}.json").read_text())
    body["extra_body"] = {"client_metadata": body.pop("client_metadata")}
    engine = ScriptedClient(tokenizer_folder=with_template(tmp_path, TEMPLATE), max_model_len=20000)
    prompts: list[str] = []
    with (
        running_server(engine) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client,
    ):
        for number, (called, arguments) in enumerate(TURNS[name]):
            thought = f"<think>\nThought {number}.\n</think>\n\n"
            engine.script = Script(thought + str(calling(called, **arguments).says))
            *_, done = client.responses.create(**body)
            assert done.type == "response.completed"
            prompts.append(prompt(engine))
            items = [json.loads(item.model_dump_json()) for item in done.response.output]
            # Codex sends the thought back as it was sealed
            body["input"] += [item | {"content": None} for item in items[:-1]]
            body["input"] += [items[-1], codex_output(items[-1])]
            assert items[0]["encrypted_content"]
            assert called == ".".join(
                filter(None, (items[-1].get("namespace"), items[-1].get("name", called)))
            )
        engine.script = Script("Done.")
        *_, done = client.responses.create(**body)
        assert done.response.output_text == "Done."
        prompts.append(prompt(engine))
    for before, after in pairwise(prompts):
        assert after.startswith(before)
    assert all(f"<think>Thought {number}.</think>" in prompts[-1] for number in range(5))
