"""Build the kernels with the system's C++ compiler, once per source, compiler and instruction set.

A release wheel contains libraries for all instruction sets of its platform in `prebuilt/`
(`scripts/build_wheel.py`), so that no compiler is needed. A prebuilt library is used if it was
built from exactly the sources of this package.

Other libraries are built in `~/.cache/nano-inference/kernels/` (`cache_folder`), which only its
owner may enter. One process builds, in a folder that it renames when it is complete, and others
wait for it. A killed build leaves its compiled objects, and the next build resumes from them. A
library whose bytes differ from its manifest is rebuilt, because loading a truncated library would
crash the process.
"""

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from nano_inference.errors import ConfigError
from nano_inference.ops.cpu.build_folders import MANIFEST, OBJECTS, alone, clean, is_whole, put
from nano_inference.system.cache_folder import cache_folder, unfinished
from nano_inference.system.machine import usable_cpus
from nano_inference.system.progress import FileProgress
from nano_inference.system.regular_files import sync

logger = logging.getLogger("nano_inference")

SOURCES = Path(__file__).parent / "kernels"
PREBUILT = Path(__file__).parent / "prebuilt"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fvisibility=default",
    "-w",
)
NATIVE = "-mtune=native"
LIBRARY = "libnano.so"
CPUINFO = Path("/proc/cpuinfo")
# Weight of a source's headers in the progress display, in bytes added to the source's own size.
COMPILE_BYTES = 7000
MOST_WORDS = 3000  # most characters of a compiler's error output that a message includes

# Name of a Linux distribution, or of its parent distribution -> command that installs a compiler.
INSTALL = {
    "debian": "apt install g++",
    "ubuntu": "apt install g++",
    "fedora": "dnf install gcc-c++",
    "rhel": "dnf install gcc-c++",
    "suse": "zypper install gcc-c++",
    "arch": "pacman -S gcc",
    "alpine": "apk add g++",
}

_ARCH_PRCTL, _ASK_FOR_REGISTERS, _TILE_DATA = 158, 0x1023, 18

# failed builds of this process (the same source with the same compiler) -> error
_failed: dict[Path, str] = {}

