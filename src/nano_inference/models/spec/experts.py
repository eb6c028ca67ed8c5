"""`MoeSpec`: what config.json says of layers of experts, and what each family means by it."""

from dataclasses import dataclass, replace

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, whole
from nano_inference.ops.settings import CLAMP, SLOPE, Routing

_MOST_EXPERTS = 2**20  # of all layers together; each has its rows in the table of parameters


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """The expert that every token goes through.

    Attributes:
        intermediate_size: of it.
        module: the checkpoint's name of it in a layer.
        gate: its name of what weighs the expert, whose sigmoid is taken; None: the weight is 1.
        projections: its names of what is stacked to gate and up, and of down.
    """

    intermediate_size: int
    module: str
    gate: str | None = None
    projections: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Other names of a layer's router and of tensors that hold all of its experts: what
    transformers has in memory, and what some checkpoints hold.
    """

    router: tuple[str, ...] = ()
    gate_up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    down: tuple[str, ...] = ("mlp.experts.down_proj",)
    bias: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The layers whose MLP is a choice of experts.

    Attributes:
        num_experts: of a layer, without the shared one.
        intermediate_size: of one expert.
        routing: how a token's experts are chosen and weighed.
        layers: one entry a layer: whether it has experts, or an MLP of the model's own intermediate
            size.
        module: the checkpoint's name of such a layer's MLP.
        router: its name, in `module`, of the router.
        projections: its names of an expert's gate, up and down.
        bias: its name, in `module`, of what is added to scores where experts are chosen; None:
            there is none.
        bias_shape: of that tensor.
        in_memory: other names of the same.
        stacked: the checkpoint holds all experts of a layer in one tensor: names of `in_memory`.
        columns: such a tensor holds the experts' rows as columns, those of gate and up in turns.
        biases: the router and every expert have them.
        shared: the expert that every token goes through; None: there is none.
        beside: such layers have an MLP too, and what both give of the residual stream, each
            through norms of its own, is added.
        router_norm: the checkpoint's name, in `module`, of the norm of what the router reads; None:
            it reads what the experts do.
        scales: its name, in `module`, of what multiplies the experts' weights; None: nothing does.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    layers: tuple[bool, ...]
    module: str = "mlp"
    router: str = "gate.weight"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: str | None = None
    bias_shape: tuple[int, ...] = ()
    in_memory: ExpertNames = ExpertNames()
    stacked: bool = False
    columns: bool = False
    biases: bool = False
    shared: SharedExpertSpec | None = None
    beside: bool = False
    router_norm: str | None = None
    scales: str | None = None

    @property
    def experts_per_token(self) -> int:
        """How many of a layer's experts each token goes through, without the shared one."""
        return self.routing.per_token


