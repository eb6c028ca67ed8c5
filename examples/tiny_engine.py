"""The idea of nano-inference in one file: plain torch on a CPU, no kernels, any Llama.

Read from top to bottom: sequence, cache, schedule, forward, sample, engine (apply, commit, weight
update). Most names are the real engine's, and a test compares the greedy tokens of both. The real
engine adds batch-invariant kernels, and also other models, grammars, drafts and ranks.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class EngineConfig:
    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int = 256
    max_batch_size: int = 16  # most running sequences
    max_tokens_per_batch: int = 512  # most rows per step


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0  # 0: greedy
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(eq=False)
class Sequence:
    """An unfinished sample. A step closes the gap between its known and its computed tokens, so
    a prompt, a decoded token and a recomputation need no phases of their own.
    """

    seq_id: int  # in order of arrival
    params: SamplingParams
    token_ids: list[int]  # known tokens: prompt and completion
    num_computed_tokens: int = 0  # leading tokens with keys and values in `block_ids`
    block_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # version that sampled each token


class KVCacheManager:
    """Blocks of keys and values: which are free, who holds the others, and which can be found again.

    A full block is named by the weight version and by all tokens up to its end. A new sequence with
    the same beginning takes the block instead of computing it. Allocation takes the least recently
    used free block and drops its name.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.block_size
        self.free = dict.fromkeys(range(config.num_kv_blocks))  # in order of last use
        self.num_holders = [0] * config.num_kv_blocks
        self.block_of: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}

    def names(self, token_ids: list[int], version: int) -> Iterator[bytes]:
        """Yield the names of the full blocks of `token_ids`."""
        name = str(version).encode()
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            tokens = array("q", token_ids[end - self.block_size : end])
            name = hashlib.sha256(name + tokens.tobytes()).digest()
            yield name

    def match(self, token_ids: list[int], version: int) -> tuple[int, ...]:
        """Return the cached blocks that `token_ids` begin with. At least one token is left to
        compute, because its row draws the next token.
        """
        found: list[int] = []
        for name in self.names(token_ids[:-1], version):
            if name not in self.block_of:
                break
            found.append(self.block_of[name])
        return tuple(found)

    def hold(self, block_ids: tuple[int, ...]) -> None:
        for block in block_ids:
            self.num_holders[block] += 1
            self.free.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        blocks = list(self.free)[:count]
        for block in blocks:
            self.block_of.pop(self.name_of.pop(block, b""), None)  # evict its old tokens
        self.hold(tuple(blocks))
        return blocks

    def deallocate(self, block_ids: list[int]) -> None:
        for block in reversed(block_ids):  # the ends of prefixes are evicted first
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self.free[block] = None

    def publish(self, seq: Sequence, version: int) -> None:
        """Name the full blocks of a sequence, so that others find them."""
        names = self.names(seq.token_ids[: seq.num_computed_tokens], version)
        for block, name in zip(seq.block_ids, names, strict=False):
            if block not in self.name_of and name not in self.block_of:
                self.name_of[block], self.block_of[name] = name, block


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + length) of a sequence, which one step computes."""

    seq: Sequence
    start: int
    length: int
    fresh_blocks: int  # blocks to allocate for it
    draws: bool  # its last row is the last known token, which draws the next one

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SchedulerOutput:
    """The decision of one step. Nothing has happened yet: `apply` carries it out."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[tuple[Sequence, tuple[int, ...]], ...]  # with the cached blocks of each
    preempted: tuple[Sequence, ...]


