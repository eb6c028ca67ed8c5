"""Compiles the launches of `ops/cuda` for a GPU that is not here, and says what each kernel takes of it.

    python -m tests.gpu.compile [--only WORD] [--small] [--arch 90] [--json PATH]

Our own host functions are called with CPU tensors of real shapes (which nobody reads: their memory is never touched).
A stand-in for Triton's driver names the target, and a launch compiles and returns. So what is compiled is what a step
on such a GPU would launch: constants, alignments and all. Nothing here needs a GPU, pytest or Triton's interpreter,
which must be off (`main` sees to that). Whoever writes a kernel adds its calls to `CALLS`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nano_inference.batch import ForwardBatch, Rows, batch_of_rows
from nano_inference.engine.storage import BoundKVStorage, KVStorage
from nano_inference.ops.backend import Norm

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may have, by compute capability
BLOCK_SIZE = 16
CONTEXT = 1024  # tokens of a sequence in `decode_batch`


@dataclass(frozen=True)
class Shape:
    """A model as the kernels see it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    head_norms: bool  # of queries and keys
    dtype: torch.dtype = torch.bfloat16

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def norm(self, width: int) -> Norm:
        return Norm(self.empty(width), 1e-6, 0.0, self.dtype)

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(sizes, dtype=dtype or self.dtype)


QWEN = Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151_936, head_norms=True)
LLAMA = Shape("Llama-3-8B", 4096, 32, 8, 128, 14_336, 128_256, head_norms=False)


def kv_view(shape: Shape, batch: ForwardBatch) -> BoundKVStorage:
    """The KV cache of one layer, bound to a batch."""
    spec = SimpleNamespace(num_layers=1, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, windows=(0,))
    storage = KVStorage(spec, 4096, BLOCK_SIZE, shape.dtype, torch.device("cpu"))  # type: ignore[arg-type]
    return storage.bind(batch.block_tables, batch.seq_lens)


