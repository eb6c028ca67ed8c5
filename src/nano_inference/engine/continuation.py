"""Samples of one request that another engine began, gone on with as one request here."""

from collections.abc import Sequence as Listed

from nano_inference.engine.delivery import Sink
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.loop import Add
from nano_inference.errors import InvalidRequest
from nano_inference.scheduling.sequence import REFERENCE, Group, Sequence
from nano_inference.text.output_text import OutputText
from nano_inference.types import TrainingSample


def go_on(
    engine: InferenceEngine,
    samples: Listed[TrainingSample],
    sink: Sink,
    *,
    stream: bool,
    request_id: int,
    num_wanted: int | None = None,
    max_staleness: int | None = None,
    version: int | None = None,
) -> None:
    """Go on with partial samples of one request, token for token as if they had been sampled here.

    Args:
        engine: by its numerics; others would draw other bits.
        samples: what is known of them, all of one request; of which some may have no token yet.
        sink: as in `InferenceEngine.submit`; it takes what is new.
        stream: as there.
        request_id: a new one.
        num_wanted: how many of these are wanted, as in `add_request`.
        max_staleness: as in `add_request`.
        version: go on with these weights, where they still serve somebody
            (`kv_policy="finish_old"`), and then wait for the step that runs; else with those that
            serve.

    Raises `InvalidRequest` for what cannot be gone on with, with nothing changed.
    """
    shared, loop = engine.shared, engine.loop
    shared.require_alive()
    group = Group(num_wanted) if num_wanted is not None else None
    sequences = list[Sequence]()
    for sample in samples:
        seq = engine.intake.resumed(sample, (), None, stream=stream)
        is_judged = REFERENCE in loop.sequences.versions
        if seq.num_completion_tokens and (
            _may_have_ended(seq, is_judged) or _has_stopped(seq, engine)
        ):
            raise InvalidRequest("the sample may have ended; nobody knows.")
        seq.request_id, seq.group, seq.max_staleness = request_id, group, max_staleness
        sequences.append(seq)
    if version is None:
        shared.delivery.open(request_id, len(sequences), sink)
        for seq in sequences:
            shared.post(Add(seq))
        return
    with shared.lock:
        shared.handle()
        weight_set = engine.weight_set_of(version)
        shared.delivery.open(request_id, len(sequences), sink)
        for seq in reversed(sequences):
            seq.weight_set = weight_set
            shared.enqueue_first(seq)


def _may_have_ended(seq: Sequence, is_judged: bool) -> bool:
    """Whether its last token may have been its last: one that waited for its reference logprobs
    looks like this.
    """
    ended = seq.token_ids[-1] in seq.stop_ids and seq.num_completion_tokens > seq.params.min_tokens
    return ended or (is_judged and bool(seq.params.stop))


def _has_stopped(seq: Sequence, engine: InferenceEngine) -> bool:
    """Whether its text holds a stop string already: tokens come before the word that they were the
    last ones.
    """
    if not seq.params.stop:
        return False
    text, tokens = (
        OutputText(engine.tokenizer, seq.params.stop),
        seq.token_ids[seq.num_prompt_tokens :],
    )
    return any(
        text.append(token_id, count > seq.params.min_tokens)
        for count, token_id in enumerate(tokens, start=1)
    )
