"""Fixtures shared with the engine tests."""

from tests.engine.conftest import (
    build as build,
)
from tests.engine.conftest import (
    model as model,
)
from tests.engine.conftest import (
    tied as tied,
)
