"""`nano-inference verify` reports each sample of a file as true, forged or not verifiable here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nano_inference import TrainingSample
from nano_inference.data import read_jsonl, sealed, write_jsonl, write_parquet
from tests.cli.running import FAST, run
from tests.rl.forgeries import rechained

SAMPLING = ("--temperature", "1", "--top-p", "0.9", "--max-tokens", "9", "--stop", "e")


@pytest.fixture(scope="module")
def written(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "receipts.jsonl"
    prompts = ("-p", "ab", "-p", "a longer one", "-n", "3", "--seed", "3")
    result = run("generate", folders["chat"], *prompts, "--json", "--receipt", *SAMPLING, *FAST)
    assert result.exit_code == 0, result.stderr
    path.write_text(result.stdout)
    return path


def read(written: Path) -> list[TrainingSample]:
    return read_jsonl(written)


def test_receipts_of_generate_are_true(
    folders: dict[str, str], written: Path, tmp_path: Path
) -> None:
    result = run("verify", str(written), "--model", folders["chat"], *FAST)
    assert result.exit_code == 0, result.output
    tokens = sum(len(sample.completion_tokens) for sample in read(written))
    assert f"6 of 6 samples are true: {tokens} tokens, " in result.stdout
    write_parquet(read(written), tmp_path / "a.parquet")
    result = run("verify", str(tmp_path / "a.parquet"), "--model", folders["chat"], "--json", *FAST)
    assert result.exit_code == 0, result.output
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["outcome"] for each in verdicts] == ["true"] * 6
    assert [each["sample"] for each in verdicts] == [*range(1, 7)]


def test_forged_sample_is_named(folders: dict[str, str], written: Path, tmp_path: Path) -> None:
    lines = read(written)
    lines[1] = rechained(replace(lines[1], text="forged"))
    write_jsonl(sealed(lines), tmp_path / "a.jsonl")
    result = run("verify", str(tmp_path / "a.jsonl"), "--model", folders["chat"], *FAST)
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    assert first.startswith("sample 2  request 0, sample 1: forged: the sample: text is 'forged'")
    assert last.startswith("5 of 6 samples are true")


def test_lost_line_is_named(folders: dict[str, str], written: Path, tmp_path: Path) -> None:
    write_jsonl(read(written)[:4], tmp_path / "a.jsonl")
    result = run("verify", str(tmp_path / "a.jsonl"), "--model", folders["chat"], *FAST)
    assert result.exit_code == 1
    assert "the file has 4 of the 6 lines that were written" in result.stderr
    assert "4 of 4 samples are true" in result.stdout


def test_text_needs_a_tokenizer(folders: dict[str, str], written: Path) -> None:
    result = run("verify", str(written), "--model", folders["bare"], "--json", *FAST)
    assert result.exit_code == 2
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert {each["outcome"] for each in verdicts} == {"not verifiable here"}
    assert "needs a tokenizer" in verdicts[0]["reason"]


@pytest.mark.parametrize("kind", ["receipt", "format", "numerics", "version"])
def test_undecidable_sample_exits_with_2(
    folders: dict[str, str], written: Path, tmp_path: Path, kind: str
) -> None:
    lines = read(written)
    receipt = lines[0].receipt
    assert receipt is not None
    other = {
        "receipt": replace(lines[0], receipt=None),
        "format": replace(lines[0], receipt=replace(receipt, format=9, file_place=None)),
        "numerics": rechained(replace(lines[0], numerics="cpu-0/float32/cpu")),
        "version": rechained(
            replace(
                lines[0],
                weight_version=7,
                weight_versions=(),
                kv_versions=(),
                receipt=replace(receipt, weights=(receipt.weights[0]._replace(version=7),)),
            )
        ),
    }[kind]
    words = {
        "receipt": "has no receipt",
        "format": "has format 9",
        "numerics": "numerics are 'cpu-0/float32/cpu'",
        "version": "version 7 are missing",
    }[kind]
    rest = [rechained(line) for line in lines[1:]]  # not sealed
    write_jsonl([other, *rest], tmp_path / "a.jsonl")
    result = run("verify", str(tmp_path / "a.jsonl"), "--model", folders["chat"], *FAST)
    assert result.exit_code == 2, result.output
    assert words in result.stdout
    assert "5 of 6 samples are true" in result.stdout


def test_bad_input_is_one_sentence(folders: dict[str, str], written: Path, tmp_path: Path) -> None:
    model, bad, empty = folders["chat"], tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    bad.write_text(written.read_text()[:-200])
    empty.write_text("\n")
    for arguments, words in (
        ((str(bad), "--model", model), "line 6 is not JSON"),
        ((str(empty), "--model", model), "has no samples"),
        ((str(tmp_path / "none"), "--model", model), "no such file"),
        ((str(written), "--model", model, "-w", "3"), "VERSION=FOLDER"),
        ((str(written),), "--model"),
    ):
        result = run("verify", *arguments, *FAST)
        assert result.exit_code == 2, result.output
        text = " ".join(result.stderr.split()).replace("│ ", "")
        assert words in text
        assert "Traceback" not in text


def test_receipt_requires_json(folders: dict[str, str]) -> None:
    result = run("generate", folders["chat"], "-p", "a", "--receipt", *FAST)
    assert result.exit_code == 2
    assert "--receipt requires --json" in result.stderr
