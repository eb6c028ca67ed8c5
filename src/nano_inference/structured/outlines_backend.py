"""Masks by outlines-core, which turns regular expressions into automata over tokens. A child
process runs it, and this process gets the automata as tables of numbers.

outlines-core gets schemas in their plain form, because it ignores many of their keywords.
"""

import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from nano_inference.errors import InvalidRequest
from nano_inference.structured.backend import (
    Backend,
    GrammarError,
    Matcher,
    Vocabulary,
    backend_named,
    kept,
)
from nano_inference.structured.compile_process import CompileProcesses, Job, way_for_whitespace
from nano_inference.structured.grammar import BOUNDED, COMPACT, Grammar
from nano_inference.structured.plain_schema import Abilities, parts_of, plain_schema
from nano_inference.structured.token_bytes import token_bytes

ABILITIES = Abilities(
    "outlines",
    frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "items",
            "prefixItems",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
            "pattern",
            "format",
        ]
    ),
)
# `whitespace` of a grammar -> pattern of outlines-core, which covers only a part of the default
WHITESPACE = {COMPACT: "", BOUNDED: "[ ]?"}
KINDS = ("json", "regex", "choice")
# nesting depth of arrays and objects without a schema: automata have no recursion
DEPTH = 1
_HOLDS = {"items", "prefixItems", "properties", "additionalProperties"}
MOST_STEPS = 2**23  # transitions by one token, 8 bytes each
END = "\U0010fffe"  # not a character; ends the texts that the automaton reads


