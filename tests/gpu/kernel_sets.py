"""Find the kernels that an engine launches, without a GPU: its real steps, graphs and draws run on
tensors with shapes but no memory.

`python -m tests.gpu.kernel_sets` counts the distinct kernels, and `tests/gpu/precompile.py`
compiles them. Triton's interpreter must be off (`TRITON_INTERPRET`). Kernels are distinguished by
Triton's own key: constants, dtypes, alignments and options.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.models import QWEN_CONFIG
from nano_inference import EngineConfig, SamplingParams
from nano_inference.core.sequence import POLICY
from nano_inference.device.graphs import DecodeGraphs, DrawResults
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.memory_profile import _batch, _scratch, run_largest_steps
from nano_inference.device.warm_up import run_all_kinds
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.sampling.tensors import DrawRequest, sampling_batch, to_device
from tests.gpu.compiled import compiling

NOWHERE = torch.device("meta")


@dataclass(frozen=True)
class KernelSet:
    """The settings of an engine that its kernels depend on.

    Attributes:
        name: Name in messages.
        model: Its config.json.
        dtype: Dtype of weights and cache.
        batch_invariant: True if the engine obeys the law.
        options: Other fields of `EngineConfig`.
    """

    name: str
    model: dict[str, Any]
    dtype: str
    batch_invariant: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.model)

    def config(self) -> EngineConfig:
        """Return the engine's config on a card."""
        values: dict[str, Any] = {
            "model_path": self.name,
            "device": "cpu",
            "dtype": self.dtype,
            "backend": "cuda",
            "batch_invariant": self.batch_invariant,
            "kv_cache_memory": 1 << 30,
        }
        return EngineConfig(**values | self.options)


class _Queue:
    """A capture queue that runs its functions immediately."""

    captures_early = True

    def synchronise(self) -> None:
        """Do nothing: no work is pending."""

    def new_pool(self) -> None:
        """Return None: there is no memory pool."""

    def capture(self, run: Callable[[], Any], pool: object) -> Any:
        return SimpleNamespace(output=run())


@dataclass(frozen=True)
class Engine:
    """A model and a cache without memory."""

    kernels: KernelSet
    config: EngineConfig
    model: Decoder
    storages: dict[str, KVStorage]

    def start(self) -> None:
        """Launch the kernels of an engine's start."""
        run_largest_steps(self.config, {POLICY: self.model}, self.storages)
        run_all_kinds(self.config, {POLICY: self.model}, self.storages)
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all graphs."""
        results = DrawResults(self.config.scheduler.max_draws, NOWHERE)
        queue: Any = _Queue()
        uploads: Any = None
        storage = self.storages[POLICY]
        blocks = -(-min(self.kernels.spec.max_position, 4352) // self.config.block_size)
        DecodeGraphs(self.model, storage, queue, uploads, results, max_blocks=blocks).capture_all()


def engine_of(kernels: KernelSet) -> Engine:
    """Return an engine that can launch kernels within `recording` or `compiling`."""
    config, spec, dtype = kernels.config(), kernels.spec, getattr(torch, kernels.dtype)
    ops = cuda_ops(batch_invariant=kernels.batch_invariant)
    params = allocate(param_table(spec), dtype, NOWHERE, ops.allocate)
    model = Decoder(spec, params, ops, 4352)
    return Engine(kernels, config, model, _scratch(config, {POLICY: model}))


@contextmanager
def recording(arch: int = 90, only: Callable[[int], bool] = lambda _: False) -> Iterator[list[str]]:
    """Stop each launch once its kernel is known. Yield the names of distinct kernels in order. The
    i-th kernel is compiled if `only(i)` is true.
    """
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    compile_it = JITFunction._do_compile

    def note(self: Any, key: Any, signature: Any, device: Any, *args: Any) -> Any:
        names.append(self.__name__)
        if only(len(names) - 1):
            return compile_it(self, key, signature, device, *args)
        made = SimpleNamespace(asm={}, result=lambda: made)
        self.device_caches[device][0][key] = made
        return made

    with compiling(arch), patch.object(JITFunction, "_do_compile", note):
        _forget_all()
        yield names


def _forget_all() -> None:
    """Drop the kernels of an earlier recording, because some are names only."""
    import gc

    from triton.runtime.jit import JITFunction

    for instance in gc.get_objects():
        if type(instance) is JITFunction:  # not isinstance, which would query every object's module
            instance.device_caches.clear()


def serve(engine: Engine) -> None:
    """Run requests on a started engine: draws of all kinds, steps of many sizes."""
    model, device = engine.model, NOWHERE
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"raw_logprobs": True},
        {"top_k": 5},
        {"top_p": 0.8, "logit_bias": {5: 1.0}},
        {"repetition_penalty": 1.3, "top_logprobs": 20},
        {"min_p": 0.1, "sampling_mask": True, "top_logprobs": 1},
        {"allowed_token_ids": frozenset({3, 4}), "presence_penalty": 0.5},
        {"allowed_token_ids": frozenset({3, 4}), "top_p": 0.5, "top_logprobs": 7},
    ]
    with torch.inference_mode():
        for rows in (2, 3, 16, 300):
            hidden = torch.empty((rows, model.spec.hidden_size), dtype=model.dtype, device=device)
            for one, other in product(kinds, kinds):
                draws = [
                    DrawRequest(
                        SamplingParams(**(one, other)[row % 2]),
                        row,
                        completion=[1],
                        banned=(7,) * (row % 3 == 1),
                    )
                    for row in range(rows)
                ]
                for some in (draws, [each._replace(banned=()) for each in draws]):
                    model.draw(hidden, to_device(sampling_batch(some), device))
        for lengths in steps_of(engine.config):
            batch = _batch(
                lengths, 2048, engine.config.block_size, POLICY, scored=lengths[0] % 2 == 0
            )
            model.forward(to_device(batch, device), engine.storages[POLICY])


def steps_of(config: EngineConfig) -> Iterator[list[int]]:
    """Yield chunk lengths per step: decodes, a prompt, and both, at many row counts."""
    for rows in (*range(1, 20), *range(31, 1200, 37), 1536, 2048):
        yield [1] * min(rows, config.max_batch_size)
        yield [rows]
        yield [rows, 1, 1]
        yield [-(-rows // 3)] * 3


def main() -> None:
    """For each set, print how many kernels its start compiles and which ones serving
    would compile.
    """
    report: dict[str, Any] = {}
    for kernels in (
        KernelSet(f"Qwen3-0.6B, batch_invariant={exact}", QWEN_CONFIG, "bfloat16", exact)
        for exact in (False, True)
    ):
        engine = engine_of(kernels)
        with recording() as names:
            engine.start()
            started = len(names)
            serve(engine)
            report[kernels.name] = {"at start": started, "later": names[started:]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
