"""The cost of receipts: their verification against a prefill of the same tokens, which computes
logits only at the last row, and against a scoring pass, which computes them at each completion
token. The chain and the hash of the weights against generation. Compared measurements run in turns.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.measure import Row, Stopwatch, show
from benchmarks.ours import Options, described, opened
from benchmarks.rl import figure, ratio, token_ids
from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.data.receipts import receipt_of
from nano_inference.rl import score
from nano_inference.rl.verifier import Verifier

GROUPS, MEMBERS, COMPLETION = 2, 4, 64
# A prompt of whole blocks is the worst case: the row before the first token is scored, so each
# sample computes the last block of its prompt again.
PROMPTS = (136, 128)


def measure(options: Options) -> list[Row]:
    """Return the rows of all measurements."""
    rows: list[Row] = []
    with opened(options, quantization=None, enable_prefix_caching=True) as engine:
        for prompt in PROMPTS:
            rows += _rows_of_samples(engine, options.repeats, prompt)
        rows.append(_row_of_weights(engine, options.repeats))
        rows[0]["engine"] = described(engine)
    show("receipts", {"what": lambda row: row["name"], "ms, or ratio": figure}, rows)
    return rows


def _rows_of_samples(engine: InferenceEngine, repeats: int, prompt: int) -> list[Row]:
    params = SamplingParams(max_tokens=COMPLETION, ignore_eos=True, receipt=True, seed=1)
    rng = random.Random(0)
    prompts = [token_ids(rng, prompt) for _ in range(GROUPS)]
    watches = {each: Stopwatch() for each in ("generate", "prefill", "score", "verify", "chain")}
    verifier = Verifier(engine)
    for warm in range(repeats + 1):
        used = watches if warm else {each: Stopwatch() for each in watches}
        engine.flush_cache()
        samples = used["generate"].time(lambda: engine.generate(prompts, params, MEMBERS))
        for each, run in _runs(engine, verifier, samples).items():
            engine.flush_cache()
            used[each].time(run)
    tokens = f"{GROUPS} x {MEMBERS} samples of {prompt} + {COMPLETION} tokens"
    rows = [watch.row(name=f"{tokens}: {each}") for each, watch in watches.items()]
    seconds = {each: watch.seconds for each, watch in watches.items()}
    for each in ("prefill", "score", "generate"):
        rows.append(ratio(f"{tokens}: verify / {each}", seconds["verify"], seconds[each]))
    rows.append(ratio(f"{tokens}: chain / generate", seconds["chain"], seconds["generate"]))
    return rows


def _runs(
    engine: InferenceEngine, verifier: Verifier, samples: list[TrainingSample]
) -> dict[str, Callable[[], Any]]:
    # the last token is drawn from the row before it, so no row of its own is needed
    rows = [[*sample.prompt_tokens, *sample.completion_tokens[:-1]] for sample in samples]
    whole = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
    prompt = len(samples[0].prompt_tokens)
    first = [row[:prompt] for row in rows[::MEMBERS]]
    params = SamplingParams(temperature=0, max_tokens=1)

    def prefill() -> None:
        engine.generate(first, params)  # so that groups share their prompts, as in `score`
        engine.generate(rows, params)

    def verify() -> None:
        assert {verdict.outcome for verdict in verifier.verify(samples)} == {"true"}

    return {
        "prefill": prefill,
        "score": lambda: score(engine, whole, from_position=prompt),
        "verify": verify,
        "chain": lambda: [
            receipt_of(replace(sample, receipt=None), sample.receipt.weights)
            for sample in samples
            if sample.receipt is not None
        ],
    }


def _row_of_weights(engine: InferenceEngine, repeats: int) -> Row:
    watch = Stopwatch()
    for _ in range(repeats):
        watch.time(engine.weight_sync.content_hash)
    size = sum(tensor.nbytes for tensor in engine.weight_sync.state_dict().values())
    return watch.row(name="hash of the weights, once per version", bytes=size)
