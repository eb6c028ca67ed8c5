import dataclasses
import inspect
import re
from typing import Any

import pytest

from nano_inference import ConfigError, EngineConfig, NanoInferenceError, SchedulerConfig
from nano_inference.server.config import ServerConfig
from nano_training_service.config import TrainServiceConfig

COUNTS = [
    "block_size",
    "max_batch_size",
    "max_tokens_per_batch",
    "max_chunk_tokens",
    "max_model_len",
    "kv_cache_memory",
    "num_threads",
]
OPTIONAL = {"max_chunk_tokens", "max_model_len", "kv_cache_memory", "num_threads"}


def make(**options: Any) -> EngineConfig:
    return EngineConfig(**({"model_path": "somewhere"} | options))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, 16.0, "16", True, float("nan")])
def test_counts_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value!r} must be a positive integer"):
        make(**{name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_counts_may_be_none_only_if_optional(name: str) -> None:
    if name in OPTIONAL:
        assert getattr(make(**{name: None}), name) is None
    else:
        with pytest.raises(ConfigError, match=name):
            make(**{name: None})
    assert getattr(make(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("cache_type", "radixx", ["'paged'", "'radix'"]),
        ("cache_type", None, ["'paged'"]),
        ("dtype", "float64", ["'auto'", "'float32'", "'bfloat16'"]),
        ("dtype", None, ["'auto'"]),
        ("quantization", "int2", ["None", "'int8'", "'int8-32'", "'int4'"]),
        ("backend", "tpu", ["'auto'", "'reference'"]),
        ("attention", "magic", ["'auto'", "'reference'", "'flex'"]),
        ("lookahead", 2, ["None", "0", "1"]),
        ("lookahead", -1, ["None", "0", "1"]),
        ("lookahead", True, ["None", "0", "1"]),
        ("lookahead", 1.0, ["None", "0", "1"]),
        ("enable_prefix_caching", 1, ["True", "False"]),
        ("enable_prefix_caching", None, ["True", "False"]),
        ("enable_chunked_prefill", "yes", ["True", "False"]),
        ("cpu_sums", "tile", ["'auto'", "'pairs'", "'tiles'"]),
    ],
)
def test_unknown_choice_lists_the_valid_choices(name: str, value: Any, choices: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} is not available")
    assert all(choice in str(caught.value) for choice in choices)


@pytest.mark.parametrize("name", ["model_path", "device", "tokenizer_path"])
@pytest.mark.parametrize("value", ["", 3, b"cpu", ["cpu"]])
def test_texts_are_non_empty_strings(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a non-empty string"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["model_path", "device"])
def test_required_texts_reject_none(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make(**{name: None})


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), "0.9", None, True]
)
def test_memory_utilization_is_a_fraction(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=.*\(0, 1\]"):
        make(gpu_memory_utilization=value)
    assert make(gpu_memory_utilization=1).gpu_memory_utilization == 1


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, "1", True])
def test_seeds_are_unsigned_64_bit(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed=.*\[0, 2\*\*64\)"):
        make(seed=value)
    assert make(seed=2**64 - 1).seed == 2**64 - 1


def test_chunk_size_without_chunks_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match=r"max_chunk_tokens.*enable_chunked_prefill=False"):
        make(max_chunk_tokens=8, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 16}, "no option 'blocksize'; did you mean 'block_size'"),
        ({"max_tokens_per_bach": 16}, "did you mean 'max_tokens_per_batch'"),
        ({"zzz": 1}, "no option 'zzz'; it has model_path, .*seed"),
    ],
)
def test_unknown_option_names_the_nearest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_missing_or_surplus_argument_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="model_path"):
        EngineConfig()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="EngineConfig"):
        EngineConfig(*range(50))  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_config_errors_are_also_python_errors() -> None:
    assert issubclass(ConfigError, NanoInferenceError)
    assert issubclass(ConfigError, ValueError)


def test_configs_are_frozen_and_compare_by_value() -> None:
    config = make(block_size=8)
    assert config == make(block_size=8)
    assert hash(config) == hash(make(block_size=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.scheduler.block_size = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="block_size"):
        dataclasses.replace(config, block_size=0)


def test_scheduler_config_copies_its_values() -> None:
    options = {
        "max_batch_size": 3,
        "max_tokens_per_batch": 17,
        "block_size": 5,
        "max_chunk_tokens": 7,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
    }
    assert make(**options).scheduler == SchedulerConfig(**options)
    assert make().scheduler == SchedulerConfig()
    assert {field.name for field in dataclasses.fields(SchedulerConfig)} == {
        *options,
        "groups",
        "max_drafts",
    }
    assert make(pipeline_parallel=4).scheduler.groups == 4
    assert make(max_drafts=3).scheduler.max_drafts == 0
    assert make(max_drafts=3, speculation="suffix").scheduler.max_drafts == 3


def test_stages_decide_the_lookahead() -> None:
    make(pipeline_parallel=2, lookahead=1)
    for options in ({"lookahead": 0}, {"pipeline_parallel": 3, "lookahead": 1}):
        with pytest.raises(ConfigError, match="omit lookahead"):
            make(**({"pipeline_parallel": 2} | options))


@pytest.mark.parametrize(
    "config", [EngineConfig, SchedulerConfig, ServerConfig, TrainServiceConfig]
)
def test_config_docstring_names_its_own_fields(config: Any) -> None:
    _, _, attributes = inspect.cleandoc(config.__doc__).partition("Attributes:\n")
    lines = re.findall(r"^    (\w[\w, ]*): ", attributes, re.MULTILINE)
    documented = sorted(name for line in lines for name in line.split(", "))
    assert documented == sorted(field.name for field in dataclasses.fields(config))
