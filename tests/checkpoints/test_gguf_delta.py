"""`.gguf` files of Qwen3.5, whose value heads are in another order than in a checkpoint.

`test_gguf_families.py` compares such files with transformers.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.arrays import host
from nano_inference.checkpoints.loading import gguf_formats, load_params, load_spec
from nano_inference.config import Backend
from nano_inference.errors import ModelLoadError
from nano_inference.models.parameters.slots import Slot, slots
from nano_inference.models.parameters.storage import formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.formats import FORMATS, Stack
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.rl.checkpoint import checkpoint_of
from tests.checkpoints import hf_to_gguf as hf_to_gguf_module
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.drafts.mtp import FAMILIES, MtpModel
from tests.invariance.test_quantised_invariance import blocks
from tests.models.families import DELTA
from tests.models.strong import strong_model
from tests.models.tiny_gguf import described, gguf, tensors_in

PROMPTS = [list(range(3, 60)), [9] * 20, [11, 5]]
PARAMS = SamplingParams(
    max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=True, raw_logprobs=True
)
# heads of half a block of Q4_K; enough value heads for formats of their own
WIDE: Mapping[str, Any] = DELTA | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def strong(folder: Path, config: Mapping[str, Any] = WIDE, **changes: Any) -> Any:
    return strong_model(folder, "Qwen3_5ForCausalLM", **deepcopy({**config, **changes}))


def engine_of(folder: Path, **options: Any) -> InferenceEngine:
    usual: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_batch_size": 4}
    return InferenceEngine(EngineConfig(str(folder), **{"quantization": None, **usual, **options}))


def logprobs_of(engine: InferenceEngine) -> list[float]:
    samples = engine.generate(PROMPTS, PARAMS)
    return [
        value for each in samples for value in (*(each.prompt_logprobs or ())[1:], *each.logprobs)
    ]


@pytest.fixture
def in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path:
    """Return the folder of a file with blocks of a type. Those of Q4_K are random."""
    strong(tmp_path / "hf")
    if request.param == "Q4_K":  # the gguf package cannot write them
        monkeypatch.setattr(gguf, "quantize", blocks)
    kind = gguf.GGMLQuantizationType[request.param]
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "qwen35", matrices=kind)
    return described(path, tmp_path / "cache", coded=True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("in_blocks", ["Q8_0", "Q4_0", "Q4_K"], indirect=True)
def test_blocks_in_tiles_are_read_unchanged(in_blocks: Path, backend: str) -> None:
    allocate = (cpu_ops(1) if backend == "cpu" else reference_ops()).allocate
    spec, device = load_spec(in_blocks), torch.device("cpu")
    params = load_params(in_blocks, spec, torch.float32, device, allocate, quantization="file")
    assert {"layers.0.mix_in", "layers.0.mix_out", "layers.1.o"} <= formats_of(params).keys()
    exact = load_params(in_blocks, spec, torch.float32, device)
    for slot in slots(param_table(spec)).values():
        assert torch.equal(read(params, slot), read(exact, slot))


def test_matrices_of_a_mix_keep_formats_of_their_own(tmp_path: Path) -> None:
    strong(tmp_path / "hf")
    kinds = gguf.GGMLQuantizationType
    path = hf_to_gguf(
        *(tmp_path / "hf", tmp_path / "m.gguf", "qwen35"),
        matrices=kinds["Q4_0"],
        others={"ssm_alpha": kinds["Q8_0"], "ssm_beta": kinds["Q8_0"]},
    )
    spec = load_spec(described(path, tmp_path / "cache", coded=True))
    four, eight = FORMATS["int4-32"], FORMATS["int8-32"]
    forms = gguf_formats(path, param_table(spec))
    assert forms["layers.0.mix_in"] == Stack(((576, four), (32, eight)))
    assert forms["layers.0.mix_out"] == four


@pytest.mark.parametrize("in_blocks", ["Q8_0", "Q4_K"], indirect=True)
def test_backends_agree_on_blocks_in_tiles(in_blocks: Path) -> None:
    results: list[list[float]] = []
    backends: tuple[Backend, ...] = ("reference", "cpu")
    for backend in backends:
        with engine_of(in_blocks, quantization="file", backend=backend) as engine:
            results.append(logprobs_of(engine))
    differences = np.abs(np.subtract(results[0], results[1]))
    # a difference in the last digit may change a rounded input by a step
    assert np.median(differences) < 1e-3
    assert differences.max() < 0.1


@pytest.mark.parametrize("in_blocks", ["Q4_K"], indirect=True)
def test_prefixes_and_forks_keep_bits_in_tiles(in_blocks: Path) -> None:
    params = replace(PARAMS, temperature=1.0, seed=3, prompt_logprobs=False)
    options: dict[str, Any] = {"quantization": "file", "block_size": 8, "max_chunk_tokens": 13}
    with engine_of(in_blocks, **options) as engine:
        first = engine.generate(PROMPTS, params, 2)
        again = engine.generate(PROMPTS, params, 2)
    with engine_of(in_blocks, **options, enable_prefix_caching=False) as engine:
        alone = [sample for each in PROMPTS for sample in engine.generate([each], params, 2)]
    assert max(sample.cached_tokens for sample in again) >= 48
    for samples in zip(first, again, alone, strict=True):
        assert len({tuple(sample.completion_tokens) for sample in samples}) == 1
        assert len({tuple(sample.logprobs) for sample in samples}) == 1


def test_checkpoint_updates_a_file_s_engine(tmp_path: Path) -> None:
    """The update's rows and columns are in the checkpoint's order."""
    strong(tmp_path / "old")
    strong(tmp_path / "new", seed=5)
    path = hf_to_gguf(tmp_path / "old", tmp_path / "m.gguf", "qwen35")
    new = hf_to_gguf(tmp_path / "new", tmp_path / "new.gguf", "qwen35")
    with engine_of(tmp_path / "new") as engine:
        expected = logprobs_of(engine)
    with engine_of(described(path, tmp_path / "cache")) as engine:
        before = logprobs_of(engine)
        engine.update_weights(tmp_path / "new", blocking=True)
        np.testing.assert_allclose(logprobs_of(engine), expected, rtol=0, atol=1e-4)
        tensors = load_file(tmp_path / "old" / "model.safetensors")
        name = "model.layers.0.linear_attn.out_proj.weight"
        places = torch.arange(tensors[name].numel()).flip(0)
        rest = {each: tensor for each, tensor in tensors.items() if each != name}
        patch = (name, places, tensors[name].reshape(-1)[places])
        engine.update_weights(iter([rest, patch]), blocking=True)
        np.testing.assert_allclose(logprobs_of(engine), before, rtol=0, atol=1e-4)
    with engine_of(tmp_path / "old") as engine:
        engine.update_weights(new, blocking=True)
        np.testing.assert_allclose(logprobs_of(engine), expected, rtol=0, atol=1e-4)


def test_saved_checkpoint_has_consecutive_heads(tmp_path: Path) -> None:
    strong(tmp_path / "hf")
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "qwen35")
    saved = checkpoint_of(str(described(path, tmp_path / "cache")), tmp_path / "saved")
    assert load_spec(saved).state == load_spec(tmp_path / "hf").state
    old, new = (load_file(each / "model.safetensors") for each in (tmp_path / "hf", saved))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("xp", [torch, host])
def test_columns_of_several_parts_are_taken_and_put(xp: Any) -> None:
    slot = Slot("w", (3, 6), 1, ((4, 6), (0, 2), (2, 4)), param="w", start=0)
    whole = xp.arange(18).reshape(3, 6)
    taken = slot.take(whole)
    assert taken[1].tolist() == [10, 11, 6, 7, 8, 9]
    back = xp.zeros((3, 6), dtype=whole.dtype)
    slot.put(back, taken)
    assert back.tolist() == whole.tolist()
    places, values = slot.take_places(xp.arange(18), whole.reshape(-1))
    assert taken.reshape(-1)[places].tolist() == values.tolist()


def test_mtp_layer_of_a_file_drafts_like_its_checkpoint(tmp_path: Path) -> None:
    folder = MtpModel(tmp_path, FAMILIES["qwen3.5"]).folder
    keys: dict[str, Any] = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True, True, False, True, False],
    }
    path = hf_to_gguf(folder, tmp_path / "m.gguf", "qwen35", **keys)
    file = described(path, tmp_path / "cache")
    # few tokens, so that drafts are often accepted
    params = replace(PARAMS, max_tokens=20, allowed_token_ids=[17, 40, 41])
    results: list[tuple[list[list[int]], int]] = []
    for each in (folder, file):
        with engine_of(each, draft_model="mtp", max_drafts=2) as engine:
            assert engine.drafter is not None
            engine.drafter.costs = None  # as many drafts as possible
            tokens = [list(each.completion_tokens) for each in engine.generate(PROMPTS, params)]
            counts = engine.stats().speculation
            assert counts is not None
            results.append((tokens, counts.num_accepted))
    assert results[0] == results[1]
    assert results[0][1] > 0
    with engine_of(file) as engine:  # the layer is ignored
        tokens = [list(each.completion_tokens) for each in engine.generate(PROMPTS, params)]
        assert tokens == results[0][0]


def with_positive_decays(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.ssm_a"][3] = 0


def with_an_embedding(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.2.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]


def without_a_gate(tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.0.attn_gate.weight"]


def with_narrow_outputs(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.ssm_out.weight"] = tensors["blk.0.ssm_out.weight"][:, :64].copy()


def with_states_in_attention(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ssm_out.weight"] = tensors["blk.0.ssm_out.weight"]


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (with_positive_decays, {}, "ssm_a of .* holds numbers of 0 or above: .* download it"),
        (with_an_embedding, {}, "nextn.embed_tokens.weight is not supported"),
        (without_a_gate, {}, "lacks the tensor model.layers.0.linear_attn.in_proj_z.weight"),
        (with_narrow_outputs, {}, "ssm_out.weight has 64 columns, expected 256 by its metadata"),
        (with_states_in_attention, {}, "its metadata excludes model.layers.1.linear_attn.out_proj"),
        (None, {"ssm.inner_size": 250}, "16 value heads in a width of 250"),
        (None, {"ssm.group_count": 3}, "16 value heads .* cannot share 3 key heads evenly"),
        (None, {"ssm.inner_size": "a"}, "contains an invalid value"),
        (None, {"attention.recurrent_layers": [True]}, "has 1 recurrent_layers for 2 layers"),
        (None, {"nextn_predict_layers": 2}, "nextn_predict_layers is 2; expected 1"),
        (None, {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms is not supported"),
    ],
)
def test_mismatched_delta_file_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, keys: Any, message: str
) -> None:
    strong(tmp_path / "hf")
    if change is not None:
        write = hf_to_gguf_module.write_gguf

        def changed(path: Path, tensors: Any, *rest: Any) -> Path:
            change(tensors)
            return write(path, tensors, *rest)

        monkeypatch.setattr(hf_to_gguf_module, "write_gguf", changed)
    path = hf_to_gguf(tmp_path / "hf", tmp_path / "m.gguf", "qwen35", **keys)
    with pytest.raises(ModelLoadError, match=message):
        tensors_in(described(path, tmp_path / "cache"))
