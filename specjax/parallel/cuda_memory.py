"""Memory of CUDA GPUs that the other GPUs of this process may write to, by the driver's own functions."""

import ctypes
from typing import Any

_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class _Failed(Exception):
    """A function of the driver returned an error."""


def mailboxes(ordinals: list[int], num_bytes: int) -> list[int] | None:
    """Return the address of zeroed memory on each GPU, which all of them may write to.

    Args:
        ordinals: the numbers of the GPUs among those that this process sees.
        num_bytes: bytes on each, a multiple of 4.

    Returns:
        The addresses, in the order of the GPUs; None where there is no driver, or where it refuses. The memory is never
        freed.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    try:
        _call(cuda.cuInit, 0)
        contexts = [ctypes.c_void_p() for _ in ordinals]
        for context, ordinal in zip(contexts, ordinals, strict=True):
            _call(cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), ordinal)  # the context that XLA works in
        return [_mailbox(cuda, context, contexts, num_bytes) for context in contexts]
    except _Failed:
        return None


def _mailbox(cuda: Any, context: ctypes.c_void_p, contexts: list[ctypes.c_void_p], num_bytes: int) -> int:
    """Return the address of zeroed memory in a context, which may access the memory of the others from now on."""
    address = ctypes.c_uint64()
    _call(cuda.cuCtxPushCurrent_v2, context)
    try:
        for other in contexts:
            if other.value != context.value:
                _call(cuda.cuCtxEnablePeerAccess, other, 0, fine=(0, _ALREADY_ENABLED))
        _call(cuda.cuMemAlloc_v2, ctypes.byref(address), ctypes.c_size_t(num_bytes))
        _call(cuda.cuMemsetD32_v2, address, 0, ctypes.c_size_t(num_bytes // 4))
        _call(cuda.cuCtxSynchronize)
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return address.value


def _call(function: Any, *arguments: Any, fine: tuple[int, ...] = (0,)) -> None:
    if function(*arguments) not in fine:
        raise _Failed
