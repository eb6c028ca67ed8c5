"""The CPU backend's layers of experts: kernels/moe.cpp on tensors."""

import ctypes
from typing import Any

from nano_inference.arrays import Dtype, Tensor, has_dtype, namespace
from nano_inference.ops.cpu.library import struct
from nano_inference.ops.cpu.operations import GATES
from nano_inference.ops.cpu.weights import LANES
from nano_inference.ops.moe import Exchange, Experts, MoeSteps, Note, mixture

ROUTING, EXPERTS, LAYER = struct("Routing"), struct("ExpertWeights"), struct("MoeLayer")
PROBLEMS = {1: "a row does not exist.", 2: "an expert does not exist."}


class CpuMoe:
    """Implementation of `Ops.moe` for a fixed number of threads."""

    def __init__(self, kernels: ctypes.CDLL, num_threads: int) -> None:
        self._c = kernels
        self.num_threads = num_threads
        self.steps = MoeSteps(self.route, self.products, self.combine)

    def __call__(
        self,
        x: Tensor,
        experts: Experts,
        exchange: Exchange | None = None,
        note: Note | None = None,
        routed: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer of experts as `Ops.moe` defines it."""
        routed = None if routed is None else routed.contiguous()
        if exchange is not None:
            return mixture(self.steps, x.contiguous(), experts, exchange, len(x), note, routed)
        out = namespace(x).empty((len(x), x.shape[1]))
        self.layer(experts)(x.contiguous(), out, note, routed)
        return out

    def layer(self, experts: Experts) -> "CpuMoeLayer":
        """Return a layer of experts, all of them in this process, that one call computes."""
        return CpuMoeLayer(self._c, experts, self.num_threads)

    def route(self, x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        router, routing = experts.router, experts.routing
        _require_rows(x, router.columns, router.dtype)
        xp = namespace(x)
        ids = xp.empty((len(x), routing.per_token), dtype=xp.int64)
        weights = xp.empty((len(x), experts.num_weights))
        spec = _routing(experts)
        self._c.nano_moe_route(
            x.data_ptr(),
            len(x),
            router.columns,
            router.data_ptr(),
            router.rows,
            has_dtype(x, "bfloat16"),
            ctypes.addressof(spec),
            ids.data_ptr(),
            weights.data_ptr(),
            self.num_threads,
        )
        return ids, weights

    def products(self, x: Tensor, rows: Tensor, held: Tensor, experts: Experts) -> Tensor:
        """Implement `MoeSteps.products` in float32."""
        weights = _weights(experts)
        _require_rows(x, weights.hidden, experts.gate_up.dtype)
        if any(
            not has_dtype(each, "int64") or not each.is_contiguous() or each.shape != rows.shape
            for each in (rows, held)
        ):
            raise ValueError("rows and experts must be contiguous int64 tensors of the same size.")
        out = namespace(x).empty((len(rows), weights.hidden))
        problem = self._c.nano_moe_products(
            x.data_ptr(),
            len(x),
            rows.data_ptr(),
            held.data_ptr(),
            len(rows),
            experts.num_held,
            ctypes.addressof(weights),
            has_dtype(x, "bfloat16"),
            GATES[experts.activation],
            out.data_ptr(),
            self.num_threads,
        )
        if problem:
            raise ValueError(f"invalid rows or experts: {PROBLEMS[problem]}")
        return out

    def combine(self, products: Tensor, weights: Tensor) -> Tensor:
        """Implement `MoeSteps.combine` in float32."""
        num_rows, per_token, hidden = products.shape
        products, weights = products.float().contiguous(), weights.float().contiguous()
        out = namespace(products).empty((num_rows, hidden))
        self._c.nano_moe_combine(
            products.data_ptr(),
            weights.data_ptr(),
            num_rows,
            per_token,
            hidden,
            out.data_ptr(),
            self.num_threads,
        )
        return out


class CpuMoeLayer:
    """Routing, products and sums of a layer of experts in one call.

    The addresses of its weights are those at construction.
    """

    def __init__(self, kernels: ctypes.CDLL, experts: Experts, num_threads: int) -> None:
        router, shared = experts.router, experts.shared
        lone = EXPERTS()  # not read without a shared expert
        if shared is not None:
            lone = _weights(experts._replace(gate_up=shared.gate_up, down=shared.down, biases=None))
        if experts.num_held != experts.num_experts or router.dtype != experts.gate_up.dtype:
            raise ValueError(
                f"a router of {experts.num_experts} experts in {router.dtype} does not fit "
                f"{experts.num_held} experts in {experts.gate_up.dtype}."
            )
        self._router = router.columns, router.dtype
        self._per_token = experts.routing.per_token
        self._experts = experts  # keeps the memory behind the addresses
        self._layer = LAYER(
            routing=_routing(experts),
            experts=_weights(experts),
            shared_expert=lone,
            router=router.data_ptr(),
            router_rows=router.rows,
            scales=None if experts.scales is None else experts.scales.data_ptr(),
            is_bf16=has_dtype(experts.gate_up, "bfloat16"),
            activation=GATES[experts.activation],
        )
        self._run, self._num_threads = kernels.nano_moe_layer, num_threads

    def __call__(
        self, x: Tensor, out: Tensor, note: Note | None = None, routed: Tensor | None = None
    ) -> None:
        """Compute x [N, H] -> out, contiguous float32 [N, H]. Other arguments as in `Ops.moe`."""
        read = x if routed is None else routed
        _require_rows(x, *self._router)
        if routed is not None:
            _require_rows(routed, *self._router)
        ids = None
        if note is not None:
            xp = namespace(x)
            ids = xp.empty((len(x), self._per_token), dtype=xp.int64)
        self._run(
            ctypes.addressof(self._layer),
            x.data_ptr(),
            read.data_ptr(),
            len(x),
            None if ids is None else ids.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        if note is not None and ids is not None:
            note(ids)


def _weights(experts: Experts) -> Any:
    """Return the structure of the weights that kernels/moe.cpp reads. It is valid as long as the
    experts live. Raise `ValueError` for weights that do not fit each other.
    """
    gate_up, down = experts.gate_up, experts.down
    require_sizes(gate_up.columns, down.columns)
    if gate_up.rows != experts.num_held * 2 * down.columns or down.dtype != gate_up.dtype:
        raise ValueError(
            f"weights {tuple(gate_up.shape)} {gate_up.dtype} and {tuple(down.shape)} "
            f"{down.dtype} do not belong to the same experts."
        )
    _, gate_up_bias, down_bias = experts.biases or (None, None, None)
    _require_bias(gate_up_bias, gate_up)
    _require_bias(down_bias, down)
    return EXPERTS(
        gate_up=gate_up.data_ptr(),
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.data_ptr(),
        down=down.data_ptr(),
        down_bias=None if down_bias is None else down_bias.data_ptr(),
        gate_up_codes=gate_up.codes,
        down_codes=down.codes,
        hidden=gate_up.columns,
        inner=down.columns,
    )


def _routing(experts: Experts) -> Any:
    """Return the structure that kernels/moe.cpp reads. It is valid as long as the experts live.
    Raise `ValueError` for impossible sizes.
    """
    routing, shared, bias, count = (
        experts.routing,
        experts.shared,
        experts.bias,
        experts.num_experts,
    )
    size, rest = divmod(count, routing.groups)
    if rest or not 1 <= routing.per_token <= size * routing.groups_kept <= count:
        raise ValueError(f"cannot select {routing.per_token} experts per row from {count}.")
    if not 1 <= routing.group_best <= size:
        raise ValueError(f"group_best must be 1 to {size}; got {routing.group_best}.")
    logits = None if experts.biases is None else experts.biases.router
    for values in (bias, logits):
        if values is not None and (values.shape != (count,) or not has_dtype(values, "float32")):
            raise ValueError(
                f"the bias must be float32 ({count},); got {values.dtype} {tuple(values.shape)}."
            )
    return ROUTING(
        num_experts=count,
        per_token=routing.per_token,
        sigmoid=routing.scores == "sigmoid",
        renormalized=routing.renormalized,
        groups=routing.groups,
        groups_kept=routing.groups_kept,
        group_best=routing.group_best,
        shared=0 if shared is None else 1 + shared.gated,
        bias=None if bias is None else bias.data_ptr(),
        logits=None if logits is None else logits.data_ptr(),
        scale=routing.scale,
        floor=routing.floor,
        logit_scale=routing.logit_scale,
    )


def require_sizes(hidden: int, inner: int) -> None:
    """Raise `ValueError` unless each expert's weights begin at a panel."""
    if hidden % LANES or inner % LANES:
        raise ValueError(
            f"experts of {hidden} x {inner} cannot be packed; both must be multiples of {LANES}."
        )


def _require_bias(bias: Tensor | None, weight: Any) -> None:
    if bias is not None and (bias.shape != (weight.rows,) or not has_dtype(bias, weight.dtype)):
        raise ValueError(
            f"biases must be {weight.dtype} ({weight.rows},); got {bias.dtype} {tuple(bias.shape)}."
        )


def _require_rows(x: Tensor, columns: int, dtype: Dtype) -> None:
    if x.dim() != 2 or x.shape[1] != columns or not has_dtype(x, dtype) or not x.is_contiguous():
        raise ValueError(
            f"expected contiguous rows of {columns} {dtype}; got {x.dtype} {tuple(x.shape)}."
        )