_AVX512 = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
    "-mf16c",
    "-DNANO_AVX512",
)
_AVX512_VNNI = (*_AVX512, "-mavx512vnni", "-DNANO_VNNI")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16", "-DNANO_BF16")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-DNANO_AVX2")
_HAS_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
_HAS_BF16 = _HAS_AVX512 | {"avx512_vnni", "avx512_bf16"}
# Instruction set -> (required processor flags, compiler flags). Best first. All builds with the
# same law of sums (`LAWS`) produce the same bits, except for one rounding that simd_neon.h
# describes. AMX instructions imply the law of tiles.
INSTRUCTION_SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (
        _HAS_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DNANO_AMX"),
    ),
    "avx512_bf16": (_HAS_BF16 | {"fast_pairs"}, _AVX512_BF16),
    "avx512_vnni": (_HAS_AVX512 | {"avx512_vnni"}, _AVX512_VNNI),
    "avx512": (_HAS_AVX512, _AVX512),
    "avx2_vnni": (
        frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
        (*_AVX2, "-mavxvnni", "-DNANO_VNNI"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c"}), _AVX2),
    "neon_dot": (
        frozenset({"asimd", "asimddp"}),
        ("-march=armv8.2-a+dotprod", "-DNANO_NEON", "-DNANO_DOT"),
    ),
    "neon": (frozenset({"asimd"}), ("-DNANO_NEON",)),
    "portable": (frozenset(), ()),
}
AMX, TILES = "amx", "+tiles"


Law = Literal["pairs", "tiles"]
# Order in which the kernels add up products of bfloat16: in pairs (`simd.h`) or in tiles
# (`tiles.h`).
LAWS = get_args(Law)
X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")


class KernelsUnavailable(ConfigError):
    """The CPU kernels cannot be built on this machine. The message gives the reason."""


def best_instruction_set(law: Law | None = None) -> str:
    """Return the fastest build for this machine and its compiler: an instruction set, followed by
    `TILES` for the law of tiles without AMX.

    Args:
        law: Law of sums of the build. None: the law of the fastest build.
    """
    has, suffix = _processor_flags(), TILES if law == "tiles" else ""
    builds = (
        name if name == AMX else name + suffix
        for name, (needs, _) in INSTRUCTION_SETS.items()
        if needs <= has and (name != AMX or law != "pairs")
    )
    return next(each for each in builds if _can_be_had(each))


def instruction_sets_here() -> list[str]:
    """Return all builds that this processor runs without a compiler, and the best one if it is
    available. They are sorted best first and named as by `best_instruction_set`.
    """
    has, best = _processor_flags(), available_instruction_set()
    names = [
        name + law
        for name, (needs, _) in INSTRUCTION_SETS.items()
        if needs <= has
        for law in ("", *((TILES,) if name != AMX else ()))
    ]
    return [
        name for name in names if name == best or is_whole(PREBUILT / prebuilt_name(name) / LIBRARY)
    ]


def available_instruction_set() -> str | None:
    """Return the best build, named as by `best_instruction_set`. None: there is neither a prebuilt
    library nor a compiler.
    """
    name = best_instruction_set()
    if not is_whole(PREBUILT / prebuilt_name(name) / LIBRARY):
        try:
            _compiler()
        except KernelsUnavailable:
            return None
    return name


@functools.cache
def _can_be_had(instruction_set: str) -> bool:
    """Return True if there is a library, or if the compiler supports the flags: GCC before 11 lacks
    those for AMX and AVX-VNNI. Also return True if the compiler is missing or compiles nothing,
    which `build` reports.
    """
    if is_whole(PREBUILT / prebuilt_name(instruction_set) / LIBRARY):
        return True
    try:
        compiler, version = _compiler()
    except KernelsUnavailable:
        return True
    if is_whole(_folder(instruction_set, version) / LIBRARY):
        return True
    if _knows(compiler, instruction_set) or not _knows(compiler, "portable"):
        return True
    logger.warning(
        "This processor supports %s, but %s cannot build kernels for it (%s); using slower ones.",
        instruction_set.removesuffix(TILES),
        compiler,
        version.partition("\n")[0],
    )
    return False


def _knows(compiler: str, instruction_set: str) -> bool:
    flags = compiler_flags(instruction_set, platform.machine())
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def law_of(instruction_set: str) -> Law:
    """Return the law of sums of a build."""
    return "tiles" if instruction_set == AMX or instruction_set.endswith(TILES) else "pairs"


def compiler_flags(instruction_set: str, machine: str) -> tuple[str, ...]:
    """Return the compiler flags of a build for a processor, named as by `platform.machine()`."""
    # some compilers for ARM reject -mtune=native, and the build would fail
    tuning = (NATIVE,) if machine in X86 else ()
    law = ("-DNANO_TILES",) if law_of(instruction_set) == "tiles" else ()
    return (*FLAGS, *tuning, *INSTRUCTION_SETS[instruction_set.removesuffix(TILES)][1], *law)


def build(
    instruction_set: str | None = None,
    cache_root: Path | None = None,
    defines: tuple[str, ...] = (),
) -> Path:
    """Return the library's path, after building it if it does not exist. Raise `KernelsUnavailable`
    on failure.

    Args:
        instruction_set: Key of `INSTRUCTION_SETS`, optionally followed by `TILES`. None: the best
            one.
        cache_root: Parent folder of the libraries. None: `cache_folder("kernels")`.
        defines: Macros of special builds, documented in the kernels.
    """
    name = instruction_set or best_instruction_set()
    if name.removesuffix(TILES) not in INSTRUCTION_SETS:
        raise KernelsUnavailable(
            f"instruction set {name!r} is unknown; choose one of {', '.join(INSTRUCTION_SETS)}."
        )
    if not defines and cache_root is None:
        library = PREBUILT / prebuilt_name(name) / LIBRARY
        if is_whole(library):
            return library
    compiler, version = _compiler()
    flags = _flags(name, defines)
    folder = _folder(name, version, cache_root, defines)
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        if not is_whole(folder / LIBRARY):
            with alone(root) as has_lock:
                if not is_whole(folder / LIBRARY):
                    _build_once(folder, compiler, flags, name, keep=has_lock)
        _require_own(folder)
    except OSError as problem:
        raise KernelsUnavailable(
            f"the CPU kernels cannot be kept in {root}: {problem}"
        ) from problem
    return folder / LIBRARY


def _flags(name: str, defines: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (*compiler_flags(name, platform.machine()), *(f"-D{each}" for each in defines))


def _folder(
    name: str, version: str, cache_root: Path | None = None, defines: tuple[str, ...] = ()
) -> Path:
    """Return the folder of a build by a compiler of this version."""
    root = cache_folder("kernels") if cache_root is None else cache_root
    parts = (version, " ".join(_flags(name, defines)), platform.machine())
    return root / f"{name}-{_digest(*parts)}"


def prebuilt_name(instruction_set: str) -> str:
    """Return the name of a build's folder in `PREBUILT`. It depends on the sources."""
    return f"{instruction_set}-{platform.machine()}-{_digest()}"


def build_for_wheel(root: Path, instruction_set: str) -> None:
    """Build a library that any processor with these instructions can load, on any Linux with
    compatible C and C++ libraries. Raise `KernelsUnavailable` on failure.
    """
    compiler, _ = _compiler()
    flags = [each for each in compiler_flags(instruction_set, platform.machine()) if each != NATIVE]
    root.mkdir(parents=True, exist_ok=True)
    folder = root / prebuilt_name(instruction_set)
    _build_into(folder, compiler, tuple(flags), instruction_set)


def _build_once(folder: Path, compiler: str, flags: tuple[str, ...], name: str, keep: bool) -> None:
    if folder in _failed:
        raise KernelsUnavailable(_failed[folder])
    try:
        _build_into(folder, compiler, flags, name, keep)
    except KernelsUnavailable as problem:
        _failed[folder] = str(problem)
        raise


def _build_into(
    folder: Path, compiler: str, flags: tuple[str, ...], name: str, keep: bool = False
) -> None:
    """Compile and link the kernels in a new folder, and rename it to `folder`.

    Args:
        folder: Folder of the library.
        compiler: Path of the compiler.
        flags: Compiler flags.
        name: Name of the build, for the log.
        keep: Leave the objects if this process is killed, and reuse objects of an earlier build.
            Only allowed while no other process builds in the parent folder.
    """
    start = time.perf_counter()
    kinds = [each + law for each in INSTRUCTION_SETS for law in ("", TILES)]
    clean(folder.parent, tuple(f".{kind}-" for kind in kinds), is_alone=keep)
    if folder.exists():
        logger.warning("The CPU kernels in %s are damaged; rebuilding them.", folder)
    logger.info("Compiling the CPU kernels (%s) with %s, once.", name, compiler)
    with unfinished(folder) as new:
        kept = folder.with_name(f".{folder.name}{OBJECTS}") if keep else new / OBJECTS
        with _objects(kept):
            objects = _compile(kept, compiler, flags)
            _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(new / LIBRARY)])
        try:
            put(new, LIBRARY, folder)
        except OSError:
            # without locks, another process may have renamed its own build first
            if not is_whole(folder / LIBRARY):
                raise
    logger.info("Compiled the CPU kernels in %.1f s: %s", time.perf_counter() - start, folder)


