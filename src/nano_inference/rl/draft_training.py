"""`DraftTrainer`: heads that draft, trained on the policy's own samples, in the formats that others
read too.
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
from nano_inference.ops.reference.backend import scaled
from nano_inference.ranks.parts import require_one_rank
from nano_inference.rl.draft_modules import PolicyRows, eagle_rows, medusa_rows
from nano_inference.system.regular_files import read_json
from nano_inference.types import TrainingSample

Kind = Literal["medusa", "eagle"]
DECAY = 0.8  # of a place's loss, for each place before it
INITIAL = 0.02  # standard deviation of new matrices
MOST_ROWS = 256  # of one sample that agreement is counted at
BLOCK = 16
WEIGHTS = "model.safetensors"


class Heads(NamedTuple):
    """Heads that are trained.

    Attributes:
        spec: of them.
        known: the policy's ids that they know, int64.
        tensors: by their one name.
        config: config.json of the saved heads.
    """

    spec: HeadsSpec
    known: Tensor
    tensors: dict[str, Tensor]
    config: dict[str, Any]


class DraftTrainer:
    """Heads and their optimiser. The policy is frozen: what it computed of each sample is computed
    again by its engine, under the weights that it serves then.

    Args:
        engine: of the policy, on one rank.
        kind: `"medusa"`, or `"eagle"` for an EAGLE-3 head.
        places: how many tokens ahead it learns to guess: of Medusa, its heads.
        known_tokens: the policy's ids that the heads know; None: all. Fewer make drafts cheaper.
        learning_rate: of AdamW.
        seed: of new matrices, and of the order of samples.
        heads: to train further, instead of new ones of this kind.

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
                f"DraftTrainer computes no layers with a state, and {engine.spec.architecture} has "
                "some."
            )
        if engine.spec.kinds:
            raise ConfigError(
                f"DraftTrainer computes no layers of several kinds, and {engine.spec.architecture} "
                "has such."
            )
        self._generator = torch.Generator().manual_seed(seed)
        if heads is None:
            heads = _new_heads(engine, kind, places, known_tokens, self._generator)
        spec, self.known, tensors, self._config = heads
        if isinstance(spec, MedusaSpec) and not spec.projections:
            raise ConfigError("heads that use the policy's own projection are not trained here.")
        self.engine, self.spec = engine, spec
        self.places = spec.num_heads if isinstance(spec, MedusaSpec) else places
        self.params = {
            name: torch.nn.Parameter(tensor.float().contiguous())
            for name, tensor in tensors.items()
            if name != "embed_tokens.weight"
        }
        self._embedding = tensors.get("embed_tokens.weight")  # which stays as it is
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
        """Train heads of a folder further, such as those that the engine drafts with."""
        heads = _heads_of(engine, Path(folder))
        return cls(engine, places=places, learning_rate=learning_rate, seed=seed, heads=heads)

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, samples: Iterable[TrainingSample], *, epochs: int = 1, batch_size: int = 4
    ) -> float:
        """Learn what the policy would draw in these samples; returns the mean loss of the last
        epoch: cross entropy to the policy's own distribution over the known tokens, in nats.

        Args:
            samples: of the policy; what is in their prompts is not learned.
            epochs: how often each is seen.
            batch_size: samples of one step of the optimiser.
        """
        every = self._rows(samples)
        head = _matrix(self.engine.model.head)[self.known]
        mean = float("nan")
        for _ in range(epochs):
            order = torch.randperm(len(every), generator=self._generator).tolist()
            losses: list[float] = []
            for begin in range(0, len(order), batch_size):
                chosen = order[begin : begin + batch_size]
                self.optimizer.zero_grad(set_to_none=True)
                for place in chosen:
                    loss = self._loss(every[place], head)
                    (loss / len(chosen)).backward()
                    losses.append(float(loss.detach()))
                torch.nn.utils.clip_grad_norm_(self.params.values(), 1.0)
                self.optimizer.step()
            mean = sum(losses) / len(losses)
        return mean

    def refresh(self, samples: Iterable[TrainingSample], *, epochs: int = 1) -> float:
        """Train on new samples and hand the heads to the engine, which drafts with them."""
        loss = self.train(samples, epochs=epochs)
        self.engine.update_draft(self.weights())
        return loss

    @torch.no_grad()
    def agreement(self, samples: Iterable[TrainingSample]) -> list[float]:
        """By place: how often the draft there, and all before it, is what the policy draws with the
        same noise, at temperature 1 without filters. Of at most 256 tokens of each sample.
        """
        head = _matrix(self.engine.model.head)
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
        for place, hidden in enumerate(self._draft_rows(rows)):
            begin, _ = rows.targets(place)
            drafts = self._draft_logits(place, hidden).log_softmax(-1)
            own = noise[begin - first :][:, self.known]
            equal = self.known[(drafts + own).argmax(-1)] == chosen[begin - first :]
            # of the bases that the first place has too
            equal = equal[first - begin + place :]
            so_far = equal if so_far is None else so_far[: len(equal)] & equal
            right[place] += int(so_far.sum())
            seen[place] += len(so_far)

    def _loss(self, rows: PolicyRows, head: Tensor) -> Tensor:
        total, weight = torch.zeros(()), 0.0
        for place, hidden in enumerate(self._draft_rows(rows)):
            if not len(hidden):
                break
            start, stop = rows.targets(place)
            wanted = self._policy_logits(rows.hidden[start:stop], head).softmax(-1)
            logprobs = self._draft_logits(place, hidden).log_softmax(-1)
            total = total - DECAY**place * (wanted * logprobs).sum(-1).mean()
            weight += DECAY**place
        if weight:
            return total / weight
        # of a sample too short for any draft there is nothing to learn
        return sum(each.sum() * 0 for each in self.params.values())  # pyright: ignore

    def _policy_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return scaled(functional.linear(hidden, head), self.engine.spec.logit_scale)

    def _draft_rows(self, rows: PolicyRows) -> list[Tensor]:
        if isinstance(self.spec, MedusaSpec):
            return medusa_rows(self.spec, self.params, rows, self.places)
        return eagle_rows(self.spec, self.params, rows, self.places)

    def _draft_logits(self, place: int, hidden: Tensor) -> Tensor:
        if isinstance(self.spec, EagleSpec):
            return functional.linear(hidden, self.params["lm_head.weight"])
        head = min(place, self.spec.projections - 1)
        return functional.linear(hidden, self.params[f"lm_heads.{head}.weight"])

    # -- what the policy computes ------------------------------------------------------------------

    def _rows(self, samples: Iterable[TrainingSample]) -> list[PolicyRows]:
        """What the policy computes of the samples, under the weights that serve now."""
        given = [each for each in samples if each.completion_tokens]
        if not given:
            raise InvalidRequest("there are no samples with a completion to train heads on.")
        # here: what does not fit a step would end the engine
        most = len(self.engine.model.ropes[0].cos)
        for each in given:
            tokens = checked_ids(
                (*each.prompt_tokens, *each.completion_tokens), self.engine.spec.vocab_size
            )
            if len(tokens) > most:
                raise InvalidRequest(
                    f"a sample has {len(tokens)} tokens, and this engine computes at most {most}."
                )
        found: list[PolicyRows] = []
        # nothing else is computed meanwhile, and no weights change
        self.engine.shared.between_steps(POLICY, lambda: found.extend(self._computed(given)))
        return found

    @torch.no_grad()
    def _computed(self, samples: Sequence[TrainingSample]) -> list[PolicyRows]:
        policy = self.engine.model
        taps = embedding = None
        if isinstance(self.spec, EagleSpec):
            taps = Taps(self.spec.layer_ids)
            embedding = self._embedding
            if embedding is None:
                embedding = _matrix(policy.params["embed"])
        model = policy.twin(taps=taps)
        lengths = [len(each.prompt_tokens) + len(each.completion_tokens) for each in samples]
        blocks = -(-max(lengths) // BLOCK)
        storage = KVStorage(policy.spec, blocks, BLOCK, policy.dtype, policy.device)
        found: list[PolicyRows] = []
        for sample, length in zip(samples, lengths, strict=True):
            ids = [*sample.prompt_tokens, *sample.completion_tokens]
            rows = Rows(ids, 0, range(blocks))
            batch = batch_of_rows([rows], BLOCK, draws=range(length))
            hidden = model.forward(batch, storage).hidden
            found.append(
                PolicyRows(
                    token_ids=torch.tensor(ids),
                    hidden=hidden.float().clone(),
                    taps=torch.empty(length, 0) if taps is None else taps.rows(),
                    embedded=torch.empty(length, 0)
                    if embedding is None
                    else embedding[torch.tensor(ids)].float(),
                    first=max(len(sample.prompt_tokens), 1),
                )
            )
        return found

    # -- weights -----------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Tensors by their public names, in the policy's dtype."""
        dtype = self.engine.model.dtype
        return {
            re.sub(r"^layers\.0\.", self._layer_name, name): param.detach().to(dtype)
            for name, param in self.params.items()
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and the tensors: Medusa as vLLM reads it, a new EAGLE-3 head as its
        authors name it, one of a folder as it was. Raises `ConfigError` for a folder that holds a
        model.
        """
        folder = Path(folder)
        if (folder / WEIGHTS).exists() or (folder / "config.json").exists():
            raise ConfigError(f"{folder} holds a model already; name a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.contiguous() for name, each in self.weights().items()}
        if self._embedding is not None:
            tensors["embed_tokens.weight"] = self._embedding.contiguous()
        tensors |= self._map()
        config = {**self._config, "torch_dtype": str(self.engine.model.dtype).split(".")[1]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        unfinished = folder / f"{WEIGHTS}.part"
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(folder / WEIGHTS)

    @property
    def _layer_name(self) -> str:
        """What EAGLE-3's layer is called where its folder comes from."""
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
    """The ids that completions have most often, so many of them; of equals the lower ones."""
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
        raise ConfigError(f"kind={kind!r} is no kind of heads; 'medusa' and 'eagle' are.")
    vocab_size = engine.spec.vocab_size
    known = sorted(set(known_tokens)) if known_tokens is not None else []
    if known and not 0 <= known[0] <= known[-1] < vocab_size:
        raise ConfigError(f"known_tokens names ids that are not among the {vocab_size}.")
    spec = _new_spec(engine.spec, kind, places, len(known) or vocab_size)
    known_ids = torch.tensor(known) if known else torch.arange(vocab_size)
    tensors = _initial(engine.model, spec, known_ids, generator)
    return Heads(spec, known_ids, tensors, _config_of(spec, engine.spec, len(known_ids)))


def _heads_of(engine: InferenceEngine, folder: Path) -> Heads:
    """Return the heads of a folder. Raises `ConfigError`."""
    spec = read_heads(folder, engine.spec)
    if spec is None:
        raise ConfigError(f"{folder} holds no Medusa heads and no EAGLE-3 head.")
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
    """A plain layer with the sizes of the policy's."""
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
    """New parameters by name. Projections begin as the policy's; Medusa's blocks begin as nothing
    added, and what EAGLE-3's layer reads as mostly the upmost of the three.
    """
    head = _matrix(policy.head)[known]
    found: dict[str, Tensor] = {}
    for source in (source for param in table_of(spec) for source in param.sources):
        if "lm_head" in source.name:
            found[source.name] = head.clone()
        elif source.name.startswith("blocks."):
            found[source.name] = torch.zeros(source.shape)
        elif len(source.shape) == 1:
            found[source.name] = torch.ones(source.shape)
        else:
            found[source.name] = torch.randn(source.shape, generator=generator) * INITIAL
    if isinstance(spec, EagleSpec):
        hidden = spec.layer.hidden_size
        found["fc.weight"][:, -hidden:] += torch.eye(hidden)
        norm = policy.params["norm"].float()
        found["norm.weight"] = norm + policy.spec.norm_offset
    return found


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


def _matrix(param: Any) -> Tensor:
    """A weight as plain numbers, float32."""
    return (param if isinstance(param, Tensor) else param.read()).float()
