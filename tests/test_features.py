"""Every row of the feature table rejects its settings, and the docs have all rows."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nano_inference import EngineConfig, SamplingParams
from nano_inference.errors import NanoInferenceError
from nano_inference.features import (
    ALL_LIMITS,
    BACKENDS,
    ENGINE_LIMITS,
    ON_GPU,
    REQUEST_LIMITS,
    SERVED_LIMITS,
    SERVER_LIMITS,
    Asked,
    Limits,
    Row,
    Runs,
    Setting,
    require,
)
from nano_inference.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
MAKERS: dict[Limits, Any] = {
    ENGINE_LIMITS: lambda **options: EngineConfig(model_path="tiny", **options),
    SERVER_LIMITS: ServerConfig,
    REQUEST_LIMITS: SamplingParams,
}
# a value that turns each option on; other names are facts
ON: dict[str, Any] = {
    "max_chunk_tokens": 64,
    "batch_invariant": True,
    "cpu_sums": "pairs",
    "quantization": "int4",
    "draft_quantization": "int4",
    "kv_cache_dtype": "int8",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "expert_parallel": 2,
    "max_loras": 1,
    "loras": ("own=folder",),
    "enable_return_routed_experts": True,
    "draft_model": "small",
    "draft_layers": 1,
    "kept_cache_folder": "folder",
    "kept_cache_bytes": 1024,
    "tls_cert": "cert.pem",
    "tls_key": "key.pem",
    "uds": "nano.sock",
    "host": "10.0.0.1",
    "port": 8001,
    "share_prefixes": True,
    "stall_timeout": 45.0,
    "restart_engine": True,
    "in_process": True,
    "rl_open": True,
    "rl_timeout": 3.0,
    "rl_max_body_bytes": 1024,
    "disable_weight_updates": True,
    "admin_key": "boss",
    "weight_update_group_init_method": "tcp://a:1",
    "weight_update_group_world_size": 2,
    "actor_llm_idx": 0,
    "prompt_top_logprobs": 3,
    "cache_priority": 3,
    "keep_cache_seconds": 5.0,
    "routed_experts": True,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A feature, one way to request it, and one conflicting setting."""

    limits: Limits
    row: Row
    asked: Asked
    clash: Asked | str | None  # a backend; None: no requirement of the feature is met

    def __str__(self) -> str:
        return f"{self.asked}-{self.clash}".replace("'", "")

    @property
    def values(self) -> dict[str, Any]:
        """Return the options and facts of a setting that is rejected."""
        every = [self.asked, *self.row.when]
        every += [self.clash] if isinstance(self.clash, Asked) else []
        return {each.name: value_of(each) for each in every}


def value_of(asked: Asked) -> Any:
    return asked.values[0] if asked.values else ON.get(asked.name, "Tiny")


def cases() -> list[Case]:
    return [
        Case(limits, row, asked, clash)
        for limits in ALL_LIMITS
        for row in limits.rows
        for asked in row.asked_by
        for clash in (
            *row.clashes,
            *(backend for backend in BACKENDS if backend not in row.backends),
            *((None,) if row.needs else ()),
        )
    ]


def setting_of(case: Case) -> Setting:
    """Return the setting by facts, with the options of a requirement at their defaults."""
    facts = {each.name: None for each in case.row.needs} | case.values
    if isinstance(case.clash, str):
        on_gpu = case.clash in (ON_GPU, "cuda")
        facts["runs"] = Runs(case.clash.split()[0], "cuda:0" if on_gpu else "cpu")
    return Setting(**facts)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_row_rejects_the_settings_it_names(case: Case) -> None:
    with pytest.raises(case.limits.error) as caught:
        require(case.limits, setting_of(case))
    message = case.row.problem_with(setting_of(case))
    assert message is not None
    assert message.endswith(f": {case.row.reason}; {case.row.instead}.")
    assert caught.type is case.limits.error
    if isinstance(case.clash, Asked):
        alone = case.values | {case.clash.name: None}
        assert case.row.problem_with(Setting(**alone)) is None


def is_option(limits: Limits, name: str) -> bool:
    kind = EngineConfig if limits is ENGINE_LIMITS else MAKERS[limits]
    return name in {each.name for each in dataclasses.fields(kind)}


def typed_cases() -> list[Case]:
    return [
        case
        for case in cases()
        if case.limits in MAKERS
        and case.clash != ON_GPU
        and all(is_option(case.limits, name) for name in case.values)
    ]


@pytest.mark.parametrize("case", typed_cases(), ids=str)
def test_config_and_request_reject_the_settings_of_a_row(case: Case) -> None:
    options = dict(case.values)
    if isinstance(case.clash, str):
        options["backend"] = case.clash
    if case.limits is SERVER_LIMITS and not case.asked.name.startswith("rl_"):
        options.setdefault("rl", "rl" not in {need.name for need in case.row.needs})
    with pytest.raises(case.limits.error):
        MAKERS[case.limits](**options)


def test_attention_option_implies_its_backend() -> None:
    with pytest.raises(NanoInferenceError, match="fp8' is not possible with attention='cpu'"):
        EngineConfig(model_path="tiny", kv_cache_dtype="fp8", attention="cpu")
    for attention, backend in (("cpu", "cpu"), ("flex", "reference"), ("triton", "cuda")):
        EngineConfig(model_path="tiny", attention=attention, backend=backend)  # type: ignore[arg-type]


def test_key_is_not_repeated() -> None:
    with pytest.raises(NanoInferenceError, match="with admin_key: ") as caught:
        ServerConfig(rl=True, rl_open=True, admin_key="hunter2")
    assert "hunter2" not in str(caught.value)


def test_request_is_checked_against_its_engine() -> None:
    config = EngineConfig(model_path="tiny", enable_prefix_caching=False)
    with pytest.raises(NanoInferenceError, match="keep_cache_seconds=5 is not possible with enabl"):
        require(SERVED_LIMITS, Setting(SamplingParams(keep_cache_seconds=5.0), config))
    with pytest.raises(NanoInferenceError, match="needs enable_return_routed_experts=True"):
        require(SERVED_LIMITS, Setting(SamplingParams(routed_experts=True), config))
    require(SERVED_LIMITS, Setting(SamplingParams(), config))


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs" / "make_features.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_the_docs_is_current(made: ModuleType) -> None:
    text = made.TARGET.read_text(encoding="utf-8")
    assert made.page(text) == text, "run python docs/make_features.py"
    rows = sum(len(limits.rows) for limits in ALL_LIMITS)
    assert text.partition(made.BEGIN)[2].count("\n| ") == rows + 1