def decode_batch(num_seqs: int) -> ForwardBatch:
    """One row of each sequence at the end of `CONTEXT` tokens."""
    return batch_of_rows([Rows([0], CONTEXT - 1, range(CONTEXT // BLOCK_SIZE))] * num_seqs, BLOCK_SIZE)


def prefill_batch(num_seqs: int) -> ForwardBatch:
    """All `CONTEXT` tokens of each sequence."""
    return batch_of_rows([Rows([0] * CONTEXT, 0, range(CONTEXT // BLOCK_SIZE))] * num_seqs, BLOCK_SIZE)


# Calls import what they call: this module is read where Triton is not.


ROWS = (1, 2, 7, 4096)  # numbers of rows that calls row by row are made with: none may make a kernel of its own


def _embed(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import embed

    for rows in ROWS:
        embed(torch.zeros(rows, dtype=torch.int64), shape.empty(shape.vocab, shape.hidden))


def _rms_norm(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import rms_norm

    for rows in ROWS:
        residual = shape.empty(rows, shape.hidden, dtype=torch.float32)
        rms_norm(None, residual, shape.norm(shape.hidden))
        rms_norm(shape.empty(rows, shape.hidden), residual, shape.norm(shape.hidden))
    odd = torch.zeros(shape.hidden + 1, dtype=shape.dtype)[1:]  # an address that is no multiple of 16
    rms_norm(
        odd[None], shape.empty(1, shape.hidden, dtype=torch.float32), shape.norm(shape.hidden)._replace(weight=odd)
    )


def _gate(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import gate

    for rows in ROWS:
        gate(shape.empty(rows, 2 * shape.inner), "silu")


def _gelu(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import gate

    gate(shape.empty(8, 2 * shape.inner), "gelu_tanh")


def _inputs(shape: Shape) -> None:
    from nano_inference.ops.cuda.rows import make_noise_keys, relay_tokens

    for rows in ROWS:
        integers = torch.zeros(rows, dtype=torch.int64)
        relay_tokens(integers.clone(), integers, integers)
        make_noise_keys(integers, integers, torch.zeros(rows, 2, dtype=torch.int64))


def _rope(shape: Shape, *, full: bool = False, units: bool = False) -> None:
    from nano_inference.ops.cuda.rope import rope_and_store

    angles = shape.empty(2 * CONTEXT, shape.head_dim // 2, dtype=torch.float32)
    widths = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim) if full else (shape.head_dim,) * 2
    norms = (shape.norm(widths[0]), shape.norm(widths[1])) if full or shape.head_norms else None
    unit_map = SimpleNamespace(units=lambda: torch.zeros(1, 64, dtype=torch.int64))
    for batch in (decode_batch(1), decode_batch(2), prefill_batch(4)):
        view, qkv = kv_view(shape, batch), shape.empty(len(batch.input_ids), shape.qkv)
        view.storage.unit_map = unit_map if units else None  # type: ignore[assignment]
        where = (batch.positions, view, 0, batch.slot_mapping)
        rope_and_store(qkv, angles, angles, *where, shape.heads, shape.kv_heads, norms)


def _rope_full(shape: Shape) -> None:
    _rope(shape, full=True)


def _rope_units(shape: Shape) -> None:
    _rope(shape, units=True)


def _draw(shape: Shape, samples: Iterable[int] = (1, 7, 256), **options: Any) -> None:
    from nano_inference import SamplingParams
    from nano_inference.ops.cuda.sampling import draw
    from nano_inference.sampling.sampling_batch import DrawRequest, sampling_batch

    for num in samples:
        requests = [DrawRequest(SamplingParams(**options), row, completion=[1]) for row in range(num)]
        draw(shape.empty(num, shape.vocab, dtype=torch.float32), sampling_batch(requests))


def _draw_raw(shape: Shape) -> None:
    _draw(shape, (1,), raw_logprobs=True)
    _draw(shape, (1,), temperature=0.0)


def _draw_filtered(shape: Shape) -> None:
    _draw(shape, top_k=50, top_p=0.9)


def _draw_all(shape: Shape) -> None:
    """What costs passes of its own."""
    options = {"top_k": 50, "sampling_mask": True, "top_logprobs": 5, "logit_bias": {1: 1.0}, "presence_penalty": 1.0}
    _draw(shape, (1, 2), **options, raw_logprobs=True, allowed_token_ids=frozenset({1, 2}))


def _score(shape: Shape) -> None:
    from nano_inference.ops.cuda.sampling import score

    for num in (1, 7, 256):
        logits = shape.empty(num, shape.vocab, dtype=torch.float32)
        score(logits, torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=torch.float64))


def _product(shape: Shape) -> None:
    _products(shape, (8, 128, 1024))  # few, more, so many that no segment has a program of its own


def _product_of_few(shape: Shape) -> None:
    _products(shape, (8,))


def _products(shape: Shape, num_rows: tuple[int, ...]) -> None:
    from nano_inference.ops.cuda.matmul import invariant_product

    for rows in num_rows:
        x, weight = shape.empty(rows, shape.inner), shape.empty(shape.hidden, shape.inner)
        invariant_product(x, weight, None if rows > 8 else shape.empty(shape.hidden), shape.dtype)


@dataclass(frozen=True)
class Call:
    """What launches kernels.

    Attributes:
        name: of the call in the table.
        run: calls a host function of `ops/cuda` with tensors of this shape; results are not used.
        small: compiled in ordinary CI too, at the first shape, for sm_90; at most one or two a module.
        shapes: of models.
    """

    name: str
    run: Callable[[Shape], None]
    small: bool = False
    shapes: tuple[Shape, ...] = (QWEN, LLAMA)


CALLS = [
    Call("embed", _embed),
    Call("rms_norm", _rms_norm, small=True),
    Call("gate", _gate, small=True),
    Call("gate, GELU", _gelu),
    Call("rope_and_store", _rope, small=True),
    Call("rope_and_store, full norms", _rope_full, shapes=(LLAMA,)),
    Call("rope_and_store, units", _rope_units, shapes=(QWEN,)),
    Call("relay, keys", _inputs, shapes=(QWEN,)),
    Call("draw", _draw, small=True),
    Call("draw, raw", _draw_raw),
    Call("draw, filtered", _draw_filtered, shapes=(QWEN,)),
    Call("draw, edits, mask, best", _draw_all, shapes=(QWEN,)),
    Call("score", _score, small=True),
    Call("product", _product),
    Call("product, few rows", _product_of_few, small=True),
]


@dataclass(frozen=True)
class Compiled:
    """One kernel of one launch. Bytes, and instructions in its PTX (a loop's are counted once)."""

    call: str
    shape: str
    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    registers: int
    stack: int  # spilled registers, for the most part
    local: int
    shared: int
    wgmma: int
    mma: int
    loads: int
    wide_loads: int  # of 16 bytes
    stores: int
    wide_stores: int


class _Driver:
    """Triton's driver where there is no GPU: it names the target. One device number an architecture: kernels are cached
    by that number.
    """

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Within it a launch only compiles. Yields the list that Triton's `CompiledKernel`s are appended to."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    made: list[Any] = []
    run, before = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return made[-1]

    JITFunction.run = compile_only
    driver.set_active(_Driver(arch))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        JITFunction.run = run
        driver._active = before


def compile_calls(calls: Iterable[Call], archs: Iterable[int], *, one_shape: bool = False) -> list[Compiled]:
    """All launches of these calls, each different kernel of a call once."""
    found: dict[tuple[str, str, str], Compiled] = {}
    for arch in archs:
        for call in calls:
            for shape in call.shapes[:1] if one_shape else call.shapes:
                with compiling(arch) as made:
                    call.run(shape)
                for kernel in made:
                    key = (call.name, shape.name, kernel.hash)
                    if key not in found:
                        found[key] = _describe(kernel, call.name, shape.name, arch)
    return list(found.values())


def _describe(kernel: Any, call: str, shape: str, arch: int) -> Compiled:
    ptx, metadata, names = kernel.asm["ptx"], kernel.metadata, kernel.src.fn.arg_names
    usage = _resource_usage(kernel.asm["cubin"])
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
    loads = re.findall(r"\b(?:ld\.global\S*|cp\.async\.c[ag]\S*[^;]*)", ptx)
    stores = re.findall(r"\bst\.global\S*", ptx)
    return Compiled(
        call=call,
        shape=shape,
        kernel=metadata.name,
        arch=arch,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        constants={name: value for name, value in constants.items() if isinstance(value, int | float | str | None)},
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=metadata.shared + usage["SHARED"],
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        loads=len(loads),
        wide_loads=sum(map(_is_wide, loads)),
        stores=len(stores),
        wide_stores=sum(map(_is_wide, stores)),
    )


def _is_wide(instruction: str) -> bool:
    return re.search(r"v4\.[bfsu]32|v2\.[bfsu]64|0x10", instruction) is not None


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump`, which comes with Triton, reads in a kernel's binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def table(kernels: Iterable[Compiled]) -> str:
    """One line a kernel. `ld 16`: how many of the loads are of 16 bytes."""
    head = ("call", "shape", "kernel", "sm", "warps", "regs", "spills", "shared", "mma", "ld 16", "st 16", "constants")
    lines = [head]
    for k in kernels:
        mma = "wgmma" if k.wgmma else "mma" if k.mma else ""
        wide = (f"{k.wide_loads}/{k.loads}", f"{k.wide_stores}/{k.stores}")
        constants = " ".join(f"{name}={value}" for name, value in k.constants.items())
        numbers = (str(n) for n in (k.arch, k.num_warps, k.registers, k.stack + k.local, k.shared))
        lines.append((k.call, k.shape, k.kernel.strip("_"), *numbers, mma, *wide, constants))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines)


def main() -> None:
    """Print the table, write JSON where asked."""
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="calls whose names contain it")
    parser.add_argument("--small", action="store_true", help="what ordinary CI compiles")
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80], choices=list(SHARED_MEMORY))
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    calls = [call for call in CALLS if options.only in call.name and (call.small or not options.small)]
    kernels = compile_calls(calls, options.arch, one_shape=options.small)
    print(table(kernels))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1))


if __name__ == "__main__":
    main()
