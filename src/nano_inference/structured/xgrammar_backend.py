"""Masks by xgrammar, which compiles in a child process. Schemas are passed in their plain form,
because xgrammar ignores keywords that it does not know.

The API process checks grammars with this module and never imports xgrammar, which imports torch.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

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
from nano_inference.structured.mask_bits import cut_to
from nano_inference.structured.plain_schema import Abilities, parts_of, plain_schema
from nano_inference.structured.regular import NotPlain, characters, plain_regex
from nano_inference.structured.token_bytes import token_bytes
from nano_inference.system.machine import usable_cpus

ABILITIES = Abilities(
    "xgrammar",
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
            "minimum",
            "maximum",
            "exclusiveMinimum",
            "exclusiveMaximum",
        ]
    ),
    recursion=True,
)
# separators between the tokens of JSON as in `json.dumps`: a part of the default `whitespace`
SEPARATORS = {COMPACT: (",", ":"), BOUNDED: (", ", ": ")}
KINDS = ("json", "regex", "choice", "gbnf")


class XgrammarBackend(Backend):
    """Backend that compiles with xgrammar in a child process. Caches vocabularies.

    Attributes:
        processes: The child processes.
    """

    def __init__(self) -> None:
        self._read = kept(_read)
        self.processes = CompileProcesses(__name__, lambda vocabulary: self._read(vocabulary)[0])

    def check(self, grammar: Grammar) -> None:
        """Check a grammar as in `Backend.check`, without xgrammar, which may still reject it."""
        _job(grammar)
        if grammar.kind == "gbnf":
            backend_named("llguidance").check(grammar)

    def prepare(self, vocabulary: Vocabulary) -> None:
        self._read(vocabulary)
        self.processes.prepare(vocabulary)

    def compile(self, grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
        import xgrammar  # pyright: ignore[reportMissingImports]

        job = _job(grammar)
        _, information = self._read(vocabulary)
        serialized = self.processes.compile(grammar, vocabulary, job)
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(serialized.decode(), information)
            return XgrammarMatcher(self, xgrammar.GrammarMatcher(compiled), vocabulary)
        except RuntimeError as problem:
            raise InvalidRequest(
                f"the {grammar.kind} grammar cannot be enforced: {problem}."
            ) from None


class XgrammarMatcher(Matcher):
    def __init__(self, backend: Backend, inner: Any, vocabulary: Vocabulary) -> None:
        self.backend = backend
        self._inner, self._vocabulary = inner, vocabulary

    def fill(self, words: np.ndarray) -> None:
        try:
            if not self._inner.fill_next_token_bitmask(words[None]):
                words.fill(-1)
        except RuntimeError as problem:
            raise GrammarError(str(problem)) from None
        cut_to(words, self._vocabulary.size)  # xgrammar sets the rest of the last word

    def accept(self, token_id: int) -> None:
        try:
            accepted = self._inner.accept_token(token_id)
        except RuntimeError as problem:
            raise GrammarError(str(problem)) from None
        if not accepted:
            raise GrammarError(f"token {token_id} cannot follow")

    def copy(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.backend, self._inner.fork(), self._vocabulary)


def make_compiler(tokens: list[bytes], ends: Sequence[int]) -> Callable[[str, str], bytes]:
    """Return the child's function, which compiles a grammar of a kind and serializes it."""
    import xgrammar  # pyright: ignore[reportMissingImports]

    num_threads = max(usable_cpus() // 2, 1)
    compiler = xgrammar.GrammarCompiler(
        _information(tokens, ends), max_threads=num_threads, cache_enabled=False
    )

    def compile_one(kind: str, source: str) -> bytes:
        if kind == "json":
            said = json.loads(source)
            grammar = xgrammar.Grammar.from_json_schema(
                said["schema"],
                any_whitespace=False,
                separators=tuple(said["separators"]),
                strict_mode=True,
            )
        elif kind == "regex":
            grammar = xgrammar.Grammar.from_regex(source)
        else:
            grammar = xgrammar.Grammar.from_ebnf(source)
        return compiler.compile_grammar(grammar).serialize_json().encode()

    return compile_one


def _read(vocabulary: Vocabulary) -> tuple[list[bytes], Any]:
    """Return the bytes of the vocabulary's tokens, and xgrammar's form of the vocabulary."""
    tokens = token_bytes(vocabulary)
    return tokens, _information(tokens, vocabulary.eos_token_ids)


def _information(tokens: list[bytes], ends: Sequence[int]) -> Any:
    import xgrammar  # pyright: ignore[reportMissingImports]

    return xgrammar.TokenizerInfo(tokens, stop_token_ids=list(ends))


def _job(grammar: Grammar) -> Job:
    """Return a grammar as the child reads it. Raises `InvalidRequest`."""
    match grammar.kind:
        case "json":
            schema = _schema(grammar)
            separators = way_for_whitespace(grammar, SEPARATORS, "xgrammar")
            return Job("json", json.dumps({"schema": schema, "separators": separators}))
        case "regex":
            try:
                return Job("regex", plain_regex(grammar.text))
            except NotPlain as problem:
                raise InvalidRequest(
                    f"xgrammar cannot enforce a regular expression with {problem}; try another "
                    "backend."
                ) from None
        case "choice":
            choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(grammar.text))
            return Job("ebnf", f"root ::= {' | '.join(choices)}\n")
        case "gbnf":
            return Job("ebnf", grammar.text)
        case kind:
            raise InvalidRequest(
                f"the backend xgrammar supports grammars of the kinds {', '.join(KINDS)}, not "
                f"{kind}; llguidance supports all."
            )


def _schema(grammar: Grammar) -> str:
    plain = plain_schema(grammar.text, ABILITIES, grammar.lenient)
    for part in parts_of(plain):
        # xgrammar's own strings of bounded length allow control characters
        if "minLength" in part:
            part["pattern"] = characters(part.pop("minLength"), part.pop("maxLength", None))
    return json.dumps(plain, ensure_ascii=False)
