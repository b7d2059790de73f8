"""Which bytes live at every moment of a step, exactly, whether it runs on real or on fake tensors.

Every operation passes a dispatch mode, which notes each new storage and, by a weak reference, its end. What a kernel allocates
for itself and frees before it returns is not seen there; `kernels` knows the CPU kernels in which that matters.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.memory.kernels import operation_flops, scratch_bytes
from memtrain.memory.ledger import Ledger, Window, Work

_aten = torch.ops.aten
FORGET_EVENTS = 2**18  # logged between two times when what is no longer needed is dropped: 5 MiB


@dataclass
class _Live:
    number: int
    nbytes: int
    part: str | None
    reference: Any


class Tracker(TorchDispatchMode):
    """Within this context, every storage on `device_type` is counted. `attach` gives the bytes their names.

    count_work: also count `Work` by place (slower). keep_all: log every event, and not only what snapshots need.
    """

    def __init__(self, device_type: str = "cpu", count_work: bool = False, keep_all: bool = False) -> None:
        super().__init__()
        self.forget_at = math.inf if keep_all else FORGET_EVENTS
        self.device_type, self.count_work = device_type, count_work
        self.live: dict[int, _Live] = {}
        self.outside: dict[int, Any] = {}  # storages that are not ours to count
        self.live_bytes = 0
        self.phases: list[str] = ["init"]
        self.place = ""
        self.windows = [Window("init", "", 0, 0, 0)]
        self.ledger = Ledger()
        self._next = 0
        self._operation = ""
        self._undo: list[Callable[[], Any]] = []

    # ---- storages ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a question, not an operation; half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        self._operation = func
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            self.see(tensor)
        if self.device_type == "cpu":
            self.scratch(scratch_bytes(func, args))
        if self.count_work:
            self._count(func, args, kwargs, out)
        if len(self.ledger.sizes) > self.forget_at:
            self._forget()
        return out

    def _forget(self) -> None:
        collects = gc.isenabled()
        gc.disable()  # the end of a storage would be logged into a log that is being copied
        self.ledger.forget(found.number for found in self.live.values())
        self.forget_at = len(self.ledger.sizes) + FORGET_EVENTS
        if collects:
            gc.enable()

    def see(self, tensor: Tensor, part: str | None = None) -> None:
        """Count the storage of `tensor` (once), and name its part if given."""
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        # the device of a fake tensor is a question to the dispatcher, which costs as much as an operation
        if (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self.live.get(key)
        if found is None:
            if key in self.outside:
                return
            number, nbytes = self._new_number(part), storage.nbytes()

            def ended(_: Any, key: int = key) -> None:
                gone = self.live.pop(key)
                self._log(gone.number, -gone.nbytes)

            self.live[key] = _Live(number, nbytes, part, weakref.ref(storage, ended))
            self._log(number, nbytes)
            return
        if storage.nbytes() != found.nbytes:
            self._resized(storage)
        if part is not None:
            self._name(found, part)

    def scratch(self, nbytes: int) -> None:
        """Note bytes that were there and are gone again."""
        if nbytes == 0:
            return
        number = self._new_number("temporaries")
        self._log(number, nbytes)
        self._log(number, -nbytes)

    @contextmanager
    def own_rise(self) -> Iterator[SimpleNamespace]:
        """Gives an object whose `bytes` is, in the end, the highest level within over the level at the start, and `work` the
        work done."""
        window, before = self.windows[-1], self.live_bytes
        peak, work, found = window.peak_bytes, window.work, SimpleNamespace(bytes=0, work=Work())
        window.peak_bytes, window.work = before, found.work
        yield found
        assert window is self.windows[-1], "one window"
        found.bytes = window.peak_bytes - before
        window.peak_bytes, window.work = max(peak, window.peak_bytes), work + found.work

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of `tensor`: it is the caller's, such as the rows of a batch."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.outside[key] = weakref.ref(storage, lambda _: self.outside.pop(key, None))

    def _new_number(self, part: str | None) -> int:
        self._next += 1
        if part is not None:
            self.ledger.part_of[self._next - 1] = part
        return self._next - 1

    def _name(self, found: _Live, part: str) -> None:
        found.part = part
        self.ledger.part_of[found.number] = part

    def _resized(self, storage: Any) -> None:
        found = self.live.get(storage._cdata)
        if found is not None and storage.nbytes() != found.nbytes:
            self._log(found.number, storage.nbytes() - found.nbytes)
            found.nbytes = storage.nbytes()

    def _log(self, number: int, nbytes: int) -> None:
        self.ledger.note(number, nbytes, (self.phases[-1], self.place, self._operation))
        self.live_bytes += nbytes
        if self.live_bytes > self.windows[-1].peak_bytes:
            self.windows[-1].peak_bytes = self.live_bytes

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        work = self.windows[-1].work
        work.flops += operation_flops(func, args, kwargs, out)
        if not func.is_view:
            work.operations += 1
            work.moved_bytes += sum(tensor.nbytes for tensor in _tensors((args, kwargs.values(), (out,))))

    # ---- phases and parts --------------------------------------------------------------------------------------------

    def _go(self, place: str | None = None, enter: str | None = None, leave: bool = False) -> None:
        """Change place, enter a phase, or leave the innermost."""
        if leave:
            self.phases.pop()
        if enter is not None:
            self.phases.append(enter)
        if place is not None:
            self.place = place
        now = self.windows[-1]
        phase = self.phases[min(1, len(self.phases) - 1)]
        if (phase, self.place) != (now.phase, now.place):
            now.end_bytes = self.live_bytes
            self.windows.append(Window(phase, self.place, self.live_bytes, self.live_bytes, self.live_bytes))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything within belongs to phase `name`."""
        self._go("", enter=name)
        try:
            yield
        finally:
            self._go("", leave=True)

    def attach(self, state: Any) -> None:
        """Follow a `TrainState`: name its parameters, gradients, optimizer state, and the phases of its steps."""
        self.state = state
        self.phases[0] = "forward"  # between the phases of an update there is little: the sum of losses
        self._go()
        model = state.accelerator.unwrap_model(state.model, keep_torch_compile=False)
        self.optimizer = getattr(state.optimizer, "optimizer", state.optimizer)
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            self.see(parameter, "parameters")
        self._name_gradients()
        self.name_optimizer_state()
        inner = model.model
        hooks = [model.register_forward_pre_hook(self._enter_forward),
                 model.register_forward_hook(self._leave_forward, always_call=True),
                 inner.embed_tokens.register_forward_hook(self._watch_backward("embedding")),
                 inner.norm.register_forward_pre_hook(lambda *_: self._go("norm")),
                 inner.norm.register_forward_hook(self._watch_backward("norm")),
                 inner.register_forward_hook(self._enter_loss),
                 self.optimizer.register_step_pre_hook(self._enter_optimizer),
                 self.optimizer.register_step_post_hook(self._leave_optimizer)]
        for index, layer in enumerate(inner.layers):
            hooks += [layer.register_forward_pre_hook(self._enter_layer(index)),
                      layer.register_forward_hook(self._leave_layer(index), always_call=True)]
        self._undo = [hook.remove for hook in hooks]
        self._wrap(state.accelerator, "backward", "backward", after=self._name_gradients)
        self._wrap(state.accelerator, "clip_grad_norm_", "optimizer")

    def detach(self) -> None:
        """Take every hook away again."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _wrap(self, owner: Any, name: str, phase: str, after: Callable[[], Any] = lambda: None) -> None:
        method = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                result = method(*args, **kwargs)
            after()
            return result

        setattr(owner, name, wrapped)
        self._undo.append(lambda: delattr(owner, name))

    def _name_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.see(parameter.grad, "gradients")

    def name_optimizer_state(self, states: Any = None) -> None:
        """Name the state of the optimizer, or only that in `states`."""
        for state in (self.optimizer.state if states is None else states).values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.see(value, "optimizer")

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._go(enter="optimizer")
        rows = kwargs.get("rows")
        self._updated = [p for p in self.parameters if p.grad is not None] if rows is None else [rows.parameter]
        self._name_gradients()
        if rows is not None:
            self.see(rows.grad, "gradients")

    def _leave_optimizer(self, *_: Any) -> None:
        self.name_optimizer_state({p: self.optimizer.state[p] for p in self._updated if p in self.optimizer.state})
        self._go(leave=True)

    def _enter_forward(self, *_: Any) -> None:
        self._forward_start = self._next
        self._go("embedding", enter="evaluate" if self.phases[-1] == "evaluate" else "forward")

    def _leave_forward(self, *_: Any) -> None:
        if self.phases[-1] == "forward":
            self._name_kept(self._forward_start)
        self._go("", leave=True)

    def _enter_loss(self, *_: Any) -> None:
        if self.phases[-1] == "forward":
            self._name_kept(self._forward_start)
        self._go("loss")

    def _name_kept(self, since: int) -> None:
        """What a forward leaves behind is kept for the backward; what the loss head makes is the loss's own."""
        for found in self.live.values():
            if found.part is None and found.number >= since:
                self._name(found, "activations")

    def _watch_backward(self, place: str) -> Callable[..., None]:
        def watch(module: Any, args: Any, out: Tensor) -> None:
            if self.phases[-1] == "forward" and isinstance(out, Tensor) and out.grad_fn is not None:
                out.grad_fn.register_prehook(lambda grads: self._go(place))

        return watch

    def _enter_layer(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._go(f"layer {index}")
            self._recompute_start = self._next

        return enter

    def _leave_layer(self, index: int) -> Callable[..., None]:
        watch = self._watch_backward(f"layer {index}")

        def leave(module: Any, args: Any, out: Any) -> None:
            if self.phases[-1] == "backward":
                self._name_kept(self._recompute_start)
            else:
                watch(module, args, out)

        return leave


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and views of dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, ValuesView)):
            yield from _tensors(value)
