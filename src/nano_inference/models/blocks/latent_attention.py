"""Attention over latents (DeepSeek-V2, arXiv:2405.04434), by `LatentOps` in `ops/interface.py`."""

from nano_inference.models.blocks.attention import Attend, output
from nano_inference.models.blocks.linear import Linear
from nano_inference.models.blocks.step import ModelPart, Step
from nano_inference.ops.interface import LatentWeights, X


class LatentAttention:
    """Attention with a single KV head: the token's latent, which replaces the keys and values of
    all heads.
    """

    def __init__(self, part: ModelPart, layer: int) -> None:
        name, latent = f"layers.{layer}.", part.spec.latent
        assert latent is not None
        norm = part.norm(name + "kv_a_norm")._replace(eps=latent.eps)
        self.weights = LatentWeights(part.params[name + "kv_b"], norm, latent.sizes)
        self.kv_a = Linear(part, name + "kv_a")
        self.q_a = None if latent.query_rank is None else Linear(part, name + "q_a")
        self.q_a_norm = part.norm(name + "q_a_norm")._replace(eps=latent.eps)
        self.q_b = Linear(part, name + "q_b")
        self.attend = Attend(part, layer)
        self.o = output(part, layer)

    def __call__(self, step: Step[X], x: X) -> X:
        attended = self.attend.read(step, self.store(step, x))
        return self.o(step, step.ops.latent.values(attended, self.weights))

    def store(self, step: Step[X], x: X) -> X:
        """Store the latents of rows. Return their queries over latents."""
        batch, attend = step.batch, self.attend
        where = batch.positions, batch.slot_mapping, step.view, attend.layer
        q, c = self.q_b(step, self._query_input(step, x)), self.kv_a(step, x)
        return step.ops.latent.store(q, c, self.weights, attend.rope, *where)

    def _query_input(self, step: Step[X], x: X) -> X:
        """Return the input of the query product: the rows, or a latent of them."""
        if self.q_a is None:
            return x
        return step.ops.rms_norm(None, self.q_a(step, x), self.q_a_norm)[0]
