"""The table of `server/errors.py`: the HTTP status of each error."""

import pytest

from nano_inference import errors
from nano_inference.errors import AdapterNotFound, EngineDead, NanoInferenceError
from nano_inference.fleet import errors as fleet_errors
from nano_inference.fleet.errors import Draining, EnginesDied, FleetError, NoReplica
from nano_inference.remote import errors as remote_errors
from nano_inference.remote.errors import EngineReplaced, EngineRestarting, ReaderTooSlow
from nano_inference.server.errors import ANSWERS, ApiError, api_error_of, is_bug

# These never reach a client: they end the start, or other errors replace them.
INSIDE = {
    FleetError,
    NoReplica,
    errors.ConfigError,
    errors.LacksMemory,
    errors.ModelLoadError,
    errors.RankLost,
    NanoInferenceError,
}


@pytest.mark.parametrize("module", [errors, fleet_errors, remote_errors])
def test_answers_have_a_row_for_each_error_that_reaches_clients(module: object) -> None:
    kinds = {
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, NanoInferenceError)
    }
    assert {kind for kind in kinds if not any(base in ANSWERS for base in kind.__mro__)} <= INSIDE


@pytest.mark.parametrize(
    ("problem", "status", "code", "headers"),
    [
        (AdapterNotFound("there is no adapter 'a'."), 404, "model_not_found", {}),
        (EngineRestarting(), 503, "engine_restarting", {"retry-after": "5"}),
        (
            EngineReplaced("a path", "died"),
            503,
            "engine_restarting",
            {"retry-after": "5", "retry-after-ms": "5000"},
        ),
        (EngineDead("a path", "died"), 503, "engine_dead", {"x-should-retry": "false"}),
        (Draining(), 503, "draining", {"retry-after": "1", "retry-after-ms": "1000"}),
        (
            errors.LacksMemoryToWake("others took memory."),
            503,
            "no_memory_to_wake",
            {"retry-after": "5", "retry-after-ms": "5000"},
        ),
        (EnginesDied(3), 500, "engines_died", {"x-should-retry": "false"}),
        (ReaderTooSlow(41), 408, None, {}),
        (KeyError("a bug"), 500, None, {"x-should-retry": "false"}),
    ],
)
def test_api_error_of_takes_status_and_headers_from_the_table(
    problem: Exception, status: int, code: str | None, headers: dict[str, str]
) -> None:
    error = api_error_of(problem)
    assert (error.status, error.code, dict(error.headers)) == (status, code, headers)


def test_is_bug_knows_errors_without_a_row() -> None:
    assert is_bug(KeyError("a bug"))
    assert not is_bug(EnginesDied(3))
    assert not is_bug(ApiError(500, "said on purpose."))
