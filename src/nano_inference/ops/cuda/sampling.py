"""The end of a step: draws and scores from logits."""

from torch import Tensor

from nano_inference.sampling import sample as reference
from nano_inference.sampling.logprobs import gather_logprobs
from nano_inference.sampling.pipeline import divide
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.sampling_batch import SamplingBatch


def draw(logits: Tensor, batch: SamplingBatch) -> Draw:
    """Draw one token for each sample from float32 logits [L, V]; `Ops.sample_logits`."""
    return reference.sample(logits, batch)


def score(logits: Tensor, token_ids: Tensor, temperatures: Tensor) -> Tensor:
    """Logprobs of given tokens [L] from logits [L, V], softmax(logits / temperature): to the bit those of `draw`."""
    return gather_logprobs(divide(logits, temperatures), token_ids)
