"""`nano-inference draft-heads`."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.running import FAST, run


@pytest.mark.parametrize(
    ("kind", "model"), [("medusa", "chat"), ("eagle", "chat"), ("medusa", "bare")]
)
def test_heads_are_trained_and_draft(
    folders: dict[str, str], tmp_path: Path, kind: str, model: str
) -> None:
    """From text where there is a tokenizer, else from token ids."""
    prompts = tmp_path / "prompts.jsonl"
    given: list[object] = ["ab", "a longer one", "b"] if model == "chat" else [[4, 5], [6], [7, 8]]
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in given))
    options = ("--kind", kind, "-n", "2", "--max-tokens", "12", "--epochs", "1", "--places", "2")
    folder = str(tmp_path / "heads")
    result = run("draft-heads", folders[model], str(prompts), folder, *options, *FAST)
    assert result.exit_code == 0, result.output
    matched = re.findall(r"agreement (before|after), by place: ([\d.]+), ([\d.]+)\n", result.stdout)
    assert [when for when, *_ in matched] == ["before", "after"]
    assert "of 4 samples" in result.stderr
    again = run(
        *("draft-heads", folders[model], str(prompts), str(tmp_path / "more")),
        *("--from", folder, "--known-tokens", "40", *options, *FAST),
    )
    assert again.exit_code == 0, again.output
    if model == "chat":
        made = ("generate", folders[model], "-p", "ab", "--max-tokens", "20", "--seed", "3")
        plain = run(*made, *FAST)
        drafted = run(*made, "--draft-model", folder, *FAST)
        assert drafted.exit_code == 0, drafted.output
        assert drafted.stdout == plain.stdout
    refused = run("draft-heads", folders[model], str(prompts), folder, *options, *FAST)
    assert refused.exit_code == 1
    assert "holds a model already" in refused.stderr


def test_unknown_kind_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    folder = str(tmp_path / "heads")
    made = ("draft-heads", folders["chat"], str(prompts), folder, "--kind", "hydra")
    result = run(*made, "-n", "1", "--max-tokens", "4", *FAST)
    assert result.exit_code == 1
    assert "kind='hydra'" in result.stderr
