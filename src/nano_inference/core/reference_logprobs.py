"""Reference logprobs: a frozen model scores each finished sample before the caller gets it."""

from dataclasses import dataclass

from nano_inference.core.apply import enter
from nano_inference.core.sequence import REFERENCE, CheckedRequest, Sequence, Sequences
from nano_inference.types import TrainingSample


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Hook that withholds finished samples until a reference model has scored them.

    A sequence with `num_samples=0` computes the scores, in the same queue as all other sequences.
    Without a reference model, samples are returned unchanged.
    """

    sequences: Sequences
    block_size: int

    def __call__(self, seq: Sequence, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Return the samples that are complete now. Signature: `OnFinish`."""
        if REFERENCE not in self.sequences.versions:
            return samples
        request = CheckedRequest(
            seq.request_id,
            seq.request.num_prompt_tokens,
            seq.request.params,
            scored=range(seq.request.num_prompt_tokens - 1, len(seq.token_ids) - 1),
            scored_sample=samples[0],
        )
        scorer = Sequence(
            self.sequences.new_id(),
            request,
            seq.token_ids,
            num_samples=0,
            sample_index=seq.sample_index,
            weight_set=REFERENCE,
        )
        enter(scorer, self.sequences, self.block_size)
        return []
