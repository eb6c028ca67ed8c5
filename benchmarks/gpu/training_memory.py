"""Memory of training on one card, by arithmetic: `python -m benchmarks.gpu.training_memory`.

Nothing is measured. The rest of the card holds the KV cache, the engine's workspace and graphs, and
what torch's allocator cannot use.
"""

import math
from dataclasses import dataclass

from benchmarks.gpu.scale import QWEN3_8B
from benchmarks.measure import show
from nano_inference.checkpoints.lora import LoraSettings, chosen
from nano_inference.models.parameters.storage import num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cuda.gradients import CudaGradients
from nano_inference.rl.activations import recomputes

CARD = 80 * 2**30
GIB = 2**30
FLOAT = 4  # bytes of float32


@dataclass(frozen=True)
class Training:
    """A trainer next to an engine that serves bfloat16.

    Attributes:
        spec: Model.
        rows: Rows of a micro-batch.
        adapter: Settings of the only trained weights. None: all weights are trained.
        itemsize: Bytes of a trained number: 4 for float32, 2 for bfloat16.
        recompute_activations: As in `PolicyModel`.
    """

    spec: ModelSpec
    rows: int = 512
    adapter: LoraSettings | None = None
    itemsize: int = FLOAT
    recompute_activations: bool | None = None

    @property
    def served(self) -> int:
        """Bytes of one set of the model's weights."""
        import torch

        return num_bytes(param_table(self.spec), torch.bfloat16)

    @property
    def trained(self) -> int:
        """Number of trained numbers."""
        if self.adapter is None:
            return sum(math.prod(param.shape) for param in param_table(self.spec))
        shapes = (target.slot.shape for target in chosen(self.spec, self.adapter.targets))
        return sum(self.adapter.rank * (out + width) for out, width in shapes)

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part at the peak of a step."""
        return {
            # one set serves, another scores; an adapter is scored on top of the first
            "weights": self.served * (2 if self.adapter is None else 1),
            # of the engine's dtype, the set that scores is the parameters
            "parameters": self.trained * self.itemsize if self.adapter or self.itemsize > 2 else 0,
            "gradients": self.trained * FLOAT,
            "AdamW's moments": 2 * self.trained * self.itemsize,
            "activations": self.activations(),
        }

    def activations(self) -> int:
        """Return the bytes of a backward pass's rows."""
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        state, layers = layer_bytes(self.spec), self.spec.num_layers
        again = recomputes(self.recompute_activations, self.rows)
        kept = layers * FLOAT * hidden + state if again else layers * state
        # gradients of an MLP's rows, of which those of its first product are also rounded
        working = 16 * inner + 2 * FLOAT * hidden
        logits = CudaGradients.most_logits * (FLOAT + 2)
        return self.rows * (kept + working) + logits

    def rest(self) -> int:
        """Return the bytes of a card that remain."""
        return CARD - sum(self.parts().values())


def layer_bytes(spec: ModelSpec, itemsize: int = 2) -> int:
    """Return the bytes of a row's `AttentionState` and `MlpState`, with products of `itemsize`."""
    hidden, inner, wide = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    columns = wide + 2 * spec.num_kv_heads * spec.head_dim
    norms_after = sum(
        param.name.startswith("layers.0.") and param.name.endswith("_out_norm")
        for param in param_table(spec)
    )
    attention = (FLOAT + itemsize) * (hidden + columns) + itemsize * wide + FLOAT * spec.num_heads
    mlp = (FLOAT + itemsize) * hidden + (2 * FLOAT + itemsize) * inner
    return attention + mlp + norms_after * FLOAT * hidden


def trainings() -> dict[str, Training]:
    """Return the rows of the table in docs/gpu.md."""
    spec = spec_from_config(QWEN3_8B)
    return {
        "adapter of rank 16": Training(spec, adapter=LoraSettings()),
        "all weights, bfloat16": Training(spec, itemsize=2),
        "all weights, float32": Training(spec),
    }


def main() -> None:
    """Print a table in GiB."""
    rows = [
        {"training": name, "rest": each.rest()} | each.parts() for name, each in trainings().items()
    ]
    names = ["training", *Training.parts(next(iter(trainings().values()))), "rest"]
    columns = {
        name: (lambda row, name=name: row[name] if name == "training" else row[name] / GIB)
        for name in names
    }
    show("GiB of a card of 80", columns, rows)


if __name__ == "__main__":
    main()
