"""`verify`: check receipts of samples, and compute each sample again in one pass over its tokens.

A receipt by itself shows only that nothing was changed after it was made, because every program can
compute its chain. The proof is the computation: each token is drawn again from its row, with the
noise of its seed and position, under weights whose hash is the receipt's (docs/receipts.md).
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from nano_inference.core.sequence import REFERENCE
from nano_inference.data.receipts import FORMAT, first_change, first_misplaced, signed_bytes
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.receipts import hash_of_adapter
from nano_inference.errors import AdapterError, InvalidRequest
from nano_inference.ops.lora import Adapter
from nano_inference.rl.comparison import Difference, differences
from nano_inference.rl.history import versions_of, was_sampled
from nano_inference.rl.replayer import MOST_CONTEXT, Replayer
from nano_inference.rl.versions import Weights
from nano_inference.system.signing import is_signed
from nano_inference.types import Receipt, SamplingParams, TrainingSample
from nano_inference.weights.update import WeightSet

Outcome = Literal["true", "forged", "not verifiable here"]


class Verdict(NamedTuple):
    """Result of the verification of one sample.

    Attributes:
        outcome: `"true"`: this engine computes exactly this sample. `"forged"`: it does not, or the
            receipt does not belong to the sample. `"not verifiable here"`: this engine or its
            weights cannot decide.
        field: Field of the sample or the receipt that is wrong. None if nothing is.
        token: Index of the first wrong token, in the prompt for fields of the prompt. None: the
            field describes the whole sample.
        reason: Sentence without a full stop. Empty if the outcome is `"true"`.
    """

    outcome: Outcome
    field: str | None = None
    token: int | None = None
    reason: str = ""


TRUE = Verdict("true")


def verify(
    engine: InferenceEngine,
    samples: Sequence[TrainingSample],
    *,
    weights: Weights | None = None,
    public_key: bytes | None = None,
) -> list[Verdict]:
    """Verify the receipts of samples.

    Samples are computed together, and prompts of a group once. The engine's requests and cache are
    not affected, but its loop pauses meanwhile. `misplaced` checks the file that they come from.

    Args:
        engine: Engine with the numerics of the one that made the samples, on any processor.
        samples: Samples with receipts.
        weights: Weights by version, as in `replay`.
        public_key: Ed25519 key that must have signed every receipt, 32 bytes. None: signatures are
            checked under the key that each receipt names.

    Returns:
        A verdict for each sample, in order.

    Raises:
        WeightUpdateError, ModelLoadError: The passed weights do not fit the model.
        ConfigError: A signature needs the package `cryptography`, which is missing.
        EngineDead: The engine was shut down.
    """
    return Verifier(engine, weights, public_key).verify(samples)


def misplaced(samples: Sequence[TrainingSample]) -> str | None:
    """Return a sentence, without a full stop, about the first sample that is missing from its file
    or not in its place, or None. Files without places are not checked.
    """
    return first_misplaced(samples)


class Verifier:
    """`verify` for many files, which share weights, hashes and KV tensors."""

    def __init__(
        self,
        engine: InferenceEngine,
        weights: Weights | None = None,
        public_key: bytes | None = None,
    ) -> None:
        self._engine, self._public_key = engine, public_key
        self._replayer = Replayer(engine, weights)
        self._hashes: dict[int, str] = {}  # hashes of the weights here, by version
        self._adapters: dict[Adapter, str] = {}

    def verify(
        self,
        samples: Sequence[TrainingSample],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Verdict]:
        """Verify samples, as the function `verify` does. `progress` gets the number of verdicts so
        far.
        """
        verdicts: list[Verdict] = []
        for portion in _portions(samples):
            verdicts += self._portion(portion)
            progress(len(verdicts))
        return verdicts

    def _portion(self, samples: Sequence[TrainingSample]) -> list[Verdict]:
        verdicts = [self._before(sample) for sample in samples]
        left = [i for i, verdict in enumerate(verdicts) if verdict is None]
        again = self._replayer.replay_many([samples[i] for i in left], to_first_difference=True)
        for index, replayed in zip(left, again, strict=True):
            changes = differences(samples[index], replayed)
            verdicts[index] = _forged_by(changes[0]) if changes else TRUE
        return [verdict for verdict in verdicts if verdict is not None]

    def _before(self, sample: TrainingSample) -> Verdict | None:
        """Return the verdict of a sample that need not or cannot be computed, or None."""
        receipt = sample.receipt
        if receipt is None:
            return _unknown("the sample has no receipt; request it with receipt=True")
        if receipt.format != FORMAT:
            return _unknown(
                f"the receipt has format {receipt.format}, and this release reads {FORMAT}"
            )
        return (
            self._chain_verdict(sample, receipt)
            or _contradiction(sample, receipt)
            or self._reason_against(sample, receipt)
        )

    def _chain_verdict(self, sample: TrainingSample, receipt: Receipt) -> Verdict | None:
        change = first_change(sample, receipt)
        if change is not None:
            where = "receipt" if change.field.startswith("receipt.") else str(change)
            return Verdict(
                "forged", change.field, change.token, f"the receipt's chain does not fit: {where}"
            )
        wanted = self._public_key
        if not receipt.signature and wanted is None:
            return None
        if not receipt.signature:
            return Verdict("forged", "receipt.signature", None, "the receipt is not signed")
        if wanted is not None and receipt.public_key != wanted:
            return Verdict("forged", "receipt.public_key", None, "another key signed the receipt")
        if not is_signed(signed_bytes(receipt), receipt.signature, receipt.public_key):
            return Verdict("forged", "receipt.signature", None, "the signature is not valid")
        return None

    def _reason_against(self, sample: TrainingSample, receipt: Receipt) -> Verdict | None:
        """Return the verdict of a sample that this engine cannot compute, or that other weights
        than those here computed.
        """
        try:
            params = self._replayer.check(sample)
            other = self._other_weights(receipt) or self._other_adapter(params, receipt)
            if other is not None:
                return other
            self._replayer.draws(sample, params)
        except (InvalidRequest, AdapterError) as problem:
            return _unknown(str(problem).rstrip("."))
        if sample.ref_logprobs is not None and REFERENCE not in self._engine.runner.models:
            return _unknown("the sample has ref_logprobs; load the reference model (--ref-model)")
        return None

    def _other_weights(self, receipt: Receipt) -> Verdict | None:
        for version, sha256 in receipt.weights:
            if sha256 and sha256 != self._hash_of(version):
                return Verdict(
                    "forged",
                    "weights",
                    None,
                    f"other weights: the receipt names {sha256[:16]}… as version {version}, and "
                    f"the weights here are {self._hash_of(version)[:16]}…",
                )
        return None

    def _hash_of(self, version: int) -> str:
        if version not in self._hashes:
            with self._engine.shared.lock:
                self._engine.shared.require_weights()
                model = self._replayer.decoders.get(version)
                self._hashes[version] = WeightSet(model).content_hash()
        return self._hashes[version]

    def _other_adapter(self, params: SamplingParams, receipt: Receipt) -> Verdict | None:
        adapter = self._engine.intake.adapter_of(params.adapter)
        if not isinstance(adapter, Adapter):
            return None
        if adapter not in self._adapters:
            self._adapters[adapter] = hash_of_adapter(adapter)
        for version, sha256 in receipt.adapters:
            if sha256 and sha256 != self._adapters[adapter]:
                return Verdict(
                    "forged",
                    "adapters",
                    None,
                    f"another adapter: the receipt names {sha256[:16]}… as version {version} of "
                    f"{adapter.name!r}, and the one here is {self._adapters[adapter][:16]}…",
                )
        return None


def _contradiction(sample: TrainingSample, receipt: Receipt) -> Verdict | None:
    """Return the verdict of a sample that contradicts itself or its receipt, or None."""
    params, length = sample.sampling_params, len(sample.completion_tokens)
    if params is None:
        return _unknown("the sample has no sampling_params")
    if not length:
        return _unknown("the sample has no tokens, so there is nothing to draw again")
    if params.seed is not None and params.seed != sample.seed:
        return Verdict("forged", "seed", None, "the seed is not that of sampling_params")
    named = tuple(version for version, _ in receipt.weights)
    try:
        wanted = tuple(sorted(versions_of(sample)))
    except InvalidRequest as problem:
        return Verdict("forged", "kv_versions", None, str(problem).rstrip("."))
    if named != wanted:
        return Verdict("forged", "weights", None, f"the receipt names versions {named}: {wanted}")
    adapters = tuple(sorted({span.version for span in sample.adapter_versions}))
    if tuple(version for version, _ in receipt.adapters) != adapters:
        return Verdict("forged", "adapters", None, "the receipt names other adapter versions")
    columns = ("logprobs", "log_kept_mass")
    for name in columns:
        values = getattr(sample, name)
        if values is None or len(values) != length:
            return Verdict("forged", name, None, f"{name} must have one entry for each token")
    if not any(was_sampled(sample)):
        return _unknown("every token was appended, so there is nothing to draw again")
    return None


def _forged_by(difference: Difference) -> Verdict:
    return Verdict("forged", difference.field, difference.token, str(difference))


def _unknown(reason: str) -> Verdict:
    return Verdict("not verifiable here", reason=reason)


def _portions(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Split samples into portions that are computed together."""
    portions: list[list[TrainingSample]] = []
    rows = 0
    for sample in samples:
        rows += len(sample.prompt_tokens) + len(sample.completion_tokens)
        if not portions or rows > MOST_CONTEXT:
            portions.append([])
            rows = len(sample.prompt_tokens) + len(sample.completion_tokens)
        portions[-1].append(sample)
    return portions
