"""`nano-inference models`: list and remove cached files."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from nano_inference.arrays import host
from nano_inference.checkpoints.packed_files import packed_file
from nano_inference.cli import models
from nano_inference.ops.cpu.memory import RecordedArena
from tests.cli.running import run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cache with a file's description, a copy by an earlier version and a kernel build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    root = tmp_path / "nano-inference"
    for name, size in (
        ("gguf/abc-v3/model.safetensors", 3000),
        ("gguf/headers/abc-v3/tokenizer.json", 70),
        ("kernels/avx2-1/libnano.so", 500),
    ):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x" * size)
    (root / "gguf/abc-v3/config.json").write_text('{"model_type": "llama"}')
    (root / "gguf/def-v4").mkdir()
    (root / "gguf/def-v4/config.json").write_text('{"nano_inference_converted_from": "gguf"}')
    (tmp_path / "m.gguf").write_bytes(b"x" * 9000)
    (root / "gguf/def-v4/model.gguf").symlink_to(tmp_path / "m.gguf")
    return root


def test_cached_entries_are_listed_with_their_sizes(cache: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert rows["gguf/abc-v3"]["bytes"] == 3000 + 23
    assert rows["gguf/headers"]["bytes"] == 70
    for name in ("gguf/abc-v3", "gguf/headers"):
        assert (rows[name]["kind"], rows[name]["uses"]) == (
            "unused copy",
            "",
        )
    assert rows["gguf/def-v4"]["bytes"] == 41  # excludes the target of the link
    assert rows["gguf/def-v4"]["uses"] == str(cache.parent / "m.gguf")
    assert rows["kernels"]["bytes"] == 500
    assert rows["smollm2-135m"]["kind"] == "package"
    shown = run("models").stdout
    assert all(name in shown for name in rows)


@pytest.mark.parametrize("columns", [80, 100])
def test_table_has_a_line_per_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(models, "output", Console(width=columns, force_terminal=True))
    lines = run("models").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 1 + len(json.loads(run("models", "--json").stdout))
    (line,) = [line for line in lines if line.startswith("gguf/def-v4")]
    assert re.search(r"  …\S+/m\.gguf$", line)


def test_cached_entry_is_removed_without_the_others(cache: Path) -> None:
    result = run("models", "--remove", "gguf/abc-v3", "--remove", "gguf/def-v4")
    assert result.exit_code == 0
    assert "removed gguf/abc-v3" in result.stderr
    assert not (cache / "gguf/abc-v3").exists()
    assert not (cache / "gguf/def-v4").exists()
    assert (cache.parent / "m.gguf").stat().st_size == 9000
    assert (cache / "kernels/avx2-1/libnano.so").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("nothing", "there is no entry"), ("smollm2-135m", "pip uninstall")]
)
def test_cache_removal_is_rejected_before_it_starts(cache: Path, name: str, said: str) -> None:
    result = run("models", "--remove", "kernels", "--remove", name)
    assert result.exit_code == 2
    assert said in result.stderr
    assert (cache / "kernels/avx2-1/libnano.so").exists()


def test_packed_weights_are_listed_with_their_model_and_removed(cache: Path) -> None:
    source = cache.parent / "m.gguf"
    arena = RecordedArena()
    arena.take((3000,), host.uint8)
    file = packed_file([source], {}, cache / "packed")
    assert file.write(arena.pieces, {"model": str(source)})
    name = f"packed/{file.path.stem}"
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert (rows[name]["kind"], rows[name]["uses"]) == ("packed weights", str(source))
    assert rows[name]["bytes"] > 3000
    assert run("models", "--remove", name).exit_code == 0
    assert not list((cache / "packed").glob(f"{file.path.stem}.*"))
