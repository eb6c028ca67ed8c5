"""MaskBench and the cost of a step with grammars, on a tiny vocabulary and a tiny model."""

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import grammars, maskbench
from benchmarks.maskbench import examine, keyword_of, summary
from benchmarks.ours import Options
from tests.models.tiny import tiny_llama
from tests.structured.vocabularies import EOS, byte_tokenizer, vocabulary_of

NUMBERS = {
    "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "tests": [
        {"valid": True, "data": [1, 2]},
        {"valid": False, "data": [1, 2, 3]},
        {"valid": False, "data": [1.5]},
    ],
}
UNIQUE = {"schema": {"type": "array", "uniqueItems": True}, "tests": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with the files that grammars need."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


@pytest.mark.thorough(cases=["ours-xgrammar"])
@pytest.mark.parametrize("name", maskbench.NAMES)
def test_documents_are_counted_by_mask_acceptance(folder: Path, name: str) -> None:
    if not maskbench.installed([name]):
        pytest.skip("its package is missing")
    tokenizer = byte_tokenizer(folder)
    compile_schema = maskbench.COMPILERS[name](vocabulary_of(tokenizer))
    outcome = examine(compile_schema, NUMBERS, tokenizer.encode, (EOS,))
    assert (outcome.right, outcome.wrongly_accepted, outcome.wrongly_refused) == (3, [], [])
    mislabelled = NUMBERS | {"tests": [test | {"valid": True} for test in NUMBERS["tests"]]}
    assert examine(compile_schema, mislabelled, tokenizer.encode, (EOS,)).wrongly_refused == [1, 2]
    mislabelled = NUMBERS | {"tests": [test | {"valid": False} for test in NUMBERS["tests"]]}
    assert examine(compile_schema, mislabelled, tokenizer.encode, (EOS,)).wrongly_accepted == [0]
    assert outcome.masks
    assert len(outcome.masks) == len(outcome.commits)
    refusal = examine(compile_schema, UNIQUE, tokenizer.encode, (EOS,)).refusal
    # the package xgrammar silently ignores constraints that it cannot enforce
    keyword = keyword_of(refusal) if refusal is not None else None
    assert keyword == (None if name == "xgrammar" else "uniqueItems")


def test_incomplete_document_is_not_accepted() -> None:
    class Endless:
        words = np.full(1, ~(1 << EOS), dtype=np.int32)

        def accept(self, token_id: int) -> None: ...

        def fill(self) -> None: ...

    outcome = maskbench.Outcome()
    assert not maskbench.try_document(Endless(), [1, 3], (EOS,), outcome)
    assert maskbench.try_document(Endless(), [1, 3], (EOS, 7), outcome)


@pytest.mark.thorough
def test_maskbench_samples_schemas_in_a_killable_process(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "maskbench" / "data"
    data.mkdir(parents=True)
    for index in range(4):
        case = UNIQUE if index == 2 else NUMBERS
        (data / f"schema{index}.json").write_text(json.dumps(case))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "data"]):
        subprocess.run([*git, *command], check=True)
    (row,) = maskbench.measure(tmp_path, str(folder), ["ours"], 2, 60.0)
    assert (row["schemas"], row["compiled"], row["refused_at_compile"]) == (2, 1, 1)
    assert (row["wrongly_accepted"], row["wrongly_refused"]) == (0, 0)
    assert (row["valid_documents"], row["invalid_documents"]) == (1, 2)
    assert row["refused_keywords"] == {"uniqueItems": 1}
    json.dumps(row)

    worker = maskbench.Worker("ours", str(folder))
    try:
        began = time.monotonic()
        many = NUMBERS | {"tests": NUMBERS["tests"] * 100_000}
        assert worker.outcome(many, 0.5) == "time limit"
        assert time.monotonic() - began < 30
    finally:
        worker.stop()
    row = summary("ours", {"schema0": "time limit"}, {"schema0": NUMBERS})
    assert (row["compiled"], row["killed"]) == (0, {"schema0": "time limit"})


def test_data_other_than_a_clone_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a clone of jsonschemabench"):
        maskbench.schemas(tmp_path, 1)


@pytest.mark.thorough
def test_step_with_masks_against_one_without(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tiny_llama(tmp_path, vocab_size=tokenizer.vocab_size, hidden=16, inner=16, layers=1)
    options = Options(str(tmp_path), "float32", "reference", threads=1, repeats=2)
    names = ("none", "regex", "thinking budget", "8 named ids")
    rows = grammars.measure(options, sequences=3, steps=4, names=names)
    assert [row["name"] for row in rows] == [*names]
    assert rows[0]["cpu_ratio"]["median"] == 1.0
    assert all(row["cpu_ms"]["min"] > 0 for row in rows)
    json.dumps(rows)
