"""What strategies cost on paper: memory a rank, bytes a token, time of a step. Nothing here runs a
model.

The figures of a device are its data sheet's; the shares of them that a program reaches are
assumptions, named as such.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

GB = 1e9
MOST_BATCH = 2048  # sequences of one engine


@dataclass(frozen=True)
class Device:
    """An NVIDIA H100 SXM (data sheet), eight to a machine with one 400 Gb/s port each (DGX H100's
    data sheet).

    Attributes:
        memory: bytes.
        bandwidth: of it, bytes a second.
        flops: bfloat16, dense.
        link: NVLink, bytes a second in one direction.
        network: between machines, the same.
        link_latency: seconds of one exchange within a machine: an assumption.
        network_latency: between machines: an assumption.
        reached: share of all rates that programs reach: an assumption.
        usable: share of the memory that is not the driver's, workspace and graphs: an assumption.
        in_machine: devices that NVLink joins.
    """

    memory: float = 80 * GB
    bandwidth: float = 3350 * GB
    flops: float = 989e12
    link: float = 450 * GB
    network: float = 50 * GB
    link_latency: float = 10e-6
    network_latency: float = 20e-6
    reached: float = 0.7
    usable: float = 0.9
    in_machine: int = 8


H100 = Device()


@dataclass(frozen=True)
class Shape:
    """A model in bfloat16. Experts: 0 where it has none."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 0
    chosen: int = 0

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def one_mlp(self) -> int:
        """Parameters of an MLP, or of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """Embedding and head counted apart."""
        mlp = self.one_mlp * max(1, self.experts) + self.hidden * self.experts
        return self.layers * (self.attention + mlp) + 2 * self.vocab * self.hidden

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        mlp = self.one_mlp * max(1, self.chosen) + self.hidden * self.experts
        return self.layers * (self.attention + mlp) + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


M8 = Shape("8B", 32, 4096, 32, 8, 128, 14336, 128256)  # Llama 3.1 8B's
M70 = Shape("70B", 80, 8192, 64, 8, 128, 28672, 128256)  # Llama 3.1 70B's
# invented, of Qwen3-MoE's kind
MOE = Shape("400B MoE", 60, 6144, 64, 8, 128, 2880, 151936, experts=124, chosen=8)
MODELS = (M8, M70, MOE)


@dataclass(frozen=True)
class Plan:
    """How devices are used: `data` engines of `tensor * pipeline * context` ranks each.

    `expert`: the experts are spread over the engine's tensor ranks, or, with one rank an engine,
    over all engines.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: bool = False

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self.tensor * self.pipeline * self.context

    @property
    def devices(self) -> int:
        """Of all."""
        return self.ranks * self.data

    def __str__(self) -> str:
        names = (
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("DP", self.data),
        )
        parts = [f"{name} {count}" for name, count in names if count > 1]
        if self.expert:
            parts.append(f"EP {self.expert_ranks}")
        return " x ".join(parts) or "one"

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts are spread over."""
        if not self.expert:
            return 1
        return self.tensor if self.tensor > 1 else self.data


# -- memory ----------------------------------------------------------------------------------------


def weight_bytes(shape: Shape, plan: Plan) -> float:
    """Of the rank that has most: whole layers, its share of everything in them, of embedding and
    head.
    """
    layers = math.ceil(shape.layers / plan.pipeline)
    kv_share = max(plan.tensor, 1) if plan.tensor <= shape.kv_heads else shape.kv_heads
    attention = (
        shape.hidden
        * shape.head_dim
        * (2 * shape.heads / plan.tensor + 2 * shape.kv_heads / kv_share)
    )
    if shape.experts:
        spread = plan.expert_ranks if plan.expert else plan.tensor
        mlp = shape.one_mlp * shape.experts / spread + shape.hidden * shape.experts
    else:
        mlp = shape.one_mlp / plan.tensor
    ends = (1 if plan.pipeline > 1 else 2) * shape.vocab * shape.hidden / plan.tensor
    return 2 * (layers * (attention + mlp) + ends)


def kv_token_bytes(shape: Shape, plan: Plan) -> float:
    """Keys and values of one token at one rank. Heads are copied where ranks outnumber them."""
    heads = max(1.0, shape.kv_heads / plan.tensor)
    return 2 * 2 * math.ceil(shape.layers / plan.pipeline) * heads * shape.head_dim / plan.context


def kv_tokens(shape: Shape, plan: Plan, device: Device = H100) -> int:
    """Tokens that one engine's KV cache holds; 0: the weights do not fit."""
    left = device.memory * device.usable - weight_bytes(shape, plan)
    return max(0, int(left / kv_token_bytes(shape, plan)))


