"""Embeddings: the policy's hidden state after the last token of a prompt. It is the row from which
the next token would be drawn, computed in the loop with all other requests.
"""

from collections.abc import Generator
from collections.abc import Sequence as Listed
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from nano_inference.arrays import HostArray, as_host, namespace
from nano_inference.core.batch import Chunks
from nano_inference.core.sequence import Sequence
from nano_inference.device.runner import ModelRunner
from nano_inference.drafts.drawn_rows import DrawnRows
from nano_inference.engine import generation
from nano_inference.engine.intake import Intake
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import RequestAborted
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ranks.parts import require_one_rank
from nano_inference.types import SamplingParams


def embed(
    shared: SharedLoop, intake: Intake, runner: ModelRunner, prompts: Any, adapter: str | None
) -> list[HostArray]:
    """Return the hidden state after each prompt, as `InferenceEngine.embed` documents, but as host
    arrays.
    """
    shared.require_alive()
    require_one_rank(runner, "embed")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, adapter=adapter)
    requests = intake.sequences(prompts, params, 1, False, embeds=True)
    states: dict[int, HostArray] = {}
    with _rows_of(shared) as rows:

        def take(seq: Sequence) -> None:
            row = rows.of(seq, len(seq.token_ids) - 1)
            if row is not None:
                copy = row.to("cpu", namespace(row).float32, copy=True)
                states[seq.request.request_id] = as_host(copy)

        for seq in requests:
            seq.request = replace(seq.request, at_end=take)
        with closing(generation.run(shared, requests, progress=False)) as deltas:
            for _ in deltas:
                pass
    ids = [seq.request.request_id for seq in requests]
    if any(each not in states for each in ids):
        raise RequestAborted("a prompt was aborted before it was computed; embed it again.")
    return [states[each] for each in ids]


@contextmanager
def _rows_of(shared: SharedLoop) -> Generator[DrawnRows]:
    """Yield the rows that steps draw from, while the context lasts."""
    loop, rows = shared.loop, DrawnRows()

    def see(chunks: Chunks, batches: Listed[ForwardBatch], result: Any) -> None:
        if hidden := [each for _, each, _ in result.drawn]:
            rows.keep(chunks, namespace(hidden[0]).cat(hidden))

    with shared.lock:  # other threads add and remove watches too
        loop.watch(see)
    try:
        yield rows
    finally:
        with shared.lock:
            loop.unwatch(see)
