"""Fixtures shared with the command and server tests."""

from tests.cli.conftest import (
    folders as folders,
)
from tests.cli.conftest import (
    same_threads as same_threads,
)
from tests.server.conftest import server as server
