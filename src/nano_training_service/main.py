"""Run the service: `serve` until a signal, `running_service` within a `with` block."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from nano_inference.config import EngineConfig
from nano_inference.errors import ConfigError, NanoInferenceError
from nano_inference.remote import send_to_stderr
from nano_inference.server import is_loopback
from nano_inference.server.http import connection_class
from nano_training_service.base import Base
from nano_training_service.checkpoints import Checkpoints
from nano_training_service.config import TrainServiceConfig
from nano_training_service.routes import build_app
from nano_training_service.service import Service

log = logging.getLogger("nano_training_service")

_KEEP_ALIVE = 75
_MAX_HEADER_BYTES, _MAX_CONNECTIONS = 64 * 1024, 4096
_GRACE = 3


def serve(engine: EngineConfig, config: TrainServiceConfig) -> None:
    """Serve until SIGTERM or Ctrl-C. Sets up logging.

    Raises:
        NanoInferenceError: The engine could not be built, another service uses `state_dir`, or the
            address is unavailable.
    """
    for name, level in (
        ("nano_inference", "INFO"),
        ("nano_training_service", "INFO"),
        ("uvicorn", "WARNING"),
    ):
        send_to_stderr(logging.getLogger(name), "text")
        logging.getLogger(name).setLevel(level)
    if not config.api_keys and not is_loopback(config.host):
        log.warning(
            "host=%s is reachable from other machines, and no API key is set: every client that "
            "reaches the service can use it.",
            config.host,
        )
    server = _server(_service(engine, config))
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn raises it again after its shutdown
        if server.force_exit:
            raise
    if not server.started:
        raise ConfigError(f"host={config.host!r}, port={config.port}: cannot listen there.")


@contextmanager
def running_service(
    base: EngineConfig | Base, config: TrainServiceConfig, *, timeout: float = 60.0
) -> Iterator[str]:
    """Run a service on a thread of this process and yield its URL, the client's `base_url`. For
    tests, notebooks and examples.

    Args:
        base: Configuration of the engine, or an existing base, which the service closes.
        config: Configuration of the service. `port=0` takes a free port.
        timeout: Seconds that the service may take to listen after the engine is built.

    Raises:
        NanoInferenceError: The engine could not be built, another service uses `state_dir`, or the
            address is unavailable.
    """
    server = _server(_service(base, config))
    thread = threading.Thread(target=server.run, name="nano-inference train-service", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + timeout
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise NanoInferenceError("the service did not start; see its log.")
            time.sleep(0.01)
        yield server.url
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    """uvicorn server that logs its address."""

    url = ""

    async def startup(self, sockets: list | None = None) -> None:
        """Start to listen, and log the address."""
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn logged the reason
            self.should_exit = True
        if self.started:
            host = self.config.host
            port = self.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("listening on %s", self.url)


def _server(service: Service) -> _Server:
    config = service.config
    return _Server(
        uvicorn.Config(
            build_app(service),
            host=config.host,
            port=config.port,
            http=connection_class(_MAX_HEADER_BYTES, _MAX_CONNECTIONS),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
        )
    )


def _service(base: EngineConfig | Base, config: TrainServiceConfig) -> Service:
    """Build the service. The folder of checkpoints is checked before the model is loaded."""
    checkpoints = Checkpoints(Path(config.state_dir), config.max_checkpoint_bytes)
    try:
        built = _engine_base(base, config) if isinstance(base, EngineConfig) else base
        return Service(config, built, checkpoints)
    except BaseException:
        checkpoints.close()
        raise


def _engine_base(engine: EngineConfig, config: TrainServiceConfig) -> Base:
    from nano_training_service.engine_base import EngineBase

    return EngineBase(engine, config)
