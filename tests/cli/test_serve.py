"""`nano-inference serve`: its options are the fields of the two configurations."""

import importlib.util
import socket
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nano_inference.cli import serve as command
from nano_inference.config import EngineConfig
from nano_inference.remote.in_process import InProcessClient
from nano_inference.server import main
from nano_inference.server.config import ServerConfig
from nano_inference.server.door import Door
from tests.cli.running import run

Configs = list[tuple[EngineConfig, ServerConfig]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Configs:
    """Return the configurations that `serve` would use."""
    seen: Configs = []
    monkeypatch.setattr(main, "serve", lambda engine, config, door: seen.append((engine, config)))
    monkeypatch.setattr(command, "Door", NoDoor)  # tests run next to each other
    return seen


class NoDoor:
    """Stand-in of the door, without sockets."""

    def __init__(self, config: ServerConfig) -> None: ...

    def close(self) -> None:
        """Do nothing."""


def test_serve_uses_defaults_without_options(started: Configs) -> None:
    result = run("serve", "smollm2-135m")
    assert result.exit_code == 0, result.stderr
    assert started == [(EngineConfig("smollm2-135m", dtype="fast"), ServerConfig())]


def test_serve_takes_several_models(started: Configs) -> None:
    names = [part for name in ("a", "b") for part in ("--served-model-name", name)]
    limits = ("--max-loaded", "1", "--idle-unload", "1h30m")
    result = run("serve", "smollm2-135m", "smollm2-135m", *names, *limits)
    assert result.exit_code == 0, result.output
    engines, config = started[0]
    assert isinstance(engines, list)
    assert [engine.model_path for engine in engines] == ["smollm2-135m"] * 2
    assert (config.served_names, config.max_loaded) == (("a", "b"), 1)
    assert config.idle_unload == 5400.0
    for wrong, said in (
        (("smollm2-135m", "smollm2-135m"), "two models are named"),
        (("smollm2-135m", "--max-loaded", "2"), "--max-loaded 2 needs"),
        (("smollm2-135m", "smollm2-135m", *names, "--rl"), "several models"),
        (("smollm2-135m", "--idle-unload", "soon"), "is not a duration"),
    ):
        result = run("serve", *wrong)
        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", "").split())


def other(value: Any, kind: str) -> Any:
    """Return a value for the field that differs from its default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return ("other", "more")
    if isinstance(value, int | float):
        return value + 2
    return 2 if "int" in kind else 2.5 if "float" in kind else "other"


CHOICES = {"cache_type": "radix", "dtype": "float32", "backend": "reference", "device": "cpu"}
CHOICES |= {
    "attention": "reference",
    "batch_invariant": True,
    "lookahead": 1,
    "gpu_memory_utilization": 0.5,
}
CHOICES |= {
    "tensor_parallel": 4,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "expert_parallel": 4,
}
CHOICES |= {"block_size": 1024}
CHOICES |= {"admin_key": "third"}  # user keys are rejected
CHOICES |= {
    "served_model_name": ("other", "more"),
    "root_path": "/other",
    "max_pending_bytes": 1 << 30,
}
CHOICES |= {"generation_config": "none", "grammar_backend": "outlines", "speculation": "suffix"}
CHOICES |= {"quantization": "int8", "kv_cache_dtype": "int8", "cpu_sums": "pairs"}
CHOICES |= {
    "log_level": "error",
    "log_format": "json",
    "tool_format": "llama",
    "reasoning_format": "none",
}
CHOICES |= {"weight_update_group_init_method": "tcp://10.0.0.1:9000", "actor_llm_idx": 0}
OPTION = {"tokenizer_path": "tokenizer", "ref_model_path": "ref-model", "num_threads": "threads"}
OPTION |= {"enable_prefix_caching": "prefix-caching", "enable_chunked_prefill": "chunked-prefill"}
OPTION |= {"api_keys": "api-key", "cors_origins": "cors-origin"}


def flags(name: str, value: Any) -> list[str]:
    option = OPTION.get(name, name.replace("_", "-"))
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [
        part
        for each in (value if isinstance(value, tuple) else (value,))
        for part in (f"--{option}", str(each))
    ]


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig])
def test_config_fields_are_options_that_arrive(kind: Any, started: Configs) -> None:
    wanted = {
        field.name: CHOICES.get(field.name, other(field.default, str(field.type)))
        for field in fields(kind)
        if field.name != "model_path"
    }
    if kind is EngineConfig:  # drafting allows one rank only, see below
        del wanted["draft_model"], wanted["draft_layers"], wanted["draft_quantization"]
        del wanted["enable_return_routed_experts"]  # so does the record of experts
        del wanted["kept_cache_folder"], wanted["kept_cache_bytes"]  # so do block files
        del wanted["cpu_sums"]  # belongs to another backend
        del wanted["cuda_overlap"]  # excludes batch invariance
        del wanted["loras"]  # names folders
    # Each conflicts with another value: `rl_open` with the admin key.
    del wanted["enable_chunked_prefill" if kind is EngineConfig else "rl_open"]
    if kind is ServerConfig:
        # `uds` replaces host and port, `chat_template` is read from a file
        del wanted["uds"], wanted["chat_template"]
        # a limit of several models, and one that `rl` excludes
        del wanted["max_loaded"], wanted["idle_unload"]
    arguments = [part for name, value in wanted.items() for part in flags(name, value)]
    result = run("serve", "smollm2-135m", *arguments)
    assert result.exit_code == 0, result.output
    config = started[0][0 if kind is EngineConfig else 1]
    assert {name: getattr(config, name) for name in wanted} == wanted
    started.clear()
    assert run("serve", "smollm2-135m", "--no-chunked-prefill").exit_code == 0
    assert not started[0][0].enable_chunked_prefill
    assert run("serve", "smollm2-135m", "--rl", "--rl-open", "--host", "0.0.0.0").exit_code == 0
    assert started[1][1].rl_open
    self_drafts = ("--draft-model", "self", "--draft-layers", "7", "--draft-quantization", "int8")
    assert run("serve", "smollm2-135m", *self_drafts).exit_code == 0
    config = started[2][0]
    assert (config.draft_model, config.draft_layers, config.draft_quantization) == (
        "self",
        7,
        "int8",
    )
    assert run("serve", "smollm2-135m", "--enable-return-routed-experts").exit_code == 0
    assert started[3][0].enable_return_routed_experts
    adapters = ("--lora", "a=/a", "--lora", "b=/b", "--max-loras", "3")
    assert run("serve", "smollm2-135m", *adapters).exit_code == 0
    assert (started[4][0].loras, started[4][0].max_loras) == (("a=/a", "b=/b"), 3)
    files = ("--kept-cache-folder", "/kept", "--kept-cache-bytes", "2GiB")
    assert run("serve", "smollm2-135m", *files).exit_code == 0
    config = started[5][0]
    assert (config.kept_cache_folder, config.kept_cache_bytes) == ("/kept", 2 << 30)
    assert run("serve", "smollm2-135m", "--cpu-sums", "pairs").exit_code == 0
    assert started[6][0].cpu_sums == "pairs"


def test_socket_file_and_a_chat_template(started: Configs, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    assert run("serve", "smollm2-135m", "--chat-template", str(file)).exit_code != 0
    file.write_text("{{ messages }}")
    assert (
        run("serve", "smollm2-135m", "--uds", "nano.sock", "--chat-template", str(file)).exit_code
        == 0
    )
    assert (started[0][1].uds, started[0][1].chat_template) == ("nano.sock", "{{ messages }}")


def test_keys_come_from_files(started: Configs, tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("one\n\n two \n")
    admin.write_text("boss\n")
    files = ("--api-key-file", str(keys), "--admin-key-file", str(admin))
    assert run("serve", "smollm2-135m", "--api-key", "zero", *files).exit_code == 0
    assert (started[0][1].api_keys, started[0][1].admin_key) == (("zero", "one", "two"), "boss")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--admin-key", "a", "--admin-key-file", "{keys}"), "the server has one admin key"),
        (("--admin-key-file", "{keys}"), "the server has one admin key"),
        (("--api-key-file", "{empty}"), "has no keys"),
        (
            ("--in-process", "--restart-engine"),
            "--restart-engine is not possible with --in-process",
        ),
        (("--tls-cert", "c.pem"), "--tls-cert c.pem needs --tls-key"),
        (("--tool-format", "morse"), "tool format 'morse' does not exist"),
        (("--max-samples", "0"), "--max-samples 0 must be"),
        (("--max-batch-size", "0"), "--max-batch-size 0 must be"),
        (("--rl", "--host", "0.0.0.0"), "lets anyone who reaches it change the weights"),
        (("--ray-address", "10.0.0.1:6379"), "--ray-address 10.0.0.1:6379 requires --ray"),
        (("--rl-open",), "--rl-open needs --rl: it is for trainers"),
        (
            ("--rl", "--actor-llm-idx", "0"),
            "--weight-update-group-world-size, --actor-llm-idx belong together; set all three",
        ),
    ],
)
def test_serve_reports_wrong_usage(
    arguments: tuple[str, ...], words: str, started: Configs, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "empty").write_text("\n")
    places = {"keys": str(tmp_path / "keys"), "empty": str(tmp_path / "empty")}
    result = run("serve", "smollm2-135m", *(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not started


@pytest.mark.parametrize("flag", ["--model", "-m"])
def test_model_is_an_argument_or_an_option(started: Configs, flag: str) -> None:
    assert run("serve", flag, "SmolLM2-135M").exit_code == 0
    assert started[0][0].model_path == "smollm2-135m"


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16")]
)
def test_data_types_have_short_names(started: Configs, spelling: str, dtype: str) -> None:
    assert run("serve", "smollm2-135m", "--dtype", spelling).exit_code == 0
    assert started[0][0].dtype == dtype


def test_port_in_use_is_the_only_line(started: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Door", Door)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("serve", "smollm2-135m", "--port", str(port))
    assert result.exit_code == 1
    assert result.output == f"error: port {port} is in use; --port 0 takes a free one.\n"
    assert not started


def test_model_is_named_before_the_server_is_imported(started: Configs) -> None:
    result = run("serve", "smollm2-135m")
    assert "INFO nano_inference.server loading smollm2-135m\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--pipeline-parallel", "99"),
            "--pipeline-parallel 99 exceeds the model's 30 layers; use at most 30",
        ),
        (
            ("--tensor-parallel", "16"),
            "--tensor-parallel 16 exceeds the model's 9 attention heads; use at most 8",
        ),
        (("--tensor-parallel", "2", "--expert-parallel", "2"), "which has no experts"),
        (("--expert-parallel", "2", "--replicas", "2"), "which has no experts"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--replicas", "2"), ("--in-process",), ("--ray",)])
def test_serve_rejects_impossible_ranks_before_it_starts(
    arguments: tuple[str, ...], words: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: Any, **__: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", starts)
    monkeypatch.setattr(InProcessClient, "start", starts)
    if more == ("--ray",):
        monkeypatch.setattr(pytest.importorskip("nano_ray.serving"), "connect", starts)
    result = run("serve", "smollm2-135m", "--port", "0", *arguments, *more)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_missing_package_is_named(started: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "zmq" else find_spec(name)
    )
    result = run("serve", "smollm2-135m")
    assert result.exit_code == 2
    assert "requires zmq" in result.stderr
    assert "pip install 'nano-inference[server]'" in result.stderr
    assert not started


def test_ray_has_to_be_installed(started: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    result = run("serve", "smollm2-135m", "--ray")
    assert result.exit_code == 2
    assert "pip install 'nano-inference[ray]'" in result.stderr
    assert not started
