"""Run this engine as a peer, in a separate process: `python -m benchmarks.peers.ours_worker OPTIONS
[CHANGES]`.

CHANGES are fields of `EngineConfig`, as JSON.
"""

import json
import sys
import time
from typing import Any

from benchmarks.peers.channel import open_channel, serve


def main() -> None:
    answers = open_channel()
    from benchmarks.ours import Options, arguments, described, opened
    from benchmarks.workloads import Request, Workload
    from nano_inference import Grammar, InferenceEngine
    from nano_inference.engine.scoring import ScoreRequest, score_tokens
    from nano_inference.models.parameters.storage import formats_of, num_bytes
    from nano_inference.models.parameters.table import param_table

    options = Options(**json.loads(sys.argv[1]))
    changes = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}

    def drafts(engine: InferenceEngine) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted drafts so far."""
        found = engine.stats().speculation
        counts = (found.drafted, found.accepted) if found else ({}, {})
        drafted, accepted = (sum(map(sum, each.values())) for each in counts)
        return drafted, accepted

    with opened(options, **changes) as engine:

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            if "score" in question:
                scores = score_tokens(engine, [ScoreRequest(each, 1) for each in question["score"]])
                return {"logprobs": [list(each.logprobs) for each in scores]}
            requests = tuple(
                Request(tuple(prompt), length, n) for prompt, length, n in question["requests"]
            )
            sampling = dict(question["sampling"])
            if "json_schema" in sampling:
                sampling["grammar"] = Grammar.json_schema(sampling.pop("json_schema"))
            load = Workload("peers", "", requests, sampling)
            engine.flush_cache()
            before = drafts(engine)
            began = time.perf_counter()
            samples = engine.generate(*arguments(load), progress=False)
            seconds = time.perf_counter() - began
            drafted, accepted = (n - m for n, m in zip(drafts(engine), before, strict=True))
            tokens = sum(len(sample.logprobs) for sample in samples)
            return {
                "seconds": seconds,
                "tokens": tokens,
                "drafted": drafted,
                "accepted": accepted,
            }

        formats = formats_of(engine.model.params)
        size = num_bytes(param_table(engine.spec), engine.model.dtype, formats)
        serve(answers, answer, {"config": described(engine), "weight_bytes": size})


if __name__ == "__main__":
    main()
