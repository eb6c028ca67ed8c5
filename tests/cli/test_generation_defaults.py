"""generation_config.json: its values apply if a request of a common protocol omits the field."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nano_inference.checkpoints.generation_defaults import (
    UNRECOMMENDED,
    defaults_for_people,
    generation_defaults,
)
from nano_inference.cli import generate as command
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError
from nano_inference.server.api.anthropic.answer import PROTOCOL as MESSAGES_API
from nano_inference.server.api.openai.chat_answer import PROTOCOL as CHATS
from nano_inference.server.api.openai.completions_answer import PROTOCOL as COMPLETIONS
from nano_inference.server.api.parsing import ChatFormat
from nano_inference.server.api.shared.protocol import ApiProtocol, Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.hosted import log_ready
from nano_inference.server.trainers.sglang.answer import PROTOCOL as SGLANG
from nano_inference.server.trainers.vllm.answer import PROTOCOL as VLLM
from nano_inference.types import SamplingParams
from tests.cli.running import FAST, run
from tests.server.scripted import ScriptedClient

RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
USUAL: list[tuple[ApiProtocol, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hi"}),
    (CHATS, MESSAGES),
    (MESSAGES_API, MESSAGES | {"model": "scripted", "max_tokens": 4}),
]
TRAINERS: list[tuple[ApiProtocol, dict[str, Any]]] = [
    (SGLANG, {"input_ids": [5]}),
    (VLLM, {"token_ids": [5], "sampling_params": {"max_tokens": 4}}),
]


def served(**config: Any) -> Served:
    engine = ScriptedClient(max_model_len=256)
    info = replace(engine._engine_info(), sampling_defaults=RECOMMENDED)
    return Served("scripted", info, engine.tokenizer, ChatFormat(), ServerConfig(**config))


def params_of(protocol: ApiProtocol, body: dict[str, Any], to: Served) -> dict[str, Any]:
    params = protocol.prepare(json.dumps(body).encode(), to, "id").asks[0].params
    return {name: getattr(params, name) for name in RECOMMENDED}


NEUTRAL = {name: getattr(SamplingParams(), name) for name in RECOMMENDED}


@pytest.mark.parametrize(("protocol", "body"), USUAL)
def test_omitted_parameters_are_as_recommended(protocol: ApiProtocol, body: dict[str, Any]) -> None:
    assert params_of(protocol, body, served()) == RECOMMENDED
    asked = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert params_of(protocol, body | asked, served()) == NEUTRAL
    assert params_of(protocol, body | {"temperature": 0}, served()) == RECOMMENDED | {
        "temperature": 0
    }
    assert params_of(protocol, body, served(generation_config="none")) == NEUTRAL


@pytest.mark.parametrize(("protocol", "body"), USUAL)
def test_folder_recommends_instead_of_the_model(
    protocol: ApiProtocol, body: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    to = served(generation_config=str(tmp_path))
    assert params_of(protocol, body, to) == NEUTRAL | {"top_k": 7}
    assert params_of(protocol, body, served(rl=True, generation_config=str(tmp_path)))["top_k"] == 7


def test_server_shows_what_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("nano_inference"), "propagate", True)
    caplog.set_level("INFO", logger="nano_inference.server")

    def told(**config: Any) -> str:
        caplog.clear()
        to = served(**config)
        log_ready(to.config, to)
        return caplog.text

    assert (
        "default sampling parameters from the model: temperature=0.6, top_p=0.95, top_k=20"
        in told()
    )
    assert "default sampling parameters" not in told(generation_config="none")
    assert "does not show this model's format of tool calls" in told()
    assert "does not show this model's format of tool calls" not in told(tool_format="none")
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    folder = str(tmp_path)
    assert f"default sampling parameters from {folder}: top_k=7;" in told(generation_config=folder)


@pytest.mark.parametrize("use", ["", "automatic", "/nowhere", 5])
def test_folder_without_the_file_is_refused(use: Any, folders: dict[str, str]) -> None:
    told = "must be 'auto', 'none' or a folder that holds generation_config.json"
    with pytest.raises(ConfigError, match=f"generation_config={use!r} {told}"):
        ServerConfig(generation_config=use)
    result = run("generate", folders["chat"], "-p", "[1]", "--generation-config", str(use))
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("protocol", "body"), USUAL)
def test_rl_server_is_neutral_on_the_usual_routes_by_default(
    protocol: ApiProtocol, body: dict[str, Any]
) -> None:
    assert params_of(protocol, body, served(rl=True)) == NEUTRAL
    assert params_of(protocol, body, served(rl=True, generation_config="auto")) == RECOMMENDED


@pytest.mark.parametrize(("protocol", "body"), TRAINERS)
def test_routes_of_trainers_are_always_neutral(protocol: ApiProtocol, body: dict[str, Any]) -> None:
    assert params_of(protocol, body, served(rl=True, generation_config="auto")) == NEUTRAL


def test_folder_recommends_what_its_file_says(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps(RECOMMENDED | {"eos_token_id": 2, "do_sample": True, "max_new_tokens": 9})
    )
    assert generation_defaults(tmp_path) == RECOMMENDED
    file.write_text(json.dumps({"temperature": None, "top_k": -1}))
    assert generation_defaults(tmp_path) == {"top_k": 0}


@pytest.mark.parametrize(
    "told",
    [
        *(
            {"temperature": -1},
            {"temperature": "0.6"},
            {"temperature": float("nan")},
            {"top_p": 0},
            {"top_p": True},
        ),
        *({"top_k": 2.5}, {"min_p": 7}, {"repetition_penalty": 0}, {"repetition_penalty": 10**400}),
    ],
)
def test_unsupported_recommendation_is_dropped_with_a_warning(
    tmp_path: Path,
    told: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("nano_inference"), "propagate", True)
    (tmp_path / "generation_config.json").write_text(
        json.dumps(told | {"top_k": told.get("top_k", 3)})
    )
    assert generation_defaults(tmp_path) == ({"top_k": 3} if "top_k" not in told else {})
    assert f"ignoring unsupported {next(iter(told))}=" in caplog.text


def test_embedded_model_recommends_what_its_card_says(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path, "smollm2-135m") == {"temperature": 0.2, "top_p": 0.9}
    assert generation_defaults(tmp_path, "./smollm2-135m.gguf") == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert generation_defaults(tmp_path, "smollm2-135m") == {"top_k": 7}


def test_temperature_has_a_default_without_a_recommendation() -> None:
    assert defaults_for_people("auto", {}) == UNRECOMMENDED
    assert defaults_for_people("auto", {"top_k": 7}) == {"top_k": 7}
    assert defaults_for_people("none", {"top_k": 7}) == {}
    assert served().defaults_for_people == RECOMMENDED
    assert served(generation_config="none").defaults_for_people == {}
    assert served(rl=True).defaults_for_people == {}


@pytest.mark.parametrize("command_name", ["generate", "chat"])
def test_commands_use_the_shared_default(
    command_name: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    sample = InferenceEngine.generate

    def noted(self: Any, prompts: Any, params: SamplingParams, *more: Any, **named: Any) -> Any:
        seen.append(params)
        return sample(self, prompts, params, *more, **named)

    monkeypatch.setattr(InferenceEngine, "generate", noted)
    words = ("-p", "x") if command_name == "generate" else ()
    for given in ((), ("--generation-config", "none"), ("-t", "0.3")):
        result = run(command_name, folders["chat"], *words, "-m", "2", *FAST, *given, stdin="x\n")
        assert result.exit_code == 0, result.stderr
    assert [params.temperature for params in seen] == [UNRECOMMENDED["temperature"], 1.0, 0.3]


def test_commands_use_the_recommendation_if_no_option_is_set(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    sample = command._sample

    def noted(engine: Any, prompts: Any, params: SamplingParams, *more: Any, **options: Any) -> Any:
        seen.append(params)
        return sample(engine, prompts, params, *more, **options)

    monkeypatch.setattr(command, "_sample", noted)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(folders["chat"]).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 5}')
    arguments = (
        "-p",
        "[1]",
        "-m",
        "3",
        "--json",
        "--threads",
        "1",
        "--kv-cache-memory",
        "8MiB",
        "--seed",
        "1",
    )

    def sampled(*more: str) -> tuple[SamplingParams, str]:
        result = run("generate", str(folder), *arguments, *more)
        assert result.exit_code == 0, result.output
        return seen[-1], result.stderr

    params, told = sampled()
    assert (params.temperature, params.top_k) == (0.0, 5)
    assert "sampling as the model recommends: temperature=0, top_k=5" in told
    params, told = sampled("--temperature", "0.5")
    assert (params.temperature, params.top_k) == (0.5, 5)
    params, told = sampled("--generation-config", "none")
    assert (params.temperature, params.top_k) == (1.0, 0)
    assert "recommends" not in told
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    params, told = sampled("--generation-config", str(other))
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 0.5)
    assert "other recommends: top_p=0.5" in " ".join(told.split())
