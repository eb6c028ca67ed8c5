"""Masks by llguidance, the default backend: sound, lazy, and with limits on its work."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from nano_inference.errors import InvalidRequest
from nano_inference.structured.backend import (
    COMPILER_STACK,
    Backend,
    GrammarError,
    Matcher,
    Vocabulary,
    kept,
)
from nano_inference.structured.grammar import Grammar
from nano_inference.structured.llguidance_tokenizer import tokenizer_of
from nano_inference.structured.pattern_names import without_spent_patterns
from nano_inference.structured.structural_tag import lark_of
from nano_inference.system.machine import usable_cpus

if TYPE_CHECKING:
    from nano_inference.structured.compile_process import CompileProcesses

SILENT = 0  # log level
# A lexer state takes 1 to 2 kB, so this limit bounds the memory of a grammar.
LIMITS = LLParserLimits(max_lexer_states=100_000, verbose_errors=False)
SMALL = 4096  # characters of a grammar that is checked in this process, within milliseconds
STACK = COMPILER_STACK // 2  # bytes of stack of the thread that checks a large grammar
_NO_VOCABULARY = Vocabulary("", 0, 0, (), lambda _: b"")  # checks need none
FEW = 8  # below this number of matchers, one thread makes the masks faster
MOST_THREADS = 16


class LlguidanceBackend(Backend):
    """Backend that compiles with llguidance. Caches tokenizers.

    Attributes:
        processes: Child processes that check large grammars.
    """

    def __init__(self) -> None:
        self._tokenizer = kept(tokenizer_of)

    @cached_property
    def processes(self) -> "CompileProcesses":
        from nano_inference.structured.compile_process import CompileProcesses

        return CompileProcesses(__name__, lambda _: [])

    def check(self, grammar: Grammar) -> None:
        """Check a grammar as in `Backend.check`. Large grammars are checked in a child process,
        because some take many seconds, and others overflow the stack and end the process.
        """
        if len(grammar.text) <= SMALL or find_spec("msgspec") is None:  # servers have msgspec
            _check(grammar)
            return
        import msgspec

        from nano_inference.structured.compile_process import Job

        job = Job("check", msgspec.json.encode(grammar).decode())
        if refusal := self.processes.compile(grammar, _NO_VOCABULARY, job):
            raise InvalidRequest(refusal.decode())

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Read the tokenizer. This holds the interpreter's lock for a third of a second."""
        self._tokenizer(vocabulary)

    def compile(self, grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
        tokenizer = self._tokenizer(vocabulary)
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=SILENT, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_refusal(grammar, matcher.get_error()))
        return LlguidanceMatcher(self, matcher)

    def fill(self, matchers: Sequence[Matcher], table: np.ndarray) -> Sequence[GrammarError | None]:
        """Write masks as `Backend.fill` does, with several threads if there are many matchers."""
        if len(matchers) < FEW:
            return super().fill(matchers, table)
        ours = [each for each in matchers if isinstance(each, LlguidanceMatcher)]
        self._executor.unsafe_compute_mask_ptr(
            [(each.inner, row) for row, each in enumerate(ours)],
            table.ctypes.data,
            table.strides[0],
            len(table),
        )
        return [each.problem for each in ours]

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor(min(usable_cpus(), MOST_THREADS))


def make_compiler(tokens: list[bytes], ends: Sequence[int]) -> Callable[[str, str], bytes]:
    """Return the child's function, which returns why a grammar is rejected, or b"". The check has
    a smaller stack than the engine's threads, which compile the grammar later.
    """
    import msgspec

    threading.stack_size(STACK)

    def check_one(_: str, source: str) -> bytes:
        refusal = b""

        def check() -> None:
            nonlocal refusal
            try:
                _check(msgspec.json.decode(source, type=Grammar))
            except InvalidRequest as problem:
                refusal = str(problem).encode()

        thread = threading.Thread(target=check, name="check a grammar")
        thread.start()
        thread.join()
        return refusal

    return check_one


def _check(grammar: Grammar) -> None:
    problem = LLMatcher.validate_grammar(_source(grammar), None, limits=LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(_refusal(grammar, problem))


class _Limits:
    """Limits that copies of a matcher share, since llguidance counts their work together."""

    are_reached = False


class LlguidanceMatcher(Matcher):
    """Matcher of llguidance. Every call checks for an error, because in an error state llguidance's
    mask allows only the end, like the mask at the end of a text.
    """

    def __init__(self, backend: Backend, inner: LLMatcher, limits: "_Limits | None" = None) -> None:
        self.backend = backend
        self.inner = inner
        self._limits = limits or _Limits()

    @property
    def is_spent(self) -> bool:
        return self._limits.are_reached

    @property
    def problem(self) -> GrammarError | None:
        """Reason why the matcher cannot continue, or None."""
        if not self.inner.is_error():
            return None
        self._limits.are_reached = True
        return GrammarError(_first_line(self.inner.get_error()))

    def fill(self, words: np.ndarray) -> None:
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._require_sound()

    def accept(self, token_id: int) -> None:
        if not self.inner.consume_token(token_id):
            self._require_sound()
            raise GrammarError(f"token {token_id} cannot follow")

    def forced(self) -> list[int]:
        return self.inner.compute_ff_tokens()

    def copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self.backend, self.inner.deep_copy(), self._limits)

    def _require_sound(self) -> None:
        problem = self.problem
        if problem is not None:
            raise problem


def _source(grammar: Grammar) -> str:
    """Return a grammar as llguidance reads it. Raises `InvalidRequest`."""
    try:
        match grammar.kind:
            case "json":
                schema = _schema(grammar.text)
                return LLMatcher.grammar_from_json_schema(schema, overrides=json_options(grammar))
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "structural_tag":
                text = lark_of(json.loads(grammar.text), json_options(grammar))
                return LLMatcher.grammar_from_lark(text)
            case kind:
                return llguidance.grammar_from(kind, grammar.text)
    except ValueError as problem:
        raise InvalidRequest(_refusal(grammar, str(problem))) from None


def _schema(text: str) -> str:
    if "patternProperties" in text:
        return json.dumps(without_spent_patterns(json.loads(text)), ensure_ascii=False)
    return "{}" if json.loads(text) is True else text


def json_options(grammar: Grammar) -> Any:
    """Return llguidance's options for JSON."""
    options: dict[str, Any] = {"whitespace_flexible": bool(grammar.whitespace)}
    if grammar.whitespace:
        options["whitespace_pattern"] = grammar.whitespace
    if grammar.lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    return options


# llguidance prints the reason after a drawing of the position in the regular expression.
_OF_REGEX = re.compile(r"regex parse error:\n.*?^error: (.*?)$", re.DOTALL | re.MULTILINE)


def _refusal(grammar: Grammar, problem: str) -> str:
    if grammar.kind == "regex" and (match := _OF_REGEX.search(problem)):
        problem = match[1]  # without positions: they count from the grammar around the pattern
    return f"the {grammar.kind} grammar cannot be enforced: {_first_line(problem)}."


def _first_line(problem: str) -> str:
    """Return the reason, without the parser state that follows it."""
    return " ".join(problem.split("<state>")[0].split("\n\n")[0].split())[:500].rstrip(".")
