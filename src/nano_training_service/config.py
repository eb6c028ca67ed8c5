"""`TrainServiceConfig`: address, API keys and limits of the service."""

import re
from dataclasses import dataclass
from pathlib import Path

from nano_inference.errors import ConfigError
from nano_inference.fields import check_least, check_seconds, option, strict_options

MIB = 1 << 20
SERVICE, KEYS, LIMITS = "The service", "Keys", "Limits"
_PREFIX = "tml-"  # the client rejects other keys


@strict_options(ConfigError)
@dataclass(frozen=True)
class TrainServiceConfig:
    """Frozen configuration. Unknown or contradictory options raise `ConfigError`.

    Attributes:
        host: Address to listen on. The default is reachable only from this machine.
        port: TCP port. 0 takes a free one.
        state_dir: Folder of checkpoints, created if it is missing. Clients can load checkpoints of
            an earlier service from it.
        served_model_name: Name of the base model for clients. None: its folder, in which clients on
            this machine also find the tokenizer.
        api_keys: Keys for every route except `/api/v1/healthz`. Empty: no key is required. The
            client accepts only keys that begin with "tml-".
        max_models: Maximum models in training, in all sessions.
        max_samplers: Maximum adapters in service. Others wait on disk.
        max_snapshots: Maximum unnamed sampler weights per model. The newest are kept, and those
            that samplers of kind `inflight` follow.
        max_rank: Highest LoRA rank accepted.
        max_request_tokens: Maximum tokens of a request: prompts and targets of all its sequences.
        max_pending: Maximum requests without a result, in all sessions.
        max_result_bytes: Maximum size of all unfetched results. Fetched results are deleted first.
            New requests are rejected as long as the limit is still exceeded.
        max_body_bytes: Maximum size of a request's body. Bodies that are read at the same time may
            have four times this size in total.
        max_checkpoint_bytes: Maximum size of all checkpoints in `state_dir`, including those of
            earlier services. A save that could exceed it is rejected. Deleting checkpoints makes
            room, and so does the end of their lifetime. Unnamed sampler weights do not count, since
            `max_snapshots` bounds them. None: no limit but the disk.
        request_timeout: Seconds until a waiting request or an unfinished sample fails.
        result_timeout: Seconds for which a result is kept for its client.
        session_timeout: Seconds without a heartbeat after which a session ends.
        recompute_activations: As in `LoraPolicy`. Decides memory and time of training, and no bit.
    """

    host: str = option(
        "127.0.0.1", SERVICE, "Listen on this address. 0.0.0.0: other machines can reach it."
    )
    port: int = option(8001, SERVICE, "Listen on this port. 0: a free one.", min=0, max=65535)
    state_dir: str = option(
        "training-service", SERVICE, "Keep checkpoints in this folder.", metavar="DIR"
    )
    served_model_name: str | None = option(
        None, SERVICE, "Name of the base model for clients. Default: its folder."
    )
    api_keys: tuple[str, ...] = option(
        (),
        KEYS,
        "Require this key, which begins with tml-. May be repeated. `ps` shows it to other users.",
        "--api-key",
        each=str,
        metavar="KEY",
    )
    max_models: int = option(4, LIMITS, "Maximum models in training.", least=1)
    max_samplers: int = option(4, LIMITS, "Maximum adapters in service.", least=1)
    max_snapshots: int = option(8, LIMITS, "Maximum unnamed sampler weights per model.", least=1)
    max_rank: int = option(64, LIMITS, "Highest LoRA rank to accept.", least=1)
    max_request_tokens: int = option(262_144, LIMITS, "Maximum tokens per request.", least=1)
    max_pending: int = option(4096, LIMITS, "Maximum requests without a result.", least=1)
    max_result_bytes: int = option(
        1024 * MIB, LIMITS, "Maximum size of all unfetched results.", least=1, size=True
    )
    max_body_bytes: int = option(64 * MIB, LIMITS, "Maximum size of a body.", least=1, size=True)
    max_checkpoint_bytes: int | None = option(
        None, LIMITS, "Maximum size of all checkpoints. Default: no limit.", least=1, size=True
    )
    request_timeout: float = option(3600.0, LIMITS, "Timeout of a request in seconds.")
    result_timeout: float = option(600.0, LIMITS, "Keep results for this many seconds.")
    session_timeout: float = option(
        300.0, LIMITS, "End sessions after this many seconds without a heartbeat."
    )
    recompute_activations: bool | None = option(
        None, SERVICE, "Recompute layers in a backward pass. Default: above 1,024 rows."
    )

    def __post_init__(self) -> None:
        check_least(self, ConfigError)
        if not isinstance(self.recompute_activations, bool | None):  # pyright: ignore
            raise ConfigError(
                f"recompute_activations={self.recompute_activations!r} must be True, False or None."
            )
        timeouts = ("request_timeout", "result_timeout", "session_timeout")
        check_seconds(self, timeouts, ConfigError)
        for key in self.api_keys:
            if not re.fullmatch(_PREFIX + r"[!-~]+", key):
                raise ConfigError(
                    f"an API key must begin with {_PREFIX!r} and be printable ASCII without "
                    "spaces; the client rejects other keys."
                )
        if not self.state_dir:
            raise ConfigError("state_dir is empty; name a folder.")
        if Path(self.state_dir).exists() and not Path(self.state_dir).is_dir():
            raise ConfigError(f"state_dir={self.state_dir!r} is not a folder.")
