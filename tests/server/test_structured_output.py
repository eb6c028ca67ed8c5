"""Structured output over HTTP: every field of every protocol, streamed and whole."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference import Grammar, InvalidRequest
from nano_inference.config import EngineConfig
from nano_inference.server.api.anthropic.answer import PROTOCOL as MESSAGES
from nano_inference.server.api.openai.chat_answer import PROTOCOL as CHATS
from nano_inference.server.api.openai.completions_answer import PROTOCOL as TEXTS
from nano_inference.server.api.openai.responses_answer import PROTOCOL as RESPONSES
from nano_inference.server.api.parsing import AT_ONCE, Behind, ChatFormat, reasoning_before
from nano_inference.server.api.shared.prompts import behind_reasoning
from nano_inference.server.api.shared.protocol import Served
from nano_inference.server.api.shared.sampling import may_ask_for_grammar
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.main import running_server
from nano_inference.server.trainers.sglang.answer import PROTOCOL as SGLANG
from nano_inference.server.trainers.vllm.answer import PROTOCOL as VLLM
from nano_inference.structured.backend import GrammarError
from nano_inference.structured.grammar import COMPACT
from nano_inference.structured.llguidance_backend import LlguidanceBackend, LlguidanceMatcher
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama
from tests.server.scripted import ScriptedClient
from tests.server.streams import events, post

CONFIG = ServerConfig(port=0, in_process=True, rl=True)
USER = {"role": "user", "content": "Hello"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["age", "ok"],
    "additionalProperties": False,
}
UNKNOWN = {"type": "array", "uniqueItems": True}  # an unsupported keyword
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'
TAG = {
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}
TREE = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "a+"}, "end": "</a>"}
CHOICES = ["yes", "no"]
OF_SCHEMA = Grammar.json_schema(SCHEMA)


def _of_openai(schema: Any = SCHEMA) -> dict[str, Any]:
    format = {"name": "person", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": format}}


# of all protocols, except Anthropic's own names
EVERYWHERE: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
    ({"structured_outputs": {"choice": CHOICES}}, Grammar.choice(CHOICES)),
    ({"structured_outputs": {"grammar": GBNF}}, Grammar.gbnf(GBNF)),
    ({"structured_outputs": {"grammar": LARK}}, Grammar.lark(LARK)),
    ({"structured_outputs": {"structural_tag": TAG}}, Grammar.structural_tag(TAG)),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"format": TREE})}},
        Grammar.structural_tag(json.dumps({"format": TREE})),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Grammar.json_schema(SCHEMA, whitespace=COMPACT),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}},
        Grammar.json_schema(SCHEMA, whitespace="[ ]?"),
    ),
    (
        {"structured_outputs": {"json": UNKNOWN, "lenient": True}},
        Grammar.json_schema(UNKNOWN, lenient=True),
    ),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"disable_any_whitespace": True}}, None),
    ({"structured_outputs": {"json_object": False, "disable_additional_properties": False}}, None),
    ({"structured_outputs_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_decoding_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": {}}, Grammar.json_schema({})),
    ({"guided_json_object": True}, Grammar.json_object()),
    ({"guided_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_choice": CHOICES}, Grammar.choice(CHOICES)),
    ({"guided_grammar": GBNF}, Grammar.gbnf(GBNF)),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
        OF_SCHEMA,
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " *"},
        Grammar.json_schema(SCHEMA, whitespace=" *"),
    ),
    ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, Grammar.regex("a+")),
    (
        {"guided_regex": "a+", "guided_decoding_backend": "guidance:no-fallback"},
        Grammar("regex", "a+", backend="llguidance"),
    ),
    (
        {"structured_outputs": {"regex": "a+", "backend": "guidance"}},
        Grammar("regex", "a+", backend="llguidance"),
    ),
    ({"json_schema": SCHEMA}, OF_SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, Grammar.json_schema(json.dumps(SCHEMA))),
    ({"json_schema": ""}, None),
    ({"regex": "a+"}, Grammar.regex("a+")),
    ({"regex": ""}, None),
    ({"ebnf": GBNF}, Grammar.gbnf(GBNF)),
    ({"grammar": GBNF}, Grammar.gbnf(GBNF)),
    ({"grammar": ""}, None),
    ({"structural_tag": json.dumps(TAG)}, Grammar.structural_tag(json.dumps(TAG))),
]
OF_OPENAI: list[tuple[dict[str, Any], Grammar | None]] = [
    (_of_openai(), OF_SCHEMA),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "text"}, "guided_regex": "a+"},
        Grammar.regex("a+"),
    ),
    (
        _of_openai() | {"structured_outputs": {"disable_any_whitespace": True}},
        Grammar.json_schema(SCHEMA, whitespace=COMPACT),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG, "format": None}},
        Grammar.structural_tag({"type": "structural_tag", **TAG}),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": TREE}},
        Grammar.structural_tag({"type": "structural_tag", "format": TREE}),
    ),
]
OF_ANTHROPIC: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, OF_SCHEMA),
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, OF_SCHEMA),
    ({"output_config": {"effort": "low"}}, None),
]
PROTOCOLS: dict[str, tuple[Any, dict[str, Any], bool]] = {  # and whether fields are nested
    "chat": (CHATS, {"messages": [USER]}, False),
    "completions": (TEXTS, {"prompt": "Hello"}, False),
    "responses": (RESPONSES, {"input": "Hello"}, False),
    "messages": (MESSAGES, {"model": "scripted", "messages": [USER], "max_tokens": 9}, False),
    "vllm": (VLLM, {"token_ids": [5, 6]}, True),
    "sglang": (SGLANG, {"input_ids": [5, 6]}, True),
}


@pytest.fixture(scope="module")
def engine() -> ScriptedClient:
    return ScriptedClient(max_model_len=512)


@pytest.fixture(scope="module")
def served(engine: ScriptedClient) -> Served:
    return Served("scripted", engine._engine_info(), engine.tokenizer, ChatFormat(), CONFIG)


def grammar_of(name: str, fields: dict[str, Any], served: Served) -> Grammar | None:
    """Return the grammar of a request with these fields."""
    protocol, body, is_nested = PROTOCOLS[name]
    whole = body | ({"sampling_params": fields} if is_nested else fields)
    data = json.dumps(whole).encode()
    (ask,) = protocol.prepare(data, served, "id").asks
    assert may_ask_for_grammar(data) or ask.params.grammar is None
    return ask.params.grammar


@pytest.mark.parametrize("name", PROTOCOLS)
def test_grammar_fields_give_one_grammar(name: str, served: Served) -> None:
    more = {"chat": OF_OPENAI, "completions": OF_OPENAI, "messages": OF_ANTHROPIC}.get(name, [])
    for fields, grammar in [*EVERYWHERE, *more]:
        assert grammar_of(name, fields, served) == grammar, fields


BAD: list[tuple[dict[str, Any], str, str]] = [  # fields, the field at fault, a part of the reason
    ({"guided_json": UNKNOWN}, "guided_json", "uniqueItems"),
    ({"guided_json": 5}, "guided_json", "must be an object"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_regex": 5}, "guided_regex", "a string"),
    ({"guided_choice": []}, "guided_choice", "at least one string"),
    ({"guided_choice": [""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": "yes"}, "guided_choice", "a list"),
    ({"guided_grammar": "root ::= other"}, "guided_grammar", "other"),
    ({"guided_grammar": "begin: A"}, "guided_grammar", "start"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "a string"),
    ({"structured_outputs": {"json": UNKNOWN}}, "structured_outputs.json", "uniqueItems"),
    ({"structured_outputs": []}, "structured_outputs", "an object"),
    ({"structural_tag": {"a": 1}}, "structural_tag", "format"),
    ({"ebnf": GBNF, "regex": "a"}, "regex", "ebnf"),
    (
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "structured_outputs.json",
        "structured_outputs.regex",
    ),
    (
        {"guided_regex": "a", "guided_decoding_backend": "mine"},
        "guided_decoding_backend",
        "guidance",
    ),
    (
        {"structured_outputs": {"regex": "a", "backend": "lm-format-enforcer"}},
        "structured_outputs.backend",
        "xgrammar",
    ),
]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_wrong_field_is_named(name: str, served: Served) -> None:
    within = "sampling_params." if PROTOCOLS[name][2] else ""
    for fields, field, reason in BAD:
        with pytest.raises(ApiError) as raised:
            grammar_of(name, fields, served)
        assert raised.value.status == 400, fields
        where = (raised.value.param or "").replace(".<one>", "")
        assert where == within + field, (fields, raised.value.message)
        assert reason in raised.value.message, raised.value.message
        assert field in raised.value.message, raised.value.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (_of_openai(UNKNOWN), "response_format"),
        (_of_openai() | {"guided_regex": "a"}, "response_format"),
    ],
)
def test_invalid_formats_are_rejected(fields: dict[str, Any], field: str, served: Served) -> None:
    with pytest.raises(ApiError) as raised:
        grammar_of("chat", fields, served)
    assert (raised.value.status, raised.value.param) == (400, field)


def test_objects_are_closed_if_the_request_says_so(served: Served) -> None:
    inner = {"properties": {"a": {"type": "integer"}}}
    kept = {"properties": {}, "additionalProperties": {"type": "null"}}
    schema = {
        "$defs": {"one": inner, "properties": {"type": "string"}},
        "properties": {
            "properties": {"items": inner},
            "kept": kept,
            "said": {"const": {"properties": 1}, "enum": [inner], "default": inner},
        },
        "anyOf": [{"patternProperties": {"^a": inner}}, {"type": "object"}],
    }
    closed = inner | {"additionalProperties": False}
    expected = {
        "$defs": {"one": closed, "properties": {"type": "string"}},
        "properties": {
            "properties": {"items": closed},
            "kept": kept,
            "said": {"const": {"properties": 1}, "enum": [inner], "default": inner},
        },
        "anyOf": [
            {"patternProperties": {"^a": closed}, "additionalProperties": False},
            {"type": "object"},
        ],
        "additionalProperties": False,
    }

    def asked(value: bool, **kind: Any) -> Any:
        said = {**kind, "disable_additional_properties": value}
        grammar = grammar_of("completions", {"structured_outputs": said}, served)
        assert grammar is not None
        return grammar.text if "regex" in kind else json.loads(grammar.text)

    assert asked(True, json=schema) == expected
    assert asked(False, json=schema) == schema
    tag = {"structures": [{"begin": "<a>", "schema": inner, "end": "</a>"}], "triggers": ["<a>"]}
    assert asked(True, structural_tag=tag)["structures"][0]["schema"] == closed
    assert asked(True, regex="a+") == "a+"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_grammar_fields_next_to_sampling_params_are_rejected(name: str, served: Served) -> None:
    protocol, body, _ = PROTOCOLS[name]
    with pytest.raises(ApiError, match="put it into sampling_params"):
        protocol.prepare(json.dumps(body | {"regex": "a+"}).encode(), served, "id")


def test_name_in_escapes_is_read_apart_too() -> None:
    assert may_ask_for_grammar(rb'{"re\u0067ex": "a"}')
    assert not may_ask_for_grammar(json.dumps({"messages": [USER]}).encode())


# -- reasoning -------------------------------------------------------------------------------------


OPEN, MAY_OPEN = Behind("</think>"), Behind("</think>", "<think>")


@pytest.mark.parametrize(
    ("end", "goes_on", "behind"),
    [
        ("<|im_start|>assistant\n", False, MAY_OPEN),
        ("<|im_start|>assistant\n<think>\n", False, OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, AT_ONCE),
        ("<|im_start|>assistant\nIt is ", True, AT_ONCE),
        ("<|im_start|>assistant\n<think>", True, OPEN),
    ],
)
def test_grammar_begins_behind_the_reasoning(
    end: str, goes_on: bool, behind: Behind, engine: ScriptedClient
) -> None:
    served = thinking(engine)
    prompt = engine.tokenizer.encode("<think>Before.</think> Yes.<|im_end|>\n" + end)
    assert behind_reasoning(prompt, served, goes_on=goes_on) == behind


def thinking(engine: ScriptedClient) -> Served:
    format = ChatFormat(reasoning="think")
    return Served("scripted", engine._engine_info(), engine.tokenizer, format, CONFIG)


def test_reasoning_stays_on_if_the_route_separates_it(engine: ScriptedClient) -> None:
    served, plain = thinking(engine), Grammar.regex("a+")
    behind = replace(plain, after="</think>", opened_by="<think>")
    for name in ("chat", "messages"):
        assert grammar_of(name, {"guided_regex": "a+"}, served) == behind
    for text, expected in (("", behind), ("So", plain)):  # whether an answer has begun
        begun = {"messages": [USER, {"role": "assistant", "content": text}]}
        assert grammar_of("messages", {"guided_regex": "a+", **begun}, served) == expected
    for name in ("completions", "vllm", "sglang"):
        assert grammar_of(name, {"guided_regex": "a+"}, served) == plain
    for protocol, field, on, off in (
        (VLLM, "reasoning_ended", False, True),
        (SGLANG, "require_reasoning", True, False),
    ):
        prompt = {"token_ids": [5]} if protocol is VLLM else {"input_ids": [5]}
        for value, expected in ((on, behind), (off, plain), (None, plain)):
            body = {**prompt, "sampling_params": {"regex": "a+"}, field: value}
            (ask,) = protocol.prepare(json.dumps(body).encode(), served, "id").asks
            assert ask.params.grammar == expected


def test_hidden_reasoning_markers_are_masked() -> None:
    format = ChatFormat(reasoning="think")
    for hidden, behind in (("<think>", AT_ONCE), ("</think>", AT_ONCE), ("<x>", MAY_OPEN)):
        assert reasoning_before(format, prompt_tail="", hidden={hidden}) == behind
        assert reasoning_before(format, prompt_tail="<think>", hidden={hidden}) == OPEN


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(engine: ScriptedClient) -> Iterator[str]:
    with running_server(engine, CONFIG) as url:
        yield url


@pytest.mark.thorough
def test_bad_grammar_never_reaches_the_engine(scripted: str, engine: ScriptedClient) -> None:
    before = len(engine.requests)
    for body in ({"messages": [USER], **_of_openai(UNKNOWN)}, {"messages": [USER], "regex": "("}):
        for stream in (False, True):
            error = post(f"{scripted}/v1/chat/completions", body | {"stream": stream}, 400)["error"]
            assert error["param"] in ("response_format", "regex")
    assert len(engine.requests) == before
    body = {"messages": [USER], **_of_openai()}
    post(f"{scripted}/v1/chat/completions", body)
    assert engine.requests[-1].params.grammar == OF_SCHEMA


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_that_keywords_were_passed_over(scripted: str, stream: bool) -> None:
    for lenient in (False, True):
        asked = {"json": SCHEMA, "lenient": lenient}
        body = {"prompt": "Hello", "structured_outputs": asked, "stream": stream}
        reply = httpx.post(f"{scripted}/v1/completions", json=body)
        assert reply.status_code == 200
        assert reply.headers.get("x-grammar") == ("lenient" if lenient else None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tiny_llama(tmp_path_factory.mktemp("structured"), seed=0)
    write_tokenizer(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, seed=0)
    with running_server(config, replace(CONFIG, served_model_name="tiny")) as url:
        yield url


@pytest.fixture(scope="module")
def thoughtful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a model whose reasoning is separated and whose template does not open it."""
    folder: Path = tiny_llama(tmp_path_factory.mktemp("thoughtful"), seed=0)
    write_tokenizer(folder, "{% for message in messages %}{{ message.content }}{% endfor %}")
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**22, seed=0)
    with running_server(config, replace(CONFIG, reasoning_format="think")) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_model_that_does_not_think_answers_under_its_grammar(thoughtful: str, stream: bool) -> None:
    path = "/v1/chat/completions"
    (opening,) = httpx.post(f"{thoughtful}/tokenize", json={"prompt": "<"}).json()["tokens"]
    for bias, thinks in ((-100, False), (100, True)):
        body = {"messages": [USER], "max_tokens": 120, "seed": 3, **_of_openai()}
        body |= {"logit_bias": {str(opening): bias}, "stream": stream}
        reply = httpx.post(thoughtful + path, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        content = _text_of(path, reply, stream)
        assert ("reasoning" in reply.text and not content) == thinks
        assert thinks or is_person(content)


def is_person(text: str) -> bool:
    read = json.loads(text)
    return set(read) == {"age", "ok"} and 0 <= read["age"] <= 99 and isinstance(read["ok"], bool)


def follows(fields: dict[str, Any], text: str) -> bool:
    said = json.dumps(fields)
    if "a+" in said:
        return re.fullmatch("a+", text) is not None
    if "yes" in said:
        return text in CHOICES
    return is_person(text)


ASKED = [
    fields
    for fields, grammar in EVERYWHERE
    if grammar is not None
    and grammar.kind != "structural_tag"
    and ("age" in grammar.text or grammar.kind != "json")
]


@pytest.mark.parametrize("fields", ASKED, ids=lambda fields: json.dumps(fields)[:40])
def test_answers_follow_every_field(tiny: str, fields: dict[str, Any]) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 120, "seed": 3, "n": 2, **fields}
    choices = post(f"{tiny}/v1/completions", body)["choices"]
    for choice in choices:
        assert choice["finish_reason"] == "length" or follows(fields, choice["text"])
    texts = {0: "", 1: ""}
    for event in events(f"{tiny}/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in choices}


def bodies(pattern: str) -> dict[str, dict[str, Any]]:
    """Return requests under a regular expression, by route."""
    asked = {"guided_regex": pattern}
    room = {"max_tokens": 50, **asked}
    return {
        "/v1/completions": {"prompt": [5, 6], **room},
        "/v1/chat/completions": {"messages": [USER], **room},
        "/v1/messages": {"model": "tiny", "messages": [USER], **room},
        "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": room},
        "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 50, **asked}},
    }


