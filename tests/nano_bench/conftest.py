"""Fixtures of the tests of commands and of the server."""

from tests.cli.conftest import (
    folders as folders,
)
from tests.cli.conftest import (
    same_threads as same_threads,
)
from tests.server.conftest import server as server
