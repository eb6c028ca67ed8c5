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
from functools import cached_property
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.models import GPT_OSS_CONFIG, QWEN_CONFIG
from nano_inference import EngineConfig, SamplingParams
from nano_inference.core.sequence import POLICY
from nano_inference.device.adapters import with_and_without_adapters
from nano_inference.device.graphs import DrawResults
from nano_inference.device.kv_tensors import KVStorage, common_layout, state_layout
from nano_inference.device.memory import longest_asked
from nano_inference.device.memory_profile import _batch, _scratch, run_largest_steps
from nano_inference.device.step_graphs import StepGraphs, graphs_of, limits_of
from nano_inference.device.units import UnitMap
from nano_inference.device.warm_up import run_all_kinds
from nano_inference.kv_cache.sliding_window import UnitPool
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.experts import block_formats
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.ops.formats import FILE
from nano_inference.sampling.tensors import (
    DrawRequest,
    SamplingBatch,
    sampling_batch,
    to_device,
)
from tests.gpu.compiled import compiling
from tests.gpu.training_kernels import LENGTHS, train

NOWHERE = torch.device("meta")
BLOCKS = 64  # blocks of a cache
# two layers of Qwen3-0.6B's widths that see the last 512 keys
WINDOWS_CONFIG = QWEN_CONFIG | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "sliding_window": 512,
}
# two layers of gpt-oss-20b, with experts in MXFP4
EXPERTS_CONFIG = GPT_OSS_CONFIG | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {"quant_method": "mxfp4"},
}
# two layers of Qwen3-30B-A3B, with few of its experts
MIXTURE_CONFIG = QWEN_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
# two layers of Qwen3-Next's and of LFM2's widths: a state, and attention
DELTA_CONFIG = QWEN_CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CONV_CONFIG = QWEN_CONFIG | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
}
# layers with heads of 256 numbers and a window, of 512, and one that reads another layer's keys
KINDS_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size": 262_144,
}
# two layers of DeepSeek-V3's heads, the second with few of its experts
LATENTS_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "vocab_size": 129_280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}


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
    """A model and a cache without memory.

    Attributes:
        trials: Storages of the trial steps before the cache exists.
        cache: Storage of the served steps and of graphs.
    """

    kernels: KernelSet
    config: EngineConfig
    model: Decoder
    trials: dict[str, KVStorage]
    cache: KVStorage

    def start(self) -> None:
        """Launch the kernels of an engine's start."""
        run_largest_steps(self.config, {POLICY: self.model}, self.trials)
        run_all_kinds(self.config, {POLICY: self.model}, self.trials)
        if self.config.cuda_graphs:
            with torch.inference_mode():
                self.graphs.capture_at_start()

    @cached_property
    def graphs(self) -> StepGraphs:
        """Graphs of the model."""
        queue: Any = _Queue()
        uploads: Any = None
        results = DrawResults(self.config.scheduler.max_draws, NOWHERE)
        longest = min(self.kernels.spec.max_position, 4352)
        limits = limits_of(self.config, longest)
        return graphs_of(self.model, self.cache, queue, uploads, results, limits)


def engine_of(kernels: KernelSet) -> Engine:
    """Return an engine that can launch kernels within `recording` or `compiling`."""
    config, spec, dtype = kernels.config(), kernels.spec, getattr(torch, kernels.dtype)
    ops = cuda_ops(batch_invariant=kernels.batch_invariant, overlaps=config.cuda_overlap)
    table = param_table(spec)
    formats = block_formats(spec, table) if config.codes == FILE else config.codes
    params = allocate(table, dtype, NOWHERE, ops.allocate, formats)
    model = Decoder(spec, params, ops, 4352)
    layout = state_layout([spec], config.block_size)
    if layout is None:
        layout = common_layout([spec], longest_asked(config, [spec]))
    pool = UnitPool(BLOCKS * layout.num_units, BLOCKS, layout)
    units = UnitMap(pool, NOWHERE) if layout.num_sliding else None
    cache = KVStorage(spec, BLOCKS, config.block_size, dtype, NOWHERE, units)
    return Engine(kernels, config, model, _scratch(config, {POLICY: model}), cache)


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


