"""TRL's unmodified `GRPOTrainer` on this engine: `GRPOTrainer(...,
rollout_func=RolloutFunction(engine))`.

This module does not import TRL: the trainer passes itself with every call.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.engine import generation
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError, InvalidRequest, RequestAborted
from nano_inference.fields.options import is_whole
from nano_inference.rl.parameter_states import states
from nano_inference.rl.scoring_module import require_chosen_codes
from nano_inference.rl.trainer_weights import require_whole, whole_weights
from nano_inference.types import GROUP_COMPLETE, SamplingParams, TrainingSample

# TRL's names in `generation_kwargs` of fields of `SamplingParams`, if different.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_OF_SAMPLES = {field.name for field in fields(TrainingSample)} - {"logprobs"} | {
    "oldest_weight_version"
}
# fields that a request must ask for
_ASKED_FOR = frozenset({"raw_logprobs", "sampling_mask", "prompt_logprobs", "routed_experts"})


@dataclass(frozen=True)
class Group:
    """Entries of a batch that have the same prompt.

    Attributes:
        token_ids: Token ids of the prompt.
        places: Indices of the entries in the batch, ascending.
    """

    token_ids: tuple[int, ...]
    places: tuple[int, ...]


class RolloutFunction:
    """A `rollout_func` for TRL's `GRPOTrainer`: completions with their sampling logprobs.

    TRL repeats each prompt for every completion. The engine computes each distinct prompt once, and
    its completions decode as one group. The engine gets the trainer's weights before the first
    batch and after every change of them: `gradient_accumulation_steps`, `num_iterations` and
    evaluations cost no update. LoRA adapters are merged for the engine, and the trainer's own
    weights keep their bits.

    The trainer's arguments control sampling: `temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty`, `max_completion_length`, and in `generation_kwargs` any field of
    `SamplingParams` under its own name or that of `transformers`. The trainer's end-of-sequence ids
    end a sample. `args.seed` determines all draws, together with the step and the prompt's index.

    The returned `logprobs` are those of the trainer's own distribution: the whole vocabulary at its
    temperature. If masks or filters (such as `top_p`) remove tokens, that is
    `TrainingSample.logprobs` plus `log_kept_mass`.

    In a data-parallel run (DDP), each process has its own engine.

    Args:
        engine: Engine of the trained model, or a configuration to build one from. An engine built
            here is shut down by `close` or at the end of a `with` block.
        extras: Fields of `TrainingSample` to pass to reward functions in addition to TRL's, one
            entry for each completion. `raw_logprobs` and the like are requested automatically.
        log_mismatch: Score each rollout with the trainer, as TRL does with vLLM, and log the
            trainer's metrics `sampling/sampling_logp_difference/{mean,max}` and
            `sampling/importance_sampling_ratio/{min,mean,max}`. Costs a forward pass of the
            trainer.
        oversample: Number of additional completions to draw for each prompt. The step takes those
            that finish first and does not wait for the longest, so completions are shorter on
            average than the policy's.
        sleep: Free the memory of the KV cache after each rollout, for a trainer on the same device.

    Raises `ConfigError` for unsupported trainers and options: FSDP, DeepSpeed, tools, and options
    that do not apply to this engine.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        *,
        extras: Iterable[str] = ("weight_version", "finish_reason"),
        log_mismatch: bool = False,
        oversample: int = 0,
        sleep: bool = False,
    ) -> None:
        self.extras = tuple(extras)
        if unknown := sorted(set(self.extras) - _OF_SAMPLES):
            names = ", ".join(map(repr, unknown))
            raise ConfigError(
                "extras must be fields of TrainingSample other than logprobs, which is always "
                f"returned; got {names}."
            )
        if not is_whole(oversample, 0):
            raise ConfigError(f"oversample={oversample!r} must be an integer of at least 0.")
        self.oversample = oversample
        self.log_mismatch = log_mismatch
        self.sleep = sleep
        self._owned = not isinstance(engine, InferenceEngine)
        if isinstance(engine, InferenceEngine):
            require_chosen_codes(engine, type(self).__name__)
        else:
            engine = InferenceEngine(with_plain_weights(engine))
        self.engine = engine
        self._synced: Any = None  # step, version and parameter states at the last sync
        # (mode, step), and the number of its rollouts so far
        self._calls: tuple[tuple[str, int], int] = (("", 0), 0)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Generate one completion for each entry of `prompts` (text or chats), in their order.

        Returns `prompt_ids`, `completion_ids` (including the end-of-sequence id), `logprobs` and
        the extras: lists with one entry for each prompt.
        """
        _require_supported(trainer)
        token_ids = prompt_token_ids(prompts, trainer)
        params = sampling_params(trainer, self.extras)
        if self.sleep:
            self.engine.wake()
        began = time.perf_counter()
        self.sync(trainer)
        synced = time.perf_counter()
        samples = self._generate(group_by_prompt(token_ids), params, trainer)
        ended = time.perf_counter()
        if self.sleep:
            self.engine.sleep()

        logprobs = [list(_full_logprobs(sample)) for sample in samples]
        completion_ids = [list(sample.completion_tokens) for sample in samples]
        figures = {
            "rollout/sync_seconds": synced - began,
            "rollout/generate_seconds": ended - synced,
        }
        if self.log_mismatch:
            figures |= mismatch(trainer, token_ids, completion_ids, logprobs)
        for name, value in figures.items():
            trainer._metrics[_mode(trainer)][name].append(value)
        extras = {name: [getattr(sample, name) for sample in samples] for name in self.extras}
        return {
            "prompt_ids": token_ids,
            "completion_ids": completion_ids,
            "logprobs": logprobs,
            **extras,
        }

    def sync(self, trainer: Any) -> bool:
        """Update the engine to the trainer's weights, as a new version, if they have changed.

        Weights count as changed if the trainer's step has advanced, a parameter was written, or
        another caller has updated the engine. Returns True after an update. Raises
        `WeightUpdateError` if the weights do not fit, or hold nan or infinity. The engine then
        keeps its own.
        """
        model = trainer.accelerator.unwrap_model(trainer.model)
        step = trainer.state.global_step
        if self._synced == (step, self.engine.get_weight_version(), states([*model.parameters()])):
            return False
        with whole_weights(model) as weights:
            self.engine.update_weights(weights, blocking=True, complete=True, check_finite=True)
        self._synced = (step, self.engine.get_weight_version(), states([*model.parameters()]))
        return True

    def close(self) -> None:
        """Shut down the engine if it was built here."""
        if self._owned:
            self.engine.shutdown()

    def __enter__(self) -> "RolloutFunction":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self, groups: Sequence[Group], params: dict[str, Any], trainer: Any
    ) -> list[TrainingSample]:
        """Return one sample for each entry, in the order of entries."""
        where = (_mode(trainer), trainer.state.global_step)
        calls = self._calls[1] + 1 if self._calls[0] == where else 0
        self._calls = (where, calls)
        requests = [
            self.engine.intake.sequence(
                group.token_ids,
                SamplingParams(**params, seed=_seed(trainer, *where, calls, number)),
                len(group.places) + self.oversample,
                stream=False,
                num_wanted=len(group.places),
            )
            for number, group in enumerate(groups)
        ]
        samples: dict[int, list[TrainingSample]] = {request.request_id: [] for request in requests}
        for delta in generation.run(self.engine.shared, requests, progress=False):
            if delta.finished is not None:
                samples[delta.request_id].append(delta.finished)
        by_place: dict[int, TrainingSample] = {}
        for group, drawn in zip(groups, samples.values(), strict=True):
            first = sorted(
                drawn,
                key=lambda sample: (sample.stop_reason == GROUP_COMPLETE, sample.sample_index),
            )
            # skip samples drawn in excess
            by_place |= zip(group.places, first, strict=False)
        if empty := [place for place, sample in by_place.items() if not sample.completion_tokens]:
            raise RequestAborted(
                f"completion {min(empty)} of the batch was aborted before its first token; do not "
                "abort requests while a trainer waits for them."
            )
        return [by_place[place] for place in sorted(by_place)]


def group_by_prompt(prompts: Iterable[Iterable[int]]) -> list[Group]:
    """Group entries with the same token ids, in the order of their first occurrence."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index, token_ids in enumerate(prompts):
        places.setdefault(tuple(token_ids), []).append(index)
    return [Group(token_ids, tuple(indices)) for token_ids, indices in places.items()]


