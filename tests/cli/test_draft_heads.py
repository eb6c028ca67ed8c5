"""`nano-inference draft-heads` on tiny models."""

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
    """Train on text if there is a tokenizer, otherwise on token ids."""
    prompts = tmp_path / "prompts.jsonl"
    given: list[object] = ["ab", "a longer one", "b"] if model == "chat" else [[4, 5], [6], [7, 8]]
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in given))
    options = ("--kind", kind, "-n", "2", "--max-tokens", "12", "--epochs", "1", "--places", "2")
    folder = str(tmp_path / "heads")
    result = run("draft-heads", folders[model], str(prompts), folder, *options, *FAST)
    assert result.exit_code == 0, result.output
    told = re.findall(
        r"agreement (before|after) training, by position: ([\d.]+), ([\d.]+)\n", result.stdout
    )
    assert [when for when, *_ in told] == ["before", "after"]
    assert ", 4 samples" in result.stderr
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
    assert refused.exit_code == 2
    assert "already contains a model" in refused.stderr


def test_unknown_kind_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    folder = str(tmp_path / "heads")
    made = ("draft-heads", folders["chat"], str(prompts), folder, "--kind", "hydra")
    result = run(*made, "-n", "1", "--max-tokens", "4", *FAST)
    assert result.exit_code == 2
    assert "kind must be one of 'medusa', 'eagle'; got 'hydra'" in result.stderr
