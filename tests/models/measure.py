"""Measure every case of `tests/models/families.py` and every quantised format, and write
`measured.json`.

`docs/make_models.py` makes its tables from that file. Run `python -m tests.models.measure`;
`--only NAME…` measures these names only and keeps the rest of the file, and so does `--kinds KIND…`
for the kinds of a case.
"""

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.folders import load_spec
from nano_inference.errors import NanoInferenceError
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.parallel.mesh import Mesh, Place
from nano_inference.rl import PolicyModel, score
from tests.checkpoints.quantisers import QUANTISERS, write_quantised
from tests.interpreter import interpret
from tests.models.families import CASES, STATE_CASES, Case
from tests.models.strong import BEST, LENGTHS, disagreement, strong_model, strong_prompts
from tests.models.tiny import llama_config, llama_weights, write_model
from tests.parallel.test_tensor_parallel import check
from tests.parity.compare import ROWS, compare_rows
from tests.rl.training import SEQUENCES, bits, build

TARGET = Path(__file__).parent / "measured.json"
ROW_BY_ROW = (1, 5, 40)  # prompt lengths for states that the reference computes in Python
INTERPRETED = (36,)  # prompt lengths in Triton's interpreter
Outcome = dict[str, Any]  # "difference", "equal" and "of", or "refused"


@dataclass(frozen=True)
class Model:
    """A strong model of a case."""

    name: str
    case: Case
    folder: Path
    oracle: Any


def on_cpu(model: Model) -> Outcome:
    return {"difference": disagreement(model.folder, model.oracle)}


def on_reference(model: Model) -> Outcome:
    lengths = ROW_BY_ROW if model.name in STATE_CASES else LENGTHS
    difference = disagreement(model.folder, model.oracle, backend="reference", lengths=lengths)
    return {"difference": difference}


def on_triton(model: Model) -> Outcome:
    difference = disagreement(
        model.folder, model.oracle, backend="cuda", lengths=INTERPRETED, max_tokens=1
    )
    return {"difference": difference}


def in_other_schedules(model: Model) -> Outcome:
    """Count samples with the same bits in other configurations, in bfloat16."""
    prompts = strong_prompts(model.oracle.get_input_embeddings().num_embeddings, (1, 50))
    common: dict[str, Any] = {"device": "cpu", "kv_cache_memory": 2**24}
    state, rows = load_spec(model.folder).state, ROWS
    if state is not None and state.by_block:  # its bits depend on the block size
        rows = tuple(replace(row, block_size=EngineConfig("any").block_size) for row in ROWS)
    results = compare_rows(
        str(model.folder), "bfloat16", prompts, 4, rows, backend=model.case.backend, **common
    )
    return {
        "equal": sum(each["equal"] for each in results),
        "of": sum(each["samples"] for each in results),
    }


def on_ranks(model: Model) -> Outcome:
    """Count results with the same bits on two ranks with half of the heads each: hidden states,
    logprobs and draws.
    """
    shard_of(load_spec(model.folder), Place(Mesh(tensor=2), 1))  # rejects unshardable models
    ops = reference_ops() if model.case.backend == "reference" else cpu_ops(1)
    check(model.folder, ops, torch.float32, (2,))
    return {"equal": 1, "of": 1}


def in_policy(model: Model) -> Outcome:
    """Count sequences for which `PolicyModel` has the engine's logprobs bit for bit."""
    with build(model.folder, backend=model.case.backend) as engine:
        logprobs = PolicyModel(engine, micro_batch_tokens=64).logprobs(SEQUENCES)
        same = [
            bits(one) == bits(other)
            for one, other in zip(score(engine, SEQUENCES), logprobs, strict=True)
        ]
    return {"equal": sum(same), "of": len(same)}


KINDS: dict[str, Callable[[Model], Outcome]] = {
    "cpu": on_cpu,
    "reference": on_reference,
    "triton": on_triton,
    "schedules": in_other_schedules,
    "ranks": on_ranks,
    "policy": in_policy,
}


