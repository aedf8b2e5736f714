"""Numbers for cache salts, since plans carry no text: equal numbers only ever mean the same salt."""

from __future__ import annotations

from collections import OrderedDict

_MAX_SALTS = 65_536


class SaltIds:
    """Counts up. A salt that has not come for long gets a new number, which shares nothing with its old one."""

    def __init__(self, max_salts: int = _MAX_SALTS) -> None:
        self._max_salts = max_salts
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._next = 1

    def id_of(self, salt: str) -> int:
        """The number of `salt`; 0 is that of requests without one."""
        if not salt:
            return 0
        if salt not in self._ids:
            self._ids[salt] = self._next
            self._next += 1
            if len(self._ids) > self._max_salts:
                self._ids.popitem(last=False)
        self._ids.move_to_end(salt)
        return self._ids[salt]
