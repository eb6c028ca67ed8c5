"""The page of a run: values of its files, bounds, hostile texts, damage."""

import base64
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.errors import ConfigError
from nano_inference.text import load_tokenizer
from nano_train import run_page
from nano_train.hashes import hash_of
from nano_train.history import Line, read_history
from nano_train.records import RunError, Update
from nano_train.run import read_run, train
from tests.browser import NEEDS_CHROMIUM, shown_by_chromium
from tests.cli.running import write_tokenizer
from tests.nano_train.tiny import tiny_run

EVIL = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>&\u2028"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete run of 4 steps with 12 samples each."""
    file = tiny_run(tmp_path_factory.mktemp("page"), steps=4)
    train(read_run(file, file.parent / "out", {"optimizer.max_grad_norm": 1.0}))
    write_tokenizer(file.parent / "model", None)
    return file.parent / "out"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to change."""
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def page_of(*folders: Path) -> str:
    return run_page.page_of([read_history(folder) for folder in folders])


def data_of(text: str, name: str = "data") -> dict[str, Any]:
    (match,) = re.findall(
        rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.S
    )
    return json.loads(match)


def run_of(*folders: Path) -> dict[str, Any]:
    return data_of(page_of(*folders))["runs"][0]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_lines(path: Path, change: Callable[[int, dict[str, Any]], Any]) -> None:
    lines = lines_of(path)
    for number, line in enumerate(lines):
        change(number, line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# -- values ----------------------------------------------------------------------------------------


def test_page_figures_equal_those_of_the_logs(trained: Path) -> None:
    run = run_of(trained)
    columns, steps = run["columns"], lines_of(trained / "steps.jsonl")
    for name in ("step", "version", "reward", "held_out", "kl", "loss", "mismatch"):
        assert columns[name] == [step[name] for step in steps]
    assert columns["length"] == [step["tokens"] / 12 for step in steps]
    norms = [step["updates"][0]["gradient_norm"] for step in steps]
    assert None not in norms
    assert columns["gradient_norm"] == norms
    assert columns["parameters"] == [step["updates"][-1]["parameters"] for step in steps]
    timings = lines_of(trained / "timings.jsonl")
    assert columns["seconds"] == [timing["seconds"] for timing in timings]
    assert run["mismatch"]["kind"] == "equal"
    assert "Steps compared: 4." in run["mismatch"]["text"]
    assert run["problems"] == []


def test_page_facts_name_state_and_checkpoint(trained: Path) -> None:
    facts = dict(run_of(trained)["facts"])
    assert facts["method"] == "grpo"
    assert facts["model"] == json.loads((trained / "origin.json").read_text())["config"]["model"]
    assert facts["state"] == "4 of 4 steps, complete"
    assert facts["last checkpoint"] == "step 4"
    about = json.loads((trained / "checkpoints" / "4" / "state.json").read_text())
    assert facts["SHA-256 of its parameters"] == about["parameters_sha256"]


def test_page_has_no_hash_of_unchanged_parameters(copy: Path) -> None:
    """The trainer logs the hash of nothing for an update that all advantages of 0 omit."""

    def omit(number: int, line: dict[str, Any]) -> None:
        if number == 2:
            line["updates"][-1]["parameters"] = hash_of(Update(0.0, [], None).parameters)

    change_lines(copy / "steps.jsonl", omit)
    hashes = data_of(page_of(copy))["runs"][0]["columns"]["parameters"]
    assert [value is None for value in hashes] == [False, False, True, False]


@pytest.mark.parametrize("step", [0, 3])
def test_page_samples_equal_those_of_the_files(trained: Path, step: int) -> None:
    text = page_of(trained)
    assert data_of(text)["runs"][0]["samples"] == [[number, 12, 12] for number in range(4)]
    block = data_of(text, f"samples-0-{step}")
    samples = lines_of(trained / "samples" / f"{step}.jsonl")
    scores = json.loads((trained / "batches" / f"{step}.json").read_text())
    assert [sample[0] for sample in block["samples"]] == [0] * 4 + [1] * 4 + [2] * 4
    assert [sample[4] for sample in block["samples"]] == [*range(12)]
    assert [sample[7] for sample in block["samples"]] == scores["rewards"]
    assert [sample[8] for sample in block["samples"]] == scores["advantages"]
    logprobs = [number for sample in samples for number in sample["logprobs"]]
    packed = struct.unpack(f"<{len(logprobs)}h", base64.b64decode(block["logprobs"]))
    assert [number / 1000 for number in packed] == pytest.approx(logprobs, abs=6e-4)
    ids = struct.unpack(f"<{len(logprobs)}I", base64.b64decode(block["ids"]))
    tokenizer = load_tokenizer(trained.parent / "model")
    for sample, shown in zip(samples, block["samples"], strict=True):
        words = "".join(block["texts"][number] for number in ids[shown[1] : shown[2]])
        assert words == tokenizer.decode(sample["completion_tokens"], skip_special_tokens=False)
        assert block["groups"][shown[0]] == tokenizer.decode(
            sample["prompt_tokens"], skip_special_tokens=False
        )


def test_page_names_origin_edits_and_changes(copy: Path) -> None:
    def change(origin: dict[str, Any]) -> None:
        origin["parent"] = {"folder": "/runs/first", "step": 2, "identity": "x"}
        origin["edits"] = {"step": 2, "rewards": {"3": 1.5}, "completions": {"7": [5, 6]}}
        origin["edits"]["seed"] = 9
        origin["changes"] = {f"key{number}": number for number in range(12)}

    change_json(copy / "origin.json", change)
    first, second, third = run_of(copy)["origin"]
    assert first == "Continues /runs/first from step 2."
    assert second == (
        "Edited in step 2: reward of sample 3 = 1.5, completion of sample 7 (2 tokens), seed 9."
    )
    assert third.startswith("Changed keys of run.toml: key0 = 0, ")
    assert third.endswith("key9 = 9, 2 more.")


def test_page_of_two_runs_has_the_figures_of_both(trained: Path, copy: Path) -> None:
    change_lines(copy / "steps.jsonl", lambda number, line: line.update(reward=number + 0.5))
    text = page_of(trained, copy)
    first, second = data_of(text)["runs"]
    assert [first["label"], second["label"]] == ["out", "copy"]
    assert first["columns"] == run_of(trained)["columns"]
    assert second["columns"]["reward"] == [0.5, 1.5, 2.5, 3.5]
    assert data_of(text, "samples-1-3") == data_of(text, "samples-0-3")
    with pytest.raises(ConfigError, match="same run"):
        page_of(trained, trained / ".." / "out")


def test_page_reports_mismatches_and_keeps_nan(copy: Path) -> None:
    def change(number: int, line: dict[str, Any]) -> None:
        line["mismatch"] = 0.25 if number == 1 else line["mismatch"]
        line["loss"] = float("nan") if number == 2 else line["loss"]

    change_lines(copy / "steps.jsonl", change)
    run = run_of(copy)
    assert run["mismatch"]["kind"] == "different"
    assert "differ by up to 0.25, in step 1" in run["mismatch"]["text"]
    assert run["columns"]["loss"][2] == "nan"
    change_lines(copy / "steps.jsonl", lambda _, line: line.update(mismatch=None))
    assert run_of(copy)["mismatch"]["kind"] == "none"


# -- bounds and hostile files ----------------------------------------------------------------------


def test_page_bounds_samples_and_states_them(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_page, "MOST_SAMPLES", 5)
    text = page_of(trained)
    assert data_of(text)["runs"][0]["samples"] == [[number, 5, 12] for number in range(4)]
    assert data_of(text)["bounds"]["samples"] == 5
    assert len(data_of(text, "samples-0-2")["samples"]) == 5
    sizes = [len(line) for line in (trained / "samples" / "3.jsonl").read_bytes().splitlines(True)]
    monkeypatch.setattr(run_page, "MOST_LINES", sum(sizes[:2]))
    assert run_of(trained)["samples"][3] == [3, 2, 12]


def test_page_bounds_bytes_and_keeps_last_and_first_step(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page_of(trained)
    blocks = re.findall(r'id="samples-0-(?:0|3)">(.*?)</script>', text, re.S)
    monkeypatch.setattr(run_page, "MOST_BYTES", sum(map(len, blocks)))
    assert [step for step, *_ in run_of(trained)["samples"]] == [0, 3]
    monkeypatch.setattr(run_page, "MOST_BYTES", sum(map(len, blocks)) - 1)
    assert [step for step, *_ in run_of(trained)["samples"]] == [3]
    monkeypatch.setattr(run_page, "MOST_BYTES", 2**24)
    monkeypatch.setattr(run_page, "MOST_BLOCKS", 3)
    assert [step for step, *_ in run_of(trained)["samples"]] == [0, 2, 3]


def test_page_bounds_steps_and_keeps_the_largest_mismatch(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(copy / "steps.jsonl")
    worse = lines[0] | {"mismatch": 1e-7}
    many = [(worse if step == 17 else lines[0]) | {"step": step} for step in range(100)]
    (copy / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in many))
    monkeypatch.setattr(run_page, "MOST_STEPS", 10)
    run = run_of(copy)
    assert run["steps"] == 100
    assert run["columns"]["step"] == [0, 10, 17, 20, 30, 40, 50, 60, 70, 80, 90, 99]


@given(st.integers(0, 70))
def test_spread_yields_every_line_once(count: int) -> None:
    fields: dict[str, Any] = {"reward": None, "held_out": None, "kl": None, "mismatch": None}
    lines = [
        Line(step=step, version=0, loss=0.0, tokens=1, updates=[], **fields)
        for step in range(count)
    ]
    steps = [line.step for line in run_page._spread(lines)]
    assert sorted(steps) == [*range(count)]
    assert steps[:2] == ([count - 1, 0] if count > 1 else [0] * count)


def test_page_escapes_all_texts_and_is_one_file(copy: Path) -> None:
    def change(origin: dict[str, Any]) -> None:
        origin["config"] |= {"name": EVIL, "model": EVIL, "method": EVIL}
        origin["changes"] = {EVIL: EVIL}
        origin["versions"] = {EVIL: EVIL}
        origin["parent"] = {"folder": EVIL, "step": 1}

    change_json(copy / "origin.json", change)
    change_lines(copy / "samples" / "3.jsonl", lambda _, line: line.update(prompt=EVIL, text=EVIL))
    path = copy.rename(copy.with_name("<img src=x onerror=alert(2)>"))
    text = page_of(path)
    assert data_of(text, "samples-0-3")["groups"] == [EVIL] * 3
    assert dict(data_of(text)["runs"][0]["facts"])["model"] == EVIL
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 2 + 4
    assert "hacked" not in re.sub(r'json" id=".*?</script>', "", text, flags=re.S)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    frame = page_of(path.rename(path.with_name("plain"))).split("<script")[0]
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", frame)


def test_page_executes_no_code_of_the_run(copy: Path) -> None:
    (copy / "low_ids.py").write_text("raise SystemExit('executed')")
    assert run_of(copy)["steps"] == 4


# -- unfinished and damaged runs -------------------------------------------------------------------


def test_page_of_an_unfinished_run_has_the_steps_done(copy: Path) -> None:
    log = copy / "steps.jsonl"
    lines = log.read_bytes().splitlines(True)
    log.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    shutil.rmtree(copy / "checkpoints")
    run = run_of(copy)
    facts = dict(run["facts"])
    assert facts["state"] == "3 of 4 steps, interrupted"
    assert facts["last checkpoint"] == "none"
    assert [step for step, *_ in run["samples"]] == [0, 1, 2]
    log.unlink()
    run = run_of(copy)
    assert (run["steps"], run["samples"]) == (0, [])


def test_page_has_the_readable_part_of_a_damaged_run(copy: Path) -> None:
    (copy / "samples" / "1.jsonl").unlink()
    (copy / "batches" / "2.json").write_text("{")
    change_json(copy / "batches" / "0.json", lambda content: content["rewards"].pop())
    (copy / "checkpoints" / "4" / "state.json").write_text("{}")
    with (copy / "samples" / "3.jsonl").open("ab") as file:
        file.write(b"{half")
    text = page_of(copy)
    run = data_of(text)["runs"][0]
    assert [step for step, *_ in run["samples"]] == [0, 2, 3]
    for words in (
        "checkpoint .* is damaged",
        "step 0 .* fewer",
        "1.jsonl cannot be read",
        "2.json cannot be read",
        "step 3 .* fewer",
    ):
        assert len([problem for problem in run["problems"] if re.search(words, problem)]) == 1
    assert all(sample[7] is None for sample in data_of(text, "samples-0-2")["samples"])
    assert all(sample[7] is None for sample in data_of(text, "samples-0-0")["samples"])
    assert len(run["problems"]) == 5


def test_page_shows_ids_without_the_model(copy: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "model.gguf")
    change_json(copy / "origin.json", lambda origin: origin["config"].update(model=missing))
    text = page_of(copy)
    (problem,) = data_of(text)["runs"][0]["problems"]
    assert problem.startswith("Token ids replace the texts of tokens: ")
    tokens = lines_of(copy / "samples" / "0.jsonl")[0]["completion_tokens"]
    assert f"{tokens[0]} " in data_of(text, "samples-0-0")["texts"]


def test_page_shows_samples_without_logprobs_and_rewards(copy: Path) -> None:
    for step in range(4):  # as in a run of sft
        change_lines(copy / "samples" / f"{step}.jsonl", lambda _, line: line.update(logprobs=[]))
        scores = copy / "batches" / f"{step}.json"
        change_json(scores, lambda content: content.update(rewards=[], advantages=[]))
    text = page_of(copy)
    run = data_of(text)["runs"][0]
    assert run["problems"] == []
    assert run["samples"] == [[number, 12, 12] for number in range(4)]
    block = data_of(text, "samples-0-2")
    assert block["refused"]["count"] == 0
    assert {sample[0] for sample in block["samples"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("origin.json", None, "does not exist; name the folder of a run"),
        ("origin.json", b"[]", "must hold a JSON object"),
        ("origin.json", b"{}", "origin.json is damaged: identity: field required"),
        ("origin.json", b"[" * 100_000, "origin.json cannot be read"),
        ("steps.jsonl", b"{half}\n", "steps.jsonl is damaged"),
        ("steps.jsonl", b"\xff\n", "steps.jsonl is damaged"),
        ("steps.jsonl", b"[1]\n", "steps.jsonl is damaged: line 1"),
        ("steps.jsonl", b'{"step": 0}\n', "damaged: line 1, version: field required"),
        ("timings.jsonl", b'{"step": 0}\n', "timings.jsonl is damaged: line 1, seconds"),
    ],
)
def test_damaged_logs_are_named_in_a_sentence(
    copy: Path, name: str, content: bytes | None, words: str
) -> None:
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    with pytest.raises(RunError, match=re.escape(words)) as raised:
        page_of(copy)
    assert "\n" not in str(raised.value)


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_browser_draws_charts_steps_and_samples(trained: Path, copy: Path, tmp_path: Path) -> None:
    change_lines(copy / "samples" / "3.jsonl", lambda _, line: line.update(prompt=EVIL))
    html = shown_by_chromium(page_of(copy, trained), tmp_path)
    shown = html.split('<script type="application/json"')[0]
    assert "12 of 12 samples of step 3. This page has samples of 4 of 4 steps" in shown
    assert shown.count("<article") == 12
    assert shown.count("<figure") == 6  # no KL
    assert shown.count('aria-label="show the samples of step') == 4
    assert "<title>copy and out</title>" in shown
    assert "<img" not in shown
