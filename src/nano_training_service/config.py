"""`TrainServiceConfig`: how the service listens, whom it trusts, what one client may ask for."""

import re
from dataclasses import dataclass
from pathlib import Path

from nano_inference.errors import ConfigError
from nano_inference.fields import check_least, check_seconds, option, strict_options

MIB = 1 << 20
SERVICE, KEYS, LIMITS = "The service", "Keys", "Limits"
_PREFIX = "tml-"  # the client refuses other keys itself


@strict_options(ConfigError)
@dataclass(frozen=True)
class TrainServiceConfig:
    """Frozen. Unknown or contradictory options raise `ConfigError`.

    Attributes:
        host: address to listen on; the default is reachable from this machine alone.
        port: TCP port; 0 takes a free one.
        state_dir: folder of checkpoints; made if it is missing. Checkpoints of an earlier service
            there can be loaded.
        served_model_name: the base model's name for clients; None: its folder, by which clients on
            this machine also find the tokenizer.
        api_keys: any of them opens every route but `/api/v1/healthz`; none: no key is asked for.
            The client takes only keys that begin with "tml-".
        max_models: models in training at once, of all sessions together.
        max_samplers: adapters that are served at once; others wait on disk.
        max_snapshots: nameless sampler weights that are kept for each model, the newest; beside
            them those that samplers of kind `inflight` follow.
        max_rank: largest LoRA rank.
        max_request_tokens: tokens of one request, prompts and targets of all its sequences
            together.
        max_pending: requests that have no result yet, of all sessions together.
        max_result_bytes: of all results that wait to be fetched. A request that comes while they
            are more is rejected; results that were fetched are forgotten first.
        max_body_bytes: size of a request's body; bodies of four times this size may be read at
            once, of all clients together.
        max_checkpoint_bytes: of all checkpoints in `state_dir`, those of earlier services too. A
            save that could come to more is refused; deleting some makes room, and so do lifetimes.
            Nameless sampler weights do not count: `max_snapshots` bounds them. None: as much as the
            disk has.
        request_timeout: seconds after which a request that has not been begun, or a sample that has
            not ended, fails.
        result_timeout: seconds that a result waits to be fetched.
        session_timeout: seconds without a heartbeat after which a session ends.
    """

    host: str = option(
        "127.0.0.1", SERVICE, "Listen on this address. 0.0.0.0: other machines can reach it."
    )
    port: int = option(8001, SERVICE, "0 takes a free one.", min=0, max=65535)
    state_dir: str = option("training-service", SERVICE, "Folder of checkpoints.", metavar="DIR")
    served_model_name: str | None = option(
        None, SERVICE, "The base model's name for clients. Default: its folder."
    )
    api_keys: tuple[str, ...] = option(
        (),
        KEYS,
        "Ask for this key, which begins with tml-; may be repeated. Others can see it with `ps`.",
        "--api-key",
        each=str,
        metavar="KEY",
    )
    max_models: int = option(4, LIMITS, "Models in training at once.", least=1)
    max_samplers: int = option(4, LIMITS, "Adapters that are served at once.", least=1)
    max_snapshots: int = option(8, LIMITS, "Nameless sampler weights kept for a model.", least=1)
    max_rank: int = option(64, LIMITS, "Largest LoRA rank.", least=1)
    max_request_tokens: int = option(262_144, LIMITS, "Tokens of one request.", least=1)
    max_pending: int = option(4096, LIMITS, "Requests without a result.", least=1)
    max_result_bytes: int = option(
        1024 * MIB, LIMITS, "Of all results that wait to be fetched.", least=1, size=True
    )
    max_body_bytes: int = option(64 * MIB, LIMITS, "Size of a body.", least=1, size=True)
    max_checkpoint_bytes: int | None = option(
        None, LIMITS, "Of all checkpoints. Default: as the disk has.", least=1, size=True
    )
    request_timeout: float = option(3600.0, LIMITS, "Seconds until a request fails.")
    result_timeout: float = option(600.0, LIMITS, "Seconds that a result is kept.")
    session_timeout: float = option(300.0, LIMITS, "Seconds without a heartbeat.")

    def __post_init__(self) -> None:
        check_least(self, ConfigError)
        timeouts = ("request_timeout", "result_timeout", "session_timeout")
        check_seconds(self, timeouts, ConfigError)
        for key in self.api_keys:
            if not re.fullmatch(_PREFIX + r"[!-~]+", key):
                raise ConfigError(
                    f"an API key must begin with {_PREFIX!r} and be printable ASCII without "
                    "spaces, as the client takes no other."
                )
        if not self.state_dir:
            raise ConfigError("state_dir is empty; name a folder.")
        if Path(self.state_dir).exists() and not Path(self.state_dir).is_dir():
            raise ConfigError(f"state_dir={self.state_dir!r} is not a folder.")
