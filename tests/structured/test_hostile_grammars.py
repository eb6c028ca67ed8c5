"""Grammars built to take long or to crash their parser."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from nano_inference import Grammar, InvalidRequest
from nano_inference.structured.backend import CompilationStopped
from nano_inference.structured.llguidance_backend import SMALL, LlguidanceBackend

# Deeper than any stack: the parsing process dies by a signal.
DEEP = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{each}": {"$ref": f"#/$defs/d{each + 1}"} for each in range(20_000)}
    | {"d20000": {"type": "integer"}},
}


@pytest.fixture
def backend() -> LlguidanceBackend:
    return LlguidanceBackend()


def test_grammar_that_overflows_the_stack_ends_only_the_child(
    backend: LlguidanceBackend,
) -> None:
    with pytest.raises(CompilationStopped, match=r"json grammar cannot be enforced: .*signal"):
        backend.check(Grammar.json_schema(DEEP))
    backend.check(Grammar.choice([f"word {each}" for each in range(SMALL)]))


def test_large_grammar_is_refused_in_the_words_of_a_small_one(backend: LlguidanceBackend) -> None:
    for names in (["a"], [f"a{each}" for each in range(SMALL)]):
        schema: dict[str, Any] = {"type": "object", "properties": {each: {} for each in names}}
        backend.check(Grammar.json_schema(schema))
        with pytest.raises(InvalidRequest) as raised:
            backend.check(Grammar.json_schema({**schema, "not": {"type": "string"}}))
        text = str(raised.value)
        assert text.startswith("the json grammar cannot be enforced: ")
        assert text.count("cannot be enforced") == 1
        assert "not" in text


def test_slow_grammar_is_stopped_by_its_cpu_time(backend: LlguidanceBackend) -> None:
    backend.check(Grammar.choice([f"word {each}" for each in range(SMALL)]))  # a child exists
    backend.processes.time_limit = 0.05
    with pytest.raises(CompilationStopped, match=r"took longer than 0\.05 seconds"):
        backend.check(Grammar.choice([f"w{each}" for each in range(90_000)]))


def nested(begin: str, middle: str, end: str) -> str:
    count = (SMALL - len(middle)) // (len(begin) + len(end)) - 8
    return begin * count + middle + end * count


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Grammar.regex, nested("(", "a", ")")),
        (Grammar.regex, nested("(", "a", "){1,9}")),
        (Grammar.regex, nested("(a|", "b", ")*")),
        (Grammar.lark, "start: " + nested("(", '"a"', ")")),
        (Grammar.lark, "start: " + nested("(", '"a"', ")*")),
        (Grammar.lark, "start: A\nA: " + nested("(", '"a"', ")~3")),
        (Grammar.gbnf, "root ::= " + nested("(", '"a"', ")")),
        (Grammar.json_schema, nested('{"items":', "{}", "}")),
        (Grammar.json_schema, nested('{"anyOf":[', "{}", "]}")),
    ],
)
def test_small_hostile_grammar_is_checked_in_process(
    make: Callable[[str], Grammar], text: str, backend: LlguidanceBackend
) -> None:
    """Accept or reject without a crash, in less CPU time than the limit of a request."""
    process = psutil.Process()
    begun = sum(process.cpu_times()[:2])
    try:
        grammar = make(text)
    except InvalidRequest:
        return
    assert len(grammar.text) <= SMALL
    with suppress(InvalidRequest):
        backend.check(grammar)
    assert sum(process.cpu_times()[:2]) - begun < 10
