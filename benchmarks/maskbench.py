"""`python -m benchmarks mask`: masks of JSON schemas, without a model.

MaskBench of guidance-ai/jsonschemabench has real-world schemas, each with valid and invalid
documents. A document is accepted if the masks allow all its tokens, as the tokenizer splits its
text, and then the end. Each backend runs in a separate process, which is killed if a schema exceeds
the time limit. Times are CPU time: for masks and commits that of the calling thread, for the first
mask that of the whole process and its children.
"""

import json
import multiprocessing
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from benchmarks.measure import Row, console, show
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.structured.backend import CompilationStopped, Vocabulary, backend_named
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.grammar import BackendName, Grammar
from nano_inference.structured.mask_bits import WORD, num_words
from nano_inference.structured.matching import GrammarState
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import load_tokenizer

FOLDER = "maskbench/data"  # in the repository
START_LIMIT = 120.0  # seconds for imports and the tokenizer
# ours: with our compiler, checks and states; the others are the unmodified packages
OURS: dict[str, BackendName] = {
    "ours": "llguidance",
    "ours-xgrammar": "xgrammar",
    "ours-outlines": "outlines",
}
NAMES = (*OURS, "llguidance", "xgrammar")
PACKAGES = {"ours": "llguidance", "ours-xgrammar": "xgrammar", "ours-outlines": "outlines-core"}
KEYWORD = re.compile(
    r"(?<![\w$])(additionalItems|additionalProperties|allOf|anyOf|const|contains|contentEncoding|"
    r"contentMediaType|dependencies|dependentRequired|dependentSchemas|enum|"
    r"exclusiveMaximum|exclusiveMinimum|format|if|items|maxContains|maximum|maxItems|"
    r"maxLength|maxProperties|minContains|minimum|minItems|minLength|minProperties|"
    r"multipleOf|not|oneOf|pattern|patternProperties|prefixItems|properties|propertyNames|"
    r"\$ref|\$dynamicRef|\$recursiveRef|required|type|unevaluatedItems|"
    r"unevaluatedProperties|uniqueItems)(?!\w)"
)


class Walk(Protocol):
    """A document in progress. `words` is the mask of its next token, int32 [W]."""

    words: np.ndarray

    def accept(self, token_id: int) -> None:
        """Append a token to the document."""
        ...

    def fill(self) -> None:
        """Compute the next mask."""
        ...


class Refused(Exception):
    """A backend rejected a schema."""


class Stopped(Exception):
    """A compilation exceeded one of our limits."""


# Compiles a schema to a factory of walks, or raises `Refused`.
Compile = Callable[[str], Callable[[], Walk]]


@dataclass
class Outcome:
    """Outcome of one schema, or the total of many."""

    refusal: str | None = None  # at compile
    first_mask: float | None = None  # seconds
    masks: list[int] = field(default_factory=list[int])  # nanoseconds
    commits: list[int] = field(default_factory=list[int])
    right: int = 0  # documents
    wrongly_accepted: list[int] = field(default_factory=list[int])  # indices of documents
    wrongly_refused: list[int] = field(default_factory=list[int])


def measure(data: Path, model: str, backends: Sequence[str], every: int, limit: float) -> list[Row]:
    """Return a row per backend, over every n-th schema.

    Args:
        data: A clone of the repository, bare or not.
        model: Model whose tokenizer splits the documents.
        backends: Names from `NAMES`.
        every: Step through the schemas, which are sorted by name.
        limit: Seconds per schema.
    """
    cases = schemas(data, every)
    rows = [summary(name, run(name, model, cases, limit), cases) for name in backends]
    show(f"MaskBench, {len(cases)} schemas, {model}'s tokenizer", COLUMNS, rows)
    for row in rows:
        console.print(f"{row['name']} rejected at compile: {row['refused_keywords']}")
    return rows


