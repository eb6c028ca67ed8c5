"""`CapturedStage`: the part of a trunk that a pipeline stage captures.

Messages between stages stay outside of graphs: a message has a step's rows, a graph a padded number
of rows, and one stage may replay a step that another computes eagerly. So the residual stream
arrives at a fixed address before a replay, and leaves from the graph's output after it.
"""

from typing import Any

import torch
from torch import Tensor

from nano_inference.device.queues import Captured
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch
from nano_inference.ops.interface import KvcacheView, Operations, X


class CapturedStage:
    """Trunk of a model without its messages, and replays with them.

    Args:
        model: Model whose trunk is captured.
        largest: Rows of the largest graph.
    """

    def __init__(self, model: Decoder, largest: int) -> None:
        self._model = model
        self._received: Tensor | None = None
        if not model.is_first_stage:
            shape = (largest, model.spec.hidden_size)
            self._received = torch.zeros(shape, dtype=torch.float32, device=model.device)

    def trunk(self, ops: Operations[X], batch: ForwardBatch, view: KvcacheView) -> X:
        """Compute `Decoder.stage` from the stream that `replay` has received."""
        stream = self._received
        # on a GPU, `X` includes tensors
        received: Any = None if stream is None else stream[: len(batch.input_ids)]
        return self._model.stage(ops, batch, view, received)

    def replay(self, graph: Captured, batch: ForwardBatch) -> Tensor:
        """Replay a captured trunk, and return the rows of a batch without its padding: [N, H],
        valid until the next replay.
        """
        exchange, rows = self._model.rank_exchange, len(batch.input_ids)
        if self._received is not None:
            exchange.receive(batch, self._received[:rows])
        graph.replay()
        out = graph.output[:rows]
        if not self._model.is_last_stage:
            exchange.pass_on(out)
        return out
