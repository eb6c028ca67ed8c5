"""Rollouts of verifiers with a tool, unmodified, in a separate environment (`make test-slow` creates
it): a trainer gets the tokens that the engine sampled, over many turns.
"""

import json
import os
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.remote.messages import Generate
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient, logprob, smollm2
from tests.server.trainers import test_verifiers
from tests.server.trainers.asking import GENERATE, ask
from tests.server.trainers.conftest import RL

PYTHON = test_verifiers.PYTHON
pytestmark = test_verifiers.pytestmark
SCRIPT = Path(__file__).with_name("with_verifiers_tools.py")
TURNS = 6
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CALL, CALL_END, ANSWER = 3, 4, 5  # ids of the first tags


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of SmolLM2 in which reserved tokens are Qwen3's tags, and no token stands for
    unknown text.
    """
    folder = tmp_path_factory.mktemp("verifiers") / "smollm2"
    folder.mkdir()
    for path in smollm2().iterdir():
        if not path.name.startswith("tokenizer"):
            (folder / path.name).symlink_to(path.resolve())
    words = json.loads((smollm2() / "tokenizer.json").read_text(encoding="utf-8"))
    for token_id, tag in enumerate(TAGS, CALL):
        added = words["added_tokens"][token_id]
        del words["model"]["vocab"][added["content"]]
        words["model"]["vocab"][tag] = token_id
        added |= {"content": tag, "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    config = json.loads((smollm2() / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["unk_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def played(url: str, folder: Path, home: Path, **sampling: Any) -> list[dict[str, Any]]:
    """Return the traces of a process with verifiers.

    Its chat program runs in an environment that uv creates. Here `uv` names the one that has
    verifiers, so nothing is downloaded.
    """
    uv = home / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(
        f'#!/bin/sh\ncase "$*" in *--help) echo --script;; *find*) echo {PYTHON};; esac\n'
    )
    uv.chmod(0o755)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    environment = os.environ | quiet | {"HOME": str(home), "PYTHONPATH": str(SCRIPT.parent)}
    command = [PYTHON, "-W", "ignore", SCRIPT, url, folder, json.dumps(sampling), str(TURNS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def turns(trace: dict[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """Return the prompt, tokens and logprobs of each turn of a trace."""
    assert not trace["errors"], trace["errors"]
    assert len(trace["branches"]) == 1, "tokens changed between turns"
    (branch,) = trace["branches"]
    places = groupby(range(len(branch["sampled"])), branch["sampled"].__getitem__)
    spans = [list(span) for sampled, span in places if sampled]
    token_ids, logprobs = branch["token_ids"], branch["logprobs"]
    return [
        (
            token_ids[: span[0]],
            token_ids[span[0] : span[-1] + 1],
            logprobs[span[0] : span[-1] + 1],
        )
        for span in spans
    ]


def test_verifiers_keep_tokens_that_text_would_change(folder: Path, tmp_path: Path) -> None:
    """A call is spelled letter by letter. Encoding its text again would give other ids."""
    client = ScriptedClient(tokenizer_folder=folder, max_model_len=8192)

    def say(request: Generate, _: int) -> Script:
        turn = list(request.prompt).count(ANSWER)
        call = {"name": "add", "arguments": {"a": turn, "b": 2}}
        letters = [client.tokenizer.encode(letter)[0] for letter in json.dumps(call)]
        return Script([CALL, *letters, CALL_END])

    client.script = say
    with running_server(client, RL) as url:
        traces = played(url, folder, tmp_path)
    answered = {tuple(request.prompt): request for request in client.requests}
    for trace in traces:
        assert trace["answers"] == [f"{turn} + 2 = {turn + 2}" for turn in range(TURNS - 1)]
        assert len(turns(trace)) == TURNS
        for prompt, token_ids, logprobs in turns(trace):
            script = say(answered[tuple(prompt)], 0)
            assert token_ids == [*script.says, client.tokenizer.eos_token_id]
            assert logprobs == [*map(logprob, range(len(token_ids)))]


def test_verifiers_train_on_turns_of_a_real_model(folder: Path, tmp_path: Path) -> None:
    """Ask again for each turn, with its prompt as token ids: the same bits must come back."""
    arguments = r'\{"a": [0-9]{1,3}, "b": [0-9]{1,3}\}'
    call = r'<tool_call>\{"name": "add", "arguments": ' + arguments + r"\}</tool_call>"
    sampling = {
        "temperature": 1.0,
        "max_tokens": 64,
        "seed": 7,
        "structured_outputs": {"regex": call},
        "logit_bias": {str(CALL): 100, str(CALL_END): 100},  # not spelled out
    }
    config = EngineConfig(str(folder), num_threads=1, kv_cache_memory=2**28, max_model_len=4096)
    with running_server(config, RL) as url:
        traces = played(url, folder, tmp_path, **sampling)
        for trace in traces:
            assert len(turns(trace)) == TURNS
            for prompt, token_ids, logprobs in turns(trace):
                body = {"token_ids": prompt, "sampling_params": sampling | {"logprobs": 1}}
                choice = ask(url, GENERATE, body)["choices"][0]
                assert token_ids == choice["token_ids"]
                assert logprobs == [row["logprob"] for row in choice["logprobs"]["content"]]