def prompt_token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Return token ids of each prompt, as TRL makes them: chats use the trainer's template."""
    if not prompts:
        return []
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    if kinds := {kind for prompt in prompts for kind in _content_kinds(prompt) if kind != "text"}:
        raise InvalidRequest(
            f"a prompt holds content of type {min(kinds)!r}; this engine accepts only text."
        )
    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in encoded["input_ids"]]


def sampling_params(trainer: Any, extras: Iterable[str] = ()) -> dict[str, Any]:
    """Return fields of `SamplingParams`, without the seed, from the trainer's arguments.

    `generation_kwargs` take precedence. Raises `ConfigError` if one of them is unknown.
    """
    options: dict[str, Any] = {
        "temperature": trainer.temperature,
        "max_tokens": trainer.max_completion_length,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "ignore_eos": True,  # the trainer's end ids count, not those of the engine's checkpoint
    }
    kwargs: dict[str, Any] = dict(trainer.args.generation_kwargs or {})
    options["stop_token_ids"] = _ids(kwargs.pop("eos_token_id", trainer.eos_token_ids)) | _ids(
        kwargs.pop("stop_token_ids", ())
    )
    if kwargs.pop("ignore_eos", False):
        options["stop_token_ids"] = frozenset()
    greedy = kwargs.pop("do_sample", True) is False
    options |= {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if greedy:
        options["temperature"] = 0.0
    if "seed" in options:
        raise ConfigError(
            "generation_kwargs must not include 'seed'; set the trainer's args.seed instead."
        )
    if unknown := options.keys() - _FIELDS:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ConfigError(f"generation_kwargs: this engine does not support {names}; remove it.")
    asked = dict.fromkeys(_ASKED_FOR.intersection(extras), True)
    return {name: value for name, value in options.items() if value is not None} | asked


def _ids(value: Any) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value)