def measured(name: str, case: Case, kinds: Collection[str], old: Outcome) -> Outcome:
    """Measure some kinds of one case, and keep the `old` others. A rejection must name its class."""
    outcome: Outcome = old | {"class": case.class_name}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        oracle = strong_model(folder, case.class_name, **case.config)
        outcome["config"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for kind, measure in ((kind, KINDS[kind]) for kind in kinds):
            began = time.perf_counter()
            try:
                outcome[kind] = measure(Model(name, case, folder, oracle))
            except NanoInferenceError as refusal:
                if case.class_name not in str(refusal):
                    raise
                outcome[kind] = {"refused": str(refusal)}
            print(f"{name}, {kind}: {time.perf_counter() - began:.1f} s", flush=True)
    return outcome


def measured_format(name: str) -> Outcome:
    """Compare a Llama with quantised projections to the same numbers stored plainly.

    Return the largest difference of a logprob in float32, and the samples with the same bits in
    bfloat16.
    """
    config = llama_config()
    with tempfile.TemporaryDirectory() as path:
        coded, plain = Path(path) / "coded", Path(path) / "plain"
        numbers = write_quantised(coded, name, config, llama_weights(config))
        write_model(plain, config, {each: tensor.float() for each, tensor in numbers.items()})
        exact = [_logprobs(folder, "float32") for folder in (coded, plain)]
        rounded = [_logprobs(folder, "bfloat16") for folder in (coded, plain)]
    difference = max(float((one - two).abs().max()) for one, two in zip(*exact, strict=True))
    same = [torch.equal(one, two) for one, two in zip(*rounded, strict=True)]
    return {
        "method": QUANTISERS[name].fields["quant_method"],
        "difference": difference,
        "equal": sum(same),
        "of": len(same),
    }


def _logprobs(folder: Path, dtype: Any) -> list[torch.Tensor]:
    """Return logprobs of each prompt's tokens and of the best tokens at each position."""
    config = EngineConfig(str(folder), dtype=dtype, device="cpu", kv_cache_memory=2**24)
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=True, prompt_top_logprobs=BEST
    )
    with InferenceEngine(config) as engine:
        samples = engine.generate(strong_prompts(300, (5, 40, 200)), params)
    rows: list[torch.Tensor] = []
    for sample in samples:
        assert sample.prompt_logprobs is not None
        assert sample.prompt_top_logprobs is not None
        best = [sorted(each.logprobs) for each in sample.prompt_top_logprobs[1:]]
        rows.append(torch.tensor(sample.prompt_logprobs[1:]))
        rows.append(torch.tensor(best))
    return rows


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, help="cases and formats")
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    interpret()
    cases = {**CASES, **STATE_CASES}
    old = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    outcomes: dict[str, dict[str, Outcome]] = {
        "cases": {name: each for name, each in old.get("cases", {}).items() if name in cases},
        "formats": {n: each for n, each in old.get("formats", {}).items() if n in QUANTISERS},
    }
    for name in arguments.only if arguments.only is not None else [*cases, *QUANTISERS]:
        with redirect_stderr(StringIO()):
            if name in cases:
                known = outcomes["cases"].get(name, {})
                result = measured(name, cases[name], arguments.kinds, known)
                outcomes["cases"][name] = result
            else:
                result = outcomes["formats"][name] = measured_format(name)
        print(name, {key: each for key, each in result.items() if key != "config"}, flush=True)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        written = {"versions": versions, **{kind: outcomes[kind] for kind in ("cases", "formats")}}
        TARGET.write_text(_lines(written), encoding="utf-8")


def _lines(written: dict[str, Any]) -> str:
    """Format as JSON with one line per case."""
    parts = [f'"versions": {json.dumps(written["versions"])}']
    for kind in ("cases", "formats"):
        lines = [
            f"  {json.dumps(name)}: {json.dumps(each, sort_keys=True)}"
            for name, each in sorted(written[kind].items())
        ]
        parts.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