def schemas(data: Path, every: int) -> dict[str, dict[str, Any]]:
    """Return every n-th schema with its tests, by name."""

    def git(*command: str, given: str = "") -> str:
        done = subprocess.run(
            ["git", "-C", str(data), *command], input=given, capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(f"{data} is not a clone of jsonschemabench: {done.stderr.strip()}.")
        return done.stdout

    paths = git("ls-tree", "-r", "--name-only", "HEAD", f"{FOLDER}/").split("\n")
    chosen = sorted(path for path in paths if path.endswith(".json"))[::every]
    return {Path(path).stem: json.loads(git("show", f"HEAD:{path}")) for path in chosen}


def run(
    backend: str, model: str, cases: dict[str, dict[str, Any]], limit: float
) -> dict[str, Outcome | str]:
    """Return the result of each schema, or a text if the process died or was killed."""
    outcomes: dict[str, Outcome | str] = {}
    worker = Worker(backend, model)
    try:
        for name, case in cases.items():
            outcomes[name] = worker.outcome(case, limit)
            if isinstance(outcomes[name], str):
                console.print(f"{backend}: {name}: {outcomes[name]}")
                worker.stop()
                worker = Worker(backend, model)
    finally:
        worker.stop()
    return outcomes


class Worker:
    """A process that tests schemas one after another."""

    def __init__(self, backend: str, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(backend, model, theirs), daemon=True)
        self._process.start()
        theirs.close()
        ready = self._answer(START_LIMIT)
        if ready != "ready":
            raise RuntimeError(f"{backend} does not start: {ready}.")

    def outcome(self, case: dict[str, Any], limit: float) -> Outcome | str:
        """Return the outcome of one schema, or the reason why there is none. In that case the
        worker is unusable.
        """
        self._pipe.send(case)
        return self._answer(limit)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _answer(self, limit: float) -> Any:
        try:
            return self._pipe.recv() if self._pipe.poll(limit) else "time limit"
        except EOFError:
            self._process.join()
            return f"crash, exit code {self._process.exitcode}"


def serve(backend: str, model: str, pipe: Connection) -> None:
    """Serve requests on the worker's side."""
    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder)
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    vocabulary = Vocabulary(
        tokenizer.backend.to_str(),
        tokenizer.vocab_size,
        tokenizer.vocab_size,
        tuple(ends) if isinstance(ends, list) else (ends,),
        TokenTexts(tokenizer).bytes_of,
    )
    compile_schema = COMPILERS[backend](vocabulary)
    examine(
        compile_schema, {"schema": {"type": "boolean"}, "tests": []}, None, ()
    )  # loads everything
    pipe.send("ready")
    while True:
        case = pipe.recv()
        try:
            pipe.send(examine(compile_schema, case, tokenizer.encode, vocabulary.eos_token_ids))
        except Stopped as problem:
            pipe.send(str(problem))


def examine(
    compile_schema: Compile, case: dict[str, Any], encode: Any, ends: Collection[int]
) -> Outcome:
    """Compile a schema and test its documents."""
    outcome = Outcome()
    begun = cpu_seconds()
    try:
        begin = compile_schema(json.dumps(case["schema"]))
    except Refused as problem:
        outcome.refusal = str(problem)
        return outcome
    outcome.first_mask = cpu_seconds() - begun
    for place, test in enumerate(case["tests"]):
        token_ids = encode(json.dumps(test["data"], ensure_ascii=False))
        accepted = try_document(begin(), token_ids, ends, outcome)
        if accepted == test["valid"]:
            outcome.right += 1
        else:
            (outcome.wrongly_accepted if accepted else outcome.wrongly_refused).append(place)
    return outcome


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    children = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in children)


def try_document(walk: Walk, token_ids: list[int], ends: Collection[int], outcome: Outcome) -> bool:
    """Return True if the masks accept a document, and record their times."""
    clock = time.thread_time_ns
    for token_id in token_ids:
        if not is_allowed(walk.words, token_id):
            return False
        began = clock()
        walk.accept(token_id)
        accepted = clock()
        walk.fill()
        outcome.masks.append(clock() - accepted)
        outcome.commits.append(accepted - began)
    return any(is_allowed(walk.words, end) for end in ends)


def is_allowed(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // WORD] >> (token_id % WORD) & 1)


def ours(backend: BackendName, vocabulary: Vocabulary) -> Compile:
    """Compile for our backend, with the checks of an engine."""
    compiler = GrammarCompiler(lambda: vocabulary, backend, num_threads=1, time_limit=1e6)
    backend_named(backend).prepare(vocabulary)

    def compile_schema(schema: str) -> Callable[[], Walk]:
        is_ready = threading.Event()
        try:
            grammar = Grammar.json_schema(schema)
            compiler.check(grammar)
            state = GrammarState(grammar)
        except Exception as problem:
            raise Refused(str(problem)) from None
        outcome = compiler.begin(grammar)
        outcome.add_done_callback(lambda _: is_ready.set())
        is_ready.wait()
        if isinstance(problem := outcome.exception(), CompilationStopped):
            raise Stopped(str(problem))
        if problem is not None:
            raise Refused(str(problem))
        compiler.start(state, is_ready.set)
        return state.fork

    return compile_schema


def llguidance_alone(vocabulary: Vocabulary) -> Compile:
    """Compile with unmodified llguidance: any whitespace."""
    from llguidance import LLMatcher, LLTokenizer  # pyright: ignore

    tokenizer = LLTokenizer(
        vocabulary.tokenizer_json, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
    )

    class Document:
        def __init__(self, matcher: Any, words: np.ndarray) -> None:
            self._matcher, self.words = matcher, words

        def accept(self, token_id: int) -> None:
            self._matcher.consume_token(token_id)

        def fill(self) -> None:
            self._matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)

    def compile_schema(schema: str) -> Callable[[], Walk]:
        try:
            source = LLMatcher.grammar_from_json_schema(schema)
        except ValueError as problem:
            raise Refused(str(problem)) from None
        template = LLMatcher(tokenizer, source, log_level=0)
        if template.is_error():
            raise Refused(template.get_error())
        words = np.zeros(num_words(vocabulary.size), dtype=np.int32)
        Document(template, words).fill()
        return lambda: Document(template.deep_copy(), words.copy())

    return compile_schema


