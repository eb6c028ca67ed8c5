"""Reference logprobs: a frozen model scores each finished sample before the caller gets it."""

from dataclasses import dataclass

from nano_inference.core.apply import enter
from nano_inference.core.sequence import REFERENCE, CheckedRequest, Sequence, Sequences
from nano_inference.types import TrainingSample


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Called with each sequence that finishes, and its samples; returns those that are complete.

    Where there is a reference model, a sample waits for its scores. They are computed by a sequence
    of no samples, in the queue with all others.
    """

    sequences: Sequences
    block_size: int

    def __call__(self, seq: Sequence, samples: list[TrainingSample]) -> list[TrainingSample]:
        """An `OnFinish` hook."""
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
