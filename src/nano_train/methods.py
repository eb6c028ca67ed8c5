"""The table of training methods: which advantage, ratio and aggregation each has, by its source.

With r the policy's ratio to the sampler, A the advantage and clip(r) = min(max(r, 1 - low),
1 + high), a token's (or a sequence's) term of the loss is -min(r * A, clip(r) * A). `[loss]` of
run.toml can change every column, so a row is a set of defaults.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["rl", "sft", "distill"]

# group: (reward - mean) / deviation of the group's rewards. centred: reward - mean. leave-one-out:
# reward - mean of the group's other rewards.
Advantage = Literal["group", "centred", "leave-one-out"]

# token: exp(p - q) of each token. sequence: exp(mean of p - q) of each sample. none: the term is
# -A * p, without a ratio (REINFORCE).
Ratio = Literal["token", "sequence", "none"]

# token: mean over all tokens of the batch. sample: mean over the tokens of a sample, then over
# samples. constant: sum over tokens, divided by samples * max_tokens. sum: sum over the tokens of a
# sample, then mean over samples.
Aggregation = Literal["token", "sample", "constant", "sum"]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        kind: Origin of tokens and loss: rewarded samples, answers, or a teacher.
        advantage, ratio, aggregation: Columns of the loss of rewarded samples.
        clip_low, clip_high: Distances from 1 at which the ratio is clipped.
        source: Publication of the method, and its parts that are missing here.
    """

    kind: Kind
    source: str
    advantage: Advantage = "group"
    ratio: Ratio = "token"
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2


METHODS: dict[str, Method] = {
    "grpo": Method(
        "rl",
        "Shao et al., DeepSeekMath, arXiv:2402.03300, equation 3; its KL term is `loss.kl`",
        aggregation="sample",
    ),
    "dr-grpo": Method(
        "rl",
        "Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2",
        advantage="centred",
        aggregation="constant",
    ),
    "dapo": Method(
        "rl",
        "Yu et al., DAPO, arXiv:2503.14476, sections 3.1 and 3.3: clip-higher and token-level "
        "loss; without dynamic sampling and overlong reward shaping",
        clip_high=0.28,
    ),
    "rloo": Method(
        "rl",
        "Ahmadian et al., Back to Basics, arXiv:2402.14740, section 3.2",
        advantage="leave-one-out",
        ratio="none",
        aggregation="sum",
    ),
    "gspo": Method(
        "rl",
        "Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 to 7",
        ratio="sequence",
        aggregation="sample",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "sft": Method("sft", "mean negative logprob of the answers' tokens"),
    "distill": Method(
        "distill",
        "Agarwal et al., On-Policy Distillation, arXiv:2306.13649: a teacher grades the student's "
        "own samples over the whole vocabulary",
    ),
}
