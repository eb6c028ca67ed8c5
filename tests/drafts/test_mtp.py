"""Drafts by the multi-token prediction layer of the policy's own checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.mtp import MtpDrafts
from tests.drafts.mtp import FAMILIES, MtpModel
from tests.drafts.test_model_drafts import PROMPTS, bits, drafts_of, engine_of

TOLERANCE = 1e-4  # on a normed row, relative to its largest number
FEW = [17, 40, 41]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    return MtpModel(tmp_path_factory.mktemp("mtp"), FAMILIES[request.param])


def source_of(engine: Any) -> MtpDrafts:
    assert isinstance(engine.drafter, Drafter)
    assert isinstance(engine.drafter.model, MtpDrafts)
    return engine.drafter.model


def best_of_few(logits: Tensor) -> int:
    return max(FEW, key=lambda token: float(logits[token]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mtp_layer_matches_its_formula(
    model: MtpModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers chunked prompts, prefix cache hits, and rows after accepted drafts, which are frequent
    because few tokens are allowed.
    """
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, allowed_token_ids=FEW)
    options: dict[str, Any] = {"backend": backend, "block_size": 4, "max_chunk_tokens": 8}
    with engine_of(model.folder, **options) as engine:
        plain = engine.generate(PROMPTS, params)
    worst, compared, drawn = 0.0, 0, list[Tensor]()
    with engine_of(model.folder, draft_model="mtp", max_drafts=3, **options) as engine:
        source = source_of(engine)
        propose, draw = source.propose, source.draw

        def kept(rows: Any, batch: Any) -> Any:
            drawn.append(as_torch(rows).clone())
            return draw(rows, batch)

        def checked(seqs: Any, most: int) -> Any:
            nonlocal worst, compared
            drawn.clear()
            guesses = propose(seqs, most)
            lengths = [len(guess.token_ids) for guess in guesses]
            for which, (seq, guess) in enumerate(zip(seqs, guesses, strict=True)):
                tokens = list(guess.token_ids)
                expected = model.rows(seq.token_ids, best_of_few, lengths[which])
                for step, row in enumerate(expected):
                    among = sum(length > step for length in lengths[:which])
                    difference = (drawn[step][among] - row).abs().max() / row.abs().max()
                    worst = max(worst, float(difference))
                logits = [model.policy.lm_head.weight @ row for row in expected]
                assert tokens == [best_of_few(each) for each in logits]
                compared += len(tokens)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        monkeypatch.setattr(source, "draw", kept)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)  # on cached prefixes
        assert drafts_of(engine, "mtp")[1] > 5
        engine.loop.check()
    assert compared > 40
    assert worst < TOLERANCE