def qwen_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Every `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""
    step, dense = (
        int(config.get("decoder_sparse_step") or 1),
        set(config.get("mlp_only_layers") or ()),
    )
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    count, per_token = _expert_counts(config)
    routing = Routing(per_token, bool(config.get("norm_topk_prob", False)))
    return _with_experts(MoeSpec(count, whole(config, "moe_intermediate_size"), routing, layers))


def qwen2_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """As Qwen 3, with a shared expert, which has a gate."""
    inner = whole(config, "shared_expert_intermediate_size")
    shared = SharedExpertSpec(inner, "mlp.shared_expert", gate="mlp.shared_expert_gate")
    found = qwen_experts(config, num_layers)
    return found and replace(found, shared=shared)


def _in_every_layer(config: Config, num_layers: int, normed: bool = True) -> MoeSpec | None:
    """In all layers, of the width that other models' MLPs have."""
    inner, (count, per_token) = whole(config, "intermediate_size"), _expert_counts(config)
    return _with_experts(MoeSpec(count, inner, Routing(per_token, normed), (True,) * num_layers))


def olmoe_experts(config: Config, num_layers: int) -> MoeSpec | None:
    return _in_every_layer(config, num_layers, bool(config.get("norm_topk_prob", False)))


def mixtral_experts(config: Config, num_layers: int) -> MoeSpec | None:
    found = _in_every_layer(config, num_layers)
    return found and replace(
        found,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        in_memory=ExpertNames(router=("mlp.gate.weight",)),
    )


def granite_experts(config: Config, num_layers: int) -> MoeSpec | None:
    shared = int(config.get("shared_intermediate_size") or 0)
    found, moe = _in_every_layer(config, num_layers), "block_sparse_moe"
    return found and replace(
        found,
        module=moe,
        router="router.layer.weight",
        in_memory=ExpertNames(
            (f"{moe}.router.weight",),
            (f"{moe}.input_linear.weight", f"{moe}.experts.gate_up_proj"),
            (f"{moe}.output_linear.weight", f"{moe}.experts.down_proj"),
        ),
        stacked=True,
        shared=SharedExpertSpec(
            shared, "shared_mlp", projections=(("input_linear",), "output_linear")
        )
        if shared
        else None,
    )


def gpt_oss_experts(config: Config, num_layers: int) -> MoeSpec | None:
    for name, only in (("swiglu_limit", CLAMP), ("swiglu_alpha", SLOPE)):
        if float(config.get(name, only)) != only:
            raise ModelLoadError(
                f"config.json has {name}={config[name]!r}; this decoder knows {only} alone."
            )
    found = _in_every_layer(config, num_layers)
    return found and replace(found, router="router.weight", stacked=True, columns=True, biases=True)


def deepseek_v2_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Scores of a softmax, not divided by their sum; groups, if any, are as good as their best."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelLoadError(
            f"config.json has topk_method={method!r}; it must be 'greedy' or "
            "'group_limited_greedy'."
        )
    limited = method == "group_limited_greedy"
    routing = Routing(
        whole(config, "num_experts_per_tok"),
        False,
        scale=_scaling(config),
        groups=whole(config, "n_group") if limited else 1,
        groups_kept=whole(config, "topk_group") if limited else 1,
    )
    return _deepseek(config, num_layers, routing)


def deepseek_v3_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Sigmoids, chosen with a bias; a group is as good as its best two."""
    routing = Routing(
        whole(config, "num_experts_per_tok"),
        bool(config.get("norm_topk_prob", True)),
        scores="sigmoid",
        scale=_scaling(config),
        floor=1e-20,
        groups=int(config.get("n_group") or 1),
        groups_kept=int(config.get("topk_group") or 1),
        group_best=2,
    )
    found = _deepseek(config, num_layers, routing)
    name = "gate.e_score_correction_bias"
    return found and replace(found, bias=name, bias_shape=(found.num_experts,))


def _scaling(config: Config) -> float:
    return float(config.get("routed_scaling_factor", 1.0))


def _deepseek(config: Config, num_layers: int, routing: Routing) -> MoeSpec | None:
    """Every layer but for the first ones, with shared experts, which are one."""
    dense, inner = (
        int(config.get("first_k_dense_replace") or 0),
        whole(config, "moe_intermediate_size"),
    )
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise ModelLoadError(f"config.json has moe_layer_freq={config['moe_layer_freq']!r}, not 1.")
    shared = int(config.get("n_shared_experts") or 0)
    return _with_experts(
        MoeSpec(
            whole(config, "n_routed_experts"),
            inner,
            routing,
            tuple(layer >= dense for layer in range(num_layers)),
            shared=SharedExpertSpec(shared * inner, "mlp.shared_experts") if shared else None,
        )
    )


def ernie_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Every `moe_layer_interval`-th layer from one to another; scores of a softmax, chosen with a
    bias.
    """
    count, inner = whole(config, "moe_num_experts"), whole(config, "moe_intermediate_size")
    shared = inner * int(config.get("moe_num_shared_experts") or 0)
    every = int(config.get("moe_layer_interval") or 1)
    first, last = (
        int(config.get("moe_layer_start_index", 1)),
        int(config.get("moe_layer_end_index", -1)),
    )
    floor = float(config.get("moe_norm_min", 1e-12))
    return _with_experts(
        MoeSpec(
            count,
            inner,
            Routing(whole(config, "moe_k"), True, floor=floor),
            tuple(
                (layer + 1) % every == 0 and first <= layer <= last % num_layers
                for layer in range(num_layers)
            ),
            bias="moe_statics.e_score_correction_bias",
            bias_shape=(1, count),
            in_memory=ExpertNames(bias=("mlp.gate.moe_statics.e_score_correction_bias",)),
            shared=SharedExpertSpec(shared, "mlp.shared_experts") if shared else None,
        )
    )


def gemma4_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """In every layer, beside its MLP."""
    if not config.get("enable_moe_block"):
        return None
    routing = Routing(
        whole(config, "top_k_experts"), True, logit_scale=whole(config, "hidden_size") ** -0.5
    )
    return _with_experts(
        MoeSpec(
            whole(config, "num_experts"),
            whole(config, "moe_intermediate_size"),
            routing,
            (True,) * num_layers,
            module="router",
            router="proj.weight",
            in_memory=ExpertNames(gate_up=("experts.gate_up_proj",), down=("experts.down_proj",)),
            stacked=True,
            beside=True,
            router_norm="scale",
            scales="per_expert_scale",
        )
    )


def _expert_counts(config: Config) -> tuple[int, int]:
    """How many there are, which transformers has written under two names, and how many a token goes
    through.
    """
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    return whole(config, name), whole(config, "num_experts_per_tok")


def _with_experts(found: MoeSpec) -> MoeSpec | None:
    if found.num_experts == 0 or not any(found.layers):
        return None
    if not 1 <= found.experts_per_token <= found.num_experts:
        raise ModelLoadError(
            f"{found.experts_per_token} experts a token cannot be chosen of {found.num_experts}."
        )
    _check_groups(found.num_experts, found.routing)
    if found.num_experts * len(found.layers) > _MOST_EXPERTS:
        raise ModelLoadError(
            f"{found.num_experts} experts in {len(found.layers)} layers are more than "
            f"{_MOST_EXPERTS:,} together."
        )
    return found


def _check_groups(num_experts: int, routing: Routing) -> None:
    groups, kept = routing.groups, routing.groups_kept
    size, rest = divmod(num_experts, groups)
    if rest or kept > groups or routing.group_best > size:
        raise ModelLoadError(
            f"{num_experts} experts cannot be {groups} groups, of which {kept} are chosen by the "
            f"best {routing.group_best} of each."
        )
    if routing.per_token > kept * size:
        raise ModelLoadError(
            f"{routing.per_token} experts a token cannot be chosen of {kept} groups of {size}."
        )
