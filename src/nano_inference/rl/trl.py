"""TRL's `GRPOTrainer`, unmodified, on this engine: `GRPOTrainer(...,
rollout_func=RolloutFunction(engine))`.

TRL is not imported here: the trainer hands itself over with every call.
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

# What TRL calls a field of `SamplingParams` in `generation_kwargs`, where that differs.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_OF_SAMPLES = {field.name for field in fields(TrainingSample)} - {"logprobs"} | {
    "oldest_weight_version"
}
# fields that a request has to ask for
_ASKED_FOR = frozenset({"raw_logprobs", "sampling_mask", "prompt_logprobs", "routed_experts"})


@dataclass(frozen=True)
class Group:
    """Entries of a batch that have the same prompt.

    Attributes:
        token_ids: the prompt.
        places: of the entries in the batch, rising.
    """

    token_ids: tuple[int, ...]
    places: tuple[int, ...]


class RolloutFunction:
    """A `rollout_func` for TRL's `GRPOTrainer`: completions, and the logprobs that they were drawn
    with.

    TRL repeats each prompt for every completion of it; each distinct prompt is computed once here,
    and its completions decode as one group. Before the first batch, and whenever the trainer's
    weights have changed, the engine gets them: `gradient_accumulation_steps`, `num_iterations` and
    evaluations cost no update. LoRA adapters are merged for the engine; the trainer's own weights
    keep their bits.

    The trainer's arguments decide how tokens are drawn: `temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty`, `max_completion_length`, and in `generation_kwargs` any field of
    `SamplingParams` under its own name or that of `transformers`. What ends a sample is what the
    trainer takes for its end. `args.seed` decides all draws, together with the step and the
    prompt's place.

    The returned `logprobs` are those of the trainer's own distribution, the whole vocabulary at its
    temperature: where masks or filters (`top_p` and the like) cut some of it,
    `TrainingSample.logprobs` plus `log_kept_mass`.

    In a data-parallel run (DDP) each process has an engine of its own.

    Args:
        engine: an engine of the model that is trained, or the configuration to build one from; one
            that was built here is shut down by `close`, or at the end of a `with`.
        extras: fields of `TrainingSample` that reward functions get beside what TRL gives them, one
            entry a completion (`raw_logprobs` and the like are asked for then).
        log_mismatch: after each rollout let the trainer score it, as TRL does with vLLM, and log
            its metrics `sampling/sampling_logp_difference/{mean,max}` and
            `sampling/importance_sampling_ratio/{min,mean,max}`. It costs a forward pass of the
            trainer.
        oversample: draw so many completions more for each prompt, and take those that finish first:
            the step does not wait for the longest. What is taken is shorter on average than what
            the policy would write.
        sleep: give the memory of the KV cache back after each rollout, for the trainer on the same
            device.

    Raises `ConfigError` for a trainer that it cannot serve: FSDP, DeepSpeed, tools, and options
    that have no meaning here.
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
                f"extras: {names} is no field of TrainingSample, or one that is returned anyway."
            )
        if not is_whole(oversample, 0):
            raise ConfigError(f"oversample={oversample!r} must be an integer from 0 on.")
        self.oversample = oversample
        self.log_mismatch = log_mismatch
        self.sleep = sleep
        self._owned = not isinstance(engine, InferenceEngine)
        if isinstance(engine, InferenceEngine):
            require_chosen_codes(engine, type(self).__name__)
        else:
            engine = InferenceEngine(with_plain_weights(engine))
        self.engine = engine
        self._synced: Any = None  # what the weights were told by when the engine got them
        # a mode and step, and how many rollouts it had
        self._calls: tuple[tuple[str, int], int] = (("", 0), 0)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """One completion for each entry of `prompts` (text or chats), in their order.

        Returns `prompt_ids`, `completion_ids` (the end-of-sequence id included), `logprobs` and the
        extras: lists with one entry a prompt.
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
        """Give the engine the trainer's weights, as a new version, if they are not those that
        serve.

        They are taken for changed when the trainer's step has moved, a parameter was written since,
        or another caller has updated the engine. Returns whether they were. Raises
        `WeightUpdateError` for weights that do not fit, or hold nan or infinity; the engine's stay
        as they are then.
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
        """Shut the engine down if it was built here."""
        if self._owned:
            self.engine.shutdown()

    def __enter__(self) -> "RolloutFunction":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self, groups: Sequence[Group], params: dict[str, Any], trainer: Any
    ) -> list[TrainingSample]:
        """One sample for each entry, in the order of entries."""
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
        found: dict[int, TrainingSample] = {}
        for group, drawn in zip(groups, samples.values(), strict=True):
            first = sorted(
                drawn,
                key=lambda sample: (sample.stop_reason == GROUP_COMPLETE, sample.sample_index),
            )
            # the rest was drawn beyond what is wanted
            found |= zip(group.places, first, strict=False)
        if empty := [place for place, sample in found.items() if not sample.completion_tokens]:
            raise RequestAborted(
                f"completion {min(empty)} of the batch was aborted before its first token; "
                "nothing else may abort "
                "requests while a trainer waits for them."
            )
        return [found[place] for place in sorted(found)]


