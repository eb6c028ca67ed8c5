"""Files read as host arrays compared with the same files read as tensors."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nano_inference.arrays import HOST, Device, host, is_tensor, namespace
from nano_inference.checkpoints.host_file import HostFile
from nano_inference.checkpoints.loading import load_params, load_spec, read_tensors, resolve_dtype
from nano_inference.checkpoints.quantised_weights import quantised_weight
from nano_inference.models.parameters.storage import formats_of
from nano_inference.models.sharding.shard import shard_of
from nano_inference.models.spec.quantisation import read_quantisation
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.parallel.mesh import Mesh, Place
from tests.checkpoints.quantisers import GROUPED, QUANTISERS, write_quantised
from tests.checkpoints.test_checkpoint_codes import FORMS, write
from tests.checkpoints.test_gguf_numbers import file_of
from tests.models.tiny import llama_config, llama_weights, tiny_llama, tiny_model
from tests.models.tiny_gguf import described
from tests.ops.cpu_kernels import kernels
from tests.same_bits import same

CPU = torch.device("cpu")
GGUF = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4")


def plain(shape: Any, dtype: Any, device: Any, **_: Any) -> Any:
    return namespace(device).empty(shape, dtype=dtype, device=device)


def load(folder: Path, dtype: str, device: Device, **options: Any) -> dict[str, Any]:
    library = getattr(namespace(device), dtype)
    return load_params(folder, load_spec(folder), library, device, plain, **options)


def require_same(on_host: dict[str, Any], on_torch: dict[str, Any]) -> None:
    assert on_host.keys() == on_torch.keys()
    assert [name for name in on_host if not same(on_host[name], on_torch[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3", "phi3"])
def test_safetensors_equal_tensors(tmp_path: Path, family: str, dtype: str) -> None:
    folder = tiny_llama(tmp_path) if family == "llama" else tiny_model(tmp_path, family)
    require_same(load(folder, dtype, HOST), load(folder, dtype, CPU))
    require_same(dict(read_tensors(folder, HOST)), dict(read_tensors(folder)))
    part = shard_of(load_spec(folder), Place(Mesh(2), 1))
    require_same(load(folder, dtype, HOST, part=part), load(folder, dtype, CPU, part=part))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*QUANTISERS, *GROUPED])
def test_dequantised_weights_equal_tensors(tmp_path: Path, name: str, dtype: str) -> None:
    sizes: Any = {"hidden": 384, "inner": 384, "layers": 1} if name in GROUPED else {"layers": 1}
    config = llama_config(**sizes)
    write_quantised(tmp_path, name, config, llama_weights(config))
    require_same(load(tmp_path, dtype, HOST), load(tmp_path, dtype, CPU))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GGUF)
def test_gguf_weights_equal_tensors(tmp_path: Path, name: str, dtype: str) -> None:
    path = file_of(tmp_path / "m.gguf", name)
    folder = described(path, tmp_path / "cache")
    require_same(load(folder, dtype, HOST), load(folder, dtype, CPU))
    require_same(dict(read_tensors(path, HOST)), dict(read_tensors(path)))


def test_stacked_experts_equal_tensors(tmp_path: Path) -> None:
    """The experts are in MXFP4, as in gpt-oss."""
    packed, _ = QUANTISERS["compressed-mxfp4"].pack(torch.randn(3, 10, 64))
    tensors = {
        "up_blocks": packed[".weight_packed"].unflatten(-1, (2, 16)),
        "up_scales": packed[".weight_scale"],
    }
    save_file(tensors, tmp_path / "t.safetensors")
    said = read_quantisation({"quantization_config": {"quant_method": "mxfp4"}})
    assert said is not None
    read = []
    for file, dtype in (
        (HostFile(tmp_path / "t.safetensors"), host.bfloat16),
        (safe_open(tmp_path / "t.safetensors", framework="pt"), torch.bfloat16),
    ):
        slices = {name: file.get_slice(name) for name in tensors}
        weight: Any = quantised_weight("up_blocks", (3, 10, 64), slices, said, dtype)
        read.append([weight[:], weight[1:3], weight[2:3, 1:9, 32:], weight[1:1]])
    assert all(map(same, *read))


def codes(folder: Path, device: Device) -> dict[str, Any]:
    kernels()
    spec, dtype = load_spec(folder), namespace(device).float32
    params = load_params(folder, spec, dtype, device, cpu_ops(1).allocate, None, "file")
    assert formats_of(params)
    return {name: each if is_tensor(each) else each.data for name, each in params.items()}


@pytest.mark.parametrize("name", FORMS)
def test_stored_codes_equal_tensors(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name, layers=1)
    require_same(codes(folder, HOST), codes(folder, CPU))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_gguf_codes_equal_tensors(tmp_path: Path, name: str) -> None:
    folder = described(file_of(tmp_path / "m.gguf", name), tmp_path / "cache", coded=True)
    require_same(codes(folder, HOST), codes(folder, CPU))


TENSORS = {
    "bytes": torch.arange(7, dtype=torch.uint8),  # what follows is not aligned
    "wide": torch.randn(5, 6, 4, dtype=torch.float64),
    "half": torch.randn(8, 3).half(),
    "bfloat16": torch.randn(8, 3).bfloat16(),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "other float8": torch.randn(4, 4).to(torch.float8_e5m2),
    "exponents": torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "truth": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "longs": torch.arange(9),
}


def test_host_file_reads_slices_of_every_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "t.safetensors")
    file = HostFile(tmp_path / "t.safetensors")
    assert set(file.keys()) == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert file.get_slice(name).get_shape() == list(tensor.shape)
        assert same(file.get_tensor(name).float(), tensor.float())
        if tensor.dim() > 1:
            part: Any = file.get_slice(name)[1:3, :2]
            assert part.flags.aligned
            assert same(part.float(), tensor[1:3, :2].float())


def test_written_host_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    HostFile(path).get_tensor("a").fill_(7)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"\0" * 6, b"\xff" * 200])
def test_damaged_host_file_is_rejected(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(damage)
    with pytest.raises((SafetensorError, OSError)):
        HostFile(path)


def test_resolved_dtype_belongs_to_the_device(tmp_path: Path) -> None:
    spec = load_spec(tiny_llama(tmp_path))
    assert resolve_dtype("bfloat16", spec, device=HOST) == host.bfloat16
    assert resolve_dtype("auto", spec, device=HOST) == host.float32
    assert resolve_dtype("auto", spec, device=CPU) == torch.float32


MODULES = (
    *("loading", "lora", "quantised_weights", "stored_weight", "dequantise", "host_file"),
    *("gguf.weights", "shard_checks"),
)
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from importlib import import_module
for name in sys.argv[2:]:
    import_module("nano_inference.checkpoints." + name)
from pathlib import Path
from nano_inference.arrays import HOST, host
from nano_inference.checkpoints.loading import load_params, load_spec
def plain(shape, dtype, device, **_):
    return host.empty(shape, dtype=dtype)
folder = Path(sys.argv[1])
print(len(load_params(folder, load_spec(folder), host.bfloat16, HOST, plain)))
"""


def run_without_torch(folder: Path, modules: Iterable[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder), *modules], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_model_is_loaded_without_torch(tmp_path: Path) -> None:
    assert int(run_without_torch(tiny_llama(tmp_path), MODULES)) > 5
