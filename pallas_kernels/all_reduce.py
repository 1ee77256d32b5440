"""The sum of a small array over the GPUs of one process, with a residual added, in one launch.

Every device has a mailbox, memory that the others write to over NVLink. A thread writes its 32 bits of the array beside
the number of the exchange, as one store of 64 bits, into the mailbox of each other device, and waits until all other
devices have written to its own. So no fence and no barrier is needed: bits and number arrive together. Parts are added
in the order of the devices, so all devices have the same sum.

A mailbox has room for two exchanges. A device starts exchange e + 2 after it has all parts of e + 1, and these were
sent by devices that had done with e. Exchanges therefore must follow one another, each with an input that depends on
the result of the one before.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import call
from pallas_kernels.triton import plgpu

MAX_WORDS = 1 << 18  # words of 32 bits in an exchange
_NUM_WARPS = 4
_THREADS = 32 * _NUM_WARPS
_ADDRESS = "{{ .reg .b64 a; mov.b64 a, {{{low}, {high}}}; mad.wide.u32 a, {place}, {size}, a; "
# The number of a thread's next exchange, kept in its mailbox.
_NEXT = _ADDRESS + "ld.volatile.global.u32 $0, [a]; add.u32 $0, $0, 1; st.volatile.global.u32 [a], $0; }}"
_SEND = _ADDRESS + "st.volatile.global.v2.u32 [a], {{$1, $2}}; mov.u32 $0, 0; }}"
_RECEIVE = (
    _ADDRESS + ".reg .b32 f; .reg .pred p; "
    "again: ld.volatile.global.v2.u32 {{$0, f}}, [a]; setp.ne.u32 p, f, $1; @p bra again; }}"
)


def mailbox_words(num_devices: int) -> int:
    """Return the words of 32 bits of a mailbox: two exchanges of all devices, and a number for each thread."""
    return (2 * num_devices * 2 + 1) * MAX_WORDS


def unsupported(x: Array) -> str | None:
    """Return why the kernel cannot sum x, or None where it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes float32, bfloat16 or float16, got {x.dtype}"
    words = x.size * x.dtype.itemsize // 4
    if x.size * x.dtype.itemsize % 4 or not 0 < words <= MAX_WORDS:
        return f"the kernel takes 4 to {4 * MAX_WORDS} bytes, a multiple of 4, got {x.size * x.dtype.itemsize}"
    return None


def all_reduce(x: Array, links: Array, *, residual: Array | None = None, after: Array | None = None) -> Array:
    """Return the sum of x [...] over devices, added in float32 in the order of the devices, plus a residual [...].

    Args:
        x: [...] float32, bfloat16 or float16.
        links: [2 n + 1] int32: for each of the n devices the low and the high half of the address of its mailbox, which
            is zero before the first exchange; last this device's place among them.
        residual: [...], which is added to the sum.
        after: the result of the exchange before, where neither x nor the residual depends on it.
    """
    size, per_word = x.size, 4 // x.dtype.itemsize
    dtype = x.dtype if residual is None else residual.dtype
    y = call(
        partial(_all_reduce_kernel, num_devices=links.shape[0] // 2, per_word=per_word),
        jax.ShapeDtypeStruct((size,), dtype),
        (x.reshape(size), links, None if residual is None else residual.reshape(size), after),
        grid=(pl.cdiv(size // per_word, _THREADS),),
        num_warps=_NUM_WARPS,
        interpret=False,
    )
    return y.reshape(x.shape)


def _all_reduce_kernel(inputs, out_ref, *, num_devices: int, per_word: int):
    x_ref, links_ref, residual_ref, _ = inputs
    size = x_ref.shape[0]
    # One word a thread: the layout of a tile is then the only one, and no operation is done twice in another.
    word = pl.program_id(0) * _THREADS + jax.lax.iota(jnp.int32, _THREADS)
    places = [word * per_word + i for i in range(per_word)]
    masks = [place < size if size % (_THREADS * per_word) else None for place in places]

    def load(ref) -> list[Array]:
        other = None if masks[0] is None else 0.0
        return [plgpu.load(ref.at[p], mask=m, other=other) for p, m in zip(places, masks, strict=True)]

    def everywhere(i: Array | int) -> Array:
        return jnp.full(_THREADS, plgpu.load(links_ref.at[i]))

    own = plgpu.load(links_ref.at[2 * num_devices])
    others = [jax.lax.rem(own + i, jnp.full_like(own, num_devices)) for i in range(1, num_devices)]
    addresses = [(everywhere(2 * i), everywhere(2 * i + 1)) for i in others]
    own_address = everywhere(2 * own), everywhere(2 * own + 1)
    number = _asm(_NEXT, own_address, word + 4 * num_devices * MAX_WORDS, size=4)
    slot = (number & 1) * (num_devices * MAX_WORDS) + word
    bits = _to_bits(load(x_ref))
    residual = None if residual_ref is None else load(residual_ref)
    sent = [_asm(_SEND, address, slot + own * MAX_WORDS, bits, number) for address in addresses]
    slot += sum(sent)  # zeros that the compiler does not know, so that no thread waits before it has sent
    received = [_asm(_RECEIVE, own_address, slot + i * MAX_WORDS, number) for i in others]
    parts = [bits] * num_devices
    for device in range(num_devices):
        for i, part in zip(others, received, strict=True):
            parts[device] = jnp.where(i == device, part, parts[device])
    values = [[v.astype(jnp.float32) for v in _from_bits(part, x_ref.dtype)] for part in parts]
    totals = [sum((part[i] for part in values[1:]), values[0][i]) for i in range(per_word)]
    if residual is not None:
        totals = [t + r.astype(jnp.float32) for t, r in zip(totals, residual, strict=True)]
    for place, mask, total in zip(places, masks, totals, strict=True):
        plgpu.store(out_ref.at[place], total.astype(out_ref.dtype), mask=mask)


def _asm(code: str, address: tuple[Array, Array], place: Array, *operands: Array, size: int = 8) -> Array:
    """Run instructions at places of a mailbox, counted in elements of `size` bytes; return their results, int32."""
    number = len(operands)
    code = code.format(low=f"${number + 1}", high=f"${number + 2}", place=f"${number + 3}", size=size)
    args = [*operands, *address, place]
    (result,) = plgpu.elementwise_inline_asm(
        code,
        args=args,
        constraints=",".join(["=&r", *["r"] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(place.shape, jnp.int32)],
    )
    return result


def _to_bits(values: list[Array]) -> Array:
    """Return numbers of 16 or 32 bits as one int32, the first in the lowest bits."""
    if len(values) == 1:
        return jax.lax.bitcast_convert_type(values[0], jnp.int32)
    low, high = (jax.lax.bitcast_convert_type(v, jnp.uint16).astype(jnp.uint32) for v in values)
    return jax.lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def _from_bits(bits: Array, dtype) -> list[Array]:
    """Return the numbers that `_to_bits` put together."""
    if jnp.dtype(dtype).itemsize == 4:
        return [jax.lax.bitcast_convert_type(bits, dtype)]
    whole = jax.lax.bitcast_convert_type(bits, jnp.uint32)
    halves = (whole & 0xFFFF).astype(jnp.uint16), (whole >> 16).astype(jnp.uint16)
    return [jax.lax.bitcast_convert_type(half, dtype) for half in halves]
