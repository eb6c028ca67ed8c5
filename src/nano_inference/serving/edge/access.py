"""Who may call what: API keys on every route but `/health`, the admin key on routes that change the
engine.
"""

import hmac
from collections.abc import Iterable
from enum import Enum
from hashlib import sha256

from nano_inference.serving import paths
from nano_inference.serving.addresses import host_name, is_address
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import NO_RETRY, ApiError

Headers = Iterable[tuple[bytes, bytes]]


class Level(Enum):
    """What a route asks for."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


# What watches a server asks these, also before it serves and where there is no room for others.
HEALTH = frozenset(("/health", "/ping"))
# Every other path, also one that does not exist, is `KEY`.
LEVELS: dict[str, Level] = dict.fromkeys(HEALTH, Level.OPEN) | {"/flush_cache": Level.ADMIN}
LEVELS |= dict.fromkeys(("/fleet", "/fleet/add", "/fleet/drain", "/fleet/remove"), Level.ADMIN)
# With `ServerConfig.rl`.
RL_LEVELS: dict[str, Level] = dict.fromkeys(paths.CHANGING, Level.ADMIN) | dict.fromkeys(
    paths.OPEN, Level.OPEN
)


class Keys:
    """The keys of a server. Comparisons take the same time for every wrong key.

    Trainers send no key. So with `rl` and without an admin key, routes that change the engine ask
    for what the others ask for, on an address that only this machine can reach (or with `rl_open`),
    but never serve a web page, since any page that is opened here could reach them, and without
    `rl_open` nothing that a proxy passes on.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin = None if config.admin_key is None else _digest(config.admin_key.encode())
        self._levels = LEVELS | RL_LEVELS if config.rl else LEVELS
        self._is_trusting = config.rl and config.admin_key is None
        # by which it may be called, beside addresses
        self._name = None if config.rl_open else config.host.lower()

    def require(self, path: str, headers: Headers) -> None:
        """Let a request pass.

        Raises:
            ApiError: 401 for a key that is missing or wrong, 403 for one that does not open this
                route, or for a web page on a route that changes the engine.
        """
        level = self._levels.get(path, Level.KEY)
        if level is Level.ADMIN and self._is_trusting:
            self._refuse_strangers(headers)
            level = Level.KEY
        if level is Level.OPEN or (level is Level.KEY and not self._keys):
            return
        given = [_digest(key) for key in _keys_in(headers)]
        is_admin = self._admin is not None and _among(given, [self._admin])
        if is_admin:  # it opens everything
            return
        is_user = _among(given, self._keys)
        if level is Level.KEY and not is_user:
            raise ApiError(401, _WRONG if given else _MISSING, headers=_ASK)
        if level is Level.ADMIN:
            if self._admin is None:
                raise ApiError(
                    403,
                    "this route is off: the server was started without an admin key.",
                    headers=NO_RETRY,
                )
            if not is_user:
                raise ApiError(401, _WRONG if given else _MISSING, headers=_ASK)
            raise ApiError(403, "this route needs the admin key.", headers=NO_RETRY)

    def _refuse_strangers(self, headers: Headers) -> None:
        """Refuse web pages, and requests that a proxy forwards (they come from this machine, from
        any sender).

        A browser marks a page's request with `Origin` or `Sec-Fetch-Site`. With DNS rebinding it
        does not, but then `Host` holds the page's name. Raises `ApiError` 403.
        """
        for name, value in headers:
            if name in _PROXIED and self._name is not None:
                raise ApiError(403, _NO_PROXIES, headers=NO_RETRY)
            is_page = name == b"origin" or (
                name == b"sec-fetch-site" and value.strip().lower() != b"none"
            )
            if is_page or (name == b"host" and not self._is_called(value.decode("latin-1"))):
                raise ApiError(403, _NO_PAGES, headers=NO_RETRY)

    def _is_called(self, host: str) -> bool:
        """Whether `Host` is an address, or the name that the server was told to listen on."""
        name = host_name(host)
        return self._name is None or name == self._name or is_address(name)


_PROXIED = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"))
_NO_PROXIES = (
    "a proxy passes this request on, so that anybody may have sent it; this route takes it with "
    "an admin key "
    "(--admin-key), or with --rl-open."
)
_MISSING = "this server needs an API key, as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
_NO_PAGES = (
    "web pages may not use this route: it takes no Origin, no Sec-Fetch-Site, and as Host an IP "
    "address or localhost. "
    "An admin key (--admin-key) opens it to all who have it."
)
_WRONG = "the API key is not one of this server's."
_ASK = {"www-authenticate": "Bearer"}


def _keys_in(headers: Headers) -> list[bytes]:
    keys: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
    return keys[:2]


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()  # of one length: a comparison says nothing about a key's


def _among(given: list[bytes], keys: list[bytes]) -> bool:
    found = False
    for one in given:
        for key in keys:  # all of them, also after a match
            found |= hmac.compare_digest(one, key)
    return found
