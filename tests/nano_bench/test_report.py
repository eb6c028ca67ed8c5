"""`nano-inference report`: accepted rows, and a page that is one safe file."""

import base64
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from nano_bench.report import page_of
from nano_inference.cli.pages import MOST_REASONS, SampleBlock
from tests.browser import NEEDS_CHROMIUM, shown_by_chromium
from tests.cli.running import FAST, run

EVIL = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>&\u2028"


def row(**fields: Any) -> dict[str, Any]:
    base = {"prompt": "2 + 2 =", "token_texts": ["4", "\n"], "logprobs": [-0.1, -3.0]}
    return base | fields


def block_of(*lines: Any) -> SampleBlock:
    block = SampleBlock()
    block.read(
        each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines
    )
    return block


def data_of(text: str) -> dict[str, Any]:
    (match,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(match)


def test_samples_of_generate(folders: dict[str, str], tmp_path: Path) -> None:
    words = ("-p", "ab", "-p", "cd", "-n", "2", "--json", "--max-tokens", "6", "--seed", "1")
    made = run("generate", folders["base"], *words, *FAST)
    file, out = tmp_path / "samples.jsonl", tmp_path / "report.html"
    file.write_text(made.stdout)
    result = run("report", str(file), "-o", str(out), "--tokenizer", folders["base"])
    assert result.exit_code == 0, result.output
    assert "4 samples, 0 skipped lines" in result.stderr
    data = data_of(out.read_text())
    assert data["groups"] == ["ab", "cd"]
    samples = [json.loads(line) for line in made.stdout.splitlines()]
    assert [each[0] for each in data["samples"]] == [0, 0, 1, 1]
    ids = struct.unpack("<24I", base64.b64decode(data["ids"]))
    for sample, kept in zip(samples, data["samples"], strict=True):
        said = "".join(data["texts"][each] for each in ids[kept[1] : kept[2]])
        assert said == sample["text"]
    logprobs = struct.unpack("<24h", base64.b64decode(data["logprobs"]))
    expected = [each for sample in samples for each in sample["logprobs"]]
    assert [each / 1000 for each in logprobs] == pytest.approx(expected, abs=6e-4)
    assert data["trainer"] == data["advantages"] == ""


def test_row_fields_are_checked() -> None:
    block = block_of(
        row(reward=1, advantage=0.5, weight_version=3, finish_reason="stop", sample_index=0),
        row(trainer_logprobs=[-0.1, None], loss_mask=[False, True], advantage=[1, -1]),
        row(
            logprobs=None,
            weight_versions=[
                {"version": 1, "start": 0, "end": 1},
                {"version": 2, "start": 1, "end": 2},
            ],
        ),
        {
            "completion_tokens": [5, 6],
            "text": "ab",
            "messages": [{"role": "user", "content": "hi"}],
        },
        {"completion_tokens": [5], "prompt_tokens": [1, 2], "logprobs": ["-Infinity"]},
        row(group="other"),
    )
    assert (block.refused, block.count) == (0, 6)
    data = data_of(page_of(block, "t"))
    assert data["groups"] == ["2 + 2 =", "user: hi", "1 2", "2 + 2 ="]
    assert data["samples"][0] == [0, 0, 2, 1, 0, "stop", 3, 1.0, 0.5, None, None]
    assert data["samples"][2][-1] == [[1, 0, 1], [2, 1, 2]]
    assert data["samples"][3][-2] == "ab"
    logprobs = struct.unpack("<11h", base64.b64decode(data["logprobs"]))
    assert logprobs[:6] == (-100, -3000, 32767, -3000, -32768, -32768)
    assert logprobs[8] == -32700
    trainer = struct.unpack("<11f", base64.b64decode(data["trainer"]))
    assert trainer[2] == 0.0
    assert [place for place, each in enumerate(trainer) if each == each] == [2]
    assert struct.unpack("<11f", base64.b64decode(data["advantages"]))[2:4] == (1.0, -1.0)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"token_texts": ["a"', "not JSON.*incomplete"),
        (b"nonsense\n", "not JSON"),
        ([1], "not an object"),
        ({}, "are both missing"),
        (row(token_texts=["a", 3]), "token_texts"),
        (row(logprobs=[-0.1]), "logprobs must be a list of 2"),
        (row(logprobs=["x", 1]), "logprobs must be"),
        (row(trainer_logprobs=3), "trainer_logprobs"),
        (row(loss_mask=[True]), "loss_mask"),
        (row(reward="good"), "reward must be a number"),
        (row(weight_version=1.5), "weight_version"),
        (row(weight_versions=[3]), "weight_versions"),
        (row(finish_reason=3), "finish_reason"),
        (row(prompt_tokens="ab"), "prompt_tokens"),
        (row(prompt_tokens=[-1]), "prompt_tokens must be token ids"),
        ({"completion_tokens": [2**32]}, "completion_tokens must be token ids"),
        (row(advantage=[1]), "advantage must be a list"),
    ],
)
def test_rows_that_cannot_be_read_are_listed_and_leave_no_trace(bad: Any, said: str) -> None:
    block = block_of(row(), bad)
    assert (block.count, block.refused) == (1, 1)
    assert re.search(f"line 2: .*{said}", block.reasons[0]), block.reasons
    assert data_of(page_of(block, "t")) | {"refused": None} == data_of(
        page_of(block_of(row()), "t")
    ) | {"refused": None}


def test_reasons_are_bounded_and_counted() -> None:
    block = block_of(*[b"x\n"] * (MOST_REASONS + 5))
    assert (block.refused, len(block.reasons)) == (MOST_REASONS + 5, MOST_REASONS)


def test_page_is_one_safe_file() -> None:
    block = block_of(row(prompt=EVIL, token_texts=[EVIL, "b"], finish_reason=EVIL), EVIL.encode())
    text = page_of(block, EVIL)
    assert "<img" not in text
    assert "hacked" not in re.sub(r'id="data">.*?</script>', "", text, flags=re.S).replace(
        "&lt;/script&gt;&lt;script&gt;document.title=&#x27;hacked&#x27;", ""
    )
    assert text.count("<script") == text.count("</script>") == 2
    assert data_of(text)["groups"] == [EVIL]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    for kind in ("style", "script"):
        (inside,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    frame = page_of(block, "t").split('id="data"')[0]
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|url\(", frame)


def test_report_rejects_empty_and_unwritable_files(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_bytes(b"{half")
    result = run("report", str(file), "-o", str(tmp_path / "x.html"))
    assert result.exit_code == 2
    assert "line 1: it is not JSON" in result.stderr
    assert "has no readable samples" in result.stderr
    assert not (tmp_path / "x.html").exists()
    file.write_text(json.dumps(row()))
    assert run("report", str(file), "-o", str(file)).exit_code == 2
    assert run("report", str(file), "-o", str(tmp_path / "no" / "x.html")).exit_code == 2
    assert file.read_text() == json.dumps(row())


@pytest.mark.slow
@NEEDS_CHROMIUM
def test_browser_shows_it(tmp_path: Path) -> None:
    rows = [row(reward=number % 3, prompt=f"p{number // 8}{EVIL}") for number in range(10_000)]
    block = block_of(*rows, b"{half")
    html = shown_by_chromium(page_of(block, "title"), tmp_path)
    assert "groups 1 to 10 of 1250; 10000 samples" in html, html[:2000]
    assert "lines left out: 1" in html
    assert html.count("<article") == 80
    assert "<title>title</title>" in html
    assert "<img" not in html.split('id="data"')[0]
