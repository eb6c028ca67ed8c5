"""`SessionStore`: the open sessions of a server, in the memory of its process."""

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import NO_RETRY, ApiError, shown
from nano_inference.text.conversation import Conversation

_BYTES_OF_ID = 40  # memory of a token: its id, its logprob and their places in two tuples


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session, and of its forks.

    Attributes:
        model: Served model or adapter. None: the model.
        priority: Scheduling priority of its turns. None: the default.
        keep_cache_seconds: Seconds for which its blocks are kept after a turn. None: not at all.
        cache_priority: Priority of its kept blocks. None: the default.
        cache_salt: Salt of its blocks. None: shared with all requests.
    """

    model: str | None = None
    priority: int | None = None
    keep_cache_seconds: float | None = None
    cache_priority: int | None = None
    cache_salt: str | None = None


@dataclass(eq=False)
class Session:
    """An open session.

    Attributes:
        name: Its id.
        owner: Digest of the key that opened it.
        options: Its options.
        chat: Conversation so far. A turn replaces it when the turn has ended.
        root: Id of the session that its forks began with. Its turns go to one replica.
        parent: Id of the session that it was forked from, or None.
        turn_of: Engine's id of the first request of its root, whose place in the queue its turns
            take. None: it has had no turn.
        turn: Turn that is being sampled, or None.
        created: Time of its opening, in seconds since the epoch.
        used: Time of its last use, by `time.monotonic`.
    """

    name: str
    owner: str
    options: SessionOptions
    chat: Conversation
    root: str
    parent: str | None = None
    turn_of: int | None = None
    turn: object | None = None
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return _BYTES_OF_ID * len(self.chat) + 4 * self.chat.num_characters

    def require_idle(self) -> None:
        """Raise `ApiError` 409 while a turn is being sampled."""
        if self.turn is not None:
            raise ApiError(
                409,
                f"session {self.name} is sampling a turn; wait for it, or fork the session first.",
                code="session_busy",
                headers=NO_RETRY,
            )

    def begin(self, turn: object) -> None:
        """Begin a turn. Raises `ApiError` 409."""
        self.require_idle()
        self.turn = turn

    def end(self, turn: object) -> None:
        """End a turn, if it is the current one."""
        if self.turn is turn:
            self.turn, self.used = None, time.monotonic()


class SessionStore:
    """Open sessions by id. All of its code runs on one event loop.

    An id proves that this server issued it, so that a session which is gone can be
    distinguished from one that never existed, without a list of those.

    Args:
        config: Limits of the server.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._secret = secrets.token_bytes(32)
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first

    def add(self, owner: str, options: SessionOptions, chat: Conversation, **more: Any) -> Session:
        """Open a session. Raises `ApiError` 429."""
        name = self._new_name(owner)
        root = more.pop("root", name)
        session = Session(name, owner, options, chat, root, used=self._clock(), **more)
        self._require_room(owner, 1, session.num_bytes)
        self._sessions[name] = session
        return session

    def get(self, name: str, owner: str, *, is_admin: bool = False) -> Session:
        """Return an open session of a key, and note its use. Raises `ApiError` 404, or 410 if it is
        gone.
        """
        self._expire()
        session = self._sessions.get(name)
        if session is None or not (is_admin or session.owner == owner):
            raise self._unknown(name, owner)
        session.used = self._clock()
        self._sessions.move_to_end(name)
        return session

    def of(self, owner: str, *, is_admin: bool = False) -> list[Session]:
        """Return the open sessions of a key, or all, the least recently used first."""
        self._expire()
        return [each for each in self._sessions.values() if is_admin or each.owner == owner]

    def fork(self, session: Session, count: int) -> list[Session]:
        """Open `count` sessions that continue a session. Raises `ApiError` 429."""
        self._require_room(session.owner, count, count * session.num_bytes)
        more: dict[str, Any] = {"root": session.root, "parent": session.name}
        return [
            self.add(session.owner, session.options, session.chat, turn_of=session.turn_of, **more)
            for _ in range(count)
        ]

    def extend(self, session: Session, before: Conversation, chat: Conversation) -> None:
        """Replace a session's conversation by a longer one, which was made from `before`. Raises
        `ApiError` 409 if another request was faster, and 429.
        """
        session.require_idle()
        if session.chat is not before:
            raise ApiError(
                409,
                f"another request has changed session {session.name} meanwhile; look at it first.",
                code="session_changed",
                headers=NO_RETRY,
            )
        more = replace(session, chat=chat).num_bytes - session.num_bytes
        self._require_room(session.owner, 0, more)
        session.chat = chat

    def remove(self, session: Session) -> None:
        """Close a session."""
        self._sessions.pop(session.name, None)

    def relatives(self, session: Session) -> list[Session]:
        """Return the other open sessions with the same root."""
        others = self._sessions.values()
        return [each for each in others if each.root == session.root and each is not session]

    def _expire(self) -> None:
        oldest = self._clock() - self._config.session_timeout
        for session in list(self._sessions.values()):
            if session.used > oldest:
                return
            if session.turn is None:
                del self._sessions[session.name]

    def _require_room(self, owner: str, count: int, num_bytes: int) -> None:
        mine, config = self.of(owner), self._config
        if len(mine) + count > config.max_sessions:
            raise _full(f"{config.max_sessions} sessions are open (max_sessions)")
        if sum(each.num_bytes for each in mine) + num_bytes > config.max_session_bytes:
            raise _full(f"the sessions exceed {config.max_session_bytes} bytes (max_session_bytes)")

    def _new_name(self, owner: str) -> str:
        unique = secrets.token_hex(10)
        return f"sess_{unique}{self._proof(unique, owner)}"

    def _proof(self, unique: str, owner: str) -> str:
        return hmac.digest(self._secret, (unique + owner).encode(), "sha256").hex()[:12]

    def _unknown(self, name: str, owner: str) -> ApiError:
        unique, proof = name[5:25], name[25:]
        if hmac.compare_digest(proof.encode(), self._proof(unique, owner).encode()):
            text = f"session {shown(name)} is gone: it was deleted, or unused for too long."
            return ApiError(410, f"{text[:-1]}; open a new one.", code="session_gone")
        text = f"session {shown(name)} does not exist; open one with POST /sessions."
        return ApiError(404, text, code="session_not_found")


def _full(text: str) -> ApiError:
    return ApiError(429, f"{text}; delete some, or wait.", code="session_limit", headers=NO_RETRY)
