"""Saved activations in host memory until the backward wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

OFFLOADED = "cuda"  # type of the devices that tensors leave
SMALLEST_BYTES = 2**20  # a smaller tensor costs more in launches than it frees
PREFETCHED = 4  # tensors on their way back ahead of the one that is wanted


class _Stored:
    """A saved tensor in pinned host memory, and on its way back once it is asked for."""

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        self.device, self.stream = tensor.device, stream
        self.uses = 0  # operations that saved it and have not had it back
        self.returning: Tensor | None = None
        self.ready: Any = None
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())  # the tensor must be computed before it is copied
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory may be used again only after the copy

    def fetch(self) -> None:
        if self.returning is None:
            with torch.cuda.stream(self.stream):
                self.returning = self.host.to(self.device, non_blocking=True)
                self.ready = self.stream.record_event()

    def take(self) -> Tensor:
        """The tensor; after its last use it is the caller's alone: kept here, it would fill the device again."""
        self.fetch()
        tensor = self.returning
        assert tensor is not None
        self.uses -= 1
        if self.uses <= 0:
            self.returning = None
        torch.cuda.current_stream().wait_event(self.ready)  # for this copy, and not for those ahead of it
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


class offload_activations(saved_tensors_hooks):
    """What autograd saves within this context goes to pinned host memory on a stream of its own, and comes back a few
    tensors ahead of the backward. Parameters and small tensors stay. Values are unchanged.

    On a CPU nothing is moved: the activations are in host memory already.
    """

    def __init__(self) -> None:
        self.stored: list[_Stored] = []
        self.places: dict[tuple[Any, ...], int] = {}  # which tensor -> index in `stored`
        self.references: list[StorageWeakRef] = []  # while they live, no other storage has the same address
        self.stream: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        owner = tensor._base if tensor._base is not None else tensor  # a transposed weight is a view of a parameter
        if tensor.device.type != OFFLOADED or owner.is_leaf or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        reference = StorageWeakRef(tensor.untyped_storage())
        # several operations save the same tensor: the input of q_proj, k_proj and v_proj
        key = (reference.cdata, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self.places:
            self.places[key] = len(self.stored)
            self.references.append(reference)
            self.stored.append(_Stored(tensor, self.stream))
        self.stored[self.places[key]].uses += 1
        return self.places[key]

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        for index in range(packed, max(packed - PREFETCHED, 0) - 1, -1):  # the backward goes in reverse
            if self.stored[index].uses > 0:
                self.stored[index].fetch()
        return self.stored[packed].take()
