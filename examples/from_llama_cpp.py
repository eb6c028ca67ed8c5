"""The first minutes of a llama.cpp user, next to `llama-cli` on the same file: install, answer,
chat, serve with a tool. Prints each command, its output, its seconds and its peak memory.

Requires `make peers` (llama.cpp) and an index for pip.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from benchmarks.models import model_path
from benchmarks.peers import install
from benchmarks.peers.llama_cpp import clean_environment, gguf_of, llama_bin, quantised
from benchmarks.start import GLANCE, peak_of

ROOT = Path(__file__).parents[1]
FILE = "smollm2-135m-Q8_0.gguf"
QUESTION = "What is 2+2?"
PORT = 8000
LINES = 12  # of a command's output
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA |= {"additionalProperties": False}
ASKED = {
    "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": "required",
    "temperature": 0,
}


def main() -> None:
    cache = install.CACHE
    if install.installed(cache, "llama.cpp") is None:
        raise SystemExit("llama.cpp is not built; run `make peers` first.")
    file = quantised(gguf_of(model_path("smollm2-135m"), cache), "Q8_0", cache)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / FILE).symlink_to(file)
        installed(folder)
        shown(folder, f'llama-cli -m {FILE} -p "{QUESTION}" -n 16 --temp 0 --single-turn')
        asked = f'-p "{QUESTION}" --max-tokens 16 --temperature 0'
        shown(folder, f"nano-inference generate {FILE} {asked}")
        turns = f"printf '{QUESTION}\\nAnd 2+3?\\n'"
        shown(folder, f"{turns} | nano-inference chat {FILE} --temperature 0")
        served(folder)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment whose PATH begins with the new venv and llama.cpp."""
    added = f"{folder / 'env' / 'bin'}:{llama_bin(install.CACHE)}"
    kept = clean_environment() | {"TERM": "dumb", "COLUMNS": "96", "PIP_NO_INPUT": "1"}
    return kept | {"PATH": f"{added}:{os.environ['PATH']}"}


def installed(folder: Path) -> None:
    command = "python3 -m venv env && env/bin/pip install 'nano-inference[server,gguf]'"
    print(f"$ {command}")
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    pip = [folder / "env" / "bin" / "pip", "install", "-q", f"{ROOT}[server,gguf]"]
    subprocess.run(pip, check=True, env=environment(folder), cwd=folder, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    used = sum(each.stat().st_size for each in (folder / "env").rglob("*") if each.is_file())
    print(f"  [{seconds:.0f} s, {used / 1e6:.0f} MB]\n", flush=True)


def shown(folder: Path, command: str) -> None:
    """Run a command twice, so that caches are warm, and print its second run."""
    print(f"$ {command}", flush=True)
    run(folder, command)
    output, seconds, peak = run(folder, command)
    lines = [line.rstrip() for line in output.splitlines() if is_worth_showing(line)]
    print("\n".join(lines[-LINES:]))
    print(f"  [{seconds:.2f} s, peak {peak / 2**20:.0f} MiB]\n", flush=True)


def is_worth_showing(line: str) -> bool:
    """Return False for blank lines, and for llama-cli's logo and list of commands."""
    return bool(line.strip()) and not re.search(r"[▄█▀]|^\s*/\w|^available|^Loading", line)


def run(folder: Path, command: str) -> tuple[str, float, int]:
    """Return a command's output, its seconds and the peak memory of its last program in bytes."""
    began = time.perf_counter()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        peaks: list[int] = [0]
        watch = threading.Thread(target=watched, args=(process, peaks))
        watch.start()
        output = process.stdout.read()
        process.wait()
        watch.join()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}: {output}")
    return output, time.perf_counter() - began, max(peaks)


def watched(process: "subprocess.Popen[str]", peaks: list[int]) -> None:
    while process.poll() is None:
        peaks.append(max(map(peak_of, family(process.pid)), default=0))
        time.sleep(GLANCE)


def family(pid: int) -> list[int]:
    """Return a process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in family(int(child)))]


def served(folder: Path) -> None:
    """Print a server's start and its answer to a request that requires a tool."""
    command = f"nano-inference serve {FILE} --port {PORT}"
    print(f"$ {command} &")
    began = time.perf_counter()
    with subprocess.Popen(
        command.split(),
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if "Ready: " in line), None)
        if ready is None:
            raise SystemExit("the server ended before it was ready.")
        seconds = time.perf_counter() - began
        peak = sum(map(peak_of, family(process.pid))) / 2**20
        print(
            f"{ready[ready.index('Ready: ') :].rstrip()}\n  [{seconds:.2f} s, peak {peak:.0f} MiB with the engine's process]"
        )
        print(f"\n$ curl http://127.0.0.1:{PORT}/v1/chat/completions -d '{json.dumps(ASKED)}'")
        address = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        began = time.perf_counter()
        with urllib.request.urlopen(address, json.dumps(ASKED).encode(), timeout=60) as reply:
            answer = json.load(reply)
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        print(f"… {json.dumps(call)} …\n  [{time.perf_counter() - began:.2f} s]")
        process.terminate()


if __name__ == "__main__":
    main()
