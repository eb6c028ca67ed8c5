"""A tiny run for tests: model, task and run.toml in one folder."""

import shutil
from pathlib import Path

from tests.models.tiny import tiny_llama

RUN = """\
model = "{model}"
steps = {steps}
test_every = 2
checkpoint_every = {every}
method = "{method}"
{more}
[task]
train = "low_ids.py:train"
held_out = "low_ids.py:held_out"
reward = "low_ids.py:reward"
prompts = 3
samples = 4

[sampling]
max_tokens = 6

[optimizer]
learning_rate = 2e-3

[engine]
device = "cpu"
max_model_len = 32
kv_cache_memory = 4_194_304
"""


def tiny_run(
    folder: Path, *, steps: int = 6, method: str = "grpo", every: int = 2, more: str = ""
) -> Path:
    """Write a run of a tiny Llama with random weights, and return its run.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_llama(folder / "model")
    shutil.copyfile(Path(__file__).with_name("low_ids.py"), folder / "low_ids.py")
    file = folder / "run.toml"
    values = {"model": model, "steps": steps, "method": method, "every": every, "more": more}
    file.write_text(RUN.format(**values))
    return file


def files_of(run: Path) -> dict[str, bytes]:
    """Return the files of a run by name, except those that depend on times and processes."""
    left_out = {"lock", "timings.jsonl", "origin.json"}
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in left_out
    }
