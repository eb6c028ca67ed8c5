"""`python -m tests.simulation.run`: run thousands of random workloads through the real loop, and
print a JSON summary.
"""

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path

from tests.simulation.workload import Outcome, random_workload, run, with_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", type=int, default=3000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--groups", type=int, default=1, help="of sequences that take turns in a pipeline"
    )
    parser.add_argument("--log", type=Path, default=None, help="where to write the summary")
    arguments = parser.parse_args()
    began, total = time.perf_counter(), Outcome()
    lookahead_one = radix = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.workloads):
        workload = random_workload(seed)
        if arguments.groups > 1:
            workload = with_groups(workload, arguments.groups)
        lookahead_one += workload.lookahead == 1
        radix += workload.cache_type == "radix"
        try:
            outcome = run(workload)
        except Exception as problem:
            raise SystemExit(f"workload {seed}: {type(problem).__name__}: {problem}") from problem
        for name in fields(Outcome):
            setattr(total, name.name, getattr(total, name.name) + getattr(outcome, name.name))
    summary = {
        "workloads": arguments.workloads,
        "first_seed": arguments.first_seed,
        "groups": arguments.groups,
        "with_lookahead_1": lookahead_one,
        "with_radix": radix,
        "failures": 0,
        "seconds": round(time.perf_counter() - began, 1),
        **{name.name: getattr(total, name.name) for name in fields(Outcome)},
    }
    print(json.dumps(summary, indent=2))
    if arguments.log is not None:
        arguments.log.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
