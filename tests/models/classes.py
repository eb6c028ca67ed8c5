"""Try every text-generating class of the installed transformers: `python -m tests.models.classes`.

A class either loads and agrees with transformers at every position, or is rejected by one sentence
that names it. Anything else is a problem.

A class whose default config.json is accepted must have a case in `tests/models/families.py`. Its
model is tried as the case defines it, and again with each switch of its config inverted, because
an ignored switch means wrong numbers.
"""

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from nano_inference.errors import ModelLoadError, NanoInferenceError
from nano_inference.models.spec.read import spec_from_config
from tests.models.families import CASES, STATE_CASES, Case
from tests.models.strong import TOLERANCE, class_named, disagreement, strong_model

EVERY_CASE = {**CASES, **STATE_CASES}
LONGEST = 320  # characters of a rejection message
SWITCH_LENGTHS = (1, 5, 70)  # prompt lengths for switches
# Switches without an effect on a prompt's numbers.
OF_OTHERS = {
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("return_dict", "use_cache", "use_mambapy", "use_kernel", "is_decoder"),
}


@dataclass(frozen=True)
class Found:
    """Result for one class.

    Attributes:
        name: Name of the class.
        model: Model tried: the defaults, a case, or a case with a switch inverted.
        difference: Largest difference of a logprob. None: not computed.
        refused: Rejection message.
        problem: Reason why the result is neither agreement nor a proper rejection.
    """

    name: str
    model: str
    difference: float | None = None
    refused: str | None = None
    problem: str | None = None

    def __str__(self) -> str:
        text = f"PROBLEM: {self.problem}" if self.problem else self.refused
        if text is None:
            text = "accepted" if self.difference is None else f"agrees: {self.difference:.1e}"
        return f"{self.name} ({self.model}): {text}"


def class_names() -> list[str]:
    """Return the classes that generate text from text, or from text and pictures, except old
    encoder-decoders.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    return sorted({name for mapping in mappings for name in mapping.values()})


def default_configs(class_name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each config.json that transformers writes for a class by default. Several model types
    may share a class.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    config_type: Any = getattr(transformers, class_name).config_class
    kinds = [kind for kind, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]
    for config_class in dict.fromkeys(
        [config_type]
        + [
            transformers.CONFIG_MAPPING[kind]
            for kind in kinds
            if auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] == class_name
            and kind not in (config_type.model_type, config_type.model_type.removesuffix("_text"))
        ]
    ):
        fields = json.loads(config_class().to_json_string(use_diff=False))
        yield str(config_class.model_type), fields | {"architectures": [class_name]}


def try_defaults(class_name: str) -> list[Found]:
    """Try the config.json of a class's defaults: it must be accepted or properly rejected."""
    try:
        configs = list(default_configs(class_name))
    except Exception as problem:  # the class has no defaults
        configs = [(type(problem).__name__, {"architectures": [class_name]})]
    return [_try_config(class_name, kind, config) for kind, config in configs]


def _try_config(class_name: str, kind: str, config: dict[str, Any]) -> Found:
    try:
        spec_from_config(config)
    except ModelLoadError as error:
        # no published model has this default
        names = ("config.json", "partial_rotary_factor") if cases_of(class_name) else ()
        return judged(class_name, kind, str(error), class_name, *names)
    except Exception as problem:
        return Found(class_name, kind, problem=f"{type(problem).__name__}: {problem}")
    if not cases_of(class_name):
        return Found(class_name, kind, problem="it is accepted, and no case shows that it agrees")
    return Found(class_name, kind)


def judged(class_name: str, model: str, message: str, *names: str) -> Found:
    """Return the rejection. It is a problem unless it is one short sentence with one of these
    names.
    """
    wrong = None
    if not any(name in message for name in names):
        wrong = f"names none of {', '.join(names)}"
    elif not message.endswith((".", ").")) or "\n" in message:
        wrong = "is not one sentence"
    elif len(message) > LONGEST:
        wrong = f"has {len(message)} characters"
    if wrong:
        return Found(class_name, model, problem=f"the refusal {wrong}: {message}")
    return Found(class_name, model, refused=message)


def cases_of(class_name: str) -> dict[str, Case]:
    return {name: case for name, case in EVERY_CASE.items() if case.class_name == class_name}


def try_case(case_name: str, folder: Path) -> Found:
    """Compare a strong model of the case with transformers."""
    case = EVERY_CASE[case_name]
    try:
        oracle = strong_model(folder, case.class_name, **case.config)
        difference = disagreement(folder, oracle, backend=case.backend)
    except Exception as problem:
        return Found(case.class_name, case_name, problem=f"{type(problem).__name__}: {problem}")
    return _compared(case.class_name, case_name, difference)


def switches(case: Case) -> list[str]:
    """Return the boolean settings of the model's config that its case does not set."""
    with tempfile.TemporaryDirectory() as folder:
        strong_model(Path(folder), case.class_name, **case.config)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    defaults: dict[str, Any] = {}
    config_class: Any = class_named(case.class_name).config_class
    if "text_config" not in config:
        defaults = json.loads(config_class().to_json_string(use_diff=False))
    fields = defaults | config
    return sorted(
        name
        for name, value in fields.items()
        if isinstance(value, bool) and name not in OF_OTHERS and name not in case.config
    )


def try_switch(case_name: str, switch: str, folder: Path) -> Found:
    """Invert one switch: the model must agree, or the rejection must name the switch."""
    case = EVERY_CASE[case_name]
    config = dict(case.config)
    config_class: Any = class_named(case.class_name).config_class
    turned = not getattr(config_class(), switch)
    model = f"{case_name}, {switch}={turned}"
    try:
        oracle = strong_model(folder, case.class_name, **{**config, switch: turned})
    except Exception as problem:  # transformers has no such model either
        return Found(case.class_name, model, refused=f"by transformers: {type(problem).__name__}.")
    try:
        difference = disagreement(folder, oracle, backend=case.backend, lengths=SWITCH_LENGTHS)
    except NanoInferenceError as error:
        return judged(case.class_name, model, str(error), switch, case.class_name)
    except Exception as problem:
        return Found(case.class_name, model, problem=f"{type(problem).__name__}: {problem}")
    return _compared(case.class_name, model, difference)


def _compared(class_name: str, model: str, difference: float) -> Found:
    wrong = None if difference < TOLERANCE else f"a logprob differs by {difference:.1e}"
    return Found(class_name, model, difference, problem=wrong)


def try_all(only: Collection[str] = ()) -> Iterator[Found]:
    """Try every class, case and switch, or only those of some classes."""
    for name in only or class_names():
        yield from try_defaults(name)
    for case_name, case in EVERY_CASE.items():
        if only and case.class_name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield try_case(case_name, Path(folder))
        for switch in switches(case):
            with tempfile.TemporaryDirectory() as folder:
                yield try_switch(case_name, switch, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=None, help="where to write what was found")
    parser.add_argument("--only", nargs="*", default=(), help="classes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    outcomes: list[Found] = []
    with redirect_stderr(StringIO()):
        for outcome in try_all(arguments.only):
            print(outcome, flush=True)
            outcomes.append(outcome)
    if arguments.log is not None:
        arguments.log.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    problems = [each for each in outcomes if each.problem]
    refused = sum(each.refused is not None for each in outcomes)
    agreed = sum(each.difference is not None and not each.problem for each in outcomes)
    print(f"{agreed} agree, {refused} are refused, {len(problems)} problems")
    if problems:
        raise SystemExit("\n".join(map(str, problems)))


if __name__ == "__main__":
    main()
