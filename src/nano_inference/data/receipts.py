"""Receipts: a hash chain (SHA-256) over a sample, and a second one over the samples of a file.

The chain's values are v[i] = SHA-256(v[i - 1], name, content), for each field in `FIELDS_OF_CHAIN`
and then for each completion token. A receipt holds the first eight bytes of every value and the
whole last one. The whole value commits to everything. The short ones only locate: the first that
does not follow from the sample names the field or the token that was changed, at 11 characters of
JSON per token.

docs/receipts.md has the threat model. `nano_inference.rl.verifier` computes the sample again.
"""

import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from nano_inference.data.kinds import FIELDS, strict
from nano_inference.types import (
    ContentHash,
    FilePlace,
    Receipt,
    SamplingParams,
    TrainingSample,
)

FORMAT = 1
LINK = 8  # bytes of a chain value that a receipt keeps
_START = b"nano-inference receipt %d"
_FILE = b"nano-inference receipts of a file"

# Parameters that are not part of a sample's statement: the seed has a field of its own, because an
# engine draws a missing one.
_NO_PARAMS = ("seed", "receipt", "grammar")
# What the sample was computed from, then what was recorded with its tokens. Identities of requests
# and the use of the cache are not part of the statement.
_CAUSES = (
    *("weights", "adapters", "numerics", "prompt_tokens", "sampling_params", "grammar", "seed"),
    *("sample_index", "kv_versions", "weight_versions", "weight_version", "adapter_versions"),
    "num_tokens",
)
_RESULTS = (
    *("finish_reason", "stop_reason", "text", "ref_logprobs", "raw_logprobs", "log_kept_mass"),
    *("sampling_mask", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"),
    *("token_id_logprobs", "raw_token_id_logprobs", "prompt_token_id_logprobs"),
    *("routed_experts", "routed_experts_unknown"),
)
FIELDS_OF_CHAIN = (*_CAUSES, *_RESULTS)


class Change(NamedTuple):
    """First part of a sample that its receipt does not fit.

    Attributes:
        field: Field of `TrainingSample` or of its receipt.
        token: Index in the completion. None: the whole field.
    """

    field: str
    token: int | None = None

    def __str__(self) -> str:
        return self.field if self.token is None else f"completion token {self.token}"


def receipt_of(
    sample: TrainingSample,
    weights: Iterable[ContentHash] = (),
    adapters: Iterable[ContentHash] = (),
) -> Receipt:
    """Return the receipt of a finished sample, without a signature.

    Args:
        sample: Sample with its `sampling_params`.
        weights: Hash of the weights of each version that computed it.
        adapters: Hash of each version of its adapter.
    """
    bare = Receipt(FORMAT, tuple(weights), tuple(adapters), b"", "")
    links = bytearray()
    value = b""
    for value in _values(sample, bare):
        links += value[:LINK]
    return replace(bare, links=bytes(links), head=value.hex())


def first_change(sample: TrainingSample, receipt: Receipt) -> Change | None:
    """Return the first field or token that does not follow from a receipt's chain, or None."""
    names = [Change(name) for name in FIELDS_OF_CHAIN]
    names += [Change("tokens", index) for index in range(len(sample.completion_tokens))]
    value = b""
    for index, (change, value) in enumerate(zip(names, _values(sample, receipt), strict=True)):
        if receipt.links[index * LINK : (index + 1) * LINK] != value[:LINK]:
            return change
    if len(receipt.links) != len(names) * LINK:
        return Change("receipt.links")
    return None if receipt.head == value.hex() else Change("receipt.head")


def signed_bytes(receipt: Receipt) -> bytes:
    """Return the bytes that a signature of this receipt signs."""
    return _START % receipt.format + b"\n" + receipt.head.encode("ascii", "backslashreplace")


def sealed(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return the samples of a file with their places in it.

    Samples without a receipt are returned unchanged, and `first_misplaced` reports them.
    """
    whole, chain = list[TrainingSample](), ""
    for line, sample in enumerate(samples, start=1):
        if sample.receipt is None:
            whole.append(sample)
            continue
        chain = _place_chain(chain, sample.receipt, line, len(samples))
        sealing = FilePlace(line, len(samples), chain)
        whole.append(replace(sample, receipt=replace(sample.receipt, file_place=sealing)))
    return whole


def first_misplaced(samples: Sequence[TrainingSample]) -> str | None:
    """Return a sentence about the first sample that is not in its place, or None.

    A file none of whose receipts has a place is not sealed, which is no error.
    """
    places = [sample.receipt and sample.receipt.file_place for sample in samples]
    if not any(places):
        return None
    for line, claim in enumerate(places, start=1):
        if claim is None:
            return f"line {line} has no place in the file, but others have"
        if claim.line != line:
            return f"line {line} is line {claim.line} of the file that was written"
        if claim.lines != len(samples):
            return f"the file has {len(samples)} of the {claim.lines} lines that were written"
    chains = [""] + [place.chain for place in places if place is not None]
    for line, (sample, (before, chain)) in enumerate(
        zip(samples, pairwise(chains), strict=True), start=1
    ):
        assert sample.receipt is not None
        if _place_chain(before, sample.receipt, line, len(samples)) != chain:
            return f"line {line} does not follow the line before it"
    return None


def _place_chain(before: str, receipt: Receipt, line: int, lines: int) -> str:
    return hashlib.sha256(_json([_FILE.decode(), before, receipt.head, line, lines])).hexdigest()


def _values(sample: TrainingSample, receipt: Receipt) -> Iterator[bytes]:
    """Yield the values of the chain."""
    value = hashlib.sha256(_START % receipt.format).digest()
    for name in FIELDS_OF_CHAIN:
        value = hashlib.sha256(
            b"%b%b\n%b" % (value, name.encode(), _content(name, sample, receipt))
        )
        value = value.digest()
        yield value
    logprobs, sampled = sample.logprobs, sample.loss_mask
    for index, token_id in enumerate(sample.completion_tokens):
        logprob = _bits(logprobs[index]) if index < len(logprobs) else ""
        kind = "" if not sampled else "+" if index >= len(sampled) else "01"[sampled[index]]
        content = f"token\n{token_id} {logprob} {kind}"
        value = hashlib.sha256(value + content.encode()).digest()
        yield value


def _bits(number: float) -> str:
    """Return all bits of a number. All nan are equal."""
    return number.hex()


def _content(name: str, sample: TrainingSample, receipt: Receipt) -> bytes:
    make = _CONTENTS.get(name)
    if make is not None:
        return _json(make(sample, receipt))
    value = getattr(sample, name)
    return b"null" if value is None else _json(FIELDS[name].to_plain(value))


def _hashes(hashes: Iterable[ContentHash]) -> list[list[Any]]:
    return [list(each) for each in hashes]


def _params(sample: TrainingSample, _: Receipt) -> Any:
    """Return the parameters that differ from their defaults, so that later releases may have more
    of them.
    """
    to_plain = FIELDS["sampling_params"].to_plain
    plain, defaults = to_plain(sample.sampling_params), to_plain(SamplingParams())
    if plain is None:
        return None
    fields = {
        name: value
        for name, value in plain.items()
        if name not in _NO_PARAMS and value != defaults[name]
    }
    # the order in which a caller names tokens is no part of the statement
    if "logit_bias" in fields:
        fields["logit_bias"] = sorted(fields["logit_bias"], key=operator.itemgetter("key"))
    return fields


def _grammar(sample: TrainingSample, _: Receipt) -> Any:
    plain = FIELDS["sampling_params"].to_plain(sample.sampling_params)
    return None if plain is None else plain["grammar"]


_CONTENTS: dict[str, Any] = {
    "weights": lambda sample, receipt: _hashes(receipt.weights),
    "adapters": lambda sample, receipt: _hashes(receipt.adapters),
    "sampling_params": _params,
    "grammar": _grammar,
    "num_tokens": lambda sample, receipt: [
        len(sample.completion_tokens),
        len(sample.logprobs),
        len(sample.loss_mask),
    ],
}


def _json(value: Any) -> bytes:
    text = json.dumps(strict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")
