"""Kernel builds: once per library, safe for concurrent processes, and the fallback if a build
fails.
"""

import ctypes
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import (
    ConfigError,
    EngineConfig,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
)
from nano_inference.device import backends
from nano_inference.ops.cpu import build, build_folders, library
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.system.cache_folder import cache_folder
from nano_inference.system.progress import heard_by
from tests.models.tiny import tiny_llama, tiny_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.ops.cpu_kernels import available

SOURCE = 'extern "C" int nano_answer() { return 42; }\n'
BUILD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from nano_inference.ops.cpu import build
build.SOURCES, root = map(Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
print(build.build("portable", root))
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return kernel sources that build instantly."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a process with no loaded library and no logged warning."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build, "_failed", {})
    for remembered in (library.load, backends._warn_once):
        remembered.cache_clear()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for remembered in (library.load, backends._warn_once):
        remembered.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")))


def config(model: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=model, device="cpu", kv_cache_memory=2**20, num_threads=1, **options
    )


def lost(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about the backend."""
    return [r.getMessage() for r in caplog.records if "reference backend" in r.getMessage()]


def numerics(model: str, **options: Any) -> str:
    """Return the numerics fingerprint in a sample of a new engine."""
    with InferenceEngine(config(model, **options)) as engine:
        return engine.generate([3, 4, 5], SamplingParams(max_tokens=2))[0].numerics


# -- machines without kernels ----------------------------------------------------------------------


def test_missing_compiler_falls_back_to_reference_and_logs_once(
    model: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for _ in range(3):
        assert numerics(model).startswith("reference-")
    (said,) = lost(caplog)
    for part in ("slower", "no C++ compiler", "g++"):
        assert part in said
    with pytest.raises(ConfigError, match="backend='cpu' is not available: no C"):
        InferenceEngine(config(model, backend="cpu"))


@NEEDS_COMPILER
def test_compiler_error_is_reported_and_build_not_retried(
    model: str,
    sources: Path,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "forty_two"))
    asked: list[list[str]] = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: (asked.append(command), run(command)))
    assert numerics(model).startswith("reference-")
    assert numerics(model).startswith("reference-")
    (said,) = lost(caplog)
    assert "forty_two" in said
    assert "answer.cpp" in said
    with pytest.raises(ConfigError, match="forty_two"):
        InferenceEngine(config(model, backend="cpu"))
    assert len(asked) == 1
    (sources / "answer.cpp").write_text(SOURCE)
    assert build.build("portable").is_file(), "a changed source was not retried"
    assert not list((Path.home() / ".cache/nano-inference/kernels").glob(".*")), (
        "a failed build left files"
    )


@NEEDS_COMPILER
def test_libraries_of_a_wheel_need_no_compiler(
    sources: Path, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    build.build_for_wheel(build.PREBUILT, "portable")
    monkeypatch.setattr("shutil.which", lambda name: None)
    path = build.build("portable")
    assert path.is_relative_to(build.PREBUILT)
    assert ctypes.CDLL(str(path)).nano_answer() == 42
    assert not list((Path.home() / ".cache").rglob(build.LIBRARY))
    whole = path.read_bytes()
    path.unlink()  # this process keeps the old file mapped
    path.write_bytes(whole[:-1])
    with pytest.raises(build.KernelsUnavailable, match=r"no C\+\+ compiler"):
        build.build("portable")
    path.write_bytes(whole)
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    with pytest.raises(build.KernelsUnavailable, match=r"no C\+\+ compiler"):
        build.build("portable")


@NEEDS_COMPILER
def test_library_of_other_sources_is_not_used(sources: Path, fresh: None) -> None:
    (sources / "sizes.cpp").write_text(
        'extern "C" void nano_sizes(long* sizes) { sizes[0] = 1; }\n'
    )
    with pytest.raises(build.KernelsUnavailable, match="another source"):
        library.load("portable")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float16"}, "kernels do not support float16"),
        ({}, "multiples of 16 up to 576; got 24"),
    ],
)
def test_model_without_kernels_runs_on_reference(
    tmp_path: Path,
    model: str,
    fresh: None,
    options: Any,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not options:
        model = str(tiny_model(tmp_path / "odd", "qwen3", head_dim=24))
    for _ in range(2):
        assert numerics(model, **options).startswith("reference-")
    (said,) = lost(caplog)
    assert why in said
    with pytest.raises(ConfigError, match=why):
        InferenceEngine(config(model, backend="cpu", **options))


def test_explicit_reference_backend_logs_nothing(
    model: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        numerics(model, backend="reference")
        numerics(model, dtype="float16", backend="reference")
    assert not caplog.records


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'sse' is unknown.*portable"):
        build.build("sse")


# -- building --------------------------------------------------------------------------------------


@pytest.mark.thorough
@NEEDS_COMPILER
def test_library_is_built_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.build("portable", tmp_path / "root")
    before = path.stat()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_build_into", None)
        assert build.build("portable", tmp_path / "root") == path
    assert path.stat() == before
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    other = build.build("portable", tmp_path / "root")
    assert other != path, "a changed source did not change the library"
    (sources / "answer.h").write_text("// a header counts too\n")
    assert build.build("portable", tmp_path / "root") not in (path, other)


@pytest.mark.thorough
@NEEDS_COMPILER
def test_build_by_two_processes_at_the_same_time(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(sources), str(tmp_path / "root")]
    builders = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for builder in builders:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        assert builder.stdin is not None
        builder.stdin.write("\n")
        builder.stdin.flush()
    said = [each.communicate(timeout=60) for each in builders]
    assert [each.returncode for each in builders] == [0] * 3, said
    paths = {out.strip() for out, _ in said}
    assert len(paths) == 1
    assert sum("Compiled the CPU kernels" in err for _, err in said) == 1
    assert sum("Compiling" in err for _, err in said) == 1, "more than one process built"
    (folder,) = (each for each in (tmp_path / "root").iterdir() if each.name != build_folders.LOCK)
    assert {each.name for each in folder.iterdir()} == {build.LIBRARY, build_folders.MANIFEST}, (
        "temporary files remain"
    )


@pytest.mark.thorough(but=["<lambda>0"])
@NEEDS_COMPILER
@pytest.mark.parametrize(
    "harm", [lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda _: b""]
)
def test_damaged_library_is_rebuilt(
    sources: Path, tmp_path: Path, harm: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Loading the damaged library would kill the process by a signal."""
    path = build.build("portable", tmp_path / "root")
    whole = path.read_bytes()
    path.write_bytes(harm(whole))
    assert build.build("portable", tmp_path / "root") == path
    assert ctypes.CDLL(str(path)).nano_answer() == 42
    assert sum("are damaged" in record.getMessage() for record in caplog.records) == 1
    (path.parent / build_folders.MANIFEST).write_bytes(b"\xff")
    assert ctypes.CDLL(str(build.build("portable", tmp_path / "root"))).nano_answer() == 42
    assert {each.name for each in (tmp_path / "root").iterdir()} == {
        path.parent.name,
        build_folders.LOCK,
    }


@NEEDS_COMPILER
@pytest.mark.parametrize("has_locks", [True, False])
def test_build_removes_leftovers_of_killed_builds(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """Leftovers are removed immediately if the lock is held. Without lock support, another process
    may be using them.
    """
    root = tmp_path / "root"
    old = {".portable-old-x", ".avx2+tiles-old-x", ".avx2-a.objects", ".another", "mine"}
    new = {".portable-new-x", ".avx2+tiles-new-x", ".avx2-b.objects"}
    for name in old | new:
        (root / name).mkdir(parents=True)
        (root / name / "part.o").write_text("")
    for name in old:
        os.utime(root / name, (0, 0))
    if not has_locks:
        monkeypatch.setattr(build_folders, "locked", lambda *_: os.stat("/no/such/file"))
    folder = build.build("portable", root).parent
    left = {".avx2-b.objects"} if has_locks else new
    assert {each.name for each in root.iterdir()} == {
        *left,
        ".another",
        "mine",
        folder.name,
        build_folders.LOCK,
    }


COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo "$*" >> {folder}/asked;; esac
case " $* " in
*" -c "*/slow.cpp*) if [ -e {folder}/hold ]; then touch {folder}/is-held; exec sleep 600; fi;;
esac
exec {real} "$@"
"""


@NEEDS_COMPILER
def test_build_resumes_after_it_was_killed(
    sources: Path, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished objects are not recompiled, and no temporary files remain."""
    for name in ("one", "two", "slow"):
        (sources / f"{name}.cpp").write_text(f'extern "C" int nano_{name}() {{ return 1; }}\n')
    tools, root = tmp_path / "bin", tmp_path / "root"
    tools.mkdir()
    real = next(filter(None, map(shutil.which, build.COMPILERS)))
    (tools / "c++").write_text(COMPILER.format(folder=tools, real=real))
    (tools / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    asked, held = tools / "asked", tools / "is-held"
    (tools / "hold").write_text("")

    command = [sys.executable, "-c", BUILD, str(sources), str(root)]
    killed = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, stderr=subprocess.DEVNULL
    )
    assert killed.stdin is not None
    killed.stdin.write(b"\n")
    killed.stdin.flush()
    quick = {"answer.o", "one.o", "two.o"}

    def compiled() -> set[str]:
        return {each.name for each in root.glob(".portable-*.objects/*.o")}

    wait_for(lambda: held.exists() and compiled() == quick)
    os.killpg(killed.pid, signal.SIGKILL)  # with a compiler that hangs
    killed.wait(30)
    killed.stdin.close()
    assert len(list(root.glob(".portable-*"))) == 2, "expected objects and an unfinished folder"
    (tools / "hold").unlink()
    asked.write_text("")

    library = build.build("portable", root)
    (line,) = asked.read_text().splitlines()
    assert "slow.cpp" in line
    assert ctypes.CDLL(str(library)).nano_two() == 1
    assert {each.name for each in root.iterdir()} == {library.parent.name, build_folders.LOCK}


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@NEEDS_COMPILER
def test_build_discards_objects_writable_by_others(sources: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    name = build.build("portable", root).parent.name
    shutil.rmtree(root / name)
    objects = root / f".{name}.objects"
    objects.mkdir()
    (objects / "answer.o").write_text("of somebody else")
    objects.chmod(0o777)
    assert ctypes.CDLL(str(build.build("portable", root))).nano_answer() == 42


@NEEDS_COMPILER
def test_build_stops_at_the_first_source_that_fails(
    sources: Path, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cpus", lambda: 1)
    (sources / "answer.cpp").write_text(SOURCE.replace("42", "forty_two") + "//" * 1000)
    for number in range(30):
        (sources / f"{number}.cpp").write_text(SOURCE.replace("answer", f"answer_{number}"))
    asked: list[list[str]] = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: (asked.append(command), run(command)))
    with pytest.raises(build.KernelsUnavailable, match="forty_two"):
        build.build("portable", tmp_path / "root")
    assert "answer.cpp" in " ".join(asked[0]), "the longest job was not first"
    assert len(asked) < 30, "the other jobs were not cancelled"
    assert not list((tmp_path / "root").glob(".*"))


@NEEDS_COMPILER
def test_build_logs_number_of_compiled_files(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "one.cpp").write_text(SOURCE.replace("answer", "one"))
    lines: list[str] = []
    with heard_by(lines.append), caplog.at_level(logging.INFO, "nano_inference"):
        build.build("portable", tmp_path / "root")
    assert lines[0] == "compiling CPU kernels (once): 0 of 2 files"
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_build_logs_that_it_waits_for_another(tmp_path: Path) -> None:
    lines: list[str] = []
    with build_folders.alone(tmp_path), heard_by(lines.append), pytest.raises(TimeoutError):
        build_folders.alone(tmp_path, patience=0.1).__enter__()
    assert lines == ["waiting for another process that compiles the CPU kernels"]


@pytest.mark.parametrize(
    ("system", "release", "advice"),
    [
        ("Linux", {"ID": "ubuntu", "ID_LIKE": "debian"}, "install one: apt install g++."),
        ("Linux", {"ID": "mint", "ID_LIKE": "ubuntu debian"}, "install one: apt install g++."),
        ("Linux", {"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, ": dnf install gcc-c++."),
        ("Linux", {"ID": "another"}, "install one, g++ for example."),
        ("Linux", None, "install one, g++ for example."),
        ("Darwin", None, "install one: xcode-select --install."),
    ],
)
def test_missing_compiler_advice_names_the_system_command(
    monkeypatch: pytest.MonkeyPatch, system: str, release: dict[str, str] | None, advice: str
) -> None:
    def told() -> dict[str, str]:
        if release is None:
            raise OSError
        return release

    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.freedesktop_os_release", told)
    with pytest.raises(build.KernelsUnavailable) as caught:
        build._compiler()
    assert str(caught.value).endswith(advice)


def test_build_wait_times_out(sources: Path, tmp_path: Path) -> None:
    with (
        build_folders.alone(tmp_path),
        pytest.raises(TimeoutError, match=r"build\.lock for more than 0\.2 s; end that process"),
        build_folders.alone(tmp_path, patience=0.2),
    ):
        pass
    with build_folders.alone(tmp_path, patience=0.2):
        pass


@pytest.mark.parametrize(
    ("base", "folder"), [("", "home/.cache"), ("cache", "home/.cache"), ("/far/away", "/far/away")]
)
def test_cache_folder_follows_environment(
    tmp_path: Path, fresh: None, base: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder("kernels") == tmp_path / folder / "nano-inference" / "kernels"


def test_excessive_thread_count_is_rejected(model: str) -> None:
    with pytest.raises(
        ConfigError, match=r"num_threads=100000 exceeds this machine's limit \(\d+\); use \d+"
    ):
        InferenceEngine(replace(config(model), num_threads=100_000))


@NEEDS_COMPILER
def test_library_folder_is_not_writable_by_others(sources: Path, tmp_path: Path) -> None:
    path = build.build("portable", tmp_path / "root")
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for spoiled in (path, path.parent):
        mode = spoiled.stat().st_mode
        for others in (0o020, 0o002):
            spoiled.chmod(mode | others)
            with pytest.raises(build.KernelsUnavailable, match="written by others"):
                build.build("portable", tmp_path / "root")
        spoiled.chmod(mode)
    assert build.build("portable", tmp_path / "root") == path


def test_cache_error_names_the_folder(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(build.KernelsUnavailable, match="cannot be kept in"):
        build.build("portable", tmp_path / "file" / "root")


# -- instruction sets ------------------------------------------------------------------------------

AVX512, AMX = "avx512f avx512bw avx512vl avx512dq", "amx_tile amx_bf16 amx_int8"
X86 = "processor\t: 0\nflags\t\t: fpu avx avx2 f16c {} fma\nbugs\t\t:\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm bf16\nCPU part\t: 0xd49\n"


@pytest.mark.parametrize(
    ("system", "machine", "cpuinfo", "best"),
    [
        ("Linux", "x86_64", X86.format("avx512f"), "avx2"),
        (
            "Linux",
            "x86_64",
            X86.format(f"{AVX512} avx512_bf16 avx512_vnni"),
            "avx512_bf16",
        ),
        ("Linux", "x86_64", X86.format(f"{AVX512} avx512_vnni"), "avx512_vnni"),
        ("Linux", "x86_64", X86.format(f"{AVX512} avx512_bf16 avx512_vnni {AMX}"), "amx"),
        ("Linux", "x86_64", X86.format("avx_vnni"), "avx2_vnni"),
        ("Linux", "x86_64", "flags\t\t: fpu sse2\n", "portable"),
        ("Linux", "aarch64", ARM, "neon"),
        ("Linux", "aarch64", ARM.replace("evtstrm", "asimddp"), "neon_dot"),
        ("Linux", "aarch64", ARM.replace("asimd", ""), "portable"),
        ("Linux", "aarch64", None, "portable"),
        ("Linux", "riscv64", ARM, "portable"),
        ("Darwin", "arm64", None, "neon_dot"),
        ("Darwin", "x86_64", None, "portable"),
    ],
)
def test_best_instruction_set(
    tmp_path: Path,
    system: str,
    machine: str,
    cpuinfo: str | None,
    best: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(build, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(build, "_can_be_had", lambda name: True)
    assert build.best_instruction_set() == best
    assert build.best_instruction_set("pairs") == ("avx512_vnni" if best == "amx" else best)
    tiles = build.best_instruction_set("tiles")
    assert tiles == ("amx" if best == "amx" else f"{best}+tiles")
    assert build.law_of(tiles) == "tiles"
    monkeypatch.setattr(build, "_may_use_tiles", lambda: False)  # mapped by the system
    assert build.best_instruction_set() == ("avx512_vnni" if best == "amx" else best)


@pytest.fixture
def compiler_without(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Put a compiler that rejects a flag first on PATH, on a processor with these
    instruction sets.
    """

    def put(refused: str, flags: str) -> Path:
        compiler = tmp_path / "bin" / "c++"
        compiler.parent.mkdir()
        real = next(filter(None, map(shutil.which, build.COMPILERS)))
        compiler.write_text(
            f'#!/bin/sh\ncase " $* " in *" {refused} "*) exit 1;; esac\nexec {real} "$@"\n'
        )
        compiler.chmod(0o755)
        (tmp_path / "cpuinfo").write_text(X86.format(flags))
        monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
        monkeypatch.setattr(build, "_may_use_tiles", lambda: True)
        monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
        return compiler

    build._can_be_had.cache_clear()
    yield put
    build._can_be_had.cache_clear()


NEEDS_X86 = pytest.mark.skipif(
    platform.machine() not in build.X86, reason="these instructions are x86's"
)


@NEEDS_COMPILER
@NEEDS_X86
@pytest.mark.parametrize(
    ("flags", "refused", "best"),
    [
        (f"{AVX512} avx512_bf16 avx512_vnni {AMX}", "-mamx-tile", "avx512_vnni"),
        (f"{AVX512} avx512_bf16 avx512_vnni", "-mavx512bf16", "avx512_vnni"),
        ("avx_vnni", "-mavxvnni", "avx2"),
    ],
)
def test_old_compiler_builds_best_set_it_supports(
    compiler_without: Callable[[str, str], Path],
    flags: str,
    refused: str,
    best: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = compiler_without(refused, flags)
    assert build.best_instruction_set() == best
    (record,) = caplog.records
    assert f"{compiler} cannot build kernels" in record.getMessage()
    assert build.best_instruction_set("tiles") == f"{best}+tiles"


@NEEDS_COMPILER
@NEEDS_X86
def test_failing_compiler_is_reported_once(
    compiler_without: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    compiler_without("-std=c++17", "avx_vnni")
    assert build.best_instruction_set() == "avx2_vnni"
    with pytest.raises(build.KernelsUnavailable, match="could not be built"):
        build.build()
    assert "slower ones" not in caplog.text


def test_native_tuning_is_for_x86_only() -> None:
    assert "-mtune=native" in build.compiler_flags("avx2", "x86_64")
    assert "-mtune=native" not in build.compiler_flags("neon", "aarch64")
    assert "-DNANO_NEON" in build.compiler_flags("neon", "arm64")
    assert "-DNANO_DOT" in build.compiler_flags("neon_dot", "arm64")


@pytest.mark.thorough(cases=[])
@NEEDS_COMPILER
@pytest.mark.parametrize("law", build.LAWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generation_has_same_bits_on_every_instruction_set(
    model: str, dtype: str, law: build.Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, max_tokens=24, seed=5, raw_logprobs=True, prompt_logprobs=True
    )
    samples_of: dict[str, list[TrainingSample]] = {}
    threads = torch.get_num_threads()
    for name in available(law):
        monkeypatch.setattr(
            backends, "cpu_ops", lambda num_threads, name=name, **_: cpu_ops(num_threads, name)
        )
        with InferenceEngine(config(model, dtype=dtype, backend="cpu")) as engine:
            assert engine.model.ops.linear.__self__.kernels is library.load(name)  # pyright: ignore
            samples_of[name] = engine.generate([list(range(3, 80)), [5, 6]], params, 2)
    torch.set_num_threads(threads)
    fingerprints = {sample.numerics for samples in samples_of.values() for sample in samples}
    assert ["/tiles" in each for each in fingerprints] == [law == "tiles" and dtype == "bfloat16"]
    first = bits(next(iter(samples_of.values())))
    for samples in samples_of.values():
        assert bits(samples) == first


def bits(samples: list[TrainingSample]) -> list[tuple[object, ...]]:
    return [
        (
            s.completion_tokens,
            s.logprobs,
            s.raw_logprobs,
            s.log_kept_mass,
            (s.prompt_logprobs or ())[1:],
            s.numerics,
        )
        for s in samples
    ]
