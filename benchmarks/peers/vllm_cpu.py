"""vLLM's settings, and the start of a worker with one of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.install import tcmalloc, vllm_python
from benchmarks.peers.llama_cpp import clean_environment
from benchmarks.peers.process import Worker

KV_GIB = 4


@dataclass(frozen=True)
class VllmSetting:
    """Settings that may affect vLLM's speed on a CPU.

    Attributes:
        eager: Run without torch.compile.
        intel_openmp: Preload the OpenMP runtime from the wheel, as vLLM's documentation advises.
        own_process: Run the engine in a separate process, vLLM's default.
        batched_tokens: Tokens per step.
        set_threads: Set OMP_NUM_THREADS. Otherwise vLLM sets the threads of the workers, and torch
            those outside of them.
        ngram: Limit on the tokens that the n-gram drafter proposes. 0: no drafts.
        kv_gib: Memory of the KV cache in GiB.
    """

    eager: bool = False
    intel_openmp: bool = True
    own_process: bool = True
    batched_tokens: int = 4096
    set_threads: bool = True
    ngram: int = 0
    kv_gib: int = KV_GIB


SETTINGS = {
    "compiled": VllmSetting(),
    "compiled, threads unset": VllmSetting(set_threads=False),
    "compiled, one process": VllmSetting(own_process=False),
    "compiled, 2048 a step": VllmSetting(batched_tokens=2048),
    "compiled, 8192 a step": VllmSetting(batched_tokens=8192),
    "compiled, GNU OpenMP": VllmSetting(intel_openmp=False),
    "eager": VllmSetting(eager=True),
    "eager, GNU OpenMP": VllmSetting(eager=True, intel_openmp=False),
}
DEFAULTS: Mapping[str, str] = {}
# One stream with drafts: continuations of the last 2 to 4 tokens in the sequence's own text.
DRAFTS = {
    "no drafts": VllmSetting(kv_gib=1),
    "ngram": VllmSetting(kv_gib=1, ngram=4),
}
LONGEST_MATCH, SHORTEST_MATCH = 4, 2


def vllm_worker(
    setting: str, model: Path, dtype: str, threads: int, cache: Path, log: Path
) -> Worker:
    """Start vLLM. Raises `PeerFailed`."""
    chosen = (SETTINGS | DRAFTS)[setting]
    told = environment(chosen, threads, cache)
    arguments = {
        "model": str(model),
        "dtype": dtype,
        "eager": chosen.eager,
        "batched_tokens": chosen.batched_tokens,
        "speculative": drafter(chosen.ngram),
    }
    command = [str(vllm_python(cache)), "-m", "benchmarks.peers.vllm_worker", json.dumps(arguments)]
    shown = {
        name: value
        for name, value in told.items()
        if name.startswith(("VLLM_CPU", "VLLM_ENABLE", "OMP", "KMP"))
    }
    preloaded = [Path(name).name for name in told["LD_PRELOAD"].split(":") if name]
    config = f"vLLM, {dtype}, {chosen}, preloaded {preloaded}, {shown}"
    return Worker("vllm", setting, command, clean_environment() | told, log, config)


def drafter(most: int) -> dict[str, Any] | None:
    """Return vLLM's config of an n-gram drafter with this many tokens. None: no drafter."""
    if not most:
        return None
    return {
        "method": "ngram",
        "num_speculative_tokens": most,
        "prompt_lookup_max": LONGEST_MATCH,
        "prompt_lookup_min": SHORTEST_MATCH,
    }


def environment(setting: VllmSetting, threads: int, cache: Path) -> dict[str, str]:
    preload = [str(cache / "vllm" / "lib" / "libiomp5.so")] if setting.intel_openmp else []
    variables = {
        "LD_PRELOAD": ":".join(preload + tcmalloc()),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(setting.own_process)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if setting.set_threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    if setting.intel_openmp:
        barriers = {
            f"KMP_{kind}_BARRIER_PATTERN": "dist,dist"
            for kind in ("FORKJOIN", "PLAIN", "REDUCTION")
        }
        variables |= {"KMP_BLOCKTIME": "1", "KMP_TPAUSE": "0", **barriers}
    return variables
