"""A peer: a decoding loop in plain torch with CUDA graphs, as an engineer might write in an
afternoon.

The loop has a static cache [batch, longest] and torch's scaled_dot_product_attention. Every decode
step replays a graph, which includes sampling. There is one graph per bucket of lengths, so that
short contexts read little. There is no paging, scheduler, prefix cache or logprobs. A batch runs
until its longest sequence is done. Llama and Qwen3 shapes are supported.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from nano_inference.checkpoints.loading import load_spec

BUCKET = 256  # positions
PREFILL_ROWS = 8192  # rows per product in the prefill


class TorchLoop:
    """A model with space for `batch` sequences of `longest` tokens."""

    def __init__(
        self,
        folder: Path,
        batch: int,
        longest: int,
        device: str,
        dtype: torch.dtype,
        temperature: float,
    ) -> None:
        self.spec, self.device, self.batch, self.temperature = (
            load_spec(folder),
            device,
            batch,
            temperature,
        )
        spec = self.spec
        self.longest = -(-longest // BUCKET) * BUCKET if device != "cpu" else longest
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {name: tensor.to(device, dtype) for name, tensor in load_file(file).items()}
        self.embed, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.layers = [_layer(weights, f"model.layers.{i}.") for i in range(spec.num_layers)]
        self.dtype = dtype
        self._make_cache()
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        # position of each token in `tokens`
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.rows = torch.arange(batch, device=device)
        self.cos, self.sin = _rotary(spec.head_dim, self.longest, spec.ropes[0].theta, device)
        self.steps: dict[int, Callable[[], None]] = {}

    def _make_cache(self) -> None:
        spec = self.spec
        shape = (spec.num_layers, self.batch, spec.num_kv_heads, self.longest, spec.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)
        )

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute prompts, padded to the longest of a few at a time, and draw each one's first
        token.
        """
        most = max(len(prompt) for prompt in prompts)
        few = max(1, PREFILL_ROWS // most)
        for start in range(0, len(prompts), few):
            part = prompts[start : start + few]
            lengths = torch.tensor([len(prompt) for prompt in part], device=self.device)
            width = int(lengths.max())
            ids = torch.tensor(
                [[*prompt, *[0] * (width - len(prompt))] for prompt in part], device=self.device
            )
            x = self.embed[ids]
            cos, sin = self.cos[:width, None], self.sin[:width, None]
            for i, layer in enumerate(self.layers):
                q, k, v = self._project(layer, x, cos, sin)  # [B, T, heads, D]
                self._store_prompts(i, start, k, v)
                found = functional.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    is_causal=True,
                    enable_gqa=True,
                )
                x = self._after(layer, x, found.transpose(1, 2).flatten(2))
            last = x[torch.arange(len(part), device=self.device), lengths - 1]
            self.tokens[start : start + len(part)] = self._draw(last)
            self.positions[start : start + len(part)] = lengths

    @torch.inference_mode()
    def decode(self, steps: int, longest: int) -> None:
        """Draw `steps` tokens of every sequence. The longest context has `longest` tokens now."""
        for i in range(steps):
            self._step_for(longest + i + 1)()

    @torch.inference_mode()
    def capture_all(self, longest: int) -> None:
        """Capture every graph for contexts of up to `longest` tokens, so that no
        capture is timed.
        """
        self.positions.zero_()
        for reach in range(BUCKET, longest + BUCKET, BUCKET):
            self._step_for(min(reach, self.longest))

    def _step_for(self, reach: int) -> Callable[[], None]:
        bucket = min(-(-reach // BUCKET) * BUCKET, self.longest)
        if bucket not in self.steps:
            self.steps[bucket] = captured(lambda: self._step(bucket), self.device)
        return self.steps[bucket]

    def _step(self, reach: int) -> None:
        x = self.embed[self.tokens][:, None]
        cos, sin = self.cos[self.positions][:, None, None], self.sin[self.positions][:, None, None]
        # [B, 1, 1, reach]
        mask = (torch.arange(reach, device=self.device) <= self.positions[:, None])[:, None, None]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            found = self._attend(i, q, k, v, mask)
            x = self._after(layer, x, found.reshape(self.batch, 1, -1))
        self.tokens.copy_(self._draw(x[:, 0]))
        self.positions.add_(1).clamp_(max=self.longest - 1)

    def _store_prompts(self, i: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values [B, T, heads, D] of a layer, starting at sequence `start`."""
        places = slice(start, start + len(k))
        self.keys[i, places, :, : k.shape[1]] = k.transpose(1, 2)
        self.values[i, places, :, : v.shape[1]] = v.transpose(1, 2)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Store the newest key and value of each sequence, and attend to all positions
        in `mask`.
        """
        spec, reach = self.spec, mask.shape[-1]
        self.keys[i, self.rows, :, self.positions] = k[:, 0]
        self.values[i, self.rows, :, self.positions] = v[:, 0]
        # Query heads of a key head are rows of its product, so no key is copied.
        group = spec.num_heads // spec.num_kv_heads
        grouped = q.view(self.batch, spec.num_kv_heads, group, spec.head_dim)
        keys, values = self.keys[i, :, :, :reach], self.values[i, :, :, :reach]
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

    def _project(
        self, layer: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        qkv = functional.linear(self._rms(x, layer["attn_norm"]), layer["qkv"]).unflatten(
            -1, (-1, spec.head_dim)
        )
        q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=-2)
        if "q_norm" in layer:
            q, k = self._rms(q, layer["q_norm"]), self._rms(k, layer["k_norm"])
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _after(self, layer: dict[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        x = x + functional.linear(attended, layer["o"])
        gate, up = functional.linear(self._rms(x, layer["mlp_norm"]), layer["gate_up"]).chunk(
            2, dim=-1
        )
        return x + functional.linear(functional.silu(gate) * up, layer["down"])

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_norm_eps)

    def _draw(self, x: Tensor) -> Tensor:
        logits = functional.linear(self._rms(x, self.norm), self.head).float() / self.temperature
        return (logits.softmax(dim=-1) / torch.empty_like(logits).exponential_()).argmax(dim=-1)


def _layer(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a layer's tensors, with products of the same rows fused."""

    def named(name: str) -> Tensor:
        return weights.pop(f"{prefix}{name}.weight")

    layer = {
        "attn_norm": named("input_layernorm"),
        "mlp_norm": named("post_attention_layernorm"),
        "qkv": torch.cat([named(f"self_attn.{each}_proj") for each in "qkv"]),
        "o": named("self_attn.o_proj"),
        "gate_up": torch.cat([named("mlp.gate_proj"), named("mlp.up_proj")]),
        "down": named("mlp.down_proj"),
    }
    if f"{prefix}self_attn.q_norm.weight" in weights:
        layer |= {"q_norm": named("self_attn.q_norm"), "k_norm": named("self_attn.k_norm")}
    return layer


def _rotary(head_dim: int, length: int, theta: float, device: str) -> tuple[Tensor, Tensor]:
    turns = theta ** (-torch.arange(0, head_dim, 2, device=device).double() / head_dim)
    angles = torch.arange(length, device=device)[:, None] * turns
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


def captured(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Return a step as a CUDA graph. On a CPU, return the step itself."""
    if device == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