# -- bytes a token ---------------------------------------------------------------------------------


def tensor_bytes(shape: Shape, ranks: int, how: str = "gather") -> float:
    """What a rank receives for a token in one layer: the sums behind attention and MLP.

    `"gather"`: all partial sums in float32, as on NCCL here; `"exchange"`: by a hypercube, as on
    gloo here; `"columns"`: each rank adds up its columns of all partials and they are gathered,
    which gives the same bits; `"ring"`: an all-reduce in bfloat16, whose bits depend on the number
    of ranks.
    """
    share = (ranks - 1) / ranks
    width = {
        "gather": 4 * (ranks - 1),
        "exchange": 4 * math.log2(ranks),
        "columns": 2 * 4 * share,
        "ring": 2 * 2 * share,
    }[how]
    return 2 * shape.hidden * width


def pipeline_bytes(shape: Shape) -> float:
    """What a stage receives for a token: the residual stream in float32, once, not in every
    layer.
    """
    return 4 * shape.hidden


def expert_bytes(shape: Shape, ranks: int) -> float:
    """What goes out of a rank and comes back for one of its tokens in one layer.

    Rows in bfloat16, once to each rank that has one of the experts; one product in float32 for each
    expert elsewhere.
    """
    elsewhere = (ranks - 1) / ranks
    asked = (ranks - 1) * (1 - (1 - 1 / ranks) ** shape.chosen)
    return shape.hidden * (2 * asked + 4 * shape.chosen * elsewhere)


def context_bytes(shape: Shape, ranks: int, context: int, segment: int = 512) -> float:
    """What goes out and comes back for one row in one layer: its query, and a state of each segment
    elsewhere.
    """
    elsewhere = (ranks - 1) / ranks
    query = 2 * shape.heads * shape.head_dim * (ranks - 1)
    states = 4 * shape.heads * (shape.head_dim + 2) * math.ceil(context / segment) * elsewhere
    return query + states


def context_keys_bytes(shape: Shape, ranks: int, context: int) -> float:
    """The other way: all keys and values of a layer brought to the rows, once for all rows of a
    step.
    """
    return 4 * shape.kv_heads * shape.head_dim * context * (ranks - 1) / ranks


# -- time ------------------------------------------------------------------------------------------


def links(plan: Plan, device: Device = H100) -> tuple[float, float]:
    """Bandwidth and latency between tensor ranks: NVLink as long as they are in one machine."""
    within = plan.tensor * plan.context <= device.in_machine
    return (
        (device.link, device.link_latency) if within else (device.network, device.network_latency)
    )


def step_time(shape: Shape, plan: Plan, batch: int, context: int, device: Device = H100) -> float:
    """Seconds of one decode step of an engine: one token for each of `batch` sequences of `context`
    tokens.

    Weights are read once, keys and values once; products overlap with that, exchanges with nothing.
    With a pipeline as many groups of sequences are under way as there are stages, so a step of all
    of them takes as long as one stage with the whole batch, but a token's own way is all stages:
    see `token_latency`.
    """
    reached = device.reached
    weights = weight_bytes(shape, plan)
    if shape.experts:  # a small batch does not touch all experts
        rows = batch * (plan.data if plan.expert and plan.tensor == 1 else 1)
        touched = 1 - (1 - shape.chosen / shape.experts) ** rows
        spread = plan.expert_ranks if plan.expert else plan.tensor
        experts = (
            2 * math.ceil(shape.layers / plan.pipeline) * shape.one_mlp * shape.experts / spread
        )
        weights -= experts * (1 - touched)
    read = (weights + batch * context * kv_token_bytes(shape, plan)) / (device.bandwidth * reached)
    work = 2 * shape.active * batch / (plan.tensor * plan.pipeline) / (device.flops * reached)
    return max(read, work) + exchange_time(shape, plan, batch, context, device)


