"""`nano-inference info --selftest`: compare all kernels of this machine with the reference, on a
model of one or two layers.

Each set of kernels runs in its own process, so that a crash or an unusable GPU becomes a verdict.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from nano_inference.arrays import (
    HOST,
    Device,
    Dtype,
    Tensor,
    as_torch,
    dtype_for,
    dtype_name,
    is_tensor,
    of_kind,
)
from nano_inference.device.adapters import blank_adapter
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import one_line
from nano_inference.models.decoder import Decoder, HeadRows
from nano_inference.models.parameters.storage import allocate
from nano_inference.models.parameters.table import param_table
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.layers import LayerSpec
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import instruction_sets_here
from nano_inference.ops.cuda import availability
from nano_inference.ops.interface import FEW_ROWS, AttentionArgs, LatentOps, Ops
from nano_inference.ops.lora import Adapter
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, sampling_batch
from nano_inference.types import SamplingParams

VOCABULARY = 4096  # maximum rows of the head
LENGTHS = (19, 1, 37)  # rows of the chunks, the second of which is a decode
CONTEXTS = (19, 90, 100)
CODES = ("int8", "fp8")  # formats of weights with fused kernels of their own
TOLERANCE = 0.05  # relative to a result's norm: kernels round where the reference does not
COMPARED = (
    "embed",
    "linear",
    "rms_norm",
    "rope_and_store",
    "attention",
    "gate",
    "moe",
    "short_conv",
    "delta_net",
    "sigmoid_gate",
    "logits",
    "gather_logprobs",
)
DRAWS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.9, top_k=30),
)


_DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = _DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# convolutions, and delta rules with gated attention
_CONVOLUTIONS: dict[str, Any] = _DENSE | {
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "norm_eps": 1e-6,
}
_DELTA_RULE: dict[str, Any] = _DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


class Differs(Exception):
    """Failure of an operation, or a result far from the reference."""


class KernelSet(NamedTuple):
    """Kernels that are selected together.

    Attributes:
        backend: Backend, `"cpu"` or `"cuda"`.
        build: Instruction set of CPU kernels. On CUDA `"fast"`, `"batch invariant"` or
            `"overlapping"`.
        device: Device that runs the kernels.
        dtype: Dtype of weights and activations.
    """

    backend: str
    build: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        where = self.device
        if self.device.startswith("cuda"):
            where += f" ({torch.cuda.get_device_name(self.device)})"
        return f"{self.backend} {self.build}, {dtype_name(self.dtype)}, {where}"

    def ops(self) -> Ops:
        """Return the kernels. Raise `KernelsUnavailable` if they cannot be built or loaded."""
        if self.backend == "cpu":
            return cpu_ops(2, self.build)
        from nano_inference.ops.cuda.backend import cuda_ops  # brings in Triton

        return cuda_ops(
            batch_invariant=self.build == "batch invariant", overlaps=self.build == "overlapping"
        )


class Verdict(NamedTuple):
    """Result of one set of kernels. `problem` is None if it agrees with the reference."""

    kernels: KernelSet
    problem: str | None


def kernel_sets() -> list[KernelSet]:
    """Return all sets of kernels that this machine supports.

    These are the CPU builds that exist or can be compiled, and all modes of CUDA on every GPU that
    Triton supports.
    """
    sets = [
        KernelSet("cpu", build, "cpu", dtype)
        for build in instruction_sets_here()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return sets + [
        KernelSet("cuda", build, str(device), torch.bfloat16)
        for device in devices
        if availability.problem_with(device, torch.bfloat16, ()) is None
        for build in ("fast", "batch invariant", "overlapping")
        if build != "overlapping" or availability.problem_with_overlap(device) is None
    ]


def usual_specs() -> list[ModelSpec]:
    """Return a dense and a mixture-of-experts specification, and two with states, for tests without
    a model.
    """
    return [*map(spec_from_config, (_DENSE, _EXPERTS, _CONVOLUTIONS, _DELTA_RULE))]


def selftest(specs: Iterable[ModelSpec], sets: Iterable[KernelSet]) -> Iterator[Verdict]:
    """Run each set of kernels with the widths of each model.

    Yield the comparison with the reference.
    """
    specs = list(specs)
    for kernels in sets:
        yield Verdict(kernels, _verdict(kernels, specs))


def _verdict(kernels: KernelSet, specs: list[ModelSpec]) -> str | None:
    """Check a set of kernels in a new process. Return the problem, or None if there is none."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, kernels, specs), daemon=True)
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        return f"crashed ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"
    finally:
        here.close()
        child.join()


