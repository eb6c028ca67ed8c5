"""`replay`: compute a sample again, bit for bit, from its prompt, its seed and its weights.

Bits do not depend on the schedule, so a replay needs no scheduler: it runs the decoder on its own
KV tensors, in fewer steps than the sample has tokens. The sample's tokens serve as a draft, in
whole chunks of rows, and each of them is drawn again from its row. As long as the draws equal the
draft, the later rows read the right tokens. After the first draw that differs, the replay continues
with its own tokens, one row at a time.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nano_inference.arrays import without_gradients
from nano_inference.core.sequence import REFERENCE
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.runner import Sampled
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.receipts import hash_of_adapter
from nano_inference.errors import InvalidRequest
from nano_inference.models.decoder import Decoder, ForwardResult
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.lora import Adapter
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.history import versions_of, was_sampled
from nano_inference.rl.replay_run import (
    NOTHING,
    Chunk,
    Computed,
    DraftGrammar,
    Drawn,
    Draws,
    Run,
    best_of,
)
from nano_inference.rl.versions import VersionedDecoders, Weights
from nano_inference.sampling.tensors import DrawRequest, sampling_batch
from nano_inference.structured.matching import GrammarState
from nano_inference.text.detokenizer import OutputText
from nano_inference.types import SamplingParams, TrainingSample

MOST_ROWS = 128  # rows of a forward pass: limits the memory for logits
MOST_CONTEXT = 4096  # rows of the samples that are replayed together: limits their KV tensors


def replay(
    engine: InferenceEngine, sample: TrainingSample, *, weights: Weights | None = None
) -> TrainingSample:
    """Compute a sample again from its prompt, sampling parameters, seed, sample index and versions.

    The engine's requests and cache are not affected, but its loop pauses meanwhile. Appended tokens
    (`loss_mask`) are taken from the sample. The replay of an aborted sample, or of one that a stop
    string ended, has the same length. Compare the two with `differences`.

    Args:
        engine: Engine with the numerics of the one that made the sample.
        sample: Sample with `sampling_params`, as engines return it.
        weights: Weights of every version in the sample that the engine does not serve now, as a
            mapping by version or a function of the version. Each is a whole state dict or a
            model's folder. Weights passed here take precedence over the engine's. At most two
            versions are in memory simultaneously.

    Returns:
        The sample with replayed `completion_tokens`, `logprobs`, `raw_logprobs`, `log_kept_mass`,
        `sampling_mask`, `top_logprobs`, `prompt_logprobs`, `prompt_top_logprobs`,
        `token_id_logprobs`, `raw_token_id_logprobs`, `prompt_token_id_logprobs`,
        `weight_versions`, `weight_version`, `finish_reason` and `stop_reason`, and
        `ref_logprobs` if the engine has a reference model. Other fields are copied.

    Raises:
        InvalidRequest: Numerics differ, weight versions are missing (the message names them), the
            sample lacks information, or the engine's weights are asleep.
        WeightUpdateError, ModelLoadError: The passed weights do not fit the model.
        EngineDead: The engine was shut down.
    """
    return Replayer(engine, weights).replay(sample)


class Replayer:
    """`replay` for many samples, which share weights and KV tensors."""

    def __init__(self, engine: InferenceEngine, weights: Weights | None = None) -> None:
        require_one_rank(engine.runner, "replay")
        self.engine = engine
        self.decoders = VersionedDecoders(engine, weights)
        self._checks = engine.intake.checks
        self._storages: dict[int, KVStorage] = {}  # by the model's identity

    def check(self, sample: TrainingSample, *, versions: bool = True) -> SamplingParams:
        """Return a sample's parameters, or raise `InvalidRequest` if it cannot be replayed.

        Missing weights are ignored if `versions` is False.
        """
        engine, params = self.engine, sample.sampling_params
        if params is None:
            raise InvalidRequest(
                "the sample has no sampling_params; a replay needs them to repeat its draws."
            )
        if params.logits_processors:
            raise InvalidRequest(
                f"the sample was drawn with the logits processor {params.logits_processors[0]!r}, "
                "which replay does not support; draw it again with its seed."
            )
        if not engine.model.part.is_whole:
            raise InvalidRequest(
                "this engine holds only a part of its model; replay on an engine with one rank "
                "that holds all of it."
            )
        fingerprint = engine.numerics.fingerprint
        if sample.numerics != fingerprint:
            raise InvalidRequest(
                f"the sample's numerics are {sample.numerics!r}, this engine's are "
                f"{fingerprint!r}; replay on an engine with the sample's numerics."
            )
        if not engine.numerics.schedule_invariant:
            raise InvalidRequest(
                f"numerics {fingerprint!r} do not guarantee the same bits under another schedule; "
                "replay on an engine whose numerics do."
            )
        self._checks.token_ids(sample.prompt_tokens)
        self._checks.token_ids(sample.completion_tokens or (0,))
        length = len(sample.completion_tokens)
        drawn = replace(
            params, max_tokens=max(length, 1), min_tokens=min(params.min_tokens, length)
        )
        self._checks.require(len(sample.prompt_tokens), drawn, 1)
        needed = versions_of(sample)
        if versions:
            self.decoders.require(needed)
        return params

    def draws(self, sample: TrainingSample, params: SamplingParams) -> "Draws":
        """Return the rules for a sample's draws.

        Raises `InvalidRequest` if its grammar cannot be compiled.
        """
        stop_ids, grammar = self._checks.stop_ids(params), params.grammar
        rules = self.engine.intake.rules_of(params, len(sample.prompt_tokens))
        text = None
        if params.stop or sample.text is not None:
            tokenizer = self._checks.need_tokenizer("the text of a sample")
            text = partial(OutputText, tokenizer, params.stop)
        draft = None
        if grammar is not None:
            first = GrammarState(grammar, allowed=params.allowed_token_ids)
            self.engine.intake.grammars.wait(first)
            prompt, sampled = len(sample.prompt_tokens), was_sampled(sample)
            after = [prompt + index + 1 for index, own in enumerate(sampled) if not own]
            draft = DraftGrammar(first.fork, [prompt, *after])
        return Draws(sample, params, stop_ids, draft, rules, self._adapter_of(sample), text)

    def _adapter_of(self, sample: TrainingSample) -> Adapter | None:
        """Return the adapter that drew a sample. Raises `InvalidRequest`.

        Versions count within one engine, so the receipt's hash decides if there is one.
        """
        assert sample.sampling_params is not None
        adapter = self.engine.intake.adapter_of(sample.sampling_params.adapter)
        if adapter is None:
            return None
        if (merged := self.engine.intake.live.merged) is not None:
            raise InvalidRequest(
                f"adapter {merged!r} is merged into the weights; call unmerge_adapter() first."
            )
        assert isinstance(adapter, Adapter)
        versions = sorted({span.version for span in sample.adapter_versions})
        if len(versions) > 1:
            raise InvalidRequest(
                f"the sample was drawn with versions {', '.join(map(str, versions))} of adapter "
                f"{adapter.name!r}; replay supports samples of one version."
            )
        known = (
            sample.receipt.adapters[0].sha256 if sample.receipt and sample.receipt.adapters else ""
        )
        if known != hash_of_adapter(adapter) if known else versions not in ([], [adapter.version]):
            raise InvalidRequest(
                f"the sample was drawn with version {versions[0]} of adapter {adapter.name!r}, and "
                "the engine has another one; load the adapter that drew it."
            )
        return adapter

    def replay(self, sample: TrainingSample) -> TrainingSample:
        """Replay one sample, as the function `replay` does."""
        return self.replay_many([sample])[0]

    @without_gradients
    def replay_many(
        self, samples: Sequence[TrainingSample], *, to_first_difference: bool = False
    ) -> list[TrainingSample]:
        """Replay samples together: each forward pass computes rows of several of them, and the
        samples of a group share the rows of their prompt.

        Args:
            samples: Samples, in any order. Their errors are those of `replay`.
            to_first_difference: End a sample's replay at the first draw that differs. Its values
                after that are the sample's own.
        """
        self.engine.shared.require_alive()
        draws = [self.draws(sample, self.check(sample)) for sample in samples]
        replayed: list[TrainingSample] = []
        while draws:
            count = _num_that_fit(draws)
            # the lock keeps weights unchanged and operations free of the engine's steps
            with self.engine.shared.lock:
                self.engine.shared.require_weights()
                self.decoders.renew()
                replayed += self._replay(draws[:count], to_first_difference)
            draws = draws[count:]
        return replayed

    def _replay(self, draws: Sequence[Draws], stops: bool) -> list[TrainingSample]:
        runs, num_blocks = self._runs(draws, stops)
        model, size = self.engine.model, self.engine.config.block_size
        storage, _ = self.storage(model, num_blocks * size)
        while live := [run for run in runs if run.is_ready]:
            version, room = live[0].version, MOST_ROWS
            chunks: list[Chunk] = []
            for run in live:
                if room and run.version == version:
                    chunks.append(run.next_chunk(room))
                    room -= chunks[-1].end - chunks[-1].start
            results = _compute(self.decoders.get(version), storage, chunks)
            for chunk, computed in zip(chunks, results, strict=True):
                chunk.run.accept(chunk, computed)
        return [self._with_reference(run) for run in runs]

    def _runs(self, draws: Sequence[Draws], stops: bool) -> tuple[list[Run], int]:
        """Return the runs with their blocks, and the number of blocks.

        Samples of one prompt share its full blocks, unless versions mix or the prompt is scored.
        """
        size, has_states = self.engine.config.block_size, self.engine.spec.state is not None
        leaders: dict[Any, Run] = {}
        runs: list[Run] = []
        num_blocks = 0
        for how in draws:
            sample, key = how.sample, None
            whole = max(len(sample.prompt_tokens) + len(sample.completion_tokens) - 1, 1)
            blocks, shared = -(-whole // size), 0
            versions = versions_of(sample)
            if len(versions) == 1 and not (how.params.scores_prompt or has_states):
                key = (sample.prompt_tokens, *versions, how.adapter)
                if key in leaders:
                    shared = (len(sample.prompt_tokens) - 1) // size
            head = leaders[key].table[:shared] if shared else []
            table = [*head, *range(num_blocks, num_blocks + blocks - shared)]
            num_blocks += blocks - shared
            run = Run(
                how,
                table,
                shared=shared * size,
                leader=leaders[key] if shared else None,
                stops=stops,
            )
            if key is not None:
                leaders.setdefault(key, run)
            runs.append(run)
        return runs, num_blocks

    def _with_reference(self, run: Run) -> TrainingSample:
        again = run.result()
        if (
            again.ref_logprobs is None
            or REFERENCE not in self.engine.runner.models
            or not again.completion_tokens
        ):
            return again
        return replace(again, ref_logprobs=self._reference_logprobs(again))

    def storage(self, model: Decoder, num_rows: int) -> tuple[KVStorage, list[int]]:
        """Return KV tensors for `num_rows` rows of a model, and their block table.

        Requests of the engine do not use these tensors.
        """
        size = self.engine.config.block_size
        num_blocks = -(-num_rows // size)
        key = id(model.spec)
        held = self._storages.get(key)
        if held is None or held.num_blocks < num_blocks:
            held = KVStorage(
                model.spec,
                2 ** (num_blocks - 1).bit_length(),
                size,
                model.dtype,
                model.device,
                kv_cache_dtype=self.engine.config.kv_cache_dtype,
            )
            self._storages[key] = held
            self.decoders.renew()  # a decoder keeps recordings of each storage that it has used
        return held, list(range(num_blocks))

    def _reference_logprobs(self, sample: TrainingSample) -> tuple[float, ...]:
        model = self.engine.runner.models[REFERENCE].twin()
        tokens, first = (
            [*sample.prompt_tokens, *sample.completion_tokens],
            len(sample.prompt_tokens) - 1,
        )
        storage, table = self.storage(model, len(tokens) - 1)
        logprobs: list[float] = []
        for start in range(0, len(tokens) - 1, MOST_ROWS):
            end = min(start + MOST_ROWS, len(tokens) - 1)
            scores = [(row - start, tokens[row + 1]) for row in range(max(start, first), end)]
            batch = batch_of_rows(
                [Rows(tokens[start:end], start, table)],
                storage.block_size,
                scores=scores,
                device=model.device,
            )
            logprobs += model.forward(batch, storage).scores.tolist()
        return tuple(logprobs)


def _num_that_fit(draws: Sequence[Draws]) -> int:
    """Return how many samples, at least one, to replay together."""
    lengths = (len(d.sample.prompt_tokens) + len(d.sample.completion_tokens) for d in draws)
    return max(1, sum(total <= MOST_CONTEXT for total in itertools.accumulate(lengths)))


def _compute(model: Decoder, storage: KVStorage, chunks: Sequence[Chunk]) -> list[Computed]:
    """Run one forward pass over chunks of several samples, and draw from their rows."""
    size, starts = storage.block_size, [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    pairs = list(zip(chunks, starts, strict=False))
    scores = [
        (start + row - chunk.start, token)
        for chunk, start in pairs
        for row in chunk.scored
        for token in chunk.run.targets(row)
    ]
    adapters = list(dict.fromkeys(c.run.how.adapter for c in chunks if c.run.how.adapter))
    of_rows = [
        adapters.index(chunk.run.how.adapter) if chunk.run.how.adapter is not None else -1
        for chunk in chunks
        for _ in range(chunk.start, chunk.end)
    ]
    batch = batch_of_rows(
        [Rows(c.token_ids, c.start, c.run.table[: -(-c.end // size)]) for c in chunks],
        size,
        draws=[start + row - chunk.start for chunk, start in pairs for row in chunk.drawing],
        scores=scores,
        num_best=max((c.run.params.prompt_top_logprobs for c in chunks if c.scored), default=0),
        adapters=adapters,
        row_adapters=of_rows if adapters else (),
        device=model.device,
    )
    result = model.forward(batch, storage)
    drawn = iter(_draw(model, result, chunks))
    values = iter(result.scores.tolist())
    best = (
        iter(list(zip(*(each.tolist() for each in result.best), strict=True)))
        if result.best is not None
        else None
    )
    computed: list[Computed] = []
    for chunk in chunks:
        count = sum(len(chunk.run.targets(row)) for row in chunk.scored)
        rows = list(itertools.islice(best, count)) if best is not None else []
        width = max(count // max(len(chunk.scored), 1), 1)  # a row is repeated for each target
        most = chunk.run.params.prompt_top_logprobs
        computed.append(
            Computed(
                list(itertools.islice(drawn, len(chunk.drawing))),
                list(itertools.islice(values, count)),
                [best_of(row[0], row[1], most) for row in rows[::width]] if most else (),
            )
        )
    return computed


def _draw(model: Decoder, result: ForwardResult, chunks: Sequence[Chunk]) -> list[Drawn]:
    """Draw from the rows of a forward pass, in their order."""
    requests: list[DrawRequest] = []
    for chunk in chunks:
        requests += [each._replace(row=len(requests) + each.row) for each in chunk.requests()]
    if not requests:
        return []
    sampled = Sampled(
        model.draw(result.hidden, sampling_batch(requests, model.device), result.rows),
        result.scores,
    ).wait()
    named = [each or b"" for each in sampled.named or (None, None)]
    drawn: list[Drawn] = []
    at = 0
    for i, request in enumerate(requests):
        params, end = request.params, at + 4 * len(request.params.logprob_token_ids)
        top = sampled.top[i] if sampled.top is not None and params.top_logprobs else None
        drawn.append(
            Drawn(
                sampled.token_ids[i],
                sampled.logprobs[i],
                sampled.raw_logprobs[i] if params.raw_logprobs else 0.0,
                sampled.log_kept_mass[i],
                tuple(sampled.masks[i])
                if sampled.masks is not None and params.sampling_mask
                else (),
                NOTHING if top is None else best_of(top[0], top[1], params.top_logprobs),
                *(each[at:end] for each in named),
            )
        )
        at = end
    return drawn
