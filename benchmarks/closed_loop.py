"""The bare engine in a process, as the baseline of a server: `python -m benchmarks.closed_loop
OPTIONS`.

The process answers two questions in JSON lines (see `peers.channel`). `prompts` runs the closed
loop that a load sends to a server, with a constant number of requests in flight, and returns
seconds, tokens and CPU seconds. `singles` streams one request after another and returns the seconds
until each first token.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.channel import open_channel, serve
from nano_inference import InferenceEngine, SamplingParams


def closed_loop(
    engine: InferenceEngine, prompts: Sequence[list[int]], params: SamplingParams, concurrency: int
) -> dict[str, Any]:
    waiting, tokens = iter(prompts), 0
    began, busy = time.perf_counter(), time.process_time()
    # in this order, so that no prompt is dropped
    for _, prompt in zip(range(concurrency), waiting, strict=False):
        engine.add_request(prompt, params)
    while engine.has_pending():
        for sample in engine.step():
            tokens += len(sample.completion_tokens)
            if (prompt := next(waiting, None)) is not None:
                engine.add_request(prompt, params)
    return {
        "seconds": time.perf_counter() - began,
        "tokens": tokens,
        "cpu_s": {"engine": time.process_time() - busy},
    }


def first_tokens(
    engine: InferenceEngine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[float]:
    found: list[float] = []
    for prompt in prompts:
        began, first = time.perf_counter(), None
        for delta in engine.generate([prompt], params, stream=True, progress=False):
            if first is None and delta.token_ids:
                first = time.perf_counter() - began
        assert first is not None
        found.append(first)
    return found


def answer(engine: InferenceEngine, question: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(max_tokens=question["output_tokens"], temperature=1.0, ignore_eos=True)
    if "singles" in question:
        return {"first_tokens": first_tokens(engine, question["singles"], params)}
    return closed_loop(engine, question["prompts"], params, question["concurrency"])


def main() -> None:
    answers = open_channel()
    from benchmarks.ours import Options, described, opened

    with opened(Options(**json.loads(sys.argv[1]))) as engine:
        serve(answers, lambda question: answer(engine, question), {"config": described(engine)})


if __name__ == "__main__":
    main()
