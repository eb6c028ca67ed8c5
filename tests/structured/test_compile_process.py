"""Compilers in a child process: a fault there fails only its grammar."""

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from nano_inference import Grammar, InvalidRequest
from nano_inference.structured.backend import CompilationStopped, Vocabulary
from nano_inference.structured.compile_process import CompileProcesses, Job
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.grammar import REFUSED
from nano_inference.structured.mask_bits import num_words, without
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.xgrammar_backend import XgrammarBackend
from nano_inference.text.tokenizer import Tokenizer
from tests.structured.vocabularies import EOS, PACKAGES, byte_tokenizer, vocabulary_of

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
GRAMMAR = Grammar.regex("a")
WORDS = Vocabulary("words", 3, 3, (2,), lambda: pytest.fail("not read"))
TOKENS = [b"a", b"\xff", b""]
FINE = b"a,\xff,(2,)!"
ODD = "tests.structured.odd_compiler"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> CompileProcesses:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return CompileProcesses(ODD, lambda _: TOKENS, memory=2**28)


def compiled(children: CompileProcesses, kind: str) -> bytes:
    return children.compile(GRAMMAR, WORDS, Job(kind, "!"))


def ids(children: CompileProcesses) -> set[int]:
    """Return the ids of the idle processes."""
    idle = children._idle.values()  # pyright: ignore
    return {child._process.pid for each in idle for child in each}  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("eat", "took more than 0.25 GiB"),
        ("crash", "ended by signal 11"),
        ("leave", "ended with exit code 3"),
    ],
)
def test_grammar_that_ends_the_child_fails_only_itself(
    kind: str, reason: str, children: CompileProcesses
) -> None:
    assert compiled(children, "") == FINE
    first = ids(children)
    with pytest.raises(CompilationStopped, match=f"regex grammar cannot be enforced: .*{reason}"):
        compiled(children, kind)
    assert compiled(children, "") == FINE
    assert ids(children) != first, "another child"


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "limit"), [("spin", 0.3), ("sleep", 0.1)])
def test_child_that_takes_too_long_is_killed(
    kind: str, limit: float, children: CompileProcesses
) -> None:
    """Kill a child that exceeds its CPU time, or that sleeps for many times its limit."""
    compiled(children, "")
    before = ids(children)
    children.time_limit = limit
    with pytest.raises(CompilationStopped, match=rf"took longer than {limit:g} seconds"):
        compiled(children, kind)
    assert not ids(children)
    assert not any(map(psutil.pid_exists, before))
    children.time_limit = PATIENCE
    assert compiled(children, "") == FINE


def test_time_that_others_take_is_not_counted(children: CompileProcesses) -> None:
    compiled(children, "")
    children.time_limit = 0.5
    assert compiled(children, "rest") == FINE


def test_child_survives_a_rejection_and_printed_text(children: CompileProcesses) -> None:
    compiled(children, "")
    before = ids(children)
    with pytest.raises(InvalidRequest, match="cannot be enforced: a panic") as raised:
        compiled(children, "panic")
    assert not isinstance(raised.value, CompilationStopped)
    with pytest.raises(InvalidRequest, match="67108865 bytes when compiled; at most 67108864 are"):
        compiled(children, "large")
    assert compiled(children, "print") == FINE
    assert ids(children) == before


