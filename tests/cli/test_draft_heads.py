"""`nano-inference draft-heads` on tiny models."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.running import FAST, run
from tests.drafts.mtp import FAMILIES, MtpModel


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
    assert "--kind must be one of eagle, medusa, mtp; got 'hydra'" in result.stderr


def test_mtp_layer_is_trained_and_saved(tmp_path: Path) -> None:
    """Train the policy's own layer on token ids, at no learning rate and at the default one."""
    model = str(MtpModel(tmp_path, FAMILIES["mimo"]).folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [each, 7]}) + "\n" for each in (4, 5, 6)))
    options = ("--kind", "mtp", "-n", "2", "--max-tokens", "12", "--epochs", "1", "--places", "2")
    changed: list[bool] = []
    name = "model.mtp_layers.0.input_proj.weight"
    before = load_file(f"{model}/model.safetensors")[name]
    for rate in (("--learning-rate", "0"), ()):
        folder = str(tmp_path / f"learned-{len(rate)}")
        result = run("draft-heads", model, str(prompts), folder, *options, *rate, *FAST)
        assert result.exit_code == 0, result.output
        assert f"Saved the model to {folder}; use it with --draft-model mtp" in result.stderr
        after = load_file(f"{folder}/model.safetensors")[name]
        changed.append(not torch.equal(before.to(after.dtype), after))
    assert changed == [False, True]
    refused = run(
        "draft-heads", model, str(prompts), str(tmp_path / "x"), *options, "--from", model
    )
    assert refused.exit_code == 2
    assert "omit --from and --known-tokens" in refused.stderr
