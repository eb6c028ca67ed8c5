"""The HTTP server. It needs the extra `server`.

Imports only from: checkpoints, core, data, fleet, models, parallel, remote, structured, text.
Begin with: app.py, then server.py.
Tests: tests/server.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.server.config import ServerConfig as ServerConfig
    from nano_inference.server.config import is_loopback as is_loopback
    from nano_inference.server.door import Door as Door
    from nano_inference.server.main import running_app as running_app
    from nano_inference.server.main import running_server as running_server
    from nano_inference.server.main import serve as serve

_MODULES = {
    "Door": "door",
    "ServerConfig": "config",
    "is_loopback": "config",
    "running_app": "main",
    "running_server": "main",
    "serve": "main",
}
__getattr__ = lazy(__name__, _MODULES)