def _require_supported(trainer: Any) -> None:
    require_whole(trainer.accelerator)
    if trainer.tools:
        raise ConfigError(
            "TRL generates the turns after a tool's result itself, without logprobs; leave out "
            "tools and environment_factory, or call the tools in a rollout function around this "
            "one."
        )
    if trainer.args.cache_implementation is not None:
        raise ConfigError(
            f"cache_implementation={trainer.args.cache_implementation!r} selects a cache of "
            "transformers, which does not generate here; leave it out."
        )


def _content_kinds(prompt: Iterable[Any]) -> Iterable[str]:
    """Yield the types of message parts in a chat, for messages that are not plain text."""
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            yield str(part.get("type", "text"))


def _mode(trainer: Any) -> str:
    return "train" if trainer.model.training else "eval"


def _seed(trainer: Any, *what: Any) -> int | None:
    """Return a group's seed, from the trainer's seed and everything that identifies the group."""
    if trainer.args.seed is None:
        return None
    key = repr((trainer.args.seed, trainer.accelerator.process_index, *what)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _full_logprobs(sample: TrainingSample) -> Iterable[float]:
    if sample.log_kept_mass is None:
        return sample.logprobs
    return (own + kept for own, kept in zip(sample.logprobs, sample.log_kept_mass, strict=True))


def mismatch(
    trainer: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Any],
) -> dict[str, float]:
    """Return TRL's metrics of the mismatch between sampler and trainer, under TRL's names."""
    ids, mask, longest = _padded(prompts, completions)
    device = trainer.accelerator.device
    size = trainer.args.per_device_train_batch_size
    with torch.no_grad():
        scored, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids.to(device), mask.to(device), longest, batch_size=size
        )
    rows = scored.float().cpu()
    theirs = torch.cat([row[: len(own)] for row, own in zip(rows, logprobs, strict=True)])
    ours = torch.cat([torch.tensor(own) for own in logprobs])
    difference, ratio = (theirs - ours).abs(), (theirs - ours).exp()
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }


def _padded(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, int]:
    """Return ids and mask [entries, longest prompt + longest completion].

    Prompts are aligned right, completions left.
    """
    before = max(map(len, prompts))
    longest = max(map(len, completions))
    ids = torch.zeros(len(prompts), before + longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        span = slice(before - len(prompt), before + len(completion))
        ids[row, span] = torch.tensor([*prompt, *completion])
        mask[row, span] = 1
    return ids, mask, longest
