"""What operations cost beside the tensors they return: multiplications, and scratch that CPU kernels take for themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


def operation_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Floating-point operations of a product or an attention; 0 for all others."""
    own = _FLOPS.get(func)
    if own is not None:
        return own(*args)
    formula = flop_registry.get(func._overloadpacket)
    return 0.0 if formula is None else formula(*args, **kwargs, out_val=out)


def scratch_bytes(func: Any, args: Any) -> int:
    """Bytes that a CPU kernel allocates beside its results and frees before it returns."""
    return _CPU_SCRATCH.get(func, _promotion_scratch)(func, args)


def _attention_flops(query: Tensor, key: Tensor, *rest: Any) -> float:
    # two products; causality is not taken off in torch's own formulas for CUDA either
    n, h, s, c = query.shape
    return 4.0 * n * h * s * key.shape[2] * c


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, *rest: Any) -> float:
    return 2.5 * _attention_flops(query, key)  # five products where the forward has two


def _addmm_flops(total: Tensor, left: Tensor, right: Tensor, *rest: Any) -> float:
    return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]


# those that torch's registry lacks
_FLOPS: dict[Any, Callable[..., float]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
    _aten.addmm_.default: _addmm_flops,
}


def _flash_attention_scratch(func: Any, args: Any) -> int:
    """Blocks of a product, float32, for each thread (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    query, key = args[:2]
    length, keys, head = query.shape[2], key.shape[2], query.shape[3]
    rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    columns = min(512, keys)
    numbers = rows * columns + 2 * rows + rows * head
    narrow = 0 if query.dtype == torch.float32 else query.element_size() * rows * columns
    return torch.get_num_threads() * (4 * numbers + narrow)


def _promotion_scratch(func: Any, args: Any) -> int:
    """On a CPU, an elementwise operation first copies operands that are not of the common dtype
    (aten/src/ATen/TensorIterator.cpp); on a GPU its kernel casts as it reads."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dim()}
    if len(dtypes) < 2 or torch.Tag.pointwise not in func.tags:
        return 0
    common = reduce(torch.promote_types, dtypes)
    return sum(arg.numel() * common.itemsize for arg in args
               if isinstance(arg, Tensor) and arg.dim() and arg.dtype != common)


# A product of more operations than this is not tried out: some MB of scratch a thread are nothing beside its operands.
TRIED_FLOPS = 2e9
_PRODUCTS = {_aten.mm.default: 0, _aten.mm.out: 0, _aten.addmm.default: 1, _aten.addmm_.default: 1}


def _product_scratch(func: Any, args: Any) -> int:
    """On a CPU, oneDNN packs the operands of a product in 16 bits into scratch whose size depends on the processor: one such
    product is run to see it."""
    left, right = args[_PRODUCTS[func]:][:2]
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if left.dtype not in (torch.bfloat16, torch.float16) or flops > TRIED_FLOPS or torch.autograd._profiler_enabled():
        return 0
    return _tried_scratch(left.dtype, tuple(left.shape), left.stride(), tuple(right.shape), right.stride(),
                          torch.get_num_threads())


@cache
def _tried_scratch(dtype: torch.dtype, left_shape: Any, left_stride: Any, right_shape: Any, right_stride: Any,
                   threads: int) -> int:
    with _disable_current_modes(), torch.no_grad():
        left = torch.zeros(_span(left_shape, left_stride), dtype=dtype)
        right = left.new_zeros(_span(right_shape, right_stride)).as_strided(right_shape, right_stride)
        left = left.as_strided(left_shape, left_stride)
        out = left.new_zeros(left_shape[0], right_shape[1])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch.mm(left, right, out=out)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max((event.nbytes() for event in events), default=0)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


_CPU_SCRATCH: dict[Any, Callable[[Any, Any], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention_scratch,
    **dict.fromkeys(_PRODUCTS, _product_scratch),
}
