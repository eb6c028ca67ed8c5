"""Parity: a teacher-forced oracle, and configurations that must not change a bit."""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.core.apply import preempt
from nano_inference.rl.checkpoint import checkpoint_of
from nano_inference.text.chat import encode_chat

TOLERANCE = 1e-4  # for a logprob, in float32
MODEL = "smollm2-135m"
# preemptions: without a limit a sequence that computes token by token would never end
MOST_FORCED = 12


@dataclass(frozen=True)
class Row:
    """One configuration that must give the default's bits."""

    enable_prefix_caching: bool
    max_chunk_tokens: int
    max_batch_size: int
    block_size: int
    preempted: bool  # forced, in every third step at first
    lookahead: int
    num_threads: int
    num_samples: int

    def config(self, model: str, dtype: str, **common: Any) -> EngineConfig:
        """Return the engine configuration of this row."""
        return EngineConfig(
            model_path=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            enable_prefix_caching=self.enable_prefix_caching,
            max_chunk_tokens=self.max_chunk_tokens,
            max_batch_size=self.max_batch_size,
            block_size=self.block_size,
            lookahead=self.lookahead,
            num_threads=self.num_threads,
            **common,
        )


# Every pair of values of any two columns occurs in some row; test_parity checks it.
ROWS = (
    Row(False, 7, 1, 8, True, 0, 1, 1),
    Row(True, 7, 8, 32, False, 1, 2, 4),
    Row(True, 64, 1, 32, False, 0, 1, 1),
    Row(False, 1, 1, 8, True, 1, 2, 4),
    Row(True, 1, 8, 8, True, 0, 1, 4),
    Row(False, 64, 8, 32, True, 1, 1, 1),
    Row(False, 1, 8, 32, False, 0, 2, 1),
    Row(False, 64, 8, 8, False, 0, 2, 4),
)


@dataclass(frozen=True)
class Agreement:
    """Comparison of the engine's samples with the oracle."""

    samples: int
    tokens: int
    tokens_equal: int
    largest_difference: float
    mean_difference: float


def prompts(engine: InferenceEngine) -> list[list[int]]:
    """Return the committed prompts as token ids: as chats if the model has a template, else as
    text.

    The last two prompts exceed the model's windows, if any.
    """
    texts: list[str] = json.loads((Path(__file__).parent / "prompts.json").read_text())
    if engine.tokenizer.chat_template is None:
        encoded = [engine.tokenizer.encode(text, add_special_tokens=True) for text in texts]
        long = engine.tokenizer.encode(" ".join(texts) * 9, add_special_tokens=True)
        window = max(engine.spec.windows)
        return [*encoded[:-2], long[: window + 37], long[: 2 * window + 1]] if window else encoded
    return [encode_chat(engine.tokenizer, [{"role": "user", "content": text}]) for text in texts]


def complete(
    engine: InferenceEngine,
    token_ids: list[list[int]],
    params: SamplingParams,
    num_samples: int,
    preempted: bool,
) -> tuple[list[TrainingSample], int]:
    """Return samples of all prompts in order, and the number of forced preemptions."""
    ids = [engine.add_request(prompt, params, num_samples) for prompt in token_ids]
    samples: list[TrainingSample] = []
    forced = step = 0
    while engine.has_pending():
        samples += engine.step()
        step += 1
        running = engine.loop.sequences.running
        if preempted and step % 3 == 0 and forced < MOST_FORCED and running:
            preempt(running[-1], engine.loop.sequences, engine.cache)
            forced += 1
        engine.loop.check()
    index_of = {request_id: index for index, request_id in enumerate(ids)}
    return sorted(samples, key=lambda s: (index_of[s.request_id], s.sample_index)), forced


def compare_rows(
    model: str,
    dtype: str,
    token_ids: list[list[int]],
    max_tokens: int,
    rows: Iterable[Row] = ROWS,
    report: Callable[[str], None] = lambda line: None,
    **common: Any,
) -> list[dict[str, Any]]:
    """Run rows against the default configuration. Each result is True if every bit is equal."""
    params = SamplingParams(temperature=0.8, max_tokens=max_tokens, seed=7, raw_logprobs=True)
    with InferenceEngine(EngineConfig(model_path=model, dtype=dtype, **common)) as engine:  # pyright: ignore[reportArgumentType]
        default, _ = complete(engine, token_ids, params, 4, preempted=False)
    results: list[dict[str, Any]] = []
    for row in rows:
        with InferenceEngine(row.config(model, dtype, **common)) as engine:
            got, forced = complete(engine, token_ids, params, row.num_samples, row.preempted)
        expected = [s for s in default if s.sample_index < row.num_samples]
        equal = [_bits(one) == _bits(other) for one, other in zip(got, expected, strict=True)]
        results.append(
            {
                **vars(row),
                "dtype": dtype,
                "forced": forced,
                "samples": len(equal),
                "equal": sum(equal),
            }
        )
        report(f"{dtype} {row}: {sum(equal)} of {len(equal)} equal, {forced} preemptions forced")
    return results


def agreement(oracle: Any, samples: list[TrainingSample]) -> Agreement:
    """Run the oracle once over each prompt and our tokens. Compare argmax and logprob at each
    position.
    """
    differences: list[float] = []
    equal = 0
    for sample in samples:
        token_ids = torch.tensor([sample.prompt_tokens + sample.completion_tokens])
        with torch.inference_mode():
            logprobs = oracle(token_ids).logits[0].float().log_softmax(dim=-1)
        rows = logprobs[len(sample.prompt_tokens) - 1 : -1]
        equal += int((rows.argmax(dim=-1) == torch.tensor(sample.completion_tokens)).sum())
        theirs = rows.gather(1, torch.tensor(sample.completion_tokens)[:, None])[:, 0]
        differences += (theirs - torch.tensor(sample.logprobs)).abs().tolist()
    return Agreement(
        len(samples),
        len(differences),
        equal,
        max(differences),
        sum(differences) / max(1, len(differences)),
    )


def oracle_of(model: str) -> Any:
    """Return the same model in transformers, in float32."""
    if model == MODEL:
        return smollm2_oracle()
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint_of(model, Path(folder))
        return AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()


def smollm2_oracle() -> Any:
    """Return SmolLM2 in float32 from transformers' GGUF loader."""
    from transformers import AutoModelForCausalLM

    from nano_inference.checkpoints.embedded import find_embedded

    file = find_embedded(MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


def _bits(sample: TrainingSample) -> tuple[object, ...]:
    return (sample.completion_tokens, sample.logprobs, sample.raw_logprobs, sample.finish_reason)
