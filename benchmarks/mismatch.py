"""Distance between the engine's logprobs and those of trainers: the same samples, scored by
`transformers` and by our trainer.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.machine import ROOT
from benchmarks.measure import Row
from benchmarks.ours import Options, opened
from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl import MismatchReport, PolicyModel, mismatch_report
from nano_inference.rl.checkpoint import checkpoint_of

PICTURE = ROOT / "docs" / "rl-mismatch.png"
TOPICS = ("rivers", "bread", "the moon", "a lost dog", "winter", "trains", "chess", "a small town")


def measure(options: Options, tokens: int, picture: Path | None = None) -> list[Row]:
    """Score samples at temperature 1 with three trainers, and draw the histogram of `transformers`
    in bfloat16.
    """
    with opened(options) as engine:
        samples = story_samples(engine, tokens)
        reports = {
            "PolicyModel": mismatch_report(samples, by_policy_model(engine, samples)),
            "transformers, float32": mismatch_report(
                samples, by_transformers(engine, samples, torch.float32)
            ),
            "transformers, bfloat16": mismatch_report(
                samples, by_transformers(engine, samples, torch.bfloat16)
            ),
        }
    for name, report in reports.items():
        print(f"{name}\n{report}\n")
    reports["transformers, bfloat16"].histogram(picture or PICTURE)
    return [row(name, report) for name, report in reports.items()]


def row(name: str, report: MismatchReport) -> Row:
    names = (
        "num_tokens",
        "num_equal",
        "kl_k1",
        "kl_k3",
        "max_abs",
        "mean_abs",
        "std",
        "p99_abs",
        "outside",
    )
    return {"name": name} | {each: getattr(report, each) for each in names}


def story_samples(engine: InferenceEngine, tokens: int) -> list[TrainingSample]:
    """Sample eight groups of four at temperature 1."""
    prompts = [f"A story about {topic}. Once" for topic in TOPICS]
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
        for seed in range(len(prompts))
    ]
    return engine.generate(prompts, params, 4, progress=False)


def by_policy_model(engine: InferenceEngine, samples: list[TrainingSample]) -> list[torch.Tensor]:
    with torch.no_grad():
        starts = [len(sample.prompt_tokens) for sample in samples]
        return PolicyModel(engine).logprobs(
            [s.prompt_tokens + s.completion_tokens for s in samples], from_position=starts
        )


def by_transformers(
    engine: InferenceEngine, samples: list[TrainingSample], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Score as trainers do: the model in this dtype, logprobs from its logits in float32."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint_of(engine.config.model_path, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for sample in samples:
            token_ids = torch.tensor([sample.prompt_tokens + sample.completion_tokens])
            logits = (
                model(input_ids=token_ids).logits[0, len(sample.prompt_tokens) - 1 : -1].float()
            )
            targets = torch.tensor(sample.completion_tokens)
            found.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return found
