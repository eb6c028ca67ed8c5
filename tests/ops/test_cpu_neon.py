"""All instruction sets produce the same bits.

`tests/sanitize/bits.cpp` prints a digest of every operation on the same numbers, and the
sanitizers' driver prints a digest of whole steps. This machine's instruction sets use the kernels
that the engine loads. NEON runs in an emulator if a cross compiler and qemu are installed:
`apt-get install g++-aarch64-linux-gnu qemu-user`. AVX-512 is computed by AVX2 if SIMDe is
installed: `apt-get install libsimde-dev`.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano_inference.ops.cpu import build
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available, kernels

PROGRAMS = Path(__file__).parents[1] / "sanitize"
SOURCES = {
    "bits": ("bits.cpp", "codes.cpp"),
    "driver": ("driver.cpp", "codes.cpp", "experts.cpp", "gradients.cpp", "states.cpp"),
}
ROUNDS = "1"  # rounds that the driver runs
# Hide inline functions: otherwise the kernels would call the program's copies.
OWN = ("-O1", "-fvisibility-inlines-hidden", f"-I{build.SOURCES}")
CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
SIMDE = Path("/usr/include/simde/x86/avx512.h")
EDGE = "edge"

pytestmark = NEEDS_COMPILER


def compiled(command: tuple[str, ...], objects: tuple[str, ...], folder: Path) -> tuple[Path, ...]:
    """Compile the programs with these kernels."""
    for name, sources in SOURCES.items():
        paths = [str(PROGRAMS / source) for source in sources]
        subprocess.run(
            [*command, *OWN, *paths, *objects, "-o", str(folder / name)],
            check=True,
            capture_output=True,
        )
    return tuple(folder / name for name in SOURCES)


def digests(programs: tuple[Path, ...], emulator: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the digest of each operation."""
    lines: list[str] = []
    for program in programs:
        done = subprocess.run(
            [*emulator, str(program), ROUNDS], check=True, capture_output=True, text=True
        )
        lines += done.stdout.splitlines()
    return dict(line.rsplit(maxsplit=1) for line in lines)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return the digests of each instruction set of this machine."""
    by_set: dict[str, dict[str, str]] = {}
    for name in (*available("pairs"), *available("tiles")):
        kernels(name)
        library = build.build(name)
        command = (build._compiler()[0], *build.compiler_flags(name, platform.machine()))
        linked = (str(library), f"-Wl,-rpath,{library.parent}")
        by_set[name] = digests(compiled(command, linked, tmp_path_factory.mktemp(name)))
    return by_set


@pytest.mark.thorough
def test_operation_has_same_bits_on_every_instruction_set(
    native: dict[str, dict[str, str]],
) -> None:
    assert len(native["portable"]) > 50
    for name, digests_here in native.items():
        assert digests_here == native[portable(name)], f"{name} computes different bits"
    pairs, tiles = native["portable"], native[portable(build.AMX)]
    assert {name for name, digest in pairs.items() if digest != tiles[name]}


def portable(name: str) -> str:
    """Build the portable program, the reference for the bits."""
    return "portable" + (build.TILES if build.law_of(name) == "tiles" else "")


@pytest.mark.slow
@pytest.mark.skipif(CROSS is None, reason="there is no cross compiler, aarch64-linux-gnu-g++")
@pytest.mark.skipif(EMULATOR is None, reason="there is no emulator, qemu-aarch64")
@pytest.mark.parametrize("name", ["neon_dot", "neon", "portable", "neon_dot+tiles"])
def test_aarch64_has_the_same_bits(
    native: dict[str, dict[str, str]], name: str, tmp_path: Path
) -> None:
    """Exception: the smallest normal number (see `simd_neon.h`), which no operation here meets."""
    command = (str(CROSS), *build.compiler_flags(name, "aarch64"))
    programs = compiled((*command, "-static"), own_kernels(command, tmp_path), tmp_path)
    emulated, here = digests(programs, (str(EMULATOR),)), dict(native[portable(name)])
    assert emulated.pop(EDGE) == "0"
    assert here.pop(EDGE) == ("0" if platform.machine() in build.ARM else "1")
    assert emulated == here


@pytest.mark.slow
@pytest.mark.skipif(not SIMDE.exists(), reason=f"there is no {SIMDE}")
@pytest.mark.skipif("avx2" not in available("pairs"), reason="there is no AVX2")
@pytest.mark.parametrize("name", ["avx512", "avx512_vnni", "avx512_bf16", "avx512_bf16+tiles"])
def test_avx512_by_avx2_has_the_same_bits(
    native: dict[str, dict[str, str]], name: str, tmp_path: Path
) -> None:
    flags = [f for f in build.compiler_flags(name, "x86_64") if not f.startswith("-mavx512")]
    header = Path(__file__).with_name("emulated_avx512.h")
    command = (
        build._compiler()[0],
        *(flag for flag in flags if flag != build.NATIVE),
        *("-mavx2", "-DNANO_EMULATED", "-w", "-O1", "-include", str(header)),
    )
    programs = compiled(command, own_kernels(command, tmp_path), tmp_path)
    assert digests(programs) == native[portable(name)]


def own_kernels(command: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Compile the kernels into objects in a folder."""
    sources = sorted(build.SOURCES.glob("*.cpp"))
    objects = tuple(str(folder / f"{source.stem}.o") for source in sources)

    def compile_one(source: Path, target: str) -> None:
        subprocess.run([*command, "-c", str(source), "-o", target], check=True, capture_output=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources, objects))
    return objects
