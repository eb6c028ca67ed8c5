"""Run the command line in this process and in others, with the files it needs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from nano_inference.cli import app

ENTRY = [sys.executable, "-c", "from nano_inference.cli import app; app()"]
FAST = ("--threads", "1", "--kv-cache-memory", "8MiB")
COLOR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|38|48|9[0-7])[0-9;]*m")


def write_tokenizer(folder: Path, template: str | None) -> None:
    """Write a byte-level tokenizer: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(["<s>", "<x>", "</s>", *alphabet])}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<x>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def spawn(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    settled = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.Popen(
        [*ENTRY, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=settled | {"TERM": "xterm-256color"} | environment,
    )


def finish(process: "subprocess.Popen[str]", stdin: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


def samples(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]
