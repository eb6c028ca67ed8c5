"""`MoeSpec`: layers of experts, read from config.json by the rules of each family."""

from dataclasses import dataclass, replace

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config, whole
from nano_inference.ops.settings import CLAMP, SLOPE, Routing

_MOST_EXPERTS = 2**20  # limit for all layers, since each expert has rows in the parameter table


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """An expert that every token passes through.

    Attributes:
        intermediate_size: Width of its MLP.
        module: Name of the expert within a layer, in the checkpoint.
        gate: Name of the projection whose sigmoid weighs the expert. None: the weight is 1.
        projections: Names of the tensors stacked to gate and up, and name of down.
    """

    intermediate_size: int
    module: str
    gate: str | None = None
    projections: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Other names of a layer's router and of tensors that hold all its experts.

    These names occur in transformers' memory and in some checkpoints.
    """

    router: tuple[str, ...] = ()
    gate_up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    down: tuple[str, ...] = ("mlp.experts.down_proj",)
    bias: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Layers whose MLP is a choice of experts. Names are those in the checkpoint.

    Attributes:
        num_experts: Number of experts in a layer, without the shared one.
        intermediate_size: Width of one expert.
        routing: Selection and weighting of a token's experts.
        layers: True for each layer with experts. The others have an MLP of the model's
            `intermediate_size`.
        module: Name of the MLP in layers with experts.
        router: Name of the router, within `module`.
        projections: Names of an expert's gate, up and down.
        bias: Name, within `module`, of the bias added to scores for the selection. None: no bias.
        bias_shape: Shape of the selection bias.
        in_memory: Other names of the router, the stacked experts and the selection bias.
        stacked: The checkpoint holds all experts of a layer in one tensor, named by `in_memory`.
        columns: Stacked tensors are transposed, and their columns alternate between gate and up.
        biases: The router and every expert have biases.
        shared: Expert that every token passes through. None: no such expert.
        beside: Layers with experts also have an MLP. The outputs of MLP and experts, each with its
            own norms, are added.
        router_norm: Name, within `module`, of the norm of the router's input. None: the router
            reads the experts' input.
        scales: Name, within `module`, of factors of the experts' weights. None: no factors.
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
        """Number of experts that each token passes through, without the shared one."""
        return self.routing.per_token


def qwen_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read experts in every `decoder_sparse_step`-th layer, except `mlp_only_layers`."""
    step, dense = (
        int(config.get("decoder_sparse_step") or 1),
        set(config.get("mlp_only_layers") or ()),
    )
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    count, per_token = _expert_counts(config)
    routing = Routing(per_token, bool(config.get("norm_topk_prob", False)))
    return _with_experts(MoeSpec(count, whole(config, "moe_intermediate_size"), routing, layers))


def qwen2_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read experts as in Qwen 3, with a gated shared expert."""
    inner = whole(config, "shared_expert_intermediate_size")
    shared = SharedExpertSpec(inner, "mlp.shared_expert", gate="mlp.shared_expert_gate")
    moe = qwen_experts(config, num_layers)
    return moe and replace(moe, shared=shared)


def _in_every_layer(config: Config, num_layers: int, normed: bool = True) -> MoeSpec | None:
    """Read experts in all layers, as wide as `intermediate_size`."""
    inner, (count, per_token) = whole(config, "intermediate_size"), _expert_counts(config)
    return _with_experts(MoeSpec(count, inner, Routing(per_token, normed), (True,) * num_layers))


def olmoe_experts(config: Config, num_layers: int) -> MoeSpec | None:
    return _in_every_layer(config, num_layers, bool(config.get("norm_topk_prob", False)))


def mixtral_experts(config: Config, num_layers: int) -> MoeSpec | None:
    moe = _in_every_layer(config, num_layers)
    return moe and replace(
        moe,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        in_memory=ExpertNames(router=("mlp.gate.weight",)),
    )


def granite_experts(config: Config, num_layers: int) -> MoeSpec | None:
    shared = int(config.get("shared_intermediate_size") or 0)
    moe, module = _in_every_layer(config, num_layers), "block_sparse_moe"
    return moe and replace(
        moe,
        module=module,
        router="router.layer.weight",
        in_memory=ExpertNames(
            (f"{module}.router.weight",),
            (f"{module}.input_linear.weight", f"{module}.experts.gate_up_proj"),
            (f"{module}.output_linear.weight", f"{module}.experts.down_proj"),
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
                f"config.json has {name}={config[name]!r}; only {only} is supported."
            )
    moe = _in_every_layer(config, num_layers)
    return moe and replace(moe, router="router.weight", stacked=True, columns=True, biases=True)


def deepseek_v2_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read experts with softmax scores, not renormalized.

    A group's score is its highest score.
    """
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


