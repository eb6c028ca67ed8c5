"""Grammars: allowed texts, and rejections that name the fault."""

import json
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import Grammar, InvalidRequest, SamplingParams
from nano_inference.structured.backend import GrammarError, backend_named
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.grammar import COMPACT, BackendName, GrammarKind
from nano_inference.structured.mask_bits import num_words
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.outlines_backend import KINDS as OF_OUTLINES
from nano_inference.structured.xgrammar_backend import KINDS as OF_XGRAMMAR
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.structured.vocabularies import (
    BACKENDS,
    EOS,
    accepts,
    byte_tokenizer,
    compiled,
    mask,
    vocabulary_of,
)

KINDS = {
    "llguidance": get_args(GrammarKind),
    "xgrammar": OF_XGRAMMAR,
    "outlines": OF_OUTLINES,
}

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


TAG = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"enum": ["a", "b"]}, "end": "</f>"},
    ],
}


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (Grammar.regex("[0-9]{3}"), ["123"], ["12", "1234", "a12"]),
        (Grammar.choice(["yes", 'a "no"']), ["yes", 'a "no"'], ["ye", "no", "yess"]),
        (Grammar.lark('start: "a" b\nb: /[bc]+/'), ["ab", "acb"], ["a", "b"]),
        (Grammar.gbnf('root ::= "a" [0-9]+'), ["a1", "a22"], ["a", "1"]),
        (Grammar.json_schema(True), ["{}", "1", "[]"], ["", "{", "a"]),
        (Grammar.json_object(), ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        (
            Grammar.json_schema(PERSON),
            ['{"name": "A", "age": 1}', '{\n  "name": "A",\n  "age": 0\n}'],
            ['{"name": "A"}', '{"name": "A", "age": -1}', '{"name": 1, "age": 1}', "{}"],
        ),
        (
            Grammar.structural_tag(TAG),
            ["free text", 'x <f=add>12</f> y <f=say>"b"</f>'],
            ["x <f=add>a</f>", "x <f=no>", '<f=say>"c"</f>'],
        ),
        (
            Grammar.structural_tag(
                {
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": "<a>"},
                            {
                                "type": "or",
                                "elements": [
                                    {"type": "regex", "pattern": "[0-9]/[0-9]"},
                                    {"type": "regex", "pattern": r"a:\/\\/b"},
                                    {"type": "json_schema", "json_schema": {"type": "boolean"}},
                                ],
                            },
                            {
                                "type": "tag",
                                "begin": "<b>",
                                "content": {"type": "any_text"},
                                "end": "</b>",
                            },
                        ],
                    }
                }
            ),
            ["<a>1/2<b>what you < like</b>", "<a>true<b></b>", "<a>a:/\\/b<b></b>"],
            ["<a>1<b></b>", "<a>true", "<a>true<b></b>!"],
        ),
        (
            Grammar.structural_tag(
                {
                    "format": {
                        "type": "tags_with_separator",
                        "separator": ",",
                        "at_least_one": True,
                        "tags": [
                            {
                                "begin": "<t>",
                                "content": {"type": "json_schema", "json_schema": True},
                                "end": "</t>",
                            }
                        ],
                    }
                }
            ),
            ["<t>1</t>", '<t>1</t>,<t>{"a":2}</t>'],
            ["", "<t>1</t><t>1</t>", "<t>1</t>,"],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_grammar_allows_only_its_language(
    grammar: Grammar, yes: list[str], no: list[str], backend: BackendName, tokenizer: Tokenizer
) -> None:
    if grammar.kind not in KINDS[backend]:
        with pytest.raises(InvalidRequest, match=f"{backend} .* not {grammar.kind}; llguidance"):
            backend_named(backend).check(grammar)
        return
    if "minimum" in grammar.text and backend == "outlines":
        with pytest.raises(InvalidRequest, match="outlines cannot enforce `minimum`"):
            backend_named(backend).check(grammar)
        return
    # these libraries write JSON in one line
    yes = [text for text in yes if backend == "llguidance" or "\n" not in text]
    assert [text for text in yes if not accepts(grammar, text, tokenizer, backend)] == []
    assert [text for text in no if accepts(grammar, text, tokenizer, backend)] == []


@pytest.mark.parametrize(
    ("text", "bounded", "compact"),
    [
        ('{"a":1}', True, True),
        ('{"a": 1}', True, False),
        ('{"a":\t1}', False, False),
        ('{"a":  1}', False, False),
        ('{\n    "a": 1\n}', True, False),
        ('{"a":\n\n1}', False, False),
        ('{"a":1} ', False, False),
    ],
)
def test_whitespace_is_bounded(
    text: str, bounded: bool, compact: bool, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(Grammar.json_schema(schema), text, tokenizer) == bounded
    assert accepts(Grammar.json_schema(schema, whitespace=COMPACT), text, tokenizer) == compact


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_backends_differ_in_whitespace_and_reject_other_patterns(
    backend: BackendName, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    text = '{"a": [1, {"b": null}]}'
    tight = text.replace(" ", "")
    default, none = Grammar.json_schema(schema), Grammar.json_schema(schema, whitespace=COMPACT)
    assert accepts(default, text, tokenizer, backend)
    assert accepts(none, tight, tokenizer, backend)
    assert not accepts(none, text, tokenizer, backend)
    for wrong in (text.replace(" ", "\n"), text.replace(" ", "  "), f"{text} "):
        assert not accepts(default, wrong, tokenizer, backend)
    with pytest.raises(InvalidRequest, match="whitespace"):
        backend_named(backend).check(Grammar.json_schema(schema, whitespace="[ ]*"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"not": {"type": "string"}}), '"not"'),
        (
            Grammar.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
            "'a' is unsatisfiable",
        ),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.lark("start: nothing"), "unknown name"),
        (Grammar.gbnf("root = x"), "Expected ::="),
        (Grammar.structural_tag({"format": {"type": "poem"}}), "unknown format 'poem'"),
        (Grammar.structural_tag({}), "needs `format`"),
        (Grammar.structural_tag({"triggers": ["<"], "structures": []}), "no tags"),
    ],
)
def test_unenforceable_keyword_is_rejected_by_name(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        backend_named("llguidance").check(grammar)


NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}
PET: dict[str, Any] = {
    "type": "object",
    "properties": {"owner": {"$ref": "#/$defs/person"}},
    "additionalProperties": False,
}
OWNER: dict[str, Any] = {
    "type": "object",
    "properties": {"pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}}},
    "required": ["pets"],
    "additionalProperties": False,
}


SCORE = {"type": "integer", "minimum": 0, "maximum": 100}


@pytest.mark.parametrize(
    ("more", "yes", "no"),
    [
        ({"patternProperties": {"^score$": {"type": "integer"}}}, ['{"score":7}'], ['{"score":7,']),
        ({"patternProperties": {"^(score|b)$": {}}}, ['{"score":7}', '{"score":7,"b":1}'], []),
        ({"patternProperties": {"^s": {}}}, ['{"score":7}', '{"score":7,"so":1}'], []),
        ({"patternProperties": {"^score$": {"maximum": 3}}}, ['{"score":3}'], ['{"score":7}']),
        (
            {"patternProperties": {"^[ab]$": {"type": "null"}}, "required": ["a", "b", "score"]},
            ['{"score":7,"a":null,"b":null}'],
            ['{"score":7,"a":1'],
        ),
        ({"patternProperties": {}}, ['{"score":7}'], ['{"score":7,']),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_patterns_of_declared_names_leave_no_comma_open(
    nested: bool, more: Any, yes: list[str], no: list[str], tokenizer: Tokenizer
) -> None:
    """Earlier llguidance allowed the comma, then only whitespace."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"score": SCORE},
        "required": ["score"],
        "additionalProperties": False,
        **more,
    }
    if nested:
        schema = {"anyOf": [{"type": "array", "items": schema, "maxItems": 1}]}
    grammar = Grammar.json_schema(schema, whitespace=COMPACT)
    backend_named("llguidance").check(grammar)
    for text in yes:
        assert accepts(grammar, f"[{text}]" if nested else text, tokenizer)
    for text in no:
        assert not begins(grammar, f"[{text}" if nested else text, tokenizer)


def begins(grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    """Return True if the text is a prefix of a text that the grammar allows."""
    matcher, vocabulary = compiled(grammar, tokenizer), vocabulary_of(tokenizer)
    for token_id in tokenizer.encode(text):
        if token_id not in mask(matcher, vocabulary):
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
            [
                '{"v": 1}',
                '{"v": 1, "next": {"v": 2, "next": {"v": 3}}}',
                '{"v":1,"next":' * 30 + '{"v": 1}' + "}" * 30,
            ],
            ['{"v": 1, "next": {}}', '{"v": 1, "next": {"v": 2, "next": {"w": 3}}}'],
        ),
        (
            {"$ref": "#/$defs/person", "$defs": {"person": OWNER, "pet": PET}},
            ['{"pets": []}', '{"pets": [{}, {"owner": {"pets": [{"owner": {"pets": []}}]}}]}'],
            ['{"pets": [{"pets": []}]}', '{"pets": [{"owner": {"owner": {}}}]}', "{}"],
        ),
        (
            {"type": "array", "items": {"$ref": "#"}},
            ["[]", "[[], [[], []]]", "[" * 100 + "]" * 100],
            ["[1]", "[[]", "{}"],
        ),
        (
            {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
            ["1"],
            ['"a"', "[1]"],
        ),
    ],
    ids=["itself", "each other", "the whole", "through anyOf"],
)
def test_schemas_may_refer_to_themselves(
    schema: dict[str, Any], yes: list[str], no: list[str], tokenizer: Tokenizer
) -> None:
    grammar = Grammar.json_schema(schema)
    assert [text for text in yes if not accepts(grammar, text, tokenizer)] == []
    assert [text for text in no if accepts(grammar, text, tokenizer)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "NoExtension"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "NoExtension",
        ),
        ({"allOf": [{"$ref": "#"}, {"type": "integer"}]}, "circular references"),
        ({"$ref": "#/$defs/none"}, "'/\\$defs/none' does not exist"),
        ({"$ref": "https://example.com/x.json"}, "does not fetch"),
    ],
)
def test_references_that_lead_nowhere_are_refused(
    schema: dict[str, Any], reason: str, tokenizer: Tokenizer
) -> None:
    """Reject the references before the engine gets them or at the first mask, without waiting."""
    compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer))
    with pytest.raises(InvalidRequest, match=reason):
        compiler.wait(GrammarState(Grammar.json_schema(schema)))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("(a*)*b", ["b", "a" * 300 + "b"], ["a" * 300, "bb"]),
        ("(a|a)*b", ["a" * 300 + "b"], ["a" * 300 + "c"]),
        ("(a|b|ab)*c", ["ab" * 150 + "c"], ["ab" * 150]),
        ("(x{1,1000}){1,1000}", ["x", "x" * 1500], ["", "x" * 300 + "y"]),
        ("((a{0,100}){0,100}){0,100}", ["", "a" * 500], ["b"]),
        (".{0,100000}", ["", "ü" * 300], ["a\nb"]),
        ("(.*)(.*)(.*)(.*)=", ["q" * 300 + "="], ["q" * 300]),
    ],
)
def test_catastrophic_patterns_compile_quickly(
    pattern: str, yes: list[str], no: list[str], tokenizer: Tokenizer
) -> None:
    grammar = Grammar.regex(pattern)
    backend_named("llguidance").check(grammar)
    assert [text for text in yes if not accepts(grammar, text, tokenizer)] == []
    assert [text for text in no if accepts(grammar, text, tokenizer)] == []


def test_lenient_mode_ignores_unenforceable_keywords(tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    grammar = Grammar.json_schema(schema, lenient=True)
    backend_named("llguidance").check(grammar)
    assert accepts(grammar, "[1, 1]", tokenizer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar("poem", "x"), "kind of a grammar must be one of .*; got 'poem'"),  # pyright: ignore[reportArgumentType]
        (lambda: Grammar("regex", 3), "text.*must be a string, not 3"),  # pyright: ignore[reportArgumentType]
        (lambda: Grammar.regex(""), "1 to 1048576 characters; got 0"),
        (lambda: Grammar.regex("a" * 2**21), "1 to 1048576 characters; got 2097152"),
        (lambda: Grammar.choice([]), "at least one string"),
        (lambda: Grammar.choice(["a", ""]), "none of them empty"),
        (lambda: Grammar.json_schema("{"), "not valid JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not valid JSON"),
        (lambda: Grammar.json_schema("3"), "must be an object, not 3"),
        (lambda: Grammar.json_schema({"a": object()}), "cannot be written as JSON"),
        (lambda: Grammar("regex", "a", backend="none"), "one of .*; got 'none'"),  # pyright: ignore[reportArgumentType]
        (lambda: SamplingParams(grammar="[0-9]"), "must be a Grammar"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_grammar_is_refused_at_construction(make: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make()


def test_invalid_token_and_limit_are_errors_not_ends(tokenizer: Tokenizer) -> None:
    """llguidance's own mask would allow the end of the text here."""
    vocabulary = vocabulary_of(tokenizer)
    matcher = backend_named("llguidance").compile(Grammar.regex("[0-9]{3}"), vocabulary)
    (letter,) = tokenizer.encode("x")
    with pytest.raises(GrammarError, match="satisfy"):
        matcher.accept(letter)
    with pytest.raises(GrammarError):
        mask(matcher, vocabulary)


TEXT = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=5)
VALUES = st.recursive(  # llguidance requires DEL escaped, JSON does not
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def test_state_is_ready_only_after_all_tokens(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consume the tokens on another thread while the engine's thread polls."""
    vocabulary = vocabulary_of(tokenizer)
    grammar = Grammar.regex("a{9}")
    state = GrammarState(grammar, tokenizer.encode("aaa"))
    seen: list[bool] = []

    def watch(name: str) -> None:
        inner = getattr(GrammarState, name)

        def watched(self: GrammarState, *args: Any) -> Any:
            result = inner(self, *args)
            seen.append(state.is_ready)
            return result

        monkeypatch.setattr(GrammarState, name, watched)

    watch("accept")
    watch("fill")
    first = np.ones(num_words(vocabulary.size), dtype=np.int32)
    state.begin(compiled(grammar, tokenizer), vocabulary, first)
    assert len(seen) > 1
    assert not any(seen)
    assert state.is_ready


@pytest.mark.thorough(but=["llguidance"])
@settings(max_examples=at_depth(200), deadline=None, derandomize=True)
@given(value=st.dictionaries(TEXT, VALUES, max_size=3), cut=st.integers(0, 10**6))
@pytest.mark.parametrize("backend", BACKENDS)
def test_object_is_accepted_only_when_complete(
    backend: BackendName, value: dict[str, Any], cut: int, tokenizer: Tokenizer
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    grammar = Grammar.json_object()
    if backend != "outlines" or (depth_of(value) <= 2 and text.isprintable() and "\\u" not in text):
        assert accepts(grammar, text, tokenizer, backend)
    assert not accepts(grammar, text[: cut % len(text)], tokenizer, backend)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return int(isinstance(value, dict | list)) + max(map(depth_of, inner), default=0)


@settings(max_examples=at_depth(100), deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_keep_their_position_in_the_text(
    backend: BackendName, data: st.DataObject, tokenizer: Tokenizer
) -> None:
    vocabulary = vocabulary_of(tokenizer)
    schema = {**PERSON, "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    matcher = compiled(Grammar.json_schema(schema), tokenizer, backend)
    taken: list[int] = []

    def go_on(steps: int) -> None:
        for _ in range(steps):
            following = sorted(mask(matcher, vocabulary) - {EOS})
            taken.append(data.draw(st.sampled_from(following)))
            matcher.accept(taken[-1])

    for token_id in tokenizer.encode('{"name": "'[: data.draw(st.integers(0, 10))]):
        matcher.accept(token_id)
        taken.append(token_id)
    before, other = mask(matcher, vocabulary), matcher.copy()
    kept = len(taken)
    go_on(data.draw(st.integers(1, 6)))
    assert mask(other, vocabulary) == before
    matcher, other = other, other.copy()
    del taken[kept:]
    go_on(3)  # the copy behaves like a state that was never moved
    replayed = compiled(Grammar.json_schema(schema), tokenizer, backend)
    for token_id in taken:
        replayed.accept(token_id)
    assert mask(matcher, vocabulary) == mask(replayed, vocabulary)
    assert mask(other, vocabulary) == before
