"""The exact workload of nano-vllm's `bench.py`: 256 requests of random ids, 100 to 1,024 tokens in
and out.

Source: https://github.com/GeeeekExplorer/nano-vllm/blob/main/bench.py
"""

import random

from benchmarks.workloads import Request, Workload

NUM_REQUESTS, SHORTEST, LONGEST, HIGHEST_ID = 256, 100, 1024, 10_000
PROMPT_TOKENS, OUTPUT_TOKENS = 142_827, 133_966
TEMPERATURE = 0.6
NAME = "nano-vllm"


def nano_vllm(seed: int = 0) -> Workload:
    """Return the workload. Seed 0 is the published one. Another seed gives the same lengths and
    other ids, for warm-up.
    """
    rng = random.Random(0)  # draws of the `random` module after `seed(0)`
    # A prompt's length is drawn before its ids, and all prompts before all lengths of completions.
    prompts = [
        tuple(rng.randint(0, HIGHEST_ID) for _ in range(rng.randint(SHORTEST, LONGEST)))
        for _ in range(NUM_REQUESTS)
    ]
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(NUM_REQUESTS)]
    if seed:
        other = random.Random(seed)
        prompts = [tuple(other.randint(0, HIGHEST_ID) for _ in prompt) for prompt in prompts]
    requests = tuple(
        Request(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)
    )
    what = "256 requests, 100..1,024 -> 100..1,024, T = 0.6"
    return Workload(NAME, what, requests, {"temperature": TEMPERATURE})