def failed(url: str, path: str, pattern: str, stream: bool) -> tuple[int, dict[str, Any]]:
    """Return status and error of a failed request, or 200 if a stream ends with the error."""
    body = bodies(pattern)[path] | {"stream": stream}
    reply = httpx.post(url + path, json=body, timeout=60)
    if reply.status_code != 200:
        return reply.status_code, reply.json()["error"]
    said = [line for line in reply.text.split("\n") if line.startswith("data: {")]
    assert len(said) > 3, "what was drawn was sent"
    return 200, json.loads(said[-1].removeprefix("data: "))["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", bodies(""))
def test_failed_matcher_says_why(
    tiny: str, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, count = LlguidanceMatcher.fill, [0]

    def failing(self: LlguidanceMatcher, words: Any) -> None:
        count[0] += 1
        if count[0] % 30 == 0:  # the stream's first steps have been sent
            raise GrammarError("a limit of lexer states is reached")
        fill(self, words)

    monkeypatch.setattr(LlguidanceMatcher, "fill", failing)
    status, error = failed(tiny, path, "[0-9]{40}", stream)
    assert status == (200 if stream else 500)
    said = "the engine could not continue this request: a limit of lexer states is reached."
    assert error["message"] == said
    assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert error.get("code", "sample_failed") == "sample_failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", bodies(""))
