"""What operations are told of a model's layers. Nothing here imports torch: a server reads
config.json without it.
"""

from typing import Literal, NamedTuple

# of the gate of gpt-oss's experts: what its sigmoid multiplies, and what bounds both of its sides
SLOPE, CLAMP = 1.702, 7.0


class Routing(NamedTuple):
    """How a row's experts are chosen and weighed, from the router's logits. Of experts that are as
    good as each other the one with the lower id is chosen.

    Attributes:
        per_token: experts that each row goes through: those of the highest scores, to which a
            correction bias may be added for the choice alone.
        renormalized: the weights of a row's experts are their scores divided by the sum of these;
            else they are the scores.
        scores: the logits' softmax over all experts, or the sigmoid of each.
        scale: multiplies the weights.
        floor: the least that weights are divided by.
        groups: the experts are so many groups of neighbours.
        groups_kept: so many of them, the best ones of a row, are those that it may choose of.
        group_best: a group is as good as so many of its best experts together.
        logit_scale: multiplies the products that are the logits, before a bias is added.
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
    """The sizes of attention over latents.

    Attributes:
        rank: numbers of a latent.
        rotary: numbers of a token's key that turn, which all heads have in common.
        plain: numbers of a head's query that do not turn.
        value: numbers of a head's values.
    """

    rank: int
    rotary: int
    plain: int
    value: int

    @property
    def key(self) -> int:
        """Numbers of a key, and of a query that meets it: those that turn, then the latent's."""
        return self.rotary + self.rank
