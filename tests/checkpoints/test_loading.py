import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import ModelLoadError
from nano_inference.checkpoints import loading
from nano_inference.checkpoints.loading import load_params, load_spec, resolve_dtype, resolve_model
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate, num_bytes
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read, write
from nano_inference.models.spec.read import spec_from_config
from tests.models.tiny import Weights, llama_config, llama_weights, tiny_llama, write_model

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[Weights], object]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_params(folder, load_spec(folder), dtype, CPU)


def changed(folder: Path, change: Change, **options: Any) -> Path:
    config = llama_config(**options)
    weights = llama_weights(config)
    change(weights)
    return write_model(folder, config, weights)


def test_tensors_are_loaded_into_their_slots(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, num_heads=6, num_kv_heads=2, hidden=48)
    params, places = load(folder), slots(param_table(load_spec(folder)))
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == places.keys()
    for name, tensor in stored.items():
        assert torch.equal(read(params, places[name]), tensor), name
    q, k, v = (stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(params["layers.1.qkv"], torch.cat((q, k, v)))
    gate, up = (stored[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(params["layers.0.gate_up"], torch.cat((gate, up)))


@pytest.mark.parametrize(
    ("device", "opened_on"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "cuda:3")]
)
def test_tensors_are_read_directly_to_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, opened_on: str
) -> None:
    seen: list[str] = []

    def opened(file: Path, framework: str, device: str) -> Any:
        seen.append(device)
        return safe_open(file, framework=framework)

    monkeypatch.setattr(loading, "safe_open", opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert len(list(loading.read_tensors(tiny_llama(tmp_path), torch.device(device)))) > 10
    assert seen == [opened_on]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3), (8, 8)]),
    layers=st.integers(1, 3),
    tie=st.booleans(),
    inner=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_slot_returns_written_values(
    heads: tuple[int, int], layers: int, tie: bool, inner: int, seed: int
) -> None:
    config = llama_config(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        layers=layers,
        tie=tie,
        hidden=48,
        inner=inner,
        vocab_size=31,
    )
    table, weights = param_table(spec_from_config(config)), llama_weights(config, seed)
    places, params = slots(table), allocate(table, torch.float32, CPU)
    for tensor in params.values():
        tensor.fill_(float("nan"))
    assert places.keys() == weights.keys()
    for name in sorted(weights):
        write(params, places[name], weights[name])
    for name, tensor in weights.items():
        assert torch.equal(read(params, places[name]), tensor)
        assert read(params, places[name]).data_ptr() >= params[places[name].param].data_ptr()
    assert not any(tensor.isnan().any() for tensor in params.values()), (
        "a part of a parameter belongs to no rank"
    )
    assert num_bytes(table, torch.bfloat16) == 2 * sum(
        tensor.numel() for tensor in weights.values()
    )


def test_weights_are_cast_on_read(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    exact, rounded = load(folder), load(folder, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.values())
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "'model.layers.1.mlp.up_proj.weight' is missing",
        ),
        (lambda w: w.pop(EMBEDDING), f"'{EMBEDDING}' is missing"),
        (lambda w: w.pop(HEAD), f"'{HEAD}' is missing"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "q_proj.bias.*not part of",
        ),
        (
            lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}),
            "layers.2.*not part of",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(65)}),
            r"'model.norm.weight'.*\(65,\).*\(64,\)",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 32)}),
            r"k_proj.*\(64, 32\).*\(32, 64\)",
        ),
    ],
)
def test_missing_extra_or_misshapen_tensor_is_named(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(changed(tmp_path, change))


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    load(
        changed(
            tmp_path,
            lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
        )
    )


def test_tied_head_may_be_absent_or_equal(tmp_path: Path) -> None:
    absent = load(tiny_llama(tmp_path / "absent", tie=True))
    present = load(
        changed(tmp_path / "present", lambda w: w.update({HEAD: w[EMBEDDING].clone()}), tie=True)
    )
    assert "head" not in absent
    assert absent.keys() == present.keys()
    assert all(torch.equal(absent[name], present[name]) for name in absent)


@pytest.mark.parametrize(
    "change", [lambda w: w[EMBEDDING] + 1, lambda w: w[EMBEDDING][:-1].clone()]
)
def test_differing_tied_head_is_rejected(
    tmp_path: Path, change: Callable[[Weights], Tensor]
) -> None:
    folder = changed(tmp_path, lambda w: w.update({HEAD: change(w)}), tie=True)
    with pytest.raises(ModelLoadError, match=f"'{HEAD}' is tied to '{EMBEDDING}'.*differs"):
        load(folder)


def sharded(folder: Path, num_files: int) -> Path:
    """Split the tiny model over several files with an index: head in the first, embedding in the
    last.
    """
    config = llama_config()
    weights = llama_weights(config)
    write_model(folder, config, weights)
    (folder / "model.safetensors").unlink()
    names = sorted(weights, key=lambda name: (name != HEAD, name == EMBEDDING, name))
    weight_map: dict[str, str] = {}
    for i in range(num_files):
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        names_in_file = names[i::num_files]
        save_file({name: weights[name] for name in names_in_file}, folder / file)
        weight_map |= dict.fromkeys(names_in_file, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    whole, parts = load(tiny_llama(tmp_path / "whole")), load(sharded(tmp_path / "parts", 3))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_tied_head_in_an_earlier_file_than_its_embedding(tmp_path: Path) -> None:
    config = llama_config(tie=True)
    weights = llama_weights(config)
    write_model(tmp_path, config, weights)
    (tmp_path / "model.safetensors").unlink()
    save_file({HEAD: weights[EMBEDDING].clone()}, tmp_path / "a.safetensors")
    save_file(weights, tmp_path / "b.safetensors")
    assert torch.equal(load(tmp_path)["embed"], weights[EMBEDDING])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"model-00002-of-00003\.safetensors.*index\.json.*missing"
    ):
        load(folder)


def test_shard_missing_from_the_index_is_not_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2)
    save_file({"stray": torch.zeros(1)}, folder / "consolidated.safetensors")
    load(folder)


def test_tensor_in_two_files_is_rejected(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    save_file({EMBEDDING: torch.zeros(300, 64)}, folder / "more.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"'model\.embed_tokens\.weight' came twice: it is in .* and in more"
    ):
        load(folder)


def test_index_without_a_map_is_rejected(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json.*weight_map"):
        load(folder)


def test_folder_without_safetensors_error_names_a_solution(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ModelLoadError, match=r"pytorch_model\.bin.*convert its weights to safetensors"
    ):
        load(folder)


def test_broken_safetensors_file_is_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "", "\x00", "[1, 2]", "3"])
def test_broken_config_is_named(tmp_path: Path, text: str) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_spec(folder)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is empty; a model folder holds config\.json"):
        load_spec(tmp_path)
    (tmp_path / "README.md").touch()
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        load_spec(tmp_path)


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_spec(folder).eos_token_ids == (2, 9)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        load_spec(folder)


def test_folder_resolves_to_itself_and_other_files_are_rejected(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_auto_dtype_follows_the_checkpoint(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    spec = load_spec(tiny_llama(tmp_path, dtype=dtype))
    assert resolve_dtype("auto", spec) == dtype
    assert resolve_dtype("float32", spec) == torch.float32
    assert resolve_dtype("bfloat16", spec) == torch.bfloat16
