"""Small arrays on their way between host and device, which nobody waits for before they are needed. A leaf module."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[np.generic] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The values on `device`; on the CPU the very same memory.

    A plain `.to` would wait until the device has done all that it was given so far; this only stages a copy.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """A tensor that travels to the host while the device goes on with what is launched behind it."""

    def __init__(self, values: torch.Tensor) -> None:
        """values: int64 [n], not written to any more."""
        self._values = values.to("cpu", non_blocking=True)  # pinned memory, if it comes from a device
        self._arrival: torch.cuda.Event | None = None
        if values.is_cuda:
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[int]:
        """The values, once they have arrived; what was launched behind the copy is not waited for."""
        if self._arrival is not None:
            self._arrival.synchronize()
        result: list[int] = self._values.tolist()
        return result
