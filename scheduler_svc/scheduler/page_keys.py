"""What names the full pages of a sequence: the tokens of each, and a number for everything up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def root_id(salt: str) -> int:
    """The number of an empty beginning under this salt."""
    return hash(salt)


def prefix_id(parent_id: int, key: bytes) -> int:
    """The number of a beginning that continues another by one page.

    Beginnings that differ may have the same number, rarely: good enough to count by, never to share KV by.
    """
    return hash((parent_id, key))


class PageKeys:
    """Keys of the leading full pages of tokens that only grow."""

    __slots__ = ("_page_size", "_salt", "keys", "prefix_ids")

    def __init__(self, salt: str, page_size: int) -> None:
        self._salt = salt
        self._page_size = page_size
        self.keys: list[bytes] = []  # token ids as bytes (bytes remember their hash; tuples do not)
        self.prefix_ids = array("q")  # of the beginning that ends with the page

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the pages that `tokens`, which begin with those known so far, have filled meanwhile."""
        start = len(self.keys) * self._page_size
        end = len(tokens) // self._page_size * self._page_size
        data = array("i", tokens[start:end])
        size = self._page_size * data.itemsize
        filled = data.tobytes()
        last = self.prefix_ids[-1] if self.prefix_ids else root_id(self._salt)
        for at in range(0, len(filled), size):
            key = filled[at : at + size]
            last = prefix_id(last, key)
            self.keys.append(key)
            self.prefix_ids.append(last)

    def copy(self) -> PageKeys:
        """The same keys, to be extended apart."""
        other = PageKeys(self._salt, self._page_size)
        other.keys, other.prefix_ids = list(self.keys), self.prefix_ids[:]
        return other