def _answer(pipe: Connection, kernels: KernelSet, specs: list[ModelSpec]) -> None:
    try:
        for spec in specs:
            check(kernels.ops(), spec, kernels.dtype, torch.device(kernels.device))
    except torch.OutOfMemoryError:
        pipe.send("out of memory; stop other programs on the device")
    except Differs as problem:
        pipe.send(str(problem))
    except Exception as problem:
        pipe.send(f"failed: {one_line(problem)}")
    else:
        pipe.send(None)


@torch.inference_mode()
def check(
    ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int = 16
) -> None:
    """Compare operations approximately with the reference, with the widths of a model.

    CUDA kernels are compared operation by operation. CPU kernels pack weights, so the steps of a
    whole model are compared. They compute with host arrays, as in an engine of one rank.

    Raises `Differs`, which names the failing operation.
    """
    tiny, reference = _tiny(spec), reference_ops()
    if ops.name != "cpu":
        _run(_beside(ops, reference), tiny, dtype, device, block_size)
        if ops.few_rows is not None:
            _compare_coded_rows(ops, tiny, dtype, device, block_size)
        if ops.has_adapters:
            _compare_adapters(ops, tiny, dtype, device)
        return
    results = _run(ops, tiny, dtype_for(HOST, dtype), HOST, block_size)
    for result, expected in zip(
        results, _run(reference, tiny, dtype, device, block_size), strict=True
    ):
        if isinstance(result, Draw):
            _require_alike("a draw", _in_torch(result), expected)
        else:
            _require_near("a step", as_torch(result), expected)


def _tiny(spec: ModelSpec) -> ModelSpec:
    """Return a model with the same widths, one layer of each kind, few tokens and few experts."""
    moe, count = spec.moe, spec.num_layers
    none = (False,) * count
    mixed = moe.layers if moe is not None else none
    states = spec.state.layers if spec.state is not None else none
    sizes = [
        spec.layer(layer)._replace(keys_of=int(spec.layer(layer).keys_of == layer))
        for layer in range(count)
    ]
    traits = list(zip(spec.windows, mixed, spec.ropes, sizes, states, strict=True))
    layers = [layer for layer in range(count) if traits.index(traits[layer]) == layer]
    few = moe and replace(
        moe,
        num_experts=min(moe.num_experts, 2 * moe.experts_per_token)
        if moe.routing.groups == 1
        else moe.num_experts,
        layers=tuple(mixed[layer] for layer in layers),
    )
    return replace(
        spec,
        num_layers=len(layers),
        windows=tuple(spec.windows[layer] for layer in layers),
        ropes=tuple(spec.ropes[layer] for layer in layers),
        kinds=tuple(_kept_kind(spec, layer, layers) for layer in layers) if spec.kinds else (),
        vocab_size=min(spec.vocab_size, VOCABULARY),
        max_position=256,
        moe=few,
        state=spec.state and replace(spec.state, layers=tuple(states[layer] for layer in layers)),
    )


def _kept_kind(spec: ModelSpec, layer: int, layers: list[int]) -> LayerSpec:
    """Return the sizes of a layer of the remaining `layers`, which reads keys of one of them."""
    maker = spec.kinds[layer].keys_of
    alike = [other for other in layers if spec.windows[other] == spec.windows[maker]]
    return spec.kinds[layer]._replace(keys_of=layers.index(layer if maker == layer else alike[0]))


