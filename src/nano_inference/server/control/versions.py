"""Names of versions: a rising integer in the engine, any string on the wire."""

from nano_inference.server.errors import bad_request, shown

MAX_NAME = 256  # characters
MAX_DIGITS = 15


class VersionNames:
    """Names of versions, chosen before an update begins, so that the first token of it already has
    one.

    Args:
        newest: the engine's version that serves, or the newest that it was told of.
    """

    def __init__(self, newest: int = 0) -> None:
        self._newest = newest
        self._names: dict[int, str] = {}  # of those that are not called by their number

    def name(self, version: int) -> str:
        """What the trainer calls a version. It waits for nothing: replies are made with it."""
        return self._names.get(version, str(version))

    def number(self, name: str) -> int | None:
        """The newest version of this name, which may be one that is still to come; None: there was
        none yet, and it is not a number that stands for itself.
        """
        for version, each in reversed(self._names.items()):
            if each == name:
                return version
        number = _own_number(name)
        return number if number is not None and number not in self._names else None

    def choose(self, name: str | None) -> int:
        """The integer of the next version: the name's own if it is larger than all before. Raises
        `ApiError`.
        """
        own = None if name is None else _own_number(checked_name(name))
        self._newest = own if own is not None and own > self._newest else self._newest + 1
        if name is not None:
            self.rename(self._newest, name)
        return self._newest

    def give_back(self, version: int, before: int) -> None:
        """The version that was chosen was never made; `before` is the newest one without it."""
        self._names.pop(version, None)
        if self._newest == version:
            self._newest = before

    def see(self, version: int) -> None:
        """There is this version, by whatever update."""
        self._newest = max(self._newest, version)

    @property
    def newest(self) -> int:
        """The newest version that there is, or that an update is about to make."""
        return self._newest

    def rename(self, version: int, name: str) -> None:
        """Call a version something else from now on. Raises `ApiError`."""
        if checked_name(name) == str(version):
            self._names.pop(version, None)
        else:
            self._names[version] = name


def checked_name(name: str, field: str = "weight_version") -> str:
    """A name that a version may have, as a field of a request says it. Raises `ApiError`."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise bad_request(
            f"{field} must be a printable string of 1 to {MAX_NAME} characters, not {shown(name)}.",
            field,
        )
    return name


def _own_number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS else None
