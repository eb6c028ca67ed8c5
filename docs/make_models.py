"""`python docs/make_models.py`: write the tables of families and quantised formats between their
markers in docs/models.md, from the decoder's table and the results of
`python -m tests.models.measure`. `--check` fails if the page is not current and writes nothing. A
test checks the same.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# Differences of a family from Llama, and the test of its spec.
WORDS: tuple[tuple[str, Says], ...] = (
    ("text part of a vision model", lambda spec: spec.is_text_part),
    ("QKV biases", lambda spec: spec.qkv_bias),
    ("o bias", lambda spec: spec.o_bias),
    ("QK norm", lambda spec: spec.qk_norm == "head"),
    ("V norm", lambda spec: spec.value_norm),
    ("QK norm over all heads", lambda spec: spec.qk_norm == "full"),
    ("post-norms", lambda spec: spec.norms == "post"),
    ("pre- and post-norms", lambda spec: spec.norms == "both"),
    ("(1 + w) norms", lambda spec: spec.norm_offset != 0),
    ("weightless norms", lambda spec: spec.bare_norms),
    ("embedding norm", lambda spec: spec.embed_norm),
    ("sliding windows", lambda spec: min(spec.windows) > 0),
    ("sliding and full layers", lambda spec: max(spec.windows) > 0 == min(spec.windows)),
    ("RoPE per layer kind", _bases),
    ("NoPE layers", _any_rope(lambda rope: rope.kind == "none")),
    ("interleaved RoPE", _any_rope(lambda rope: rope.interleaved)),
    ("inverse rotation", _any_rope(lambda rope: rope.factor < 0)),
    (
        "partial RoPE",
        lambda spec: spec.latent is None and any(rope.share != 1 for rope in spec.ropes),
    ),
    ("query scaling by position", _any_rope(lambda rope: rope.query_beta != 0)),
    ("separate heads in full layers", lambda spec: len({k[:2] for k in spec.kinds}) > 1),
    ("shared K and V projection", lambda spec: any(kind.joint for kind in spec.kinds)),
    (
        "KV sharing across layers",
        lambda spec: any(kind.keys_of != layer for layer, kind in enumerate(spec.kinds)),
    ),
    ("per-layer inputs", lambda spec: spec.layer_inputs > 0),
    ("layer scales", lambda spec: spec.layer_scales),
    ("attention sinks", lambda spec: spec.attention_sinks),
    ("score soft cap", lambda spec: spec.attention_cap > 0),
    ("logit soft cap", lambda spec: spec.logits_cap > 0),
    ("gated attention", lambda spec: spec.gated_attention),
    ("MLA", lambda spec: spec.latent is not None),
    ("gated DeltaNet layers", lambda spec: isinstance(spec.state, DeltaNet)),
    (
        "short convolutions",
        lambda spec: spec.state is not None and not isinstance(spec.state, DeltaNet),
    ),
    ("GELU", lambda spec: spec.activation == "gelu_tanh"),
    ("clamped SwiGLU", lambda spec: spec.activation == "clamped_swiglu"),
    ("ungated MLP (xIELU)", lambda spec: spec.activation == "xielu"),
    ("ungated MLP (squared ReLU)", lambda spec: spec.activation == "relu2"),
    ("embedding scale", lambda spec: spec.embed_scale != 1),
    ("residual scale", lambda spec: spec.residual_scale != 1),
    ("logit divisor", lambda spec: spec.logits_divisor != 1),
    ("fused projections", lambda spec: spec.fused_qkv or spec.fused_gate_up),
    ("experts", lambda spec: spec.moe is not None),
    ("sigmoid scores", _routing(lambda routing: routing.scores == "sigmoid")),
    ("grouped", _routing(lambda routing: routing.groups > 1)),
    ("selection bias", lambda spec: spec.moe is not None and spec.moe.bias is not None),
    ("parallel MLP", lambda spec: spec.moe is not None and spec.moe.beside),
    ("shared expert", lambda spec: spec.moe is not None and spec.moe.shared is not None),
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
    """Return the differences of any of these models from Llama."""
    specs = [spec_from_config(case["config"]) for case in cases]
    kinds = {rope.kind for spec in specs for rope in spec.ropes if rope.factor > 0}
    kinds -= {"none", "default"}
    said = [word for word, says in WORDS if any(map(says, specs))]
    return ", ".join([*said, *(f"{kind} RoPE scaling" for kind in sorted(kinds))])


def families(cases: Mapping[str, Case]) -> Iterator[str]:
    """Return the table of families."""
    head = [
        *("architecture", "differences from Llama", "largest difference", "backends"),
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
        yield _row(
            f"`{name}`",
            words(own),
            _number(max(differences)),
            _backends(own),
            *(_exact(own, kind) for kind in EXACT),
        )


def formats(measured: Mapping[str, Case]) -> Iterator[str]:
    """The table of quantised formats: one row a method."""
    yield from _head(["`quant_method`", "checkpoints", "largest difference", "same bits"])
    for method in sorted({case["method"] for case in measured.values()}):
        cases = {name: case for name, case in measured.items() if case["method"] == method}
        equal, of = (sum(case[key] for case in cases.values()) for key in ("equal", "of"))
        yield _row(
            f"`{method}`",
            ", ".join(sorted(cases)),
            _number(max(case["difference"] for case in cases.values())),
            f"{equal} of {of}",
        )


def _number(difference: float) -> str:
    return f"{difference:.1e}".replace("e-0", "e-") if difference else "0"


def _head(names: list[str]) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _backends(cases: Sequence[Case]) -> str:
    """Return the backends that run a class, or "all"."""
    names = [shown for key, shown in BACKENDS.items() if _has(cases, key) == "yes"]
    return "all" if len(names) == len(BACKENDS) else ", ".join(names)


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