def glm4_moe_lite_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read the experts of `deepseek_v3_experts` in the listed layers, or in all but the first."""
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        raise ModelLoadError(
            f"config.json has mlp_layer_types={kinds!r:.100}; it must name 'dense' or 'sparse' for "
            f"each of {num_layers} layers."
        )
    moe = deepseek_v3_experts({**config, "first_k_dense_replace": 0}, num_layers)
    return moe and _with_experts(replace(moe, layers=tuple(kind == "sparse" for kind in kinds)))


def deepseek_v3_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read experts with sigmoid scores and a selection bias.

    A group's score is the sum of its two highest scores.
    """
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
    moe = _deepseek(config, num_layers, routing)
    name = "gate.e_score_correction_bias"
    return moe and replace(moe, bias=name, bias_shape=(moe.num_experts,))


def _scaling(config: Config) -> float:
    return float(config.get("routed_scaling_factor", 1.0))


def _deepseek(config: Config, num_layers: int, routing: Routing) -> MoeSpec | None:
    """Read experts in all layers but the first ones, with shared experts merged into one."""
    inner = whole(config, "moe_intermediate_size")
    dense = int(config.get("first_k_dense_replace") or 0)
    layers = tuple(layer >= dense for layer in range(num_layers))
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise ModelLoadError(
            f"config.json has moe_layer_freq={config['moe_layer_freq']!r}; it must be 1."
        )
    shared = int(config.get("n_shared_experts") or 0)
    return _with_experts(
        MoeSpec(
            whole(config, "n_routed_experts"),
            inner,
            routing,
            layers,
            shared=SharedExpertSpec(shared * inner, "mlp.shared_experts") if shared else None,
        )
    )


def ernie_experts(config: Config, num_layers: int) -> MoeSpec | None:
    """Read experts with softmax scores and a selection bias.

    Experts are in every `moe_layer_interval`-th layer from a first to a last one.
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
    """Read experts in every layer, in addition to its MLP."""
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
    """Return the number of experts and how many of them each token passes through.

    transformers has used two names for the former.
    """
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    return whole(config, name), whole(config, "num_experts_per_tok")


def _with_experts(moe: MoeSpec) -> MoeSpec | None:
    if moe.num_experts == 0 or not any(moe.layers):
        return None
    if not 1 <= moe.experts_per_token <= moe.num_experts:
        raise ModelLoadError(
            f"cannot choose {moe.experts_per_token} experts for each token from {moe.num_experts}."
        )
    _check_groups(moe.num_experts, moe.routing)
    if moe.num_experts * len(moe.layers) > _MOST_EXPERTS:
        raise ModelLoadError(
            f"{moe.num_experts} experts in {len(moe.layers)} layers exceed the limit of "
            f"{_MOST_EXPERTS:,} in total."
        )
    return moe


def _check_groups(num_experts: int, routing: Routing) -> None:
    groups, kept = routing.groups, routing.groups_kept
    size, rest = divmod(num_experts, groups)
    if rest or kept > groups or routing.group_best > size:
        raise ModelLoadError(
            f"cannot choose {kept} of {groups} groups of {num_experts} experts by the best "
            f"{routing.group_best} of each."
        )
    if routing.per_token > kept * size:
        raise ModelLoadError(
            f"cannot choose {routing.per_token} experts for each token from {kept} groups of "
            f"{size}."
        )