def schedule(
    waiting: list[Sequence],
    running: list[Sequence],
    cache: KVCacheManager,
    config: EngineConfig,
    version: int,
) -> SchedulerOutput:
    """Decide one step. Read the arguments, write nothing.

    Running sequences come first, in order of arrival. If blocks run out, the newest sequence is
    preempted: it gives up its blocks and computes its tokens again later. If none was preempted,
    waiting sequences enter in order while they fit. A chunk is as long as the step's budget of
    tokens allows (chunked prefill).
    """
    budget, free = config.max_tokens_per_batch, len(cache.free)
    chunks: list[Chunk] = []
    admitted: list[tuple[Sequence, tuple[int, ...]]] = []
    alive = list(running)
    for seq in running:
        start, known = seq.num_computed_tokens, len(seq.token_ids)
        length = min(known - start, budget)
        if seq not in alive or not length:
            continue
        fresh = math.ceil((start + length) / cache.block_size) - len(seq.block_ids)
        while fresh > free:
            victim = alive.pop()
            free += sum(cache.num_holders[block] == 1 for block in victim.block_ids)
            if victim is seq:
                break
        else:
            chunks.append(Chunk(seq, start, length, fresh, draws=start + length == known))
            budget, free = budget - length, free - fresh
    preempted = tuple(seq for seq in running if seq not in alive)
    for seq in () if preempted else waiting:
        cached = cache.match(seq.token_ids, version)
        start, known = len(cached) * cache.block_size, len(seq.token_ids)
        length = min(known - start, budget)
        fresh = math.ceil((start + length) / cache.block_size) - len(cached)
        unheld = sum(not cache.num_holders[block] for block in cached)  # free until it is held
        if not length or len(alive) == config.max_batch_size or fresh + unheld > free:
            break  # no later sequence overtakes this one
        alive.append(seq)
        admitted.append((seq, cached))
        chunks.append(Chunk(seq, start, length, fresh, draws=start + length == known))
        budget, free = budget - length, free - fresh - unheld
    return SchedulerOutput(tuple(chunks), tuple(admitted), preempted)


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step, chunk after chunk: one flat batch without padding."""

    chunks: tuple[Chunk, ...]
    input_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    contexts: list[Tensor]  # slots of the keys and values that each chunk attends to
    slot_mapping: Tensor  # int64 [rows], where the keys and values of each row go
    logits_indices: Tensor  # int64 [draws], rows that draw a token


def build(chunks: tuple[Chunk, ...], block_size: int) -> ForwardBatch:
    offsets = torch.arange(block_size)
    tables = [torch.tensor(chunk.seq.block_ids)[:, None] for chunk in chunks]
    contexts = [
        (table * block_size + offsets).flatten()[: chunk.end]
        for table, chunk in zip(tables, chunks, strict=True)
    ]
    ends = torch.tensor([chunk.length for chunk in chunks]).cumsum(0)
    return ForwardBatch(
        chunks,
        torch.tensor([t for c in chunks for t in c.seq.token_ids[c.start : c.end]]),
        torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]),
        contexts,
        torch.cat([slots[c.start :] for slots, c in zip(contexts, chunks, strict=True)]),
        ends[torch.tensor([chunk.draws for chunk in chunks])] - 1,
    )


class Decoder:
    """A Llama over paged keys and values. `params` has the names of the checkpoint."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.params = {
            name: tensor.float()
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        self.params.setdefault("lm_head.weight", self.params["model.embed_tokens.weight"])  # tied
        self.layers, heads = self.config["num_hidden_layers"], self.config["num_attention_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        # [layer, key or value, slot, KV head, head_dim]
        shape = (self.layers, 2, num_slots, self.config["num_key_value_heads"], self.head_dim)
        self.kv = torch.zeros(shape)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the rows, write their keys and values, and return logits [draws, vocab]."""
        x = self.params["model.embed_tokens.weight"][batch.input_ids]
        for i in range(self.layers):
            h = self._norm(x, f"model.layers.{i}.input_layernorm")
            x = x + self._attention(h, batch, i)
            h = self._norm(x, f"model.layers.{i}.post_attention_layernorm")
            gate = self._linear(h, f"model.layers.{i}.mlp.gate_proj")
            up = self._linear(h, f"model.layers.{i}.mlp.up_proj")
            x = x + self._linear(functional.silu(gate) * up, f"model.layers.{i}.mlp.down_proj")
        x = self._norm(x[batch.logits_indices], "model.norm")
        return self._linear(x, "lm_head")

    def _attention(self, x: Tensor, batch: ForwardBatch, layer: int) -> Tensor:
        module = f"model.layers.{layer}.self_attn"
        q, k, v = (
            self._linear(x, f"{module}.{name}_proj").view(len(x), -1, self.head_dim)
            for name in "qkv"
        )
        q, k = self._rope(q, batch.positions), self._rope(k, batch.positions)
        keys, values = self.kv[layer]
        keys[batch.slot_mapping], values[batch.slot_mapping] = k, v
        outputs: list[Tensor] = []
        rows = q.split([chunk.length for chunk in batch.chunks])
        for chunk, queries, slots in zip(batch.chunks, rows, batch.contexts, strict=True):
            mask = torch.ones(chunk.length, chunk.end, dtype=torch.bool).tril(chunk.start)
            q, k, v = (x.transpose(0, 1) for x in (queries, keys[slots], values[slots]))
            out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            outputs.append(out.transpose(0, 1).flatten(1))
        return self._linear(torch.cat(outputs), f"{module}.o_proj")

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None] * self.frequencies
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.params[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.params[f"{name}.weight"])


def sample(logits: Tensor, seq: Sequence) -> tuple[int, float]:
    """Draw a token and return it with its logprob.

    The noise is a function of seed and position, so it does not depend on the batch. A preempted
    sample continues with the same noise (Gumbel-max, Maddison et al. 2014).
    """
    temperature = seq.params.temperature
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    scores = logprobs
    if temperature:
        generator = torch.Generator().manual_seed(seq.params.seed << 32 | len(seq.token_ids))
        noise = torch.empty_like(logprobs).exponential_(generator=generator)
        scores = logprobs - noise.log()
    token = int(scores.argmax())
    return token, float(logprobs[token])


class InferenceEngine:
    def __init__(self, folder: Path, config: EngineConfig = EngineConfig()) -> None:
        self.config = config
        self.cache = KVCacheManager(config)
        self.model = Decoder(folder, config.num_kv_blocks * config.block_size)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.new_id = count()
        self.weight_version = 0

    def add_request(self, prompt: list[int], params: SamplingParams) -> Sequence:
        room = self.config.num_kv_blocks * self.config.block_size
        if not prompt or len(prompt) + params.max_tokens > room:
            raise ValueError(f"prompt and max_tokens must fit into {room} tokens of cache")
        seq = Sequence(next(self.new_id), params, list(prompt))
        self.waiting.append(seq)
        return seq

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Compute one step and return the samples that finished."""
        version = self.weight_version
        decision = schedule(self.waiting, self.running, self.cache, self.config, version)
        if not decision.chunks:
            return []
        self.apply(decision)
        logits = self.model.forward(build(decision.chunks, self.config.block_size))
        return self.commit(decision, logits)

    def apply(self, decision: SchedulerOutput) -> None:
        """Carry out a decision on sequences and cache."""
        for seq in decision.preempted:
            self.preempt(seq)
        for seq, cached in decision.admitted:
            self.waiting.remove(seq)
            self.running.append(seq)
            self.cache.hold(cached)
            seq.block_ids = list(cached)
            seq.num_computed_tokens = len(cached) * self.config.block_size
        for chunk in decision.chunks:
            chunk.seq.block_ids += self.cache.allocate(chunk.fresh_blocks)

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.cache.deallocate(seq.block_ids)
        seq.block_ids, seq.num_computed_tokens = [], 0
        self.waiting.append(seq)
        self.waiting.sort(key=lambda waiting: waiting.seq_id)

    def commit(self, decision: SchedulerOutput, logits: Tensor) -> list[Sequence]:
        """Count the computed tokens, publish full blocks, draw, and finish samples."""
        finished: list[Sequence] = []
        rows, version = iter(logits), self.weight_version
        for chunk in decision.chunks:
            seq = chunk.seq
            seq.num_computed_tokens += chunk.length
            self.cache.publish(seq, version)
            if chunk.draws:
                token, logprob = sample(next(rows), seq)
                seq.token_ids.append(token)
                seq.logprobs.append(logprob)
                seq.weight_versions.append(version)
                is_last = len(seq.logprobs) == seq.params.max_tokens
                if is_last or token in seq.params.stop_token_ids:
                    self.running.remove(seq)
                    self.cache.deallocate(seq.block_ids)
                    finished.append(seq)
        return finished

    @torch.inference_mode()
    def update_weights(self, weights: dict[str, Tensor]) -> int:
        """Replace tensors between two steps and return the new version.

        Running sequences keep their tokens, logprobs and versions, and compute their context again
        under the new weights. Old blocks no longer match: the version is part of their names.
        """
        for name, tensor in weights.items():  # check everything before anything changes
            if name not in self.model.params or tensor.shape != self.model.params[name].shape:
                raise ValueError(f"{name} does not match a tensor of the model")
        for name, tensor in weights.items():
            self.model.params[name].copy_(tensor)
        self.weight_version += 1
        for seq in list(self.running):
            self.preempt(seq)
        return self.weight_version


def main() -> None:
    """Export SmolLM2-135M from its Python package, then sample across a weight update."""
    import nano_inference
    from nano_inference.rl import PolicyModel

    config = nano_inference.EngineConfig("smollm2-135m", dtype="float32", quantization=None)
    with nano_inference.InferenceEngine(config) as real, TemporaryDirectory() as temporary:
        PolicyModel(real).save_pretrained(f"{temporary}/model")
        engine = InferenceEngine(Path(temporary) / "model")
        tokenizer = real.tokenizer
    prompts = [tokenizer.encode(f"The capital of {name} is") for name in ("France", "Japan")]
    samples = [engine.add_request(prompt, SamplingParams(temperature=0)) for prompt in prompts]
    for _ in range(8):
        engine.step()
    norm = engine.model.params["model.norm.weight"]
    engine.update_weights({"model.norm.weight": norm * 1.5})  # in training: the policy's tensors
    while engine.waiting or engine.running:
        engine.step()
    for seq in samples:
        print(repr(tokenizer.decode(seq.token_ids)), "by versions", *seq.weight_versions)


if __name__ == "__main__":
    main()