def _run(ops: Ops, spec: ModelSpec, dtype: Dtype, device: Device, block_size: int) -> list[Any]:
    """Run every kind of step and draw once. Return the results that all backends produce."""
    generator = torch.Generator(torch.device(str(device))).manual_seed(0)
    params = allocate(param_table(spec), dtype, device, ops.allocate)
    for param in params.values():
        _fill(param, generator)
    model = Decoder(spec, params, ops, spec.max_position)
    per_table = -(-max(CONTEXTS) // block_size)
    num_tables = len(LENGTHS) if ops.few_rows is None else max(len(LENGTHS), FEW_ROWS)
    storage = KVStorage(spec, num_tables * per_table, block_size, dtype, device)
    for tensor in storage.tensors:  # contexts include positions that are not computed here
        tensor.zero_()
    chunks = [
        Rows(
            [(7 * index) % spec.vocab_size for index in range(length)],
            context - length,
            _table(chunk, per_table),
        )
        for chunk, (length, context) in enumerate(zip(LENGTHS, CONTEXTS, strict=True))
    ]
    last = [sum(LENGTHS[: chunk + 1]) - 1 for chunk in range(len(LENGTHS))]
    batch = batch_of_rows(
        *(chunks, block_size),
        draws=last,
        scores=[(row, 1) for row in range(sum(LENGTHS))],
        device=device,
    )
    result = model.forward(batch, storage)
    hidden = result.hidden.clone()  # the next forward overwrites it
    logits = model.logits(hidden)
    results = [
        *(hidden, result.scores.clone(), logits.clone()),
        ops.sample_logits(logits, _draws(DRAWS, device)),
        model.draw(hidden, _draws(DRAWS, device)),
        # draws without filters may use another path
        model.draw(hidden, _draws(DRAWS[:1] * len(last), device)),
    ]
    if ops.few_rows is not None:
        _compare_few_rows("few_rows", model, storage)
    return results


def _compare_coded_rows(
    ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> None:
    """Compare fused products of few rows and weights in 8 bits with the plain ones."""
    generator, per_table = torch.Generator(device).manual_seed(0), -(-max(CONTEXTS) // block_size)
    storage = KVStorage(spec, FEW_ROWS * per_table, block_size, dtype, device)
    for tensor in storage.tensors:
        tensor.zero_()
    for codes in CODES:
        params = allocate(param_table(spec), dtype, device, ops.allocate, codes)
        for param in params.values():
            _fill(param, generator)
        model = Decoder(spec, params, ops, spec.max_position)
        _compare_few_rows(f"few_rows of weights in {codes}", model, storage)


def _compare_few_rows(name: str, model: Decoder, storage: KVStorage) -> None:
    """Compare the fused operations of few rows with the plain ones."""
    ops, block_size = model.ops, storage.block_size
    assert ops.few_rows is not None
    per_table = -(-max(CONTEXTS) // block_size)
    for rows in (1, 2, FEW_ROWS):  # the row count selects the kernel
        decodes = [
            Rows([7], max(CONTEXTS) - row - 1, _table(row, per_table)) for row in range(rows)
        ]
        batch = batch_of_rows(decodes, block_size, device=model.device)
        expected = model.trunk(ops, batch, storage)
        _require_near(name, _called(name, ops.few_rows, (model.trunk, batch, storage)), expected)


def _compare_adapters(ops: Ops, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the adapters of every product, for rows with one of two adapters or none."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5

    def adapter(rank: int) -> Adapter:
        parts = {
            name: tuple(
                part._replace(a=drawn(*part.a.shape), b=drawn(*part.b.shape)) for part in blank
            )
            for name, blank in blank_adapter(shard_of(spec), rank, device).parts.items()
        }
        return Adapter(f"of rank {rank}", 1, parts)

    adapters, num_rows = (adapter(8), adapter(24)), sum(LENGTHS)
    rows = HeadRows(adapters, torch.arange(num_rows, device=device) % 3 - 1)
    for name, parts in adapters[0].parts.items():
        columns = parts[-1].first + parts[-1].b.shape[1]
        x = drawn(num_rows, parts[0].a.shape[1]).to(dtype)
        y = drawn(num_rows, columns).to(dtype)
        expected = reference_ops().lora(y, x, name, rows)
        _require_near("lora", _called("lora", ops.lora, (y, x, name, rows)), expected)


def _draws(params: Iterable[SamplingParams], device: Device) -> Any:
    draws = [DrawRequest(each, row, (1, row, 5)) for row, each in enumerate(params)]
    return sampling_batch(draws, device)


def _table(chunk: int, blocks: int) -> list[int]:
    return list(range(chunk * blocks, (chunk + 1) * blocks))


def _fill(param: Any, generator: torch.Generator) -> None:
    """Fill a parameter with random weights that preserve a row's scale. Norms are about 1."""
    shape = param.shape
    values = torch.randn(shape, generator=generator, device=generator.device)
    values = values * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * values
    values = of_kind(param.dtype, values)
    param.copy_(values) if is_tensor(param) else param.write(0, values)


def _in_torch(draw: Draw) -> Draw:
    """Return a draw of host arrays as tensors."""
    arrays = {each.name: getattr(draw, each.name) for each in fields(draw)}
    return Draw(**{name: as_torch(x) if is_tensor(x) else x for name, x in arrays.items()})


def _beside(ops: Ops, reference: Ops) -> Ops:
    """Return `ops` with each operation compared with the reference, which is called first."""
    compared = {
        name: _compared(name, getattr(ops, name), getattr(reference, name)) for name in COMPARED
    }
    compared["plan_attention"] = lambda *args: (
        _called("plan_attention", ops.plan_attention, args),
        reference.plan_attention(*args),
    )
    attend = _compared("attention", _attending(ops, 0), _attending(reference, 1))
    latent = LatentOps(
        _compared("latent store", ops.latent.store, reference.latent.store),
        _compared("latent values", ops.latent.values, reference.latent.values),
    )
    draws = {
        name: _drawn(name, getattr(ops, name), getattr(reference, name))
        for name in ("sample", "sample_logits")
    }
    return replace(ops, **compared | {"attention": attend, "latent": latent} | draws)


def _attending(ops: Ops, index: int) -> Callable[..., Tensor]:
    """Return the attention of `ops`, with its plan among several, and zeros that nothing reads."""

    def attend(q: Tensor, view: Any, layer: int, plans: Any, scores: AttentionArgs) -> Tensor:
        out = ops.attention(q, view, layer, plans[index], scores)
        out.unflatten(1, (q.shape[1], -1))[:, :, : scores.unread] = 0
        return out

    return attend


def _compared(
    name: str, tested: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        expected = reference(*[arg.clone() if is_tensor(arg) else arg for arg in args])
        actual = _called(name, tested, args)
        pairs = (
            zip(actual, expected, strict=True)
            if isinstance(actual, tuple)
            else [(actual, expected)]
        )
        for result, other in pairs:
            _require_near(name, result, other)
        return actual

    return call


def _require_near(name: str, actual: Tensor, expected: Tensor) -> None:
    error = float(
        (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
    )
    if not error <= TOLERANCE:  # also true for NaN
        raise Differs(f"{name} is wrong: relative difference {error:.2g} from the reference")


def _drawn(
    name: str, tested: Callable[..., Draw], reference: Callable[..., Draw]
) -> Callable[..., Draw]:
    def call(*args: Any) -> Draw:
        expected, drawn = reference(*args), _called(name, tested, args)
        _require_alike(name, drawn, expected)
        return drawn

    return call


def _require_alike(name: str, drawn: Draw, expected: Draw) -> None:
    """Compare two draws.

    Drawn tokens may differ if two are about equally good. The logprobs of equal tokens must agree.
    """
    same = drawn.token_ids == expected.token_ids
    apart = (drawn.logprobs - expected.logprobs)[same].abs()
    if 2 * int(same.sum()) < len(same) or not bool((apart < 0.1).all()):
        raise Differs(
            f"{name} is wrong: it drew {drawn.token_ids.tolist()}, the reference "
            f"{expected.token_ids.tolist()}"
        )


def _called(name: str, operation: Callable[..., Any], args: Any) -> Any:
    try:
        result = operation(*args)
        if torch.cuda.is_available():
            # report a kernel's error here instead of in a later call
            torch.cuda.synchronize()
        return result
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise Differs(f"{name} fails: {one_line(problem)}") from problem
