"""`python docs/make_models.py`: write the tables of families and quantised formats between their
markers in docs/models.md, from the decoder's table and the results of
`python -m tests.models.measure`. `--check` fails if the page is not current and writes nothing. A
test checks the same.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nano_inference.models.spec.families import ARCHITECTURES
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.read import spec_from_config
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.models.spec.states import DeltaNet

TARGET = Path(__file__).parent / "models.md"
MEASURED = Path(__file__).parents[1] / "tests" / "models" / "measured.json"
BACKENDS = {"reference": "reference", "cpu": "CPU", "triton": "Triton"}
EXACT = {"ranks": "ranks", "policy": "`PolicyModel`"}
Case = Mapping[str, Any]
Says = Callable[[ModelSpec], bool]


def _any_rope(says: Callable[[RopeSpec], bool]) -> Says:
    return lambda spec: any(map(says, spec.ropes))


def _routing(says: Callable[[Any], bool]) -> Says:
    return lambda spec: spec.moe is not None and says(spec.moe.routing)


def _bases(spec: ModelSpec) -> bool:
    turning = {(rope.theta, rope.kind) for rope in spec.ropes if rope.kind != "none"}
    return len(turning) > 1


# Features of families in addition to Llama's, and how to find them in a spec.
WORDS: tuple[tuple[str, Says], ...] = (
    ("the text part of a model that reads pictures", lambda spec: spec.is_text_part),
    ("biases of q, k, v", lambda spec: spec.qkv_bias),
    ("bias of the output", lambda spec: spec.o_bias),
    ("norms of query and key heads", lambda spec: spec.qk_norm == "head"),
    ("norms of values", lambda spec: spec.value_norm),
    ("norms of whole queries and keys", lambda spec: spec.qk_norm == "full"),
    ("norms after the blocks", lambda spec: spec.norms == "post"),
    ("norms before and after the blocks", lambda spec: spec.norms == "both"),
    ("norms of 1 + w", lambda spec: spec.norm_offset != 0),
    ("norms without weights", lambda spec: spec.bare_norms),
    ("a norm of embeddings", lambda spec: spec.embed_norm),
    ("sliding windows", lambda spec: min(spec.windows) > 0),
    ("sliding and full layers", lambda spec: max(spec.windows) > 0 == min(spec.windows)),
    ("two rotary bases or scalings", _bases),
    ("layers that do not turn", _any_rope(lambda rope: rope.kind == "none")),
    ("rotation of neighbours", _any_rope(lambda rope: rope.interleaved)),
    ("heads turn the other way", _any_rope(lambda rope: rope.factor < 0)),
    (
        "a part of each head turns",
        lambda spec: spec.latent is None and any(rope.share != 1 for rope in spec.ropes),
    ),
    ("queries scaled beyond the original context", _any_rope(lambda rope: rope.query_beta != 0)),
    ("full layers with heads of their own", lambda spec: len({k[:2] for k in spec.kinds}) > 1),
    ("keys that make values", lambda spec: any(kind.joint for kind in spec.kinds)),
    (
        "layers that read another's keys",
        lambda spec: any(kind.keys_of != layer for layer, kind in enumerate(spec.kinds)),
    ),
    ("inputs of layers", lambda spec: spec.layer_inputs > 0),
    ("scaled layers", lambda spec: spec.layer_scales),
    ("attention sinks", lambda spec: spec.attention_sinks),
    ("a cap of attention scores", lambda spec: spec.attention_cap > 0),
    ("a cap of logits", lambda spec: spec.logits_cap > 0),
    ("gated attention", lambda spec: spec.gated_attention),
    ("attention over latents", lambda spec: spec.latent is not None),
    ("layers of a gated delta rule", lambda spec: isinstance(spec.state, DeltaNet)),
    (
        "layers of short convolutions",
        lambda spec: spec.state is not None and not isinstance(spec.state, DeltaNet),
    ),
    ("GELU", lambda spec: spec.activation == "gelu_tanh"),
    ("a bounded gate", lambda spec: spec.activation == "clamped_swiglu"),
    ("an MLP without a gate (xIELU)", lambda spec: spec.activation == "xielu"),
    ("an MLP without a gate (squared ReLU)", lambda spec: spec.activation == "relu2"),
    ("scaled embeddings", lambda spec: spec.embed_scale != 1),
    ("scaled residuals", lambda spec: spec.residual_scale != 1),
    ("divided logits", lambda spec: spec.logits_divisor != 1),
    ("fused projections", lambda spec: spec.fused_qkv or spec.fused_gate_up),
    ("experts", lambda spec: spec.moe is not None),
    ("chosen by sigmoids", _routing(lambda routing: routing.scores == "sigmoid")),
    ("in groups", _routing(lambda routing: routing.groups > 1)),
    ("chosen with a bias", lambda spec: spec.moe is not None and spec.moe.bias is not None),
    ("beside an MLP", lambda spec: spec.moe is not None and spec.moe.beside),
    ("a shared expert", lambda spec: spec.moe is not None and spec.moe.shared is not None),
)


def cases_by_class(cases: Mapping[str, Case]) -> dict[str, list[Case]]:
    """Return the cases in the decoder's order. Raises `KeyError` for a class without a case."""
    found: dict[str, list[Case]] = {name: [] for name in ARCHITECTURES}
    for case in cases.values():
        found[case["class"]].append(case)
    if missing := [name for name, each in found.items() if not each]:
        raise KeyError(f"not measured: {', '.join(missing)}: python -m tests.models.measure")
    return found


