"""Signed receipts: the key of the engine, another key, and no key."""

from dataclasses import replace
from pathlib import Path

import pytest

from nano_inference import ConfigError, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.rl.verifier import verify
from nano_inference.system import signing
from tests.models.tiny import tiny_llama
from tests.rl.forgeries import rechained

pytest.importorskip("cryptography")
PARAMS = SamplingParams(max_tokens=6, receipt=True, ignore_eos=True)


def test_signature_decides_next_to_the_chain(tmp_path: Path) -> None:
    from tests.system.test_signing import write_keys

    private, public = write_keys(tmp_path)
    key = signing.read_public_key(str(public))
    folder = str(tiny_llama(tmp_path))
    config = EngineConfig(folder, num_threads=1, kv_cache_memory=2**21, backend="reference")
    with InferenceEngine(replace(config, receipt_key=str(private))) as engine:
        sample = engine.generate([5, 6, 7], PARAMS)[0]
    with InferenceEngine(config) as engine:
        unsigned = engine.generate([5, 6, 7], replace(PARAMS, seed=sample.seed))[0]
        receipt = sample.receipt
        assert receipt is not None
        assert unsigned.receipt is not None
        assert receipt.public_key == key
        assert unsigned.receipt.head == receipt.head, "the key is no part of the statement"
        other = bytes(32)
        changed = rechained(replace(sample, text="x"))
        assert changed.receipt is not None
        links, head = changed.receipt.links, changed.receipt.head
        cases = (
            (sample, key, ("true", None)),
            (sample, None, ("true", None)),
            (unsigned, None, ("true", None)),
            (unsigned, key, ("forged", "receipt.signature")),
            (sample, other, ("forged", "receipt.public_key")),
            (
                replace(sample, receipt=replace(receipt, signature=bytes(64))),
                key,
                ("forged", "receipt.signature"),
            ),
            (
                # a smart forger cannot sign
                replace(changed, receipt=replace(receipt, links=links, head=head)),
                key,
                ("forged", "receipt.signature"),
            ),
        )
        for case, public_key, wanted in cases:
            assert verify(engine, [case], public_key=public_key)[0][:2] == wanted


def test_missing_key_file_is_an_error(tmp_path: Path) -> None:
    config = EngineConfig(str(tiny_llama(tmp_path)), receipt_key=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"none\.pem cannot be read"):
        InferenceEngine(config)
