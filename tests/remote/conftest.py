"""Fixtures shared with the server tests."""

from tests.server.conftest import (
    client as client,
)
from tests.server.conftest import (
    model as model,
)
from tests.server.conftest import (
    run as run,
)
from tests.server.conftest import (
    served as served,
)
from tests.server.conftest import (
    server as server,
)
from tests.server.conftest import (
    slow_steps as slow_steps,
)
