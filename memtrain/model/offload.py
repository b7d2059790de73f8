"""Saved activations in host memory until the backward wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 2**20  # a smaller tensor costs more in launches than it frees
PREFETCHED = 4  # tensors on their way back ahead of the one that is wanted


class _Stored:
    """A saved tensor in pinned host memory, and on its way back once it is asked for."""

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        self.device, self.stream = tensor.device, stream
        self.returning: Tensor | None = None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())  # the tensor must be computed before it is copied
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory may be used again only after the copy

    def fetch(self) -> None:
        if self.returning is None:
            with torch.cuda.stream(self.stream):
                self.returning = self.host.to(self.device, non_blocking=True)

    def take(self) -> Tensor:
        self.fetch()
        assert self.returning is not None
        torch.cuda.current_stream().wait_stream(self.stream)
        self.returning.record_stream(torch.cuda.current_stream())
        return self.returning


class offload_activations(saved_tensors_hooks):
    """What autograd saves within this context goes to pinned host memory on a stream of its own, and comes back a few
    tensors ahead of the backward. Parameters and small tensors stay. Values are unchanged.

    On a CPU nothing is moved: the activations are in host memory already.
    """

    def __init__(self) -> None:
        self.stored: list[_Stored] = []
        self.stream: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.device.type != "cuda" or tensor.is_leaf or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stored.append(_Stored(tensor, self.stream))
        return len(self.stored) - 1

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for index in range(packed, max(packed - PREFETCHED, 0) - 1, -1):  # the backward goes in reverse
            self.stored[index].fetch()
        return self.stored[packed].take()
