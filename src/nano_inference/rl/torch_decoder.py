"""The decoder for gradients: `models/decoder.py` in differentiable torch, without KV cache."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nano_inference.models.activations import UNGATED
from nano_inference.models.blocks.experts import EXPERT_BIASES
from nano_inference.models.rope import Rotation
from nano_inference.models.spec.experts import MoeSpec
from nano_inference.models.spec.latents import LatentSpec
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.ops.reference.backend import rotate
from nano_inference.ops.settings import CLAMP, SLOPE, Latent, Routing
from nano_inference.rl.activations import recomputes
from nano_inference.rl.head_gradients import head_gradients
from nano_inference.rl.micro_batch import MicroBatch
from nano_inference.rl.torch_attention import attend

ATTENTION_ROWS = 512  # rows of a segment whose attention is computed together
LORA = ".lora"  # suffix of a weight's name: the adapter's part of its product
_CONSTANT = ("router_bias", ".scale")  # suffixes of names without gradients

KeysAndValues = tuple[Tensor, Tensor]  # each [N, kv heads, head_dim]

EndGradients = Callable[[Tensor, bool], tuple[Tensor, Tensor]]


class TorchDecoder:
    """Forward and backward pass of one micro-batch, with the decoder's (fused) parameters.

    Products have the parameters' dtype and float32 sums. Norms, rotation and residual stream are
    float32. Keys and values are rounded as the engine stores them (`kept`), and gradients pass that
    rounding unchanged. `recompute_activations` is that of `PolicyModel`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ropes: Sequence[Rotation],
        embed_scale: float,
        dtype: torch.dtype,
        kept: KvFormat,
        recompute_activations: bool | None = None,
    ) -> None:
        self.spec = spec
        self.ropes = ropes
        self.embed_scale = embed_scale
        self.dtype = dtype
        self.kept = kept
        self.recompute_activations = recompute_activations
        self.head = "embed" if spec.tie_word_embeddings else "head"

    def gradients(
        self,
        params: Mapping[str, Tensor],
        end: EndGradients,
        batch: MicroBatch,
        wanted: Set[str],
    ) -> dict[str, Tensor]:
        """Compute gradients of parameters from those of a micro-batch's hidden rows.

        Args:
            params: Parameters by the decoder's names; matrices in `dtype`.
            end: Function that returns the gradients of the hidden rows [N, H], and of the head if
                its second argument is True.
            batch: Rows.
            wanted: Names of the parameters whose gradients to compute.

        Returns:
            Gradients by name, in float32 or in the parameter's dtype.
        """
        embedded = functional.embedding(batch.token_ids, params["embed"]).float() * self.embed_scale
        embedded.requires_grad_("embed" in wanted)
        # biases that only select experts have no gradient, nor do scales transformers freezes
        inner = sorted(name for name in wanted - {"embed", "head"} if not name.endswith(_CONSTANT))
        leaves = {name: params[name].detach().requires_grad_(True) for name in inner}
        with torch.enable_grad():
            hidden = self.hidden({**params, **leaves}, embedded, batch)
        with torch.no_grad():
            d_hidden, d_head = end(hidden.detach(), self.head in wanted)
            by_name: dict[str, Tensor] = {}
            if hidden.requires_grad:
                inputs = [embedded, *leaves.values()] if "embed" in wanted else [*leaves.values()]
                grads = list(torch.autograd.grad(hidden, inputs, d_hidden))
                if "embed" in wanted:
                    by_name["embed"] = (
                        d_head
                        if self.head == "embed"
                        else torch.zeros_like(params["embed"].float())
                    )
                    by_name["embed"].index_add_(0, batch.token_ids, grads.pop(0) * self.embed_scale)
                by_name |= dict(zip(inner, grads, strict=True))
        if "head" in wanted:
            by_name["head"] = d_head
        return by_name

    def adapter_gradients(
        self,
        params: Mapping[str, Any],
        leaves: Sequence[Tensor],
        head: tuple[Tensor, Tensor, float] | None,
        batch: MicroBatch,
        temperature: float,
    ) -> list[Tensor]:
        """Compute gradients of an adapter's matrices from those of a micro-batch's logprobs.

        Call it with gradients enabled.

        Args:
            params: As in `gradients`. In addition, names of weights + `LORA` have the adapter's
                parts, made from `leaves`.
            leaves: The adapter's matrices in layers.
            head: The adapter's matrices of the head, [rank, H] and [V, rank], and their scale.
                None: the adapter does not change the head.
            batch: As in `gradients`.
            temperature: As in `gradients`.

        Returns:
            Gradients of the leaves, then of the head's two matrices, float32.
        """
        weight = params[self.head]
        with torch.no_grad():
            embedded = functional.embedding(batch.token_ids, params["embed"])
            embedded = embedded.float() * self.embed_scale
            weight32 = weight.float()
            if head is not None:
                a, b, scale = head
                weight32 = weight32 + b @ a * scale
                weight = weight32.to(self.dtype)
        hidden = self.hidden(params, embedded, batch)
        with torch.no_grad():
            d_hidden, d_head = head_gradients(
                self.spec, hidden.detach(), weight, weight32, batch, temperature, head is not None
            )
        grads = list(torch.autograd.grad(hidden, leaves, d_hidden)) if leaves else []
        if head is not None:
            a, b, scale = head
            with torch.no_grad():
                grads += [b.T @ d_head * scale, d_head @ a.T * scale]
        return grads

    def hidden(self, params: Mapping[str, Any], embedded: Tensor, batch: MicroBatch) -> Tensor:
        """Compute rows after the last norm, in `dtype`: embedded float32 [N, H] -> [N, H]."""
        spec = self.spec
        routes = batch.experts_by_layer(spec.moe)
        if spec.bare_norms:
            params = {**params, **self._bare_norms(embedded)}
        residual = self._normed(embedded, params["norm"]) if spec.embed_norm else embedded
        inputs = self._inputs(embedded, params, batch) if spec.layer_inputs else None
        kept: dict[int, KeysAndValues] = {}
        for layer in range(spec.num_layers):
            maker = spec.layer(layer).keys_of
            shared = None if maker == layer else kept[maker]
            layer_inputs = None if inputs is None else inputs[:, layer]
            arguments = residual, params, layer, batch, routes.get(layer), shared, layer_inputs
            if recomputes(self.recompute_activations, len(residual)):
                residual, kept[layer] = checkpoint(
                    self._layer, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                residual, kept[layer] = self._layer(*arguments)
        return self._norm(residual, params["norm"])

    def _inputs(self, embedded: Tensor, params: Mapping[str, Tensor], batch: MicroBatch) -> Tensor:
        """Return the inputs of all layers: float32 [N, layers, layer_inputs]."""
        spec = self.spec
        scale = float(torch.tensor(spec.layer_inputs**0.5, dtype=self.dtype))
        known = functional.embedding(batch.token_ids, params["inputs_embed"]).float() * scale
        projected = functional.linear(embedded.to(self.dtype), params["inputs_project"]).float()
        shape = (spec.num_layers, spec.layer_inputs)
        projected = (projected * spec.hidden_size**-0.5).unflatten(1, shape)
        joined = self._normed(projected, params["inputs_norm"]) + known.unflatten(1, shape)
        return joined * 2**-0.5

    def _bare_norms(self, rows: Tensor) -> dict[str, Tensor]:
        """Return weights (ones) for norms that have none."""
        hidden, size = self.spec.hidden_size, self.spec.head_dim
        ones = rows.new_ones(max(hidden, size))
        sizes = {"attn_norm": hidden, "mlp_norm": hidden, "q_norm": size, "k_norm": size}
        layers = range(self.spec.num_layers)
        by_name = {f"layers.{i}.{name}": ones[:to] for i in layers for name, to in sizes.items()}
        return {"norm": ones[:hidden], **by_name}

    def _layer(
        self,
        residual: Tensor,
        params: Mapping[str, Tensor],
        layer: int,
        batch: MicroBatch,
        ids: Tensor | None,
        shared: KeysAndValues | None,
        inputs: Tensor | None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Return the residual stream after a layer, and the layer's keys and values."""
        name, moe = f"layers.{layer}.", self.spec.moe
        normed = self._norm(residual, params.get(name + "attn_norm"))
        x, kept = self._attention(normed, params, name, batch, layer, shared)
        residual = residual + self._after(x, params.get(name + "attn_out_norm"))
        normed = self._norm(residual, params.get(name + "mlp_norm"))
        if moe is not None and moe.beside:
            x = self._mlp_and_experts(normed, residual, params, name, ids)
        else:
            x = self._mlp(normed, params, name, ids)
        residual = residual + self._after(x, params.get(name + "mlp_out_norm"))
        if inputs is not None:
            residual = residual + self._of_input(residual, params, name, inputs)
        if self.spec.layer_scales:
            residual = residual * params[name + "scale"]
        return residual, kept

    def _of_input(
        self, residual: Tensor, params: Mapping[str, Tensor], name: str, inputs: Tensor
    ) -> Tensor:
        """Return the contribution of a layer's input to the residual stream."""
        gates = functional.linear(residual.to(self.dtype), params[name + "input_gate"]).float()
        gated = self._gate(torch.cat((gates, inputs), dim=1))
        x = functional.linear(gated, params[name + "input_out"])
        return self._after(x, params[name + "input_norm"])

    def _mlp_and_experts(
        self,
        normed: Tensor,
        residual: Tensor,
        params: Mapping[str, Tensor],
        name: str,
        ids: Tensor | None,
    ) -> Tensor:
        """Compute an MLP and parallel experts, float32."""
        dense = self._mlp(normed, params, name, None)
        rows = self._norm(residual, params[name + "experts_norm"])
        routed = self._norm(residual, params[name + "router_norm"])
        assert ids is not None
        mixed = self._experts(rows, params, name, ids, routed)
        outs = ((dense, "dense_out_norm"), (mixed, "experts_out_norm"))
        dense, mixed = (self._normed(x.float(), params[name + norm]) for x, norm in outs)
        return dense + mixed

    def _attention(
        self,
        normed: Tensor,
        params: Mapping[str, Tensor],
        name: str,
        batch: MicroBatch,
        layer: int,
        shared: KeysAndValues | None,
    ) -> tuple[Tensor, KeysAndValues]:
        spec, window = self.spec, self.spec.windows[layer]
        kind = spec.layer(layer)
        if spec.latent is None:
            qkv = self._linear(normed, params, name + "qkv")
        else:
            qkv = self._met(normed, params, name, spec.latent)
        q, rest = qkv.tensor_split([spec.num_heads * kind.head_dim], dim=-1)
        rope, places = self.ropes[layer], batch.positions
        q = self._turned(q, params, name + "q_norm", layer, places)
        if rope.query_scales is not None:
            q = q * rope.query_scales[places][:, None, None]
        q = q.to(self.dtype)
        if shared is None:
            shared = self._keys_and_values(rest, params, name, layer, places)
        k, v = (self.kept.rounded(each) for each in shared)
        lengths = [each.end - each.start for each in batch.segments]
        parts: list[Tensor] = []
        for segment, own_q, own_k, own_v in zip(
            batch.segments, *(x.split(lengths) for x in (q, k, v)), strict=True
        ):
            before = segment.path[: len(segment.path) - len(own_k)]
            if len(before):
                own_k, own_v = (torch.cat((x[before], own)) for x, own in ((k, own_k), (v, own_v)))
            first = len(before)
            for rows in own_q.split(ATTENTION_ROWS):
                last = first + len(rows)
                sinks = params.get(name + "sinks")
                parts.append(attend(rows, own_k[:last], own_v[:last], window, sinks, spec))
                first = last
        attended = torch.cat(parts)
        if spec.latent is not None:
            attended = self._latent_values(attended, params[name + "kv_b"], spec.latent.sizes)
        return self._linear(attended, params, name + "o"), shared

    def _keys_and_values(
        self,
        rows: Tensor,
        params: Mapping[str, Tensor],
        name: str,
        layer: int,
        places: Tensor,
    ) -> KeysAndValues:
        """Return keys and values from their projection, at these positions."""
        kind = self.spec.layer(layer)
        k, v = (rows, rows) if kind.joint else rows.chunk(2, dim=-1)
        if self.spec.value_norm:
            v = self._norm_heads(v, v.new_ones(kind.head_dim))
        k = self._turned(k, params, name + "k_norm", layer, places)
        return k.to(self.dtype), v.view(k.shape)

    def _turned(
        self, x: Tensor, params: Mapping[str, Tensor], norm: str, layer: int, places: Tensor
    ) -> Tensor:
        """Normalize heads [N, heads * D] if the model does, and rotate them by position.

        Returns float32 [N, heads, D].
        """
        if self.spec.qk_norm:
            x = self._norm_heads(x, params[norm])
        rope, size = self.ropes[layer], self.spec.layer(layer).head_dim
        heads = x.view(len(x), -1, size).float()
        return rotate(heads, rope.cos[places], rope.sin[places], rope.interleaved)

    def _met(
        self, normed: Tensor, params: Mapping[str, Tensor], name: str, latent: LatentSpec
    ) -> Tensor:
        """Compute queries that attend to latents, and the key twice."""
        sizes, q = latent.sizes, normed

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return self._normed(x.float(), weight, latent.eps).to(self.dtype)

        if latent.query_rank is not None:
            q = norm(self._linear(q, params, name + "q_a"), params[name + "q_a_norm"])
        q = self._linear(q, params, name + "q_b").unflatten(1, (self.spec.num_heads, -1))
        plain, turning = q.split([sizes.plain, sizes.rotary], dim=-1)
        c = self._linear(normed, params, name + "kv_a")
        keys = params[name + "kv_b"].unflatten(0, (self.spec.num_heads, -1))[:, : sizes.plain]
        met = torch.cat((turning, torch.einsum("nhp,hpr->nhr", plain, keys)), dim=-1)
        c, turning = c.split([sizes.rank, sizes.rotary], dim=-1)
        key = torch.cat((turning, norm(c, params[name + "kv_a_norm"])), dim=-1)
        return torch.cat((met.flatten(1), key, key), dim=1)

    def _latent_values(self, attended: Tensor, kv: Tensor, sizes: Latent) -> Tensor:
        """Compute values from attended latents, as `LatentOps.values`."""
        of_heads = attended.unflatten(1, (self.spec.num_heads, -1))[:, :, sizes.rotary :]
        rows = kv.unflatten(0, (self.spec.num_heads, -1))[:, sizes.plain :]
        return torch.einsum("nhr,hvr->nhv", of_heads, rows).flatten(1)

    def _mlp(
        self, normed: Tensor, params: Mapping[str, Tensor], name: str, ids: Tensor | None
    ) -> Tensor:
        if ids is not None:
            return self._experts(normed, params, name, ids)
        if not self.spec.gated:
            numbers = params.get(name + "act")
            if numbers is not None:
                trained, fixed = numbers.split([2, 2])
                numbers = torch.cat((trained, fixed.detach()))
            up = self._linear(normed, params, name + "up").float()
            inner = UNGATED[self.spec.activation](up, numbers).to(self.dtype)
            return self._linear(inner, params, name + "down")
        gated = self._gate(self._linear(normed, params, name + "gate_up"))
        return self._linear(gated, params, name + "down")

    def _linear(self, x: Tensor, params: Mapping[str, Any], name: str) -> Tensor:
        """Compute a product with its bias and the adapter's part (`ops.lora`)."""
        y = functional.linear(x, params[name], params.get(name + "_bias"))
        for first, a, b, scale in params.get(name + LORA, ()):
            end = first + b.shape[1]
            added = y[:, first:end].float() + functional.linear(x.float(), a) * scale @ b
            y = torch.cat((y[:, :first], added.to(y.dtype), y[:, end:]), dim=1)
        return y

    def _experts(
        self,
        normed: Tensor,
        params: Mapping[str, Tensor],
        name: str,
        ids: Tensor,
        routed: Tensor | None = None,
    ) -> Tensor:
        """Sum the outputs of each row's experts, `ids` [N, K], in the order of the ids.

        The router reads the rows `routed`, or `normed` if that is None.
        """
        moe = self.spec.moe
        assert moe is not None
        router_bias, up_biases, down_biases = _expert_biases(moe, params, name)
        read = (normed if routed is None else routed).float() * moe.routing.logit_scale
        logits = functional.linear(read, params[name + "router"].float(), router_bias)
        weights = _weights_of(logits[:, : moe.num_experts], ids, moe.routing)
        if moe.scales is not None:
            weights = weights * params[name + "router_scales"][ids]
        gate_ups, downs = (
            params[name + part].chunk(moe.num_experts)
            for part in ("experts_gate_up", "experts_down")
        )
        total = torch.zeros(normed.shape, device=normed.device)
        for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
            rows, which = (ids == expert).nonzero(as_tuple=True)
            gated = self._gate(functional.linear(normed[rows], gate_up, up_biases[expert]))
            product = functional.linear(gated, down, down_biases[expert])
            total = total.index_add(0, rows, product.float() * weights[rows, which, None])
        if moe.shared is None:
            return total
        gated = self._gate(functional.linear(normed, params[name + "shared_gate_up"]))
        product = functional.linear(gated, params[name + "shared_down"]).float()
        gates = logits[:, moe.num_experts :].sigmoid() if moe.shared.gate is not None else 1.0
        return total + product * gates

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize [N, heads * D] by head, or all heads together if the weight is that wide."""
        return self._norm(x.float().view(len(x), -1, len(weight)), weight).view(x.shape)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return (x if weight is None else self._normed(x, weight)).to(self.dtype)

    def _after(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return a block's contribution to the residual stream, float32."""
        x = x.float() if weight is None else self._normed(x.float(), weight)
        return x if self.spec.residual_scale == 1 else x * self.spec.residual_scale

    def _normed(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        eps = self.spec.rms_norm_eps if eps is None else eps
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
        return x * scale * (self.spec.norm_offset + weight.float())

    def _gate(self, gate_up: Tensor) -> Tensor:
        first, second = gate_up.chunk(2, dim=-1)
        if self.spec.activation == "silu":
            return (functional.silu(first) * second).to(self.dtype)
        if self.spec.activation == "gelu_tanh":
            return (functional.gelu(first, approximate="tanh") * second).to(self.dtype)
        first, second = first.float().clamp(max=CLAMP), second.float().clamp(-CLAMP, CLAMP)
        return ((second + 1) * first * torch.sigmoid(SLOPE * first)).to(self.dtype)


def _expert_biases(
    moe: MoeSpec, params: Mapping[str, Tensor], name: str
) -> tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Return the biases of the router, and of each expert's gate and up, and down."""
    nothing = (None,) * moe.num_experts
    if not moe.biases:
        return None, nothing, nothing
    router, gate_up, down = (params[name + part] for part in EXPERT_BIASES)
    return router, gate_up.chunk(moe.num_experts), down.chunk(moe.num_experts)


def _weights_of(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Return the weights of the engine's choice of experts [N, K], from all their logits [N, E]."""
    scores = logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()
    weights = scores.gather(1, ids)
    if routing.renormalized:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.floor)
    return weights * routing.scale