def words(cases: Iterable[Case]) -> str:
    """Return the features of these models in addition to Llama's."""
    specs = [spec_from_config(case["config"]) for case in cases]
    kinds = {rope.kind for spec in specs for rope in spec.ropes if rope.factor > 0}
    kinds -= {"none", "default"}
    said = [word for word, says in WORDS if any(map(says, specs))]
    return ", ".join([*said, *(f"rope scaling {kind}" for kind in sorted(kinds))])


def families(cases: Mapping[str, Case]) -> Iterator[str]:
    """Return the table of families."""
    head = [
        *("architecture", "beside Llama", "largest difference", "same bits"),
        *BACKENDS.values(),
        *EXACT.values(),
    ]
    yield from _head(head)
    for name, own in cases_by_class(cases).items():
        differences = [
            case[backend]["difference"]
            for case in own
            for backend in BACKENDS
            if "difference" in case[backend]
        ]
        equal, of = (sum(case["schedules"][each] for case in own) for each in ("equal", "of"))
        yield _row(
            f"`{name}`",
            words(own),
            _number(max(differences)),
            f"{equal} of {of}",
            *(_has(own, backend) for backend in BACKENDS),
            *(_exact(own, kind) for kind in EXACT),
        )


def formats(measured: Mapping[str, Case]) -> Iterator[str]:
    """Return the table of quantised formats."""
    yield from _head(["`quant_method`", "checkpoint", "largest difference", "same bits"])
    for name, each in sorted(measured.items(), key=lambda item: (item[1]["method"], item[0])):
        yield _row(
            f"`{each['method']}`",
            name,
            _number(each["difference"]),
            f"{each['equal']} of {each['of']}",
        )


def _number(difference: float) -> str:
    return f"{difference:.1e}".replace("e-0", "e-") if difference else "0"


def _head(names: list[str]) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _has(cases: Iterable[Case], kind: str) -> str:
    return "no" if any("refused" in case[kind] for case in cases) else "yes"


def _exact(cases: Iterable[Case], kind: str) -> str:
    """Describe a result: bit-identical or rejected by name. Raises `ValueError` for any other."""
    own = list(cases)
    if _has(own, kind) == "no":
        return "no"
    if any(case[kind]["equal"] != case[kind]["of"] for case in own):
        raise ValueError(f"{own[0]['class']}: {kind} has other bits")
    return "bits"


def page(text: str, measured: Mapping[str, Any]) -> str:
    """Return the page with current tables."""
    for name, lines in (
        ("families", families(measured["cases"])),
        ("formats", formats(measured["formats"])),
    ):
        begin, end = f"<!-- {name}: made by docs/make_models.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    return text


def main() -> None:
    """Write the page, or check it."""
    old = TARGET.read_text(encoding="utf-8")
    new = page(old, json.loads(MEASURED.read_text(encoding="utf-8")))
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(new, encoding="utf-8")
    elif new != old:
        raise SystemExit("docs/models.md is not current: run python docs/make_models.py")


if __name__ == "__main__":
    main()