def group_by_prompt(prompts: Iterable[Iterable[int]]) -> list[Group]:
    """Which entries have the same token ids; groups in the order in which their prompts first
    come.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, token_ids in enumerate(prompts):
        places.setdefault(tuple(token_ids), []).append(place)
    return [Group(token_ids, tuple(found)) for token_ids, found in places.items()]


def prompt_token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids of each prompt, as TRL's own generation makes them: chats go through the trainer's
    template.
    """
    if not prompts:
        return []
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    if kinds := {kind for prompt in prompts for kind in _content_kinds(prompt) if kind != "text"}:
        raise InvalidRequest(
            f"a prompt holds content of type {min(kinds)!r}; this engine takes text alone."
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
    """Fields of `SamplingParams`, without the seed, that the trainer's arguments and
    `generation_kwargs` ask for.

    Raises `ConfigError` for one in `generation_kwargs` that is unknown here.
    """
    given: dict[str, Any] = {
        "temperature": trainer.temperature,
        "max_tokens": trainer.max_completion_length,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "ignore_eos": True,  # the trainer's ends count, not those of the engine's checkpoint
    }
    kwargs: dict[str, Any] = dict(trainer.args.generation_kwargs or {})
    given["stop_token_ids"] = _ids(kwargs.pop("eos_token_id", trainer.eos_token_ids)) | _ids(
        kwargs.pop("stop_token_ids", ())
    )
    if kwargs.pop("ignore_eos", False):
        given["stop_token_ids"] = frozenset()
    greedy = kwargs.pop("do_sample", True) is False
    given |= {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    if greedy:
        given["temperature"] = 0.0
    if "seed" in given:
        raise ConfigError(
            "generation_kwargs: the trainer's args.seed decides all draws; take 'seed' out."
        )
    if unknown := given.keys() - _FIELDS:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ConfigError(
            f"generation_kwargs: {names} has no meaning for this engine; take it out."
        )
    asked = dict.fromkeys(_ASKED_FOR.intersection(extras), True)
    return {name: value for name, value in given.items() if value is not None} | asked


def _ids(value: Any) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value)


def _require_supported(trainer: Any) -> None:
    require_whole(trainer.accelerator)
    if trainer.tools:
        raise ConfigError(
            "TRL writes the turns after a tool's result with its own generate, and without "
            "logprobs; leave tools and "
            "environment_factory out, or call the tools in a rollout function around this one."
        )
    if trainer.args.cache_implementation is not None:
        raise ConfigError(
            f"cache_implementation={trainer.args.cache_implementation!r} chooses a cache of "
            "transformers, which "
            "generates nothing here; leave it out."
        )


def _content_kinds(prompt: Iterable[Any]) -> Iterable[str]:
    """Types of the parts of a chat's messages, where those are not plain text."""
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            yield str(part.get("type", "text"))


def _mode(trainer: Any) -> str:
    return "train" if trainer.model.training else "eval"


def _seed(trainer: Any, *what: Any) -> int | None:
    """Of a group, from the trainer's seed and all that tells one group of a run from another."""
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
    """TRL's own metrics of the difference between who samples and who trains, under TRL's names."""
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
    """Ids and mask [entries, longest prompt + longest completion], prompts to the right,
    completions to the left.
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