# the fields of `Automaton` as bytes
Table = tuple[bytes, bytes, bytes, bytes]
DTYPES = (np.int64, np.int32, np.int32, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """Automaton over tokens, as tables.

    Attributes:
        starts: int64 [S + 1], index of each state's first step. State 0 is the initial state.
        tokens: int32 [N], token of each step, ascending within a state.
        following: int32 [N], next state of each step.
        final: bool [S], True if a text may end in the state.
    """

    starts: np.ndarray
    tokens: np.ndarray
    following: np.ndarray
    final: np.ndarray

    @classmethod
    def of(cls, table: Table) -> "Automaton":
        """Return an automaton over the arrays' bytes, without a copy."""
        return cls(*(np.frombuffer(part, dtype) for part, dtype in zip(table, DTYPES, strict=True)))

    def steps(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that may follow a state, and the next state of each."""
        rows = slice(self.starts[state], self.starts[state + 1])
        return self.tokens[rows], self.following[rows]


class OutlinesBackend(Backend):
    """Backend that compiles with outlines-core in a child process. Caches vocabularies.

    Attributes:
        processes: The child processes.
    """

    def __init__(self) -> None:
        self.processes = CompileProcesses(__name__, kept(token_bytes))

    def check(self, grammar: Grammar) -> None:
        """Check a grammar without outlines-core, which may still reject it."""
        _job(grammar)
        if grammar.kind == "regex":  # llguidance reads the same syntax
            backend_named("llguidance").check(grammar)

    def prepare(self, vocabulary: Vocabulary) -> None:
        self.processes.prepare(vocabulary)

    def compile(self, grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
        table = self.processes.compile(grammar, vocabulary, _job(grammar))
        automaton = Automaton.of(msgspec.msgpack.decode(table, type=Table))
        return OutlinesMatcher(self, automaton, vocabulary, 0)


class OutlinesMatcher(Matcher):
    def __init__(
        self, backend: Backend, automaton: Automaton, vocabulary: Vocabulary, state: int
    ) -> None:
        self.backend = backend
        self._automaton, self._vocabulary = automaton, vocabulary
        self._state = state

    def fill(self, words: np.ndarray) -> None:
        bits = np.zeros(len(words) * 32, dtype=np.bool_)
        bits[self._automaton.steps(self._state)[0]] = True
        if self._automaton.final[self._state]:
            bits[list(self._vocabulary.eos_token_ids)] = True
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        tokens, following = self._automaton.steps(self._state)
        step = int(np.searchsorted(tokens, token_id))
        if step == len(tokens) or tokens[step] != token_id:
            raise GrammarError(f"token {token_id} cannot follow")
        self._state = int(following[step])

    def copy(self) -> "OutlinesMatcher":
        return OutlinesMatcher(self.backend, self._automaton, self._vocabulary, self._state)


def make_compiler(tokens: list[bytes], ends: Sequence[int]) -> Callable[[str, str], bytes]:
    """Return the child's function, which compiles a grammar of a kind into a packed `Table`."""
    import outlines_core  # pyright: ignore[reportMissingImports]
    from outlines_core.json_schema import (  # pyright: ignore[reportMissingImports]
        build_regex_from_schema,
    )

    by_bytes: dict[bytes, list[int]] = {END.encode(): [len(tokens)]}
    for token_id, text in enumerate(tokens):
        if text:
            by_bytes.setdefault(text, []).append(token_id)
    vocabulary = outlines_core.Vocabulary(ends[0], by_bytes)

    def compile_one(kind: str, source: str) -> bytes:
        if kind == "json":
            said = json.loads(source)
            source = build_regex_from_schema(said["schema"], said["whitespace"])
        # outlines-core stops at the first match and loses less preferred ones (`ab` in `a|ab`).
        # An end marker prevents matches before the end.
        index = outlines_core.Index(f"(?:{source}){END}", vocabulary)
        return msgspec.msgpack.encode(_table(index, len(tokens), set(ends)))

    return compile_one


def _table(index: Any, end: int, ends: Container[int]) -> Table:
    """Return all states and their steps, without states from which no text can end.

    Args:
        index: Index of outlines-core.
        end: Token of `END`.
        ends: Ids that end a text.
    """
    states = [index.get_initial_state()]  # grows during the loop below
    numbers: dict[int, int] = {states[0]: 0}
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    final: list[bool] = []
    size = 0
    for state in states:
        steps = sorted(each for each in index.get_allowed_tokens(state) or () if each not in ends)
        final.append(False)
        if steps and steps[-1] == end:
            final[-1] = index.is_final_state(index.get_next_state(state, steps.pop()))
        behind: list[int] = []
        for token_id in steps:
            next_state = index.get_next_state(state, token_id)
            if next_state not in numbers:
                numbers[next_state] = len(states)
                states.append(next_state)
            behind.append(numbers[next_state])
        rows.append((np.array(steps, dtype=np.int32), np.array(behind, dtype=np.int32)))
        size += len(steps)
        if size > MOST_STEPS:
            raise ValueError(f"its automaton has more than {MOST_STEPS} steps")
    live = _live([np.unique(behind).tolist() for _, behind in rows], final)
    if not live[0]:
        raise ValueError("it allows no text")
    kept = [(tokens[live[behind]], behind[live[behind]]) for tokens, behind in rows]
    return (
        np.cumsum([0, *(len(tokens) for tokens, _ in kept)], dtype=np.int64).tobytes(),
        np.concatenate([tokens for tokens, _ in kept]).tobytes(),
        np.concatenate([behind for _, behind in kept]).tobytes(),
        np.array(final, dtype=np.bool_).tobytes(),
    )


def _live(behind: Sequence[Sequence[int]], final: Sequence[bool]) -> np.ndarray:
    """Return a mask of the states that lead to a final one. States amid the bytes of `END` do not,
    although real tokens may spell these bytes.
    """
    before: list[list[int]] = [[] for _ in behind]
    for state, others in enumerate(behind):
        for other in others:
            before[other].append(state)
    live = np.array(final, dtype=np.bool_)
    reached = np.flatnonzero(live).tolist()
    for state in reached:  # grows during the loop
        for other in before[state]:
            if not live[other]:
                live[other] = True
                reached.append(other)
    return live


def _job(grammar: Grammar) -> Job:
    """Return a grammar as the child reads it. Raises `InvalidRequest`."""
    match grammar.kind:
        case "json":
            schema = _schema(grammar)
            whitespace = way_for_whitespace(grammar, WHITESPACE, "outlines")
            return Job("json", json.dumps({"schema": schema, "whitespace": whitespace}))
        case "regex":
            return Job("regex", _unanchored(grammar.text))
        case "choice":
            return Job("regex", "|".join(map(_escaped, json.loads(grammar.text))))
        case kind:
            raise InvalidRequest(
                f"the backend outlines supports grammars of the kinds {', '.join(KINDS)}, not "
                f"{kind}; llguidance supports all."
            )


def _schema(grammar: Grammar) -> str:
    plain = plain_schema(grammar.text, ABILITIES, grammar.lenient)
    for part in parts_of(plain):
        if part.get("type") in ("object", "array") and not _HOLDS.intersection(part):
            part["depth"] = DEPTH
        if "enum" in part:
            part["enum"] = [_with_names_escaped(each) for each in part["enum"]]
        if "properties" in part:
            part["properties"] = {
                _inside_quotes(name): value for name, value in part["properties"].items()
            }
            part["required"] = [_inside_quotes(name) for name in part["required"]]
    return json.dumps(plain, ensure_ascii=False)


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _with_names_escaped(value: Any) -> Any:
    """Return a value with escaped property names, which outlines-core reads as patterns."""
    if isinstance(value, list):
        return [_with_names_escaped(each) for each in value]
    if isinstance(value, dict):
        return {
            _escaped(_inside_quotes(name)): _with_names_escaped(each)
            for name, each in value.items()
        }
    return value


def _unanchored(pattern: str) -> str:
    """Return a pattern for whole texts without `^` and `$` at its ends, since `END` follows it."""
    body = pattern.removeprefix("^")
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    return body[:-1] if ends else body


def _escaped(text: str) -> str:
    """Return a pattern that matches only this text."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)
