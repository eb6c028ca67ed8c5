from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nano_inference import ModelLoadError
from nano_inference.models.spec.families import ARCHITECTURES
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.spec.rope import RopeSpec
from tests.models.tiny import FAMILIES, MORE_FAMILIES, llama_config


def config(**changes: Any) -> dict[str, Any]:
    return llama_config() | changes


def longrope(**changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "attention_factor": 1,
    } | changes


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in config(**changes).items() if name not in names}


def test_spec_of_a_llama_config() -> None:
    spec = spec_from_config(
        llama_config(num_heads=8, num_kv_heads=2, layers=3, vocab_size=321, tie=True)
    )
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 96, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 8)
    assert (spec.vocab_size, spec.max_position, spec.rms_norm_eps) == (321, 512, 1e-5)
    assert spec.tie_word_embeddings
    assert spec.eos_token_ids == (2,)
    assert spec.checkpoint_dtype == "float32"
    assert not spec.quantized_source
    assert spec.ropes[0] == RopeSpec(theta=10000.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), "1e-5"])
def test_family_specific_field_name_is_checked(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    def renamed(config_fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config_fields, "rms_norm_eps": config_fields["layer_norm_epsilon"]}

    family = replace(ARCHITECTURES["LlamaForCausalLM"], read=renamed)
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", family)
    assert spec_from_config(config(layer_norm_epsilon=1e-5)).rms_norm_eps == 1e-5
    with pytest.raises(ModelLoadError, match="rms_norm_eps"):
        spec_from_config(config(layer_norm_epsilon=value))


def test_gemma3_layer_pattern_agrees_with_transformers() -> None:
    def windows(**changes: Any) -> tuple[int, ...]:
        config_fields = {**llama_config(), **FAMILIES["gemma3"], "num_hidden_layers": 7, **changes}
        config_fields.pop("layer_types", None)
        return spec_from_config(config_fields).windows

    every_sixth = windows()
    assert [i for i, window in enumerate(every_sixth) if not window] == [5]
    assert windows(_sliding_window_pattern=3) == every_sixth
    assert [i for i, window in enumerate(windows(sliding_window_pattern=3)) if not window] == [2, 5]


def test_old_config_without_newer_fields_is_read() -> None:
    spec = spec_from_config(
        without(
            "head_dim",
            "num_key_value_heads",
            "tie_word_embeddings",
            "eos_token_id",
            "rope_theta",
            "rope_scaling",
        )
    )
    assert spec.head_dim == 16
    assert spec.num_kv_heads == spec.num_heads == 4
    assert not spec.tie_word_embeddings
    assert spec.eos_token_ids == ()
    assert spec.ropes[0].theta == 10000.0


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert spec_from_config(config(head_dim=24)).head_dim == 24
    assert spec_from_config(config(head_dim=None)).head_dim == 16


@pytest.mark.parametrize(
    ("fields", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 1.0}, (2,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_end_of_sequence_ids(
    fields: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert spec_from_config(config(eos_token_id=fields), generation).eos_token_ids == expected


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_dtype_has_two_spellings(name: str) -> None:
    assert (
        spec_from_config(without("torch_dtype") | {name: "bfloat16"}).checkpoint_dtype == "bfloat16"
    )


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeSpec(theta=5e5)),
        ({"rope_type": "default"}, RopeSpec(theta=5e5)),
        ({"rope_type": "linear", "factor": 2}, RopeSpec(theta=5e5, kind="linear", factor=2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 128,
            },
            RopeSpec(5e5, "llama3", 8.0, 128, 1.0, 4.0),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.5,
            },
            RopeSpec(5e5, "yarn", 4.0, 128, attention_factor=1.5),
        ),
    ],
)
def test_old_and_new_spelling_of_rope(scaling: dict[str, Any] | None, expected: RopeSpec) -> None:
    old = config(rope_theta=5e5, rope_scaling=scaling)
    new = without("rope_theta", "rope_scaling") | {
        "rope_parameters": (scaling or {}) | {"rope_theta": 5e5}
    }
    assert spec_from_config(old).ropes[0] == expected
    assert spec_from_config(new).ropes[0] == expected
    if scaling is not None:  # the oldest alias of this setting
        oldest = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
        assert spec_from_config(config(rope_theta=5e5, rope_scaling=oldest)).ropes[0] == expected