@contextmanager
def _objects(folder: Path) -> Iterator[None]:
    """Provide a folder for objects that only its owner may enter. It is removed after the library
    is linked or if a source does not compile, and stays if the build is interrupted.
    """
    if folder.exists() and not _is_own(folder):
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield
    except KernelsUnavailable:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _compile(folder: Path, compiler: str, flags: tuple[str, ...]) -> list[Path]:
    """Return the objects of all sources, after compiling those that the folder lacks."""
    sources = {path.stem: path for path in sorted(SOURCES.glob("*.cpp"))}
    sizes = {name: COMPILE_BYTES + path.stat().st_size for name, path in sources.items()}
    # longest first, so that all cores stay busy until the end
    work = dict(sorted(sizes.items(), key=lambda each: -each[1]))
    ready = {name for name in sources if (folder / f"{name}.o").exists()}
    at_once = usable_cpus()

    def compile_one(name: str) -> None:
        target = folder / f"{name}.o"
        part = target.with_suffix(".part")
        _run([compiler, *flags, "-c", str(sources[name]), "-o", str(part)])
        sync(part)
        part.rename(target)  # files with this name are complete

    with (
        FileProgress("compiling CPU kernels (once)", work, ready, at_once) as progress,
        ThreadPoolExecutor(at_once) as pool,
    ):
        jobs = {pool.submit(compile_one, name): name for name in work if name not in ready}
        try:
            for name in _finished(jobs, progress.tick):
                progress.finish(name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [folder / f"{name}.o" for name in sources]


def _finished(jobs: Mapping[Future[None], str], tick: Callable[[], None]) -> Iterator[str]:
    """Yield the names of jobs as they end, and call `tick` at least once a second. Raise the
    exception of a failed job.
    """
    waiting = {*jobs}
    while waiting:
        ended, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
        for job in ended:
            job.result()
            yield jobs[job]
        tick()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(
            f"building the CPU kernels took more than 600 s: {' '.join(command)}"
        ) from None
    if done.returncode:
        complaint = done.stderr.strip()[:MOST_WORDS]
        raise KernelsUnavailable(
            f"the CPU kernels could not be built: {' '.join(command)}\n{complaint}"
        )


def _compiler() -> tuple[str, str]:
    """Return the path and the version of the first C++ compiler in `COMPILERS` that runs."""
    for name in COMPILERS:
        path = shutil.which(name)
        version = None if path is None else _version_of(path)
        if path is not None and version is not None:
            return path, version
    raise KernelsUnavailable(
        f"no C++ compiler was found ({', '.join(COMPILERS)}); install one{_install_command()}."
    )


def _version_of(compiler: str) -> str | None:
    """Return what a compiler reports as its version, or None if it does not run. The answer is
    remembered until its file changes, because every start of an engine needs it.
    """
    known, status = cache_folder("kernels") / "compilers.json", os.stat(compiler)
    stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    versions: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        versions = json.loads(known.read_text("utf-8"))
    if compiler in versions and versions[compiler][0] == stamp:
        return versions[compiler][1]
    asked = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    if asked.returncode != 0:
        return None
    with suppress(OSError):
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = known.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({**versions, compiler: [stamp, asked.stdout]}), "utf-8")
        new.replace(known)
    return asked.stdout


