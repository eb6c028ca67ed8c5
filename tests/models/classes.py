"""`python -m tests.models.classes`: every text-generating class of the installed transformers is
tried. It loads and agrees with transformers at every position, or is refused by one sentence that
names it; anything else is a problem.

A class whose default config.json is accepted must have a case in `tests/models/families.py`. Its
model is then tried as it stands there, and with each switch of its config turned over, because a
switch that nobody reads is a wrong number.
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
from tests.models.strong import TOLERANCE, disagreement, strong_model

EVERY_CASE = {**CASES, **STATE_CASES}
LONGEST = 320  # characters of a refusal
SWITCH_LENGTHS = (1, 5, 70)  # of prompts, where a switch is tried
# Switches that say nothing of what is computed for a prompt.
OF_OTHERS = {
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("return_dict", "use_cache", "use_mambapy", "use_kernel", "is_decoder"),
}


@dataclass(frozen=True)
class Found:
    """What became of one class.

    Attributes:
        name: of the class.
        model: which: its defaults', a case, or a case with a switch turned over.
        difference: of a logprob, the largest; None: it was not computed.
        refused: the sentence.
        problem: why this is neither agreement nor a refusal.
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
    """Classes that make text of text, or of text beside pictures, without the old encoders with
    decoders.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    return sorted({name for mapping in mappings for name in mapping.values()})


def default_configs(class_name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each config.json that transformers writes of a class where nothing is said: several model
    types may share the class.
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
    """Whether the config.json of a class's defaults is accepted, or refused well."""
    try:
        configs = list(default_configs(class_name))
    except Exception as problem:  # a class that has no defaults
        configs = [(type(problem).__name__, {"architectures": [class_name]})]
    return [_try_config(class_name, kind, config) for kind, config in configs]


def _try_config(class_name: str, kind: str, config: dict[str, Any]) -> Found:
    try:
        spec_from_config(config)
    except ModelLoadError as error:
        # a default that no model has
        names = ("config.json", "partial_rotary_factor") if cases_of(class_name) else ()
        return judged(class_name, kind, str(error), class_name, *names)
    except Exception as problem:
        return Found(class_name, kind, problem=f"{type(problem).__name__}: {problem}")
    if not cases_of(class_name):
        return Found(class_name, kind, problem="it is accepted, and no case shows that it agrees")
    return Found(class_name, kind)


def judged(class_name: str, model: str, message: str, *names: str) -> Found:
    """A refusal; a problem unless it is one short sentence with one of these names in it."""
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
    """A strong model, compared."""
    case = EVERY_CASE[case_name]
    try:
        oracle = strong_model(folder, case.class_name, **case.config)
        difference = disagreement(folder, oracle, backend=case.backend)
    except Exception as problem:
        return Found(case.class_name, case_name, problem=f"{type(problem).__name__}: {problem}")
    return _compared(case.class_name, case_name, difference)


def switches(case: Case) -> list[str]:
    """What the model's config says of yes or no, and its case does not."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        strong_model(Path(folder), case.class_name, **case.config)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    defaults: dict[str, Any] = {}
    config_class: Any = getattr(transformers, case.class_name).config_class
    if "text_config" not in config:
        defaults = json.loads(config_class().to_json_string(use_diff=False))
    fields = defaults | config
    return sorted(
        name
        for name, value in fields.items()
        if isinstance(value, bool) and name not in OF_OTHERS and name not in case.config
    )


def try_switch(case_name: str, switch: str, folder: Path) -> Found:
    """The same model with one switch turned over: it agrees, or the refusal names the switch."""
    case = EVERY_CASE[case_name]
    config = dict(case.config)
    import transformers

    config_class: Any = getattr(transformers, case.class_name).config_class
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
    """Every class, every case, every switch; or of some classes alone."""
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
