"""The table of engine operations matches the signatures of the engine's functions."""

from inspect import Parameter, signature
from operator import attrgetter
from typing import Any

import pytest

from nano_inference.engine.adapters import Adapters
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.kept_prompts import KeptPrompts
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import InvalidRequest
from nano_inference.remote.block_link import BlockLink
from nano_inference.remote.core import EngineCore
from nano_inference.remote.engine_weights import EngineWeights
from nano_inference.remote.operations import OPERATIONS, Operation, operation_named

CALLED = [each for each in OPERATIONS.values() if each.function]
OWNERS: dict[str, Any] = {
    "": EngineCore,
    "engine": InferenceEngine,
    "engine.adapter_table": Adapters,
    "engine.kept_prompts": KeptPrompts,
    "engine.shared": SharedLoop,
    "weights": EngineWeights,
    "block_link": BlockLink,
}


def parameters_of(operation: Operation) -> dict[str, Parameter]:
    owner, _, name = operation.function.rpartition(".")
    return dict(list(signature(attrgetter(name)(OWNERS[owner])).parameters.items())[1:])


@pytest.mark.parametrize("operation", CALLED, ids=lambda each: each.name)
def test_operation_rows_match_their_functions_arguments(operation: Operation) -> None:
    parameters = parameters_of(operation)
    needed = {name for name, each in parameters.items() if each.default is Parameter.empty}
    assert needed <= set(operation.arguments) <= set(parameters)


def test_deadline_is_passed_to_engines_that_keep_it() -> None:
    for operation in CALLED:
        assert (operation.deadline == "engine") == ("seconds" in operation.arguments)


def test_undo_of_an_operation_is_an_operation() -> None:
    undoing = {"undone", "sleep", "wake", "join", "begin"}
    for operation in CALLED:
        assert not operation.undo or (operation.fleet in undoing and operation.undo in OPERATIONS)
        assert operation.fleet != "undone" or operation.undo


def test_caller_waits_a_little_longer_than_the_engine() -> None:
    patience, arguments = operation_named("pause").timed(5.0, {"mode": "keep"})
    assert (patience, arguments) == (15.0, {"mode": "keep", "seconds": 5.0})
    assert operation_named("pause").timed(9.0, {"seconds": 5.0})[1] == {"seconds": 5.0}
    assert operation_named("stats").timed(5.0, {}) == (5.0, {})


def test_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'shutdown' is not an engine operation; use one of"):
        operation_named("shutdown")
