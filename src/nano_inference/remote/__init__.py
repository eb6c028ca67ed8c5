"""An engine in another process: messages, operations, the process and its client.

Imports only from: checkpoints, core, device, engine, kv_cache, parallel, ranks, structured, text,
weights.
Begin with: client.py (the API's side), then core.py (the engine's side).
Tests: tests/remote.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.remote.client import STOPPING as STOPPING
    from nano_inference.remote.client import EngineClient as EngineClient
    from nano_inference.remote.client import RemoteClient as RemoteClient
    from nano_inference.remote.client import RequestStream as RequestStream
    from nano_inference.remote.core import EngineCore as EngineCore
    from nano_inference.remote.engine_host import EngineHost as EngineHost
    from nano_inference.remote.engine_host import encoded as encoded
    from nano_inference.remote.errors import EngineReplaced as EngineReplaced
    from nano_inference.remote.errors import EngineRestarting as EngineRestarting
    from nano_inference.remote.in_process import InProcessClient as InProcessClient
    from nano_inference.remote.log_lines import send_to_stderr as send_to_stderr
    from nano_inference.remote.messages import FromEngine as FromEngine
    from nano_inference.remote.messages import Generate as Generate
    from nano_inference.remote.messages import Ready as Ready
    from nano_inference.remote.messages import Stop as Stop
    from nano_inference.remote.tasks import start_task as start_task
    from nano_inference.remote.time_limits import BEAT as BEAT

_MODULES = {
    "BEAT": "time_limits",
    "EngineClient": "client",
    "EngineCore": "core",
    "EngineHost": "engine_host",
    "EngineReplaced": "errors",
    "EngineRestarting": "errors",
    "FromEngine": "messages",
    "Generate": "messages",
    "InProcessClient": "in_process",
    "Ready": "messages",
    "RemoteClient": "client",
    "RequestStream": "client",
    "STOPPING": "client",
    "Stop": "messages",
    "encoded": "engine_host",
    "send_to_stderr": "log_lines",
    "start_task": "tasks",
}
__getattr__ = lazy(__name__, _MODULES)