def exchange_time(
    shape: Shape, plan: Plan, batch: int, context: int, device: Device = H100
) -> float:
    """Seconds that a decode step of one stage waits for other ranks."""
    layers = math.ceil(shape.layers / plan.pipeline)
    rate, latency = links(plan, device)
    rate *= device.reached
    total = 0.0
    if plan.tensor > 1:
        sums = 1 if plan.expert and shape.experts else 2
        total += layers * sums * (latency + batch * tensor_bytes(shape, plan.tensor) / 2 / rate)
    if plan.expert and plan.expert_ranks > 1:
        ranks = plan.expert_ranks
        within = ranks <= device.in_machine
        far, wait = (
            (device.link, device.link_latency)
            if within
            else (device.network, device.network_latency)
        )
        own = batch / plan.tensor  # each rank looks after its share of the rows
        total += layers * (3 * wait + own * expert_bytes(shape, ranks) / (far * device.reached))
        if plan.tensor > 1:  # and all ranks get all rows back
            total += layers * (latency + 4 * own * shape.hidden * (ranks - 1) / rate)
    if plan.context > 1:
        own = batch / plan.context
        total += layers * (2 * latency + own * context_bytes(shape, plan.context, context) / rate)
    if plan.pipeline > 1:
        total += device.network_latency + batch * pipeline_bytes(shape) / (
            device.network * device.reached
        )
    return total


def token_latency(shape: Shape, plan: Plan, context: int, device: Device = H100) -> float:
    """Seconds a token of a stream that has the engine to itself."""
    return plan.pipeline * step_time(shape, plan, 1, context, device)


@dataclass(frozen=True)
class Choice:
    """A plan, and what it comes to on paper."""

    plan: Plan
    weights: float  # bytes a rank
    kv_tokens: int  # of one engine
    latency: float  # seconds a token, one stream
    batch: int  # sequences of one engine in the row of the most tokens
    step: float  # seconds between two tokens of a sequence there
    tokens: float  # a second, of all devices


def plans(shape: Shape, devices: int, device: Device = H100) -> Iterator[Plan]:
    """What fits on so many devices: tensor ranks in one machine, whole engines on all of them."""
    powers = [1 << bit for bit in range(devices.bit_length()) if 1 << bit <= devices]
    for tensor, pipeline in itertools.product(powers, powers):
        if tensor * pipeline > devices or tensor > device.in_machine or pipeline > 16:
            continue
        plan = Plan(tensor, pipeline, data=devices // (tensor * pipeline))
        spread = (plan, replace(plan, expert=True)) if shape.experts and devices > 1 else (plan,)
        for each in spread:
            if each.expert and each.tensor == 1 and (pipeline > 1 or each.data == 1):
                continue  # engines in lockstep have one rank each
            if each.expert and shape.experts % 4:
                continue
            if kv_tokens(shape, each, device) >= 8192:
                yield each


def choice(
    shape: Shape, plan: Plan, context: int, most_step: float, device: Device = H100
) -> Choice:
    """The largest batch that memory holds and whose sequences get a token every `most_step`
    seconds.
    """
    tokens = kv_tokens(shape, plan, device)

    def seconds(batch: int) -> float:
        if batch < plan.pipeline:
            return plan.pipeline * step_time(shape, plan, 1, context, device)
        # each group passes through all stages, one behind the other
        return plan.pipeline * step_time(
            shape, plan, max(1, batch // plan.pipeline), context, device
        )

    batch, above = 1, min(MOST_BATCH, tokens // context) + 1
    while above - batch > 1:
        middle = (batch + above) // 2
        batch, above = (middle, above) if seconds(middle) <= most_step else (batch, middle)
    step = seconds(batch)
    return Choice(
        plan=plan,
        weights=weight_bytes(shape, plan),
        kv_tokens=tokens,
        latency=token_latency(shape, plan, context, device),
        batch=batch,
        step=step,
        tokens=plan.data * batch / step,
    )


def choices(
    shape: Shape, devices: int, context: int = 4096, most_step: float = 0.05, device: Device = H100
) -> list[Choice]:
    """All that fit, most tokens first."""
    found = [
        choice(shape, plan, context, most_step, device) for plan in plans(shape, devices, device)
    ]
    return sorted(found, key=lambda each: -each.tokens)
