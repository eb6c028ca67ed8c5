"""Contents of a wheel: all files of the package, and kernels if they were built for it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that a wheel is built from."""
    copy = tmp_path / "tree"
    (copy / "src").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    left_out = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "src/nano_inference", copy / "src/nano_inference", ignore=left_out)
    return copy


def wheel_of(tree: Path) -> tuple[str, set[str]]:
    """Build a wheel. Return its name and its files."""
    target = tree.parent / "dist"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = target.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, set(archive.namelist())


def test_wheel_holds_all_files_of_the_package(tree: Path) -> None:
    name, files = wheel_of(tree)
    assert name.endswith("-py3-none-any.whl")
    source = tree / "src"
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert "nano_inference/py.typed" in expected
    assert expected <= files


def test_wheel_with_kernels_is_for_its_platform(tree: Path) -> None:
    library = tree / "src/nano_inference/ops/cpu/prebuilt/avx2-x86_64-abc/libnano.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not really")
    name, files = wheel_of(tree)
    assert "-py3-none-linux" in name or "-py3-none-macosx" in name
    assert "nano_inference/ops/cpu/prebuilt/avx2-x86_64-abc/libnano.so" in files
