"""Parameters of a model's layers that operations read. This module must not import torch: a server
reads config.json without it.
"""

from typing import Literal, NamedTuple

# gpt-oss's expert gate: SLOPE multiplies the sigmoid's argument, CLAMP bounds gate and up
SLOPE, CLAMP = 1.702, 7.0


class Routing(NamedTuple):
    """Rule that selects and weighs a row's experts from the router's logits. Ties are broken by the
    lower expert id.

    Attributes:
        per_token: Number of experts per row: those with the highest scores. A correction bias may
            be added to the scores, for this selection only.
        renormalized: If True, a row's weights are its experts' scores divided by their sum;
            otherwise the scores themselves.
        scores: Softmax of the logits over all experts, or the sigmoid of each logit.
        scale: Factor applied to the weights.
        floor: Lower bound of the divisor of the weights.
        groups: Number of groups of consecutive experts.
        groups_kept: Number of groups that a row may select experts from: the best ones.
        group_best: Number of a group's best experts whose scores add up to the score of the group.
        logit_scale: Factor applied to the logits before a bias is added.
    """

    per_token: int
    renormalized: bool
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    floor: float = 0.0
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 1
    logit_scale: float = 1.0


class Latent(NamedTuple):
    """Sizes of attention over latents.

    Attributes:
        rank: Numbers per latent.
        rotary: Rotated numbers per key. All heads share them.
        plain: Unrotated numbers per query head.
        value: Numbers per value head.
    """

    rank: int
    rotary: int
    plain: int
    value: int

    @property
    def key(self) -> int:
        """Numbers per key, and per query multiplied with it: the rotated ones, then the
        latent's.
        """
        return self.rotary + self.rank
