"""Draft heads and quantized drafts on the CUDA backend: under graphs, heads read the rows of the
latest step, and no draft changes a bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.core.sequence import POLICY
from nano_inference.device import cuda_runner, graphs, trunk_graphs
from nano_inference.device.captured_taps import CapturedTaps
from nano_inference.models.taps import Taps
from tests.device.cuda_cases import CheckingQueue, conventional
from tests.device.test_cuda_runner import runner
from tests.drafts.heads import (
    eagle_of_sglang,
    eagle_of_speculators,
    medusa_of_its_authors,
    medusa_of_vllm,
    write_heads,
)
from tests.drafts.mtp import FAMILIES, MtpModel
from tests.drafts.test_model_drafts import PROMPTS, bits, drafts_of, engine_of
from tests.models.tiny import tiny_llama

__all__ = ["conventional"]

Drafting = tuple[Path, str, dict[str, Any]]  # model, name of the source, options
HEADS: dict[str, Callable[..., Any]] = {
    "eagle": eagle_of_sglang,
    "eagle, every switch": eagle_of_speculators,
    "medusa": medusa_of_its_authors,
    "medusa, known tokens": medusa_of_vllm,
}
KINDS = (*HEADS, "mtp", "mtp, int8", "self, int8")
PARAMS = SamplingParams(max_tokens=14, seed=5, ignore_eos=True)


class FrozenQueue(CheckingQueue):
    """A queue whose replays run no Python code of taps, as on a GPU."""

    replaying = False

    def capture(self, run: Callable[[], Any], pool: Any) -> Any:
        captured = super().capture(run, pool)
        replay = captured.replay

        def frozen() -> None:
            FrozenQueue.replaying = True
            try:
                replay()
            finally:
                FrozenQueue.replaying = False

        captured.replay = frozen
        return captured


@pytest.fixture
def frozen(conventional: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay graphs whose writes to tensors happen, and whose assignments do not."""
    note = Taps.note

    def noted(self: Taps, layer: int, batch: Any, out: Tensor, x: Tensor) -> None:
        if FrozenQueue.replaying:
            out.copy_(x)
        else:
            note(self, layer, batch, out, x)

    monkeypatch.setattr(Taps, "note", noted)
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: FrozenQueue())


def drafting_of(kind: str, folder: Path) -> Drafting:
    name, _, variant = kind.partition(", ")
    options: dict[str, Any] = {"max_drafts": 3, "block_size": 4}
    if variant == "int8":
        options["draft_quantization"] = "int8"
    if name == "mtp":
        model = MtpModel(folder / "mtp", FAMILIES["mimo"]).folder
        return model, name, options | {"draft_model": "mtp"}
    model = tiny_llama(folder / "policy", layers=5)
    if name == "self":
        return model, name, options | {"draft_model": "self"}
    heads = write_heads(folder / "heads", *HEADS[kind]())
    return model, name, options | {"draft_model": str(heads)}


def run(engine: InferenceEngine) -> list[Any]:
    return [bits(engine.generate(PROMPTS, PARAMS, 2, progress=False)) for _ in range(2)]


@pytest.mark.thorough(but=["eagle", "medusa"])
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_under_graphs_are_those_of_the_reference(tmp_path: Path, kind: str) -> None:
    """All drafts are equal, not only the samples: wrong rows would change the accepted ones."""
    model, name, options = drafting_of(kind, tmp_path)
    outcomes: list[Any] = []
    for backend in ("reference", "cuda"):
        drafting = {"backend": backend, "lookahead": 0, **options}
        with engine_of(model, batch_invariant=True, **drafting) as engine:
            outcomes.append((run(engine), drafts_of(engine, name)))
            if backend == "cuda":
                assert runner(engine).num_replays > 5
                assert runner(engine).num_trunk_replays > 1
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1][0] > 20
    with engine_of(model, backend="cuda", block_size=4, lookahead=1) as engine:
        assert run(engine) == outcomes[0][0]


@pytest.mark.thorough
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("largest", [1, 6])
def test_taps_of_large_steps_are_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """Steps beyond the largest graph, next to replayed ones."""
    monkeypatch.setattr(trunk_graphs, "MOST_ROWS", largest)
    monkeypatch.setattr(trunk_graphs, "trunk_sizes", lambda _largest: (largest,))
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: (min(most, largest), most))
    model, name, options = drafting_of("eagle", tmp_path)
    outcomes: list[Any] = []
    for backend in ("reference", "cuda"):
        few = {"max_batch_size": largest, "backend": backend, "lookahead": 0}
        with engine_of(model, **options, **few) as engine:
            outcomes.append((run(engine), drafts_of(engine, name)))
            if backend == "cuda":
                taps = engine.runner.models[POLICY].taps
                assert isinstance(taps, CapturedTaps)
                assert runner(engine).num_eager_steps > 1
    assert outcomes[0] == outcomes[1]


def test_taps_are_counted_at_fixed_addresses(tmp_path: Path) -> None:
    with engine_of(tiny_llama(tmp_path, layers=2), backend="reference") as engine:
        model = engine.runner.models[POLICY]
    taps = CapturedTaps((2, 0, 2), 4, model)
    batch: Any = None
    for rows in (4, 2, 6, 3):
        streams = {layer: torch.randn(rows, 64) for layer in (0, 2)}
        for layer, x in streams.items():
            out = torch.empty(rows, 64)
            taps.note(layer, batch, out, x)
            assert torch.equal(out, x)
        expected = torch.cat([streams[2], streams[0], streams[2]], dim=1)
        assert torch.equal(taps.rows(rows), expected)
        assert torch.equal(taps.rows(1), expected[:1]) or rows > 4


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_the_kernels_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Kernels run in Triton's interpreter."""
    monkeypatch.setattr(CheckingQueue, "warms_up", False)
    monkeypatch.setattr(cuda_runner, "queue_of", lambda _device: CheckingQueue())
    monkeypatch.setattr(graphs, "graph_sizes", lambda largest: (largest,))
    monkeypatch.setattr(trunk_graphs, "trunk_sizes", lambda largest: (16,))
    model, name, options = drafting_of(kind, tmp_path)
    params = SamplingParams(max_tokens=5, seed=5, ignore_eos=True)
    same = {"backend": "cuda", "batch_invariant": True, "max_batch_size": 4, "max_model_len": 32}
    results: list[Any] = []
    for drafting in ({"block_size": 4}, options):
        with engine_of(model, **same, **drafting) as engine:
            results.append(bits(engine.generate(PROMPTS[:2], params, progress=False)))
            if drafting is options:
                assert drafts_of(engine, name)[0] > 3
    assert results[0] == results[1]
