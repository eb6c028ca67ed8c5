"""`DraftTrainer`: draft heads trained on the policy's own samples, saved in formats of other
engines.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from nano_inference.arrays import as_torch, dtype_name
from nano_inference.core.sequence import POLICY
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.drafts.heads import (
    EagleSpec,
    HeadsSpec,
    MedusaSpec,
    mapped_ids,
    read_heads,
    read_named,
    table_of,
)
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.requests import checked_ids
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.decoder import Decoder
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.draft_modules import PolicyRows, eagle_rows, medusa_rows
from nano_inference.rl.tensors import numbers, torch_dtype
from nano_inference.sampling.scaling import scaled
from nano_inference.system.regular_files import read_json
from nano_inference.types import TrainingSample

Kind = Literal["medusa", "eagle"]
DECAY = 0.8  # factor of the loss at each further depth
INITIAL = 0.02  # standard deviation of new matrices
MOST_ROWS = 256  # tokens of a sample at which agreement is measured
BLOCK = 16
WEIGHTS = "model.safetensors"


class Heads(NamedTuple):
    """Heads to train.

    Attributes:
        spec: Description of the heads.
        known: Token ids of the policy that the heads know, int64.
        tensors: Parameters by name.
        config: Contents of config.json when the heads are saved.
    """

    spec: HeadsSpec
    known: Tensor
    tensors: dict[str, Tensor]
    config: dict[str, Any]


class DraftTrainer:
    """Draft heads and their optimizer. The policy is frozen.

    The engine recomputes the policy's rows of each sample with its current weights.

    Args:
        engine: Engine of the policy, on one rank.
        kind: `"medusa"`, or `"eagle"` for an EAGLE-3 head.
        places: Number of tokens ahead to draft. For Medusa: the number of heads.
        known_tokens: Token ids of the policy that the heads know. None: all. Fewer make drafts
            cheaper.
        learning_rate: Learning rate of AdamW.
        seed: Seed of new matrices and of the order of samples.
        heads: Existing heads to continue training, instead of new ones of this kind.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        kind: Kind = "eagle",
        *,
        places: int = 3,
        known_tokens: Sequence[int] | None = None,
        learning_rate: float = 1e-3,
        seed: int = 0,
        heads: Heads | None = None,
    ) -> None:
        if places < 1:
            raise ConfigError(f"places={places} must be at least 1.")
        require_one_rank(engine.runner, "DraftTrainer")
        if engine.spec.state is not None:
            raise ConfigError(
                f"DraftTrainer does not support {engine.spec.architecture}: some of its layers "
                "carry a state."
            )
        if engine.spec.kinds:
            raise ConfigError(
                f"DraftTrainer does not support {engine.spec.architecture}: its layers are of "
                "several kinds."
            )
        self._generator = torch.Generator().manual_seed(seed)
        if heads is None:
            heads = _new_heads(engine, kind, places, known_tokens, self._generator)
        spec, self.known, tensors, self._config = heads
        if isinstance(spec, MedusaSpec) and not spec.projections:
            raise ConfigError(
                "cannot train heads that use the policy's projection; they need their own."
            )
        self.engine, self.spec = engine, spec
        self.places = spec.num_heads if isinstance(spec, MedusaSpec) else places
        self.params = {
            name: torch.nn.Parameter(tensor.float().contiguous())
            for name, tensor in tensors.items()
            if name != "embed_tokens.weight"
        }
        self._embedding = tensors.get("embed_tokens.weight")  # frozen
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )

    @classmethod
    def from_folder(
        cls,
        engine: InferenceEngine,
        folder: str | os.PathLike[str],
        *,
        places: int = 3,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> "DraftTrainer":
        """Continue training heads from a folder, such as those that the engine drafts with."""
        heads = _heads_of(engine, Path(folder))
        return cls(engine, places=places, learning_rate=learning_rate, seed=seed, heads=heads)

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, samples: Iterable[TrainingSample], *, epochs: int = 1, batch_size: int = 4
    ) -> float:
        """Train on the policy's samples and return the mean loss of the last epoch.

        The loss is the cross entropy to the policy's distribution over the known tokens, in nats.

        Args:
            samples: Samples of the policy. Their prompts are not learned.
            epochs: Number of passes over the samples.
            batch_size: Samples in each step of the optimizer.
        """
        every = self._rows(samples)
        head = numbers(self.engine.model.head).float()[self.known]
        mean = float("nan")
        for _ in range(epochs):
            order = torch.randperm(len(every), generator=self._generator).tolist()
            losses: list[float] = []
            for begin in range(0, len(order), batch_size):
                chosen = order[begin : begin + batch_size]
                self.optimizer.zero_grad(set_to_none=True)
                for index in chosen:
                    loss = self._loss(every[index], head)
                    (loss / len(chosen)).backward()
                    losses.append(float(loss.detach()))
                torch.nn.utils.clip_grad_norm_(self.params.values(), 1.0)
                self.optimizer.step()
            mean = sum(losses) / len(losses)
        return mean

    def refresh(self, samples: Iterable[TrainingSample], *, epochs: int = 1) -> float:
        """Train on new samples and update the engine's draft heads."""
        loss = self.train(samples, epochs=epochs)
        self.engine.update_draft(self.weights())
        return loss

    @torch.no_grad()
    def agreement(self, samples: Iterable[TrainingSample]) -> list[float]:
        """Return, for each depth, how often the drafts up to it equal the policy's draws.

        Drafts and draws share the noise, at temperature 1 without filters. Measures at most 256
        tokens of each sample.
        """
        head = numbers(self.engine.model.head).float()
        right, seen = [0] * self.places, [0] * self.places
        for rows in self._rows(samples):
            stop = min(len(rows.token_ids), rows.first + MOST_ROWS)
            rows = replace(
                rows,
                token_ids=rows.token_ids[:stop],
                hidden=rows.hidden[:stop],
                taps=rows.taps[:stop],
                embedded=rows.embedded[:stop],
            )
            self._count_right(rows, head, right, seen)
        return [one / max(all_, 1) for one, all_ in zip(right, seen, strict=True)]

    def _count_right(
        self, rows: PolicyRows, head: Tensor, right: list[int], seen: list[int]
    ) -> None:
        first, stop = rows.targets(0)
        if stop <= first:
            return
        logits = self._policy_logits(rows.hidden[first:stop], head)
        uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
        noise = -(-uniform.clamp_min(1e-20).log()).log()
        chosen = (logits.log_softmax(-1) + noise).argmax(-1)
        so_far: Tensor | None = None
        for depth, hidden in enumerate(self._draft_rows(rows)):
            begin, _ = rows.targets(depth)
            drafts = self._draft_logits(depth, hidden).log_softmax(-1)
            known_noise = noise[begin - first :][:, self.known]
            equal = self.known[(drafts + known_noise).argmax(-1)] == chosen[begin - first :]
            # only bases that the first depth has too
            equal = equal[first - begin + depth :]
            so_far = equal if so_far is None else so_far[: len(equal)] & equal
            right[depth] += int(so_far.sum())
            seen[depth] += len(so_far)

    def _loss(self, rows: PolicyRows, head: Tensor) -> Tensor:
        total, weight = torch.zeros(()), 0.0
        for depth, hidden in enumerate(self._draft_rows(rows)):
            if not len(hidden):
                break
            start, stop = rows.targets(depth)
            wanted = self._policy_logits(rows.hidden[start:stop], head).softmax(-1)
            logprobs = self._draft_logits(depth, hidden).log_softmax(-1)
            total = total - DECAY**depth * (wanted * logprobs).sum(-1).mean()
            weight += DECAY**depth
        if weight:
            return total / weight
        # a sample too short for any draft has no loss
        return sum(each.sum() * 0 for each in self.params.values())  # pyright: ignore

    def _policy_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return scaled(functional.linear(hidden, head), self.engine.spec.logit_scale)

    def _draft_rows(self, rows: PolicyRows) -> list[Tensor]:
        if isinstance(self.spec, MedusaSpec):
            return medusa_rows(self.spec, self.params, rows, self.places)
        return eagle_rows(self.spec, self.params, rows, self.places)

    def _draft_logits(self, depth: int, hidden: Tensor) -> Tensor:
        if isinstance(self.spec, EagleSpec):
            return functional.linear(hidden, self.params["lm_head.weight"])
        head = min(depth, self.spec.projections - 1)
        return functional.linear(hidden, self.params[f"lm_heads.{head}.weight"])

    # -- rows of the policy ------------------------------------------------------------------------

    def _rows(self, samples: Iterable[TrainingSample]) -> list[PolicyRows]:
        """Compute the policy's rows of the samples, under the weights currently served."""
        usable = [each for each in samples if each.completion_tokens]
        if not usable:
            raise InvalidRequest(
                "no samples with a completion to train heads on; pass at least one."
            )
        # check now, because a sequence that is too long for a step would stop the engine
        most = len(self.engine.model.ropes[0].cos)
        for sample in usable:
            tokens = checked_ids(
                (*sample.prompt_tokens, *sample.completion_tokens), self.engine.spec.vocab_size
            )
            if len(tokens) > most:
                raise InvalidRequest(
                    f"a sample has {len(tokens)} tokens; this engine computes at most {most}."
                )
        rows: list[PolicyRows] = []
        # between steps: no other computation and no weight update at the same time
        self.engine.shared.between_steps(POLICY, lambda: rows.extend(self._computed(usable)))
        return rows

    @torch.no_grad()
    def _computed(self, samples: Sequence[TrainingSample]) -> list[PolicyRows]:
        policy = self.engine.model
        taps = embedding = None
        if isinstance(self.spec, EagleSpec):
            taps = Taps(self.spec.layer_ids)
            embedding = self._embedding
            if embedding is None:
                embedding = numbers(policy.params["embed"]).float()
        model = policy.twin(taps=taps)
        lengths = [len(each.prompt_tokens) + len(each.completion_tokens) for each in samples]
        blocks = -(-max(lengths) // BLOCK)
        storage = KVStorage(policy.spec, blocks, BLOCK, policy.dtype, policy.device)
        computed: list[PolicyRows] = []
        for sample, length in zip(samples, lengths, strict=True):
            ids = [*sample.prompt_tokens, *sample.completion_tokens]
            sample_rows = Rows(ids, 0, range(blocks))
            batch = batch_of_rows([sample_rows], BLOCK, draws=range(length), device=policy.device)
            hidden = as_torch(model.forward(batch, storage).hidden)
            computed.append(
                PolicyRows(
                    token_ids=torch.tensor(ids),
                    hidden=hidden.float().clone(),
                    taps=torch.empty(length, 0) if taps is None else as_torch(taps.rows()),
                    embedded=torch.empty(length, 0)
                    if embedding is None
                    else embedding[torch.tensor(ids)].float(),
                    first=max(len(sample.prompt_tokens), 1),
                )
            )
        return computed

    # -- weights -----------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors by their public names, in the policy's dtype."""
        dtype = torch_dtype(self.engine.model.dtype)
        return {
            re.sub(r"^layers\.0\.", self._layer_name, name): param.detach().to(dtype)
            for name, param in self.params.items()
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and the tensors.

        Medusa heads are in vLLM's format, a new EAGLE-3 head in its authors' format, and heads
        from a folder in the format of that folder. Raises `ConfigError` if the folder already
        holds a model.
        """
        folder = Path(folder)
        if (folder / WEIGHTS).exists() or (folder / "config.json").exists():
            raise ConfigError(f"{folder} already holds a model; choose a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.contiguous() for name, each in self.weights().items()}
        if self._embedding is not None:
            tensors["embed_tokens.weight"] = self._embedding.contiguous()
        tensors |= self._map()
        config = {**self._config, "torch_dtype": dtype_name(self.engine.model.dtype)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        unfinished = folder / f"{WEIGHTS}.part"
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(folder / WEIGHTS)

    @property
    def _layer_name(self) -> str:
        """Prefix of EAGLE-3's layer in the format of its folder."""
        return "layers.0." if "transformer_layer_config" in self._config else "midlayer."

    def _map(self) -> dict[str, Tensor]:
        vocab_size = self.engine.spec.vocab_size
        if len(self.known) == vocab_size:
            return {}
        if isinstance(self.spec, MedusaSpec):
            return {"token_map": self.known}
        known = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, self.known, True)
        return {"d2t": self.known - torch.arange(len(self.known)), "t2d": known}


def frequent_tokens(samples: Iterable[TrainingSample], count: int, vocab_size: int) -> list[int]:
    """Return the `count` most frequent ids of completions; among equals, the lower ones."""
    counts = Counter(token for each in samples for token in each.completion_tokens)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return sorted(ranked[:count])


def _new_heads(
    engine: InferenceEngine,
    kind: Kind,
    places: int,
    known_tokens: Sequence[int] | None,
    generator: torch.Generator,
) -> Heads:
    """Return new heads. Raises `ConfigError`."""
    if kind not in ("medusa", "eagle"):
        raise ConfigError(f"kind must be one of 'medusa', 'eagle'; got {kind!r}.")
    vocab_size = engine.spec.vocab_size
    known = sorted(set(known_tokens)) if known_tokens is not None else []
    if known and not 0 <= known[0] <= known[-1] < vocab_size:
        raise ConfigError(f"known_tokens must be ids from 0 to {vocab_size - 1}.")
    spec = _new_spec(engine.spec, kind, places, len(known) or vocab_size)
    known_ids = torch.tensor(known) if known else torch.arange(vocab_size)
    tensors = _initial(engine.model, spec, known_ids, generator)
    return Heads(spec, known_ids, tensors, _config_of(spec, engine.spec, len(known_ids)))


def _heads_of(engine: InferenceEngine, folder: Path) -> Heads:
    """Load the heads of a folder. Raises `ConfigError`."""
    spec = read_heads(folder, engine.spec)
    if spec is None:
        raise ConfigError(f"{folder} does not hold Medusa heads or an EAGLE-3 head.")
    tensors = read_named(folder, spec)
    stored = tensors.pop("map", None)
    known = torch.arange(engine.spec.vocab_size) if stored is None else mapped_ids(spec, stored)
    if isinstance(spec, MedusaSpec):
        return Heads(spec, known, tensors, _config_of(spec, engine.spec, len(known)))
    return Heads(spec, known, tensors, read_json(folder / "config.json"))


def _new_spec(policy: ModelSpec, kind: Kind, places: int, known: int) -> HeadsSpec:
    if kind == "medusa":
        return MedusaSpec(
            num_heads=places,
            num_blocks=1,
            hidden_size=policy.hidden_size,
            vocab_size=policy.vocab_size,
            draft_vocab_size=known,
            biases=False,
            projections=places,
        )
    count = policy.num_layers
    ids = (min(2, count - 1), count // 2, max(count - 3, 0))
    layer = spec_from_config({**_layer_config(policy), "architectures": ["LlamaForCausalLM"]})
    return EagleSpec(layer, policy.hidden_size, ids, known)


def _layer_config(policy: ModelSpec) -> dict[str, Any]:
    """Return the config of a plain layer with the policy's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_kv_heads,
        "head_dim": policy.head_dim,
        "vocab_size": policy.vocab_size,
        "max_position_embeddings": policy.max_position,
        "rms_norm_eps": policy.rms_norm_eps,
        "rope_theta": policy.ropes[-1].theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _initial(
    policy: Decoder, spec: HeadsSpec, known: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return new parameters by name.

    Projections start as copies of the policy's. Medusa's blocks start by adding nothing. The input
    of EAGLE-3's layer starts as mostly the last of the three taps.
    """
    head = numbers(policy.head).float()[known]
    params: dict[str, Tensor] = {}
    for source in (source for param in table_of(spec) for source in param.sources):
        if "lm_head" in source.name:
            params[source.name] = head.clone()
        elif source.name.startswith("blocks."):
            params[source.name] = torch.zeros(source.shape)
        elif len(source.shape) == 1:
            params[source.name] = torch.ones(source.shape)
        else:
            params[source.name] = torch.randn(source.shape, generator=generator) * INITIAL
    if isinstance(spec, EagleSpec):
        hidden = spec.layer.hidden_size
        params["fc.weight"][:, -hidden:] += torch.eye(hidden)
        norm = numbers(policy.params["norm"]).float()
        params["norm.weight"] = norm + policy.spec.norm_offset
    return params


def _config_of(spec: HeadsSpec, policy: ModelSpec, known: int) -> dict[str, Any]:
    if isinstance(spec, MedusaSpec):
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "num_heads": spec.num_heads,
            "num_hidden_layers": spec.num_blocks,
            "truncated_vocab_size": known,
            "medusa_fc_bias": spec.biases,
            "original_lm_head": spec.projections != spec.num_heads,
        }
    return {
        **_layer_config(policy),
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": spec.target_hidden_size,
        "draft_vocab_size": known,
        "eagle_aux_hidden_state_layer_ids": list(spec.layer_ids),
    }