def xgrammar_alone(vocabulary: Vocabulary) -> Compile:
    """Compile with unmodified xgrammar: any whitespace, no additional properties."""
    import xgrammar  # pyright: ignore
    from tokenizers import Tokenizer

    reader = Tokenizer.from_str(vocabulary.tokenizer_json)
    ids = reader.get_vocab(with_added_tokens=True)
    metadata = xgrammar.TokenizerInfo._detect_metadata_from_hf(vocabulary.tokenizer_json)
    information = xgrammar.TokenizerInfo(
        sorted(ids, key=ids.__getitem__),
        **metadata,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(information, max_threads=1, cache_enabled=False)

    class Document:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher
            self._table = np.full((1, num_words(vocabulary.size)), -1, dtype=np.int32)
            self.words = self._table[0]
            self.fill()

        def accept(self, token_id: int) -> None:
            self._matcher.accept_token(token_id)

        def fill(self) -> None:
            self._matcher.fill_next_token_bitmask(self._table)

    def compile_schema(schema: str) -> Callable[[], Walk]:
        try:
            compiled = compiler.compile_json_schema(schema)
        except Exception as problem:
            raise Refused(str(problem)) from None
        Document(xgrammar.GrammarMatcher(compiled))  # the first mask
        return lambda: Document(xgrammar.GrammarMatcher(compiled))

    return compile_schema


COMPILERS: dict[str, Callable[[Vocabulary], Compile]] = {
    **{name: partial(ours, backend) for name, backend in OURS.items()},
    "llguidance": llguidance_alone,
    "xgrammar": xgrammar_alone,
}


def installed(names: Sequence[str]) -> tuple[str, ...]:
    """Return the backends whose package is installed."""
    found: list[str] = []
    for name in names:
        try:
            version(PACKAGES.get(name, name))
            found.append(name)
        except PackageNotFoundError:
            console.print(f"{name}: its package is not installed.")
    return tuple(found)


def summary(
    backend: str, outcomes: dict[str, Outcome | str], cases: dict[str, dict[str, Any]]
) -> Row:
    """Return a row of the report."""
    done = {name: each for name, each in outcomes.items() if isinstance(each, Outcome)}
    compiled = {name: each for name, each in done.items() if each.refusal is None}
    refusals = [each.refusal for each in done.values() if each.refusal is not None]
    tests = [test for name in compiled for test in cases[name]["tests"]]
    valid = sum(test["valid"] for test in tests)
    wrongly_accepted = {name: each.wrongly_accepted for name, each in compiled.items()}
    wrongly_refused = {name: each.wrongly_refused for name, each in compiled.items()}
    refused = sum(map(len, wrongly_refused.values()))
    return {
        "name": backend,
        "package_version": version(PACKAGES.get(backend, backend)),
        "schemas": len(cases),
        "compiled": len(compiled),
        "refused_at_compile": len(refusals),
        "refused_keywords": dict(Counter(map(keyword_of, refusals)).most_common()),
        "killed": {name: each for name, each in outcomes.items() if isinstance(each, str)},
        "valid_documents": valid,
        "invalid_documents": len(tests) - valid,
        "wrongly_accepted": sum(map(len, wrongly_accepted.values())),
        "wrongly_refused": refused,
        "wrongly_refused_share": round(refused / max(valid, 1), 5),
        "where_wrongly_accepted": {name: each for name, each in wrongly_accepted.items() if each},
        "where_wrongly_refused": {name: each for name, each in wrongly_refused.items() if each},
        "first_mask_ms": percentiles([(each.first_mask or 0) * 1e3 for each in compiled.values()]),
        "mask_us": percentiles([ns / 1e3 for each in compiled.values() for ns in each.masks]),
        "commit_us": percentiles([ns / 1e3 for each in compiled.values() for ns in each.commits]),
    }


def keyword_of(refusal: str) -> str:
    """Return the first JSON schema keyword in a rejection."""
    found = KEYWORD.search(refusal)
    return found[1] if found else "none named"


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95, p99, maximum and mean."""
    if not values:
        return {}
    points = np.percentile(values, (50, 95, 99, 100))
    figures = dict(zip(("p50", "p95", "p99", "max"), map(float, points), strict=True))
    return {
        name: round(each, 2) for name, each in (figures | {"mean": float(np.mean(values))}).items()
    }


def _spread(name: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(
        f"{row[name].get(p, 0):.4g}" for p in ("p50", "p95", "p99", "max")
    )


COLUMNS: dict[str, Callable[[Row], Any]] = {
    "backend": lambda row: row["name"],
    "compiled": lambda row: row["compiled"],
    "rejected": lambda row: row["refused_at_compile"],
    "killed": lambda row: len(row["killed"]),
    "wrongly accepted": lambda row: f"{row['wrongly_accepted']} of {row['invalid_documents']}",
    "wrongly rejected": lambda row: f"{row['wrongly_refused']} of {row['valid_documents']}",
    "first mask, ms": _spread("first_mask_ms"),
    "mask, µs": _spread("mask_us"),
    "commit, µs": _spread("commit_us"),
}