def test_grammar_that_the_engine_refuses_is_a_bad_request(
    tiny: str, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an error that shows only with the model's vocabulary."""

    def refuse(*_: Any) -> Any:
        raise InvalidRequest("the regex grammar cannot be enforced: it is not.")

    monkeypatch.setattr(LlguidanceBackend, "compile", refuse)
    status, error = failed(tiny, path, f"{path}|{stream}", stream)  # none that it knows
    assert status == 400
    assert error["message"] == "the regex grammar cannot be enforced: it is not."
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_in_every_protocol(tiny: str, stream: bool) -> None:
    room, said = {"max_tokens": 200, "seed": 7}, dict[str, str]()
    formats = {
        "/v1/chat/completions": {"messages": [USER], **room, **_of_openai()},
        "/v1/messages": {
            "model": "tiny",
            "messages": [USER],
            **room,
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
        "/inference/v1/generate": {
            "token_ids": [5, 6],
            "output_mode": "text",
            "sampling_params": {**room, "structured_outputs": {"json": SCHEMA}},
        },
        "/generate": {
            "input_ids": [5, 6],
            "sampling_params": {"max_new_tokens": 200, "sampling_seed": 7, "json_schema": SCHEMA},
        },
    }
    for path, body in formats.items():
        reply = httpx.post(tiny + path, json=body | {"stream": stream}, timeout=60)
        assert reply.status_code == 200, reply.text
        said[path] = _text_of(path, reply, stream)
    assert all(is_person(text) for text in said.values()), said


def _text_of(path: str, reply: httpx.Response, stream: bool) -> str:
    whole = not stream
    told = (
        [reply.json()]
        if whole
        else [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: {")]
    )
    match path:
        case "/v1/chat/completions":
            name = "message" if whole else "delta"
            parts = [each["choices"][0][name].get("content") for each in told if each["choices"]]
        case "/v1/messages" if whole:
            parts = [block["text"] for block in told[0]["content"]]
        case "/v1/messages":
            parts = [each["delta"].get("text") for each in told if "delta" in each]
        case "/inference/v1/generate":
            parts = [each["choices"][0]["text"] for each in told if each["choices"]]
        case _:
            parts = [told[-1]["text"]]
    return "".join(part or "" for part in parts)