def test_compile_asks_another_child_if_the_idle_one_is_ending(
    children: CompileProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choose an idle child that runs when chosen, and ends before the grammar arrives."""
    compiled(children, "")
    (first,) = ids(children)
    ((child,),) = children._idle.values()  # pyright: ignore
    monkeypatch.setattr(type(child), "runs", True)
    psutil.Process(first).kill()
    assert compiled(children, "") == FINE
    assert ids(children) != {first}


def test_child_that_ended_while_it_was_idle_is_replaced(children: CompileProcesses) -> None:
    compiled(children, "")
    (child,) = ids(children)
    psutil.Process(child).kill()
    psutil.wait_procs([psutil.Process(child)], timeout=PATIENCE)
    assert compiled(children, "") == FINE


@pytest.mark.thorough
def test_concurrent_compilations_have_separate_children(children: CompileProcesses) -> None:
    children.time_limit = 0.5  # sleeps for 15 times the limit
    problems: list[Exception] = []

    def sleep() -> None:
        try:
            compiled(children, "sleep")
        except CompilationStopped as problem:
            problems.append(problem)

    slow = threading.Thread(target=sleep)
    slow.start()
    assert compiled(children, "") == FINE
    slow.join(PATIENCE)
    assert len(problems) == 1


def test_child_that_does_not_start_says_why(children: CompileProcesses) -> None:
    missing = CompileProcesses("tests.structured.no_compiler", lambda _: TOKENS)
    with pytest.raises(InvalidRequest, match=r"grammar compiler did not start.*no_compiler"):
        compiled(missing, "")


@pytest.mark.thorough
def test_stopped_compilation_is_retried_but_not_a_rejected_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vocabulary = vocabulary_of(byte_tokenizer(tmp_path))
    compiler = GrammarCompiler(lambda: vocabulary, num_threads=1)
    problems: list[Exception] = [CompilationStopped("stopped"), InvalidRequest("refused")]

    def fail(*_: Any) -> Any:
        raise problems[0]

    monkeypatch.setattr(
        "nano_inference.structured.llguidance_backend.LlguidanceBackend.compile", fail
    )
    for expected in ("stopped", "refused", "refused"):
        state, done = GrammarState(GRAMMAR), threading.Event()
        compiler.start(state, done.set)
        assert state.is_ready or done.wait(PATIENCE)
        assert state.problem == f"{REFUSED}{expected}"
        problems[:] = [InvalidRequest("refused" if expected == "stopped" else "not asked again")]
    compiler.close()


def test_child_that_could_not_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, children: CompileProcesses
) -> None:
    """Fail to start, as on a machine without free processes or under load."""
    vocabulary = vocabulary_of(byte_tokenizer(tmp_path))
    compiler = GrammarCompiler(lambda: vocabulary, num_threads=1)

    def problem() -> str | None:
        state, done = GrammarState(GRAMMAR), threading.Event()
        compiler.start(state, done.set)
        assert state.is_ready or done.wait(PATIENCE)
        return state.problem

    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(
        "nano_inference.structured.llguidance_backend.LlguidanceBackend.prepare",
        lambda _, vocabulary: children.prepare(vocabulary),
    )
    with monkeypatch.context() as patch:
        patch.setattr("nano_inference.structured.compile_process.start_child", refuse)
        assert problem() == "compiling the grammar raised BlockingIOError"
    with monkeypatch.context() as patch:
        patch.setattr("nano_inference.structured.compile_process.START_LIMIT", 0.0)
        assert "longer than 0 seconds" in str(problem())
    assert problem() is None
    compiler.close()


CHECK = """
import json, sys
from nano_inference import Grammar, InvalidRequest
from nano_inference.structured.backend import backend_named
for name in ("xgrammar", "outlines"):
    backend_named(name).check(Grammar.json_object())
    try:
        backend_named(name).check(Grammar.json_schema({"type": "array", "uniqueItems": True}))
    except InvalidRequest as problem:
        assert f"{name} cannot enforce `uniqueItems`" in str(problem), problem
    else:
        raise AssertionError(name)
print(json.dumps([each for each in ("torch", "xgrammar", "outlines_core") if each in sys.modules]))
"""


@pytest.mark.skipif(not all(map(find_spec, PACKAGES.values())), reason="missing")
def test_grammars_are_checked_without_packages_or_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from nano_inference.structured import backend

    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    monkeypatch.delitem(backend._loaded, "xgrammar", raising=False)  # pyright: ignore
    with pytest.raises(InvalidRequest, match=r"xgrammar needs .*nano-inference\[xgrammar\]"):
        backend.backend_named("xgrammar")


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("xgrammar") is None, reason="xgrammar is missing")
def test_xgrammar_that_blows_up_is_stopped(tmp_path: Path) -> None:
    """Nest optional properties: xgrammar's grammar doubles with each level."""
    tokenizer: Tokenizer = byte_tokenizer(tmp_path)
    backend = XgrammarBackend()
    vocabulary = vocabulary_of(tokenizer)
    backend.prepare(vocabulary)
    backend.processes.time_limit = 0.5
    schema: dict[str, Any] = {"type": "string", "maxLength": 20_000}
    for level in range(40):
        names = [f"p{level}{each}" for each in range(60)]
        schema = {"type": "object", "properties": dict.fromkeys(names, schema)}
        if level == 1:
            break
    with pytest.raises(CompilationStopped):
        backend.compile(Grammar.json_schema(schema), vocabulary)
    backend.processes.time_limit = PATIENCE
    matcher = backend.compile(GRAMMAR, vocabulary)
    matcher.accept(tokenizer.encode("a")[0])
    words = np.zeros(num_words(vocabulary.size), dtype=np.int32)
    matcher.fill(words)
    assert not without(words, vocabulary.eos_token_ids).any(), "only the end may follow"
    assert EOS in vocabulary.eos_token_ids
