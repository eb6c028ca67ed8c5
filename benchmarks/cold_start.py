"""A fresh process up to its first token, then W2: `python -m benchmarks.cold_start OPTIONS`. Prints
times and memory.

`latency` runs this program, passes the options as JSON and measures the time from outside.
"""

import time

BEGAN = time.perf_counter()  # before the imports, which are part of the measured time

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.ours import Options, opened, run  # noqa: E402
from benchmarks.workloads import workload  # noqa: E402


def memory(field: str) -> int | None:
    """Return this process's memory in bytes by Linux's account, None on other systems.

    `getrusage` does not work here: its maximum includes the parent process.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")]
    return values[0] if values else None


def main() -> None:
    imported = time.perf_counter()
    options = Options(**json.loads(sys.argv[1]))
    with opened(options) as engine:
        loaded, after_load = time.perf_counter(), memory("VmRSS")
        run(engine, workload("W1").cut(1))
        first = time.perf_counter()
        print("first token", flush=True)
        run(engine, workload("W2"))
        report = {
            "imports": imported - BEGAN,
            "load": loaded - imported,
            "first": first - loaded,
            "after_load": after_load,
            "peak": memory("VmHWM"),
        }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
