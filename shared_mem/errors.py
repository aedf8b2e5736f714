"""What can go wrong between scheduler and workers: raised by segments, rings, channels and heartbeats."""

from __future__ import annotations


class SharedMemoryError(Exception):
    """A segment cannot be made, found or used; the message names its path."""


class RingError(SharedMemoryError):
    """The bytes of a ring are not what its writer must have written (torn, foreign or of another version)."""


class ChannelTimeout(SharedMemoryError):
    """A message found no space in time; `readers` are the indices of those that hold the writer back."""

    def __init__(self, message: str, readers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.readers = readers
