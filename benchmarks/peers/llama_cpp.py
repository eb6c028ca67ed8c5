"""llama.cpp's llama-server on localhost: token ids in, token ids out. Each workload has its own
server, sized for it.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.peers.install import llama_bin, llama_source
from benchmarks.peers.process import LOAD_LIMIT, Made, PeerFailed, Processes, exact
from benchmarks.workloads import Workload

ANSWER_LIMIT = 1800.0  # seconds
SPARE_CONTEXT = 16  # tokens per slot in addition to those of the longest request


@dataclass(frozen=True)
class LlamaSetting:
    """Arguments of llama-server that may affect speed.

    Attributes:
        slots: Limit on concurrent sequences, never more than in the workload.
        unified: True for one KV buffer for all slots. Attention then spans all of it.
        cache_mib: Memory for prompts of idle slots.
        draft: Weight type of a draft model, which is the model itself: `"Q4_0"`. Empty: no draft
            model.
        more: Further arguments.
    """

    slots: int = 64
    unified: bool = False
    cache_mib: int = 0
    draft: str = ""
    more: tuple[str, ...] = ()


# The first setting is the default. DEFAULTS has better ones for some workloads, by an initial
# measurement.
SETTINGS = {
    "own KV": LlamaSetting(),
    "unified KV": LlamaSetting(unified=True),
    "own KV, 16 slots": LlamaSetting(slots=16),
    "own KV, 8 slots": LlamaSetting(slots=8),
    "unified KV, 16 slots": LlamaSetting(slots=16, unified=True),
    "1 slot": LlamaSetting(slots=1),
    "own KV, backend sampling": LlamaSetting(more=("--backend-sampling",)),
    "own KV, micro-batch 2048": LlamaSetting(more=("-ub", "2048")),
}
DEFAULTS = {"W1": "unified KV", "W5": "1 slot"}
# One stream with drafts. By default, ngram-simple waits for a match of 12 tokens and drafts 48.
DRAFTS = {
    "no drafts": LlamaSetting(unified=True),
    "ngram-simple": LlamaSetting(unified=True, more=("--spec-type", "ngram-simple")),
    "ngram-simple, 3 then 4": LlamaSetting(
        unified=True,
        more=(
            *("--spec-type", "ngram-simple"),
            *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"),
        ),
    ),
    "ngram-cache": LlamaSetting(unified=True, more=("--spec-type", "ngram-cache")),
    "its own weights in Q4_0": LlamaSetting(unified=True, draft="Q4_0"),
}


class LlamaServer:
    """A llama-server process as an `Engine`."""

    name = "llama.cpp"

    def __init__(self, setting: str, gguf: Path, threads: int, cache: Path, log: Path) -> None:
        self.setting, self.gguf, self.threads, self.log = setting, gguf, threads, log
        self.chosen = (SETTINGS | DRAFTS)[setting]
        self.draft: Path | None = None
        if self.chosen.draft:
            self.draft = quantised(gguf, self.chosen.draft, cache)
        self.binary = llama_bin(cache) / "llama-server"
        self.processes: Processes | None = None
        self.port = 0
        self.config = ""
        self.load_seconds = 0.0

    def prepare(self, load: Workload) -> None:
        """Start a server with the slots and the context size that the workload needs."""
        self.stop()
        slots = min(self.chosen.slots, load.num_sequences)
        needs = sorted(
            len(r.prompt) + r.max_tokens + SPARE_CONTEXT for r in load.requests for _ in range(r.n)
        )
        context = sum(needs[-slots:]) if self.chosen.unified else slots * needs[-1]
        settings = [
            *(
                "-t",
                str(self.threads),
                "-tb",
                str(self.threads),
                "-np",
                str(slots),
                "-c",
                str(context + 256),
            ),
            *("--kv-unified" if self.chosen.unified else "--no-kv-unified", "--flash-attn", "on"),
            *(
                "-b",
                "2048",
                "-ub",
                "512",
                "--cache-ram",
                str(self.chosen.cache_mib),
                *self.chosen.more,
            ),
        ]
        self.port, self.config = free_port(), " ".join(["llama-server", *settings])
        if self.draft is not None:
            self.config += f" --spec-type draft-simple, draft model {self.draft.name}"
            settings += ["-md", str(self.draft), "--spec-type", "draft-simple"]
            settings += ["-td", str(self.threads), "-tbd", str(self.threads)]
        place = [
            "-m",
            str(self.gguf),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--no-webui",
            "--log-disable",
        ]
        began = time.perf_counter()
        self.processes = Processes(
            [str(self.binary), *place, *settings], clean_environment(), self.log
        )
        self._wait_until_healthy()
        self.load_seconds = time.perf_counter() - began
        self.processes.sleep()

    def run(self, load: Workload) -> float:
        return exact("llama-server", load, self.make(load))

    def make(self, load: Workload) -> Made:
        assert self.processes is not None
        bodies = [
            json.dumps(body(r.prompt, r.max_tokens, r.n, load.sampling)) for r in load.requests
        ]
        self.processes.wake()
        try:
            with ThreadPoolExecutor(len(bodies)) as senders:
                try:
                    began = time.perf_counter()
                    answers = list(senders.map(self._post, bodies))
                    seconds = time.perf_counter() - began
                except BaseException:
                    # otherwise the senders, which wait for the server, would be joined
                    self.stop()
                    raise
        finally:
            if self.processes is not None:
                self.processes.sleep()
        return made_of(seconds, answers)

    def memory(self) -> int:
        return self.processes.memory() if self.processes else 0

    def peak_memory(self) -> int:
        return self.processes.peak_memory() if self.processes else 0

    def cpu_seconds(self) -> float:
        return self.processes.cpu_seconds() if self.processes else 0.0

    def stop(self) -> None:
        if self.processes is not None:
            self.processes.stop()
            self.processes = None

    def _post(self, body: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode()
        connection.close()
        if response.status != 200:
            raise PeerFailed(f"llama-server answered {response.status}: {answer[:300]}")
        return answer

    def _wait_until_healthy(self) -> None:
        assert self.processes is not None
        deadline = time.perf_counter() + LOAD_LIMIT
        while time.perf_counter() < deadline:
            self.processes.require_alive()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise PeerFailed(
            f"llama-server was not ready after {LOAD_LIMIT:.0f} s; its log is {self.log}."
        )


def body(prompt: tuple[int, ...], max_tokens: int, n: int, sampling: Any) -> dict[str, Any]:
    """Return a request to /completion that samples the whole vocabulary at temperature 1 and ends
    only at `max_tokens`, unless overridden.
    """
    penalties = {
        "presence_penalty": sampling.get("presence_penalty", 0.0),
        "frequency_penalty": sampling.get("frequency_penalty", 0.0),
        "repeat_penalty": sampling.get("repetition_penalty", 1.0),
        "repeat_last_n": len(prompt) + max_tokens,  # all of them
    }
    asks = any(name.endswith("penalty") for name in sampling)
    filters = [name for name in ("top_k", "top_p") if name in sampling]
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "ignore_eos": sampling.get("ignore_eos", True),
        "temperature": sampling.get("temperature", 1.0),
        "top_k": sampling.get("top_k", 0),
        "top_p": sampling.get("top_p", 1.0),
        "min_p": 0.0,
        "samplers": [*(["penalties"] if asks else []), *filters, "temperature"],
        "cache_prompt": True,
        "return_tokens": True,
        "stream": False,
        **{name: sampling[name] for name in ("seed", "json_schema") if name in sampling},
        **(penalties if asks else {}),
        **({"n_cmpl": n} if n > 1 else {}),
    }


def made_of(seconds: float, answers: Iterable[str]) -> Made:
    """Return the totals of a run from llama-server's answers. Each answer holds one result or
    several.
    """
    results: list[dict[str, Any]] = []
    for answer in answers:
        told = json.loads(answer)
        results += told.get("results", [told]) if isinstance(told, dict) else told
    times = [result.get("timings", {}) for result in results]
    return Made(
        seconds,
        sum(len(result["tokens"]) for result in results),
        sum(each.get("draft_n", 0) for each in times),
        sum(each.get("draft_n_accepted", 0) for each in times),
    )


def gguf_of(folder: Path, cache: Path) -> Path:
    """Return the model as bf16 GGUF in the cache, converted at its first use. Raises
    `PeerFailed`.
    """
    out = cache / "gguf" / f"{folder.name}-bf16.gguf"
    converter = [sys.executable, "-m", "benchmarks.peers.gguf", str(llama_source(cache))]
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        output_of([*converter, str(folder), str(out)])
    return out


def quantised(plain: Path, kind: str, cache: Path) -> Path:
    """Quantize a bf16 GGUF with llama-quantize at its first use, into the same folder. Raises
    `PeerFailed`.
    """
    out = plain.with_name(f"{plain.name.removesuffix('-bf16.gguf')}-{kind}.gguf")
    if not out.exists():
        partial = out.with_suffix(".partial")
        output_of([str(llama_bin(cache) / "llama-quantize"), str(plain), str(partial), kind])
        partial.rename(out)
    return out


def perplexity(gguf: Path, text: Path, context: int, threads: int, cache: Path) -> float:
    """Run llama-perplexity on pieces of `context` tokens. The tokens after the first one of each
    second half count. Raises `PeerFailed`.
    """
    tool = [str(llama_bin(cache) / "llama-perplexity"), "-m", str(gguf), "-f", str(text)]
    said = output_of([*tool, "-c", str(context), "-t", str(threads), "-tb", str(threads)])
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
    if found is None:
        raise PeerFailed(f"llama-perplexity reported no perplexity of {gguf.name}:\n{said[-800:]}")
    return float(found[1])


def output_of(command: Sequence[str]) -> str:
    """Return both streams of one of llama.cpp's tools. Raises `PeerFailed` if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-8:])
        raise PeerFailed(f"`{' '.join(command)}` failed with status {done.returncode}:\n{last}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return this environment without variables for our own process, so that a peer's threads wait
    by its own settings.
    """
    unwanted = ("OMP_", "KMP_", "GOMP_", "PYTHON", "LD_PRELOAD", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
