"""Receipts of an engine's samples: hashes of its weights and adapters, and its signature."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from nano_inference.arrays import as_host, host
from nano_inference.core.sequence import POLICY, PREVIOUS, Sequence, Sequences
from nano_inference.data.receipts import receipt_of, signed_bytes
from nano_inference.ops.lora import Adapter
from nano_inference.system.signing import SigningKey
from nano_inference.types import ContentHash, TrainingSample, VersionSpan


class ReceiptMaker:
    """Adds receipts to finished samples. Implements `core.receipts.Receipts`.

    The stepping thread hashes the weights of each version once, when the first sequence that wants
    a receipt begins or continues under it. Samples then cost only their own chain.

    Args:
        sequences: Sequences of the engine, with the versions of its weights.
        hash_weights: Function that returns the hash of the policy's live weights.
        key: Key that signs the receipts, or None.
    """

    def __init__(
        self, sequences: Sequences, hash_weights: Callable[[], str], key: SigningKey | None
    ) -> None:
        self._sequences, self._hash_weights, self._key = sequences, hash_weights, key
        self._weights: dict[int, str] = {}
        self._adapters: dict[tuple[str, int], str] = {}

    def note(self, seq: Sequence) -> None:
        """Hash the weights and the adapter that compute a sequence from now on."""
        if not seq.request.params.receipt or seq.weight_set not in (POLICY, PREVIOUS):
            return
        version, adapter = self._sequences.versions[seq.weight_set], seq.adapter
        if version not in self._weights and seq.weight_set == POLICY:
            self._weights[version] = self._hash_weights()
        if isinstance(adapter, Adapter):
            key = adapter.name, adapter.version
            if key not in self._adapters:
                self._adapters[key] = hash_of_adapter(adapter)

    def weights(self, version: int) -> ContentHash:
        """Return the hash of the weights of a version. It is empty if this engine never had it."""
        return ContentHash(version, self._weights.get(version, ""))

    def add(self, sample: TrainingSample) -> TrainingSample:
        """Return a finished sample with its receipt, if it wants one."""
        params = sample.sampling_params
        if params is None or not params.receipt:
            return sample
        name = params.adapter or ""
        adapters = [
            ContentHash(version, self._adapters.get((name, version), ""))
            for version in _versions(sample.adapter_versions)
        ]
        contexts = (span for entry in sample.kv_versions for span in entry.versions)
        weights = map(self.weights, _versions(contexts))
        receipt = receipt_of(sample, weights, adapters)
        if self._key is not None:
            receipt = replace(
                receipt,
                public_key=self._key.public_key,
                signature=self._key.sign(signed_bytes(receipt)),
            )
        return replace(sample, receipt=receipt)


def hash_of_adapter(adapter: Adapter) -> str:
    """Return the SHA-256 of an adapter's matrices, with their places and scales."""
    digest = hashlib.sha256()
    for name, parts in sorted(adapter.parts.items()):
        for part in parts:
            shapes = [list(part.a.shape), list(part.b.shape)]
            position = [name, part.first, float(part.scale).hex(), shapes]
            digest.update(json.dumps(position).encode())
            for matrix in (part.a, part.b):
                flat = as_host(matrix).contiguous().reshape(-1).view(host.uint8)
                digest.update(flat.data)
    return digest.hexdigest()


def _versions(spans: Iterable[VersionSpan]) -> list[int]:
    return sorted({span.version for span in spans})