def _install_command() -> str:
    """Return the end of a message: the command that installs a compiler on this system."""
    if platform.system() == "Darwin":
        return ": xcode-select --install"
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    known = (INSTALL[name] for name in names if name in INSTALL)
    return f": {command}" if (command := next(known, "")) else ", g++ for example"


def _digest(*parts: str) -> str:
    """Return a digest of these parts and of the sources."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _require_own(folder: Path) -> None:
    """Raise `KernelsUnavailable` if another user can write the library, because its code will be
    loaded.
    """
    for path in (folder.parent, folder, folder / LIBRARY, folder / MANIFEST):
        if not _is_own(path):
            raise KernelsUnavailable(
                f"{path} can be written by others; remove it, or take ownership and run chmod go-w."
            )


def _is_own(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _processor_flags() -> frozenset[str]:
    if platform.machine() not in (*X86, *ARM):
        return frozenset()
    if platform.system() == "Darwin":  # has no /proc/cpuinfo, and every ARM Mac has both
        return frozenset({"asimd", "asimddp"} if platform.machine() in ARM else ())
    try:
        return usable(flags_in(CPUINFO.read_text(encoding="utf-8")))
    except OSError:
        return frozenset()


def usable(flags: frozenset[str]) -> frozenset[str]:
    """Return the flags that this process can use. Add "fast_pairs" if pairs of bfloat16 are
    multiplied at full speed, and remove AMX flags if the system does not permit AMX.
    """
    # on processors with AMX, vdpbf16ps takes four times as long as one of the two fma that it
    # equals
    if "avx512_bf16" in flags and "amx_tile" not in flags:
        flags |= {"fast_pairs"}
    if "amx_tile" in flags and not _may_use_tiles():
        flags -= {"amx_tile"}
    return flags


@functools.cache
def _may_use_tiles() -> bool:
    """Request the AMX registers from the system, for all threads of this process."""
    system = ctypes.CDLL(None, use_errno=True)
    return system.syscall(_ARCH_PRCTL, _ASK_FOR_REGISTERS, _TILE_DATA) == 0


def flags_in(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first processor, as Linux lists them: under "flags" on x86, under
    "Features" on ARM.
    """
    listed = (
        line.split(":", 1)[1]
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features")) and ":" in line
    )
    return frozenset(next(listed, "").split())
