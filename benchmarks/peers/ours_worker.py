"""`python -m benchmarks.peers.ours_worker OPTIONS`: this engine as one of the peers, in a process
of its own.
"""

import json
import sys
import time
from typing import Any

from benchmarks.peers.channel import open_channel, serve


def main() -> None:
    answers = open_channel()
    from benchmarks.ours import Options, described, opened, run
    from benchmarks.workloads import Request, Workload

    options = Options(**json.loads(sys.argv[1]))
    with opened(options) as engine:

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            requests = tuple(
                Request(tuple(prompt), length, n) for prompt, length, n in question["requests"]
            )
            load = Workload("peers", "", requests, question["sampling"])
            engine.flush_cache()
            began = time.perf_counter()
            tokens = run(engine, load)
            return {"seconds": time.perf_counter() - began, "tokens": tokens}

        serve(answers, answer, {"config": described(engine)})


if __name__ == "__main__":
    main()