def test_yarn_derives_its_attention_factor_from_the_scaling() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert spec_from_config(config(rope_scaling=yarn)).ropes[0].attention_factor == pytest.approx(
        1.1386294
    )
    assert (
        spec_from_config(config(rope_scaling=yarn | {"factor": 1.0})).ropes[0].attention_factor
        == 1.0
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (config(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*Mamba.*not implemented"),
        (config(architectures=[]), "names no architecture.*LlamaForCausalLM"),
        (without("architectures"), "names no architecture.*LlamaForCausalLM"),
        (without("hidden_size"), "lacks 'hidden_size'"),
        (without("rms_norm_eps"), "lacks 'rms_norm_eps'"),
        (without("max_position_embeddings"), "lacks 'max_position_embeddings'"),
        (config(hidden_act="gelu"), "hidden_act='gelu'.*silu"),
        (config(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (
            config(architectures=["MistralForCausalLM"], sliding_window=8, layer_types=["chunked"]),
            "layer_types.*2 entries",
        ),
        (config(mlp_bias=True), "mlp_bias=True"),
        (config(num_key_value_heads=3), "4 attention heads.*3 key-value heads"),
        (config(rope_scaling={"rope_type": "longrope"}), "lacks 'short_factor'"),
        (
            config(rope_scaling=longrope(long_factor=[1.5] * 8)),
            "longrope.*requires equal short_factor and long_factor",
        ),
        (config(rope_scaling=longrope(attention_factor=None)), "and an attention_factor"),
        (
            config(rope_scaling=longrope(short_factor=[1.0], long_factor=[1.0])),
            "1 factors; heads of 16 dimensions need 8",
        ),
        (config(rope_scaling=longrope(short_factor=[0] * 8)), "short_factor=.*numbers above 0"),
        (
            config(rope_scaling={"rope_type": "spiral"}),
            "'spiral'.*default, linear, llama3, longrope, proportional, yarn",
        ),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "lacks 'low_freq_factor'"),
        (
            config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (config(hidden_size="many"), "hidden_size='many'"),
        (config(vocab_size=None), "lacks 'vocab_size'"),
    ],
)
def test_unsupported_feature_is_rejected_by_name(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_from_config(broken)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rope_theta", [0, -1e4, NAN, INFINITE, "10000", True, 10**400, [1e4]]),
        ("rms_norm_eps", [0, -1e-5, NAN, INFINITE, "1e-5", [1e-5]]),
        ("hidden_size", [0, -64, 2**62, 64.5, True, "64", [64], {}]),
        ("intermediate_size", [0, -1, 2**40, "96"]),
        ("num_hidden_layers", [0, -2, 10**9]),
        ("num_attention_heads", [0, -4, 10**9, 2.5]),
        ("num_key_value_heads", [0, -2, False]),
        ("head_dim", [0, 1, -16, "16"]),
        ("vocab_size", [0, -1, 2**50, 10**5000]),
        ("max_position_embeddings", [0, -1, 2**40, NAN]),
        ("tie_word_embeddings", ["yes", 1]),
        ("attention_bias", ["no"]),
        ("architectures", ["LlamaForCausalLM", 7, [1], {}]),
        ("eos_token_id", ["2", [2, "3"], -1, 2.5, True, {}]),
        ("hidden_act", [3, ["silu"]]),
        ("torch_dtype", [16]),
        ("rope_scaling", ["linear", [1], 2.0]),
        ("rope_local_base_freq", [0, NAN]),
    ],
)
def test_absurd_value_is_rejected_in_one_sentence(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(
            ModelLoadError, match=rf"config\.json has {name}=.*; it must be "
        ) as raised:
            spec_from_config(config(**{name: value}))
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "linear", "factor": 0}, "factor=0"),
        ({"rope_type": "linear", "factor": NAN}, "factor=nan"),
        ({"rope_type": ["linear"]}, "rope_type="),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "must be less than",
        ),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 4, "attention_factor": -1}, "attention_factor=-1"),
        (
            {"full_attention": {"rope_theta": 0}, "sliding_attention": {}},
            "full_attention has rope_theta=0",
        ),
        ({"full_attention": {}, "sliding_attention": 3}, "sliding_attention=3"),
    ],
)
def test_absurd_rope_is_rejected(fields: dict[str, Any], message: str) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelLoadError, match=message):
            spec_from_config(config(**{name: fields}))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": -1}),
        ("qwen2", {"max_window_layers": -1}),
        ("gemma3", {"query_pre_attn_scalar": 0}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}),
        ("granite", {"logits_scaling": 0}),
        ("granite", {"embedding_multiplier": NAN}),
        ("mixtral", {"num_local_experts": -1}),
        (
            "mixtral",
            {"num_local_experts": 2**14, "num_hidden_layers": 2**12, "num_experts_per_tok": 1},
        ),
        ("qwen3-moe", {"mlp_only_layers": 1}),
        ("qwen3-moe", {"decoder_sparse_step": "1"}),
        ("lfm2", {"norm_eps": NAN}),
        ("lfm2", {"conv_L_cache": 0}),
        ("lfm2", {"block_ff_dim": -96}),
        ("qwen3_5", {"linear_num_key_heads": 0}),
        ("qwen3_5", {"linear_value_head_dim": -32}),
        ("qwen3_5", {"linear_conv_kernel_dim": "4"}),
    ],
)
def test_absurd_value_of_a_family_is_rejected(family: str, changes: dict[str, Any]) -> None:
    good = llama_config() | (FAMILIES | MORE_FAMILIES)[family]
    spec_from_config(good)
    with pytest.raises(ModelLoadError, match=r"must be|exceed the limit"):
        spec_from_config(good | changes)


def test_absurd_stop_token_in_generation_config_is_rejected() -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json has eos_token_id='x'"):
        spec_from_config(config(), {"eos_token_id": "x"})


def test_config_needs_one_known_architecture_among_several() -> None:
    assert spec_from_config(config(architectures=["Other", "LlamaForCausalLM"])).hidden_size == 64