# Options of a request that change which kernels draw, the bans of its draw, and a greedy sample next
# to it. Sets of them cover every flag of the sampling kernels.
FLAGS: tuple[dict[str, Any], ...] = (
    {"greedy": True},
    {"raw_logprobs": True},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    {"top_k": 7, "sampling_mask": True},
    {"logit_bias": {5: 1.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5},
    {"allowed_token_ids": frozenset({3, 4})},
    {"top_logprobs": 7},
    {"logprob_token_ids": (3, 4, 5)},
    {"banned": (7,)},
)
SAMPLES = (1, 2, 16, 300)  # numbers of samples that Triton may specialize on, and others


def serve(engine: Engine) -> None:
    """Run requests on a started engine: draws with all sets of flags, steps of many sizes."""
    model, device = engine.model, NOWHERE
    with torch.inference_mode():
        for samples in SAMPLES:
            shape = (samples, model.spec.hidden_size)
            hidden = torch.empty(shape, dtype=model.dtype, device=device)
            for flags in sets_of_flags(full=samples == 2):
                model.draw(hidden, to_device(_flagged(flags, samples), device))
        for lengths in steps_of(engine.config):
            batch = _batch(
                lengths, 2048, engine.config.block_size, POLICY, scored=lengths[0] % 2 == 0
            )
            for variant in with_and_without_adapters(engine.config, model, batch):
                model.forward(to_device(variant, device), engine.cache)
        if engine.config.cuda_graphs:
            engine.graphs.trunks.capture(engine.graphs.trunks.sizes)


def sets_of_flags(*, full: bool) -> Iterator[dict[str, Any]]:
    """Yield all sets of `FLAGS`, or those of at most two and of all."""
    for size in range(len(FLAGS) + 1):
        if full or size <= 2 or size == len(FLAGS):
            for flags in combinations(FLAGS, size):
                yield {name: value for each in flags for name, value in each.items()}


def _flagged(flags: dict[str, Any], samples: int) -> SamplingBatch:
    """Return a sample with these flags, and others without."""
    options = dict(flags)
    banned, other = options.pop("banned", ()), SamplingParams()
    if options.pop("greedy", False):
        other = SamplingParams(temperature=0.0)
    flagged = DrawRequest(SamplingParams(**options), 0, prompt=[1], completion=[1], banned=banned)
    others = [DrawRequest(other, row, completion=[1]) for row in range(1, samples)]
    return sampling_batch([flagged, *others])


def steps_of(config: EngineConfig) -> Iterator[list[int]]:
    """Yield chunk lengths per step: decodes, a prompt, and both, at many row counts."""
    for rows in (*range(1, 20), *range(31, 1200, 37), 1536, 2048):
        yield [1] * min(rows, config.max_batch_size)
        yield [rows]
        yield [rows, 1, 1]
        yield [-(-rows // 3)] * 3


def main() -> None:
    """For each set, print how many kernels its start compiles and which ones serving
    would compile. For training, the first micro-batch is the start.
    """
    report: dict[str, Any] = {}
    for kernels in served_sets():
        engine = engine_of(kernels)
        with recording() as names:
            engine.start()
            started = len(names)
            serve(engine)
            report[kernels.name] = {"at start": started, "later": names[started:]}
    for name, model in (("training", QWEN_CONFIG), ("training experts", MIXTURE_CONFIG)):
        engine = engine_of(KernelSet(name, model, "bfloat16", batch_invariant=False))
        with recording() as names, torch.no_grad():
            train(engine.model, engine.cache.format, LENGTHS[:1])
            started = len(names)
            train(engine.model, engine.cache.format)
            report[name] = {"at start": started, "later": names[started:]}
    print(json.dumps(report))


def served_sets() -> Iterator[KernelSet]:
    """Yield sets with and without the law, with codes, overlapping kernels, adapters, windows, heads
    of two sizes, latents, states, and experts in MXFP4 with and without graphs.
    """
    for exact in (False, True):
        name = f"Qwen3-0.6B, batch_invariant={exact}"
        yield KernelSet(name, QWEN_CONFIG, "bfloat16", exact)
    codes = {"kv_cache_dtype": "fp8", "quantization": "int8"}
    yield KernelSet("codes", QWEN_CONFIG, "bfloat16", batch_invariant=True, options=codes)
    for name, graphs in product(("int8", "fp8"), (True, False)):
        fused = {"quantization": name, "cuda_graphs": graphs, "cuda_overlap": graphs}
        yield KernelSet(f"{name}, graphs={graphs}", QWEN_CONFIG, "bfloat16", False, fused)
    overlap = {"cuda_overlap": True}
    yield KernelSet("overlapping", QWEN_CONFIG, "bfloat16", batch_invariant=False, options=overlap)
    adapters = {"max_loras": 2}
    yield KernelSet("adapters", QWEN_CONFIG, "bfloat16", batch_invariant=True, options=adapters)
    eager = {"cuda_graphs": False}  # otherwise graphs launch what the trial steps have left out
    yield KernelSet("windows", WINDOWS_CONFIG, "bfloat16", batch_invariant=False, options=eager)
    yield KernelSet("kinds", KINDS_CONFIG, "bfloat16", batch_invariant=True)
    yield KernelSet("latents", LATENTS_CONFIG, "bfloat16", batch_invariant=True)
    blocks = eager | {"quantization": "file"}
    yield KernelSet("experts", EXPERTS_CONFIG, "bfloat16", batch_invariant=True, options=blocks)
    graphs = {"quantization": "file"}
    yield KernelSet("experts, graphs", EXPERTS_CONFIG, "bfloat16", False, options=graphs)
    yield KernelSet("delta rule", DELTA_CONFIG, "bfloat16", batch_invariant=True)
    yield KernelSet("convolutions", CONV_CONFIG, "bfloat16", batch_invariant=False, options=eager)


if __name__ == "__main__":
    main()
