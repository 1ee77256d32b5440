"""The product of one row with a quantised matrix, with the norm before it, and the bias, the gate or the sum after it.

The kernel is bound by memory, and with codes of 4 bits by instructions, too. A program has several outputs at a time:
its threads share the inputs, so that a thread prepares an input once for all of them. The sums of outputs are added up
together once. The codes of a thread's load are of one group of inputs: its scale multiplies their sum.

Integers and e2m1 are multiplied as integers, four at a time: the inputs of a thread's load become integers with a
common exponent, in parts of 8 bits. Inputs of 16 bits become 15 bits and a sign, two parts: they are off by 2^-15 of
the largest one in the load at most, less than its own rounding to 16 bits. Inputs in float32 become 19 to 22 bits,
three parts. An instruction converts two e4m3. Where a thread has few inputs for codes of 4 bits, it keeps them, and the
program goes on to other outputs.

Integers of 8 bits are loaded one step ahead, and so are codes of 4 bits where a thread loads once for an output. Other
codes are not: registers for them would leave room for fewer programs, and as many programs as fit keep more loads in
flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.launch import NUM_MULTIPROCESSORS, call, has_float8
from pallas_kernels.quantized import (
    BIAS,
    MIDDLE,
    RAISE,
    WORDS_IN_BLOCK,
    Quantized,
    as_scale,
    convert_e4m3,
    decode,
    field_of,
    unsupported_weight,
)
from pallas_kernels.quantized_dots import (
    INPUT_BITS,
    MIDDLE_OF_E2M1,
    TABLES,
    as_integers,
    bytes_of,
    dots,
    kept_in_register,
)
from pallas_kernels.triton import plgpu

_WARP = 32  # threads in a warp
_ROOM = {4: 36, 8: 24}  # warps that a multiprocessor runs at once, for programs with so many rows of a matrix e4m3
_LONG = 9  # steps from which a row of e4m3 has too few threads
_MOST_IDLE = 1.15  # loads of all threads, in those that there are
_ROOM_OF_INT8 = 32  # warps that a multiprocessor runs at once, for programs with four rows of integers of 8 bits
_MOST_OF_INT8 = 20  # warps that are enough for it, for programs with eight rows
_FEW_STEPS = 3  # the fewest loads of a thread for a row of them, where it loads ahead
_KEPT_INPUTS = 96  # the most that a thread keeps


class RowTiling(NamedTuple):
    """How the matrix is split among programs and threads."""

    outputs: int  # outputs of a program, a power of two
    num_warps: int  # warps of a program, which share the inputs
    # The most programs, whose threads keep their inputs where a program has several groups of outputs; None is a
    # program for each group.
    num_programs: int | None = None

    def num_programs_of(self, num_outputs: int, num_products: int = 1) -> int:
        """Return the number of programs of each of some products with so many outputs."""
        num_groups = pl.cdiv(num_outputs, self.outputs)
        return num_groups if self.num_programs is None else min(num_groups, pl.cdiv(self.num_programs, num_products))


@dataclass(frozen=True)
class _Gated:
    """The function activation(gate) * up of two halves of the products."""

    activation: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.activation(gate) * up


class _Sums(NamedTuple):
    """Sums of each thread so far."""

    outputs: list[Array]  # [outputs, lanes] of each half of the matrix
    squares: Array  # [1, lanes] of the inputs
    inputs: Array  # [1, lanes]


class _Codes(NamedTuple):
    """Codes of each thread in a step, and the numbers of their groups, of each half of the matrix."""

    words: list[Array]  # [outputs, lanes, 4]
    groups: list[tuple[Array | None, ...]]  # scale, zero and minimum [outputs, lanes] of groups of some inputs


class _Inputs(NamedTuple):
    """Inputs of each thread in a step, as codes multiply them."""

    numbers: list[Any]  # [1, lanes, 4] of each place; for dots of integers, of each four places of each part
    unit: Array | None  # [1, lanes], factor from a sum of products of integers to a sum of products of inputs
    added: Array | int  # int32 [1, lanes], the sum that codes of 0 with their middle would give
    total: Array  # [1, lanes], the sum of the inputs, as codes multiply them
    squares: Array  # [1, lanes], the sum of their squares before the norm


def unsupported(x: Array, weight: Quantized) -> str | None:
    """Return why the kernel cannot multiply x [..., K] by a weight [N, K], or None where it can."""
    if x.size != x.shape[-1]:
        return f"the kernel takes one row, got shape {x.shape}"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the kernel takes float32, bfloat16 or float16 rows, got {x.dtype}"
    return unsupported_weight(weight)


def is_worthwhile(x: Array, weight: Quantized) -> bool:
    """Return whether the kernel is faster than XLA, which turns a matrix into floats first: always."""
    return True


def default_tiling(weight: Quantized, num_outputs: int, num_products: int = 1) -> RowTiling:
    """Choose a tiling that reads a row at once where it is short, and whose programs fill the device.

    The same launch may compute the products of `num_products` matrices of this shape.
    """
    loads, num_halves = weight.values.shape[-1] // WORDS_IN_BLOCK, weight.shape[-2] // num_outputs
    share = num_halves * num_products * num_outputs / NUM_MULTIPROCESSORS
    num_warps = pl.next_power_of_2(pl.cdiv(loads, _WARP))
    if weight.bits == 4 and pl.cdiv(loads, _WARP) == 3:  # a fourth warp would have nothing to load
        return RowTiling(4 // num_halves, 1, 12 * NUM_MULTIPROCESSORS)
    if is_converted(weight):
        rows, num_warps = _tiling_of_e4m3(loads, share)
        return RowTiling(rows // num_halves, num_warps)
    if weight.bits == 8:
        rows, num_warps, num_programs = *_tiling_of_int8(loads, num_halves, share), None
    elif weight.code == "int" and loads > 8 * _WARP:  # kept inputs would take registers of half of the programs
        rows, num_warps, num_programs = 8, 4, None
    else:
        num_warps = min(8, num_warps)
        # Threads that load once load ahead, which takes registers of as many codes again.
        rows, num_programs = 4 if loads <= num_warps * _WARP else 8, 16 // num_warps * NUM_MULTIPROCESSORS
        if not can_keep_inputs(weight, num_warps):
            num_programs = None
    outputs = rows // num_halves
    while outputs > 2 and num_products * num_outputs < outputs * 2 * NUM_MULTIPROCESSORS:
        outputs //= 2
    return RowTiling(outputs, num_warps, num_programs)


def _tiling_of_e4m3(loads: int, share: float) -> tuple[int, int]:
    """Return the rows and the warps of programs that a multiprocessor runs at once, with enough to hide their loads.

    Args:
        loads: of a row of the matrix.
        share: rows of the matrices for each multiprocessor.
    """
    rows, num_warps = 4 if share <= _ROOM[4] else 8, 1
    while 2 * num_warps * share <= _ROOM[rows] * rows:
        num_warps *= 2
    if loads >= _LONG * num_warps * _WARP:
        num_warps *= 2
    return rows, _without_idle(num_warps, loads)


def _tiling_of_int8(loads: int, num_halves: int, share: float) -> tuple[int, int]:
    """Return the rows and the warps of programs of integers of 8 bits, whose threads load one step ahead.

    Args:
        loads: of a row of the matrix.
        num_halves: of the matrix, whose rows a program has in pairs.
        share: rows of the matrices for each multiprocessor.
    """
    all_at_once = pl.next_power_of_2(pl.cdiv(loads, _WARP))
    if share * all_at_once <= _ROOM_OF_INT8 * 4 and _without_idle(all_at_once, loads) == all_at_once:
        return 4, all_at_once
    if num_halves == 2 and share > _MOST_OF_INT8 * 4:
        return 4, 1
    num_warps = 1
    while 2 * num_warps * share <= _MOST_OF_INT8 * 8 and loads >= _FEW_STEPS * 2 * num_warps * _WARP:
        num_warps *= 2
    return 8, _without_idle(num_warps, loads)


def _without_idle(num_warps: int, loads: int) -> int:
    """Return the most warps, up to 8, of which few have nothing to load in the last step of a row."""
    while num_warps > 1 and (
        num_warps > 8 or pl.cdiv(loads, num_warps * _WARP) * num_warps * _WARP > _MOST_IDLE * loads
    ):
        num_warps //= 2
    return num_warps


def is_converted(weight: Quantized) -> bool:
    """Return whether an instruction of this machine's GPUs converts the codes."""
    return weight.code == "e4m3" and has_float8()


def can_keep_inputs(weight: Quantized, num_warps: int) -> bool:
    """Return whether the threads of a program have registers for their inputs beside codes."""
    loads = pl.cdiv(weight.values.shape[-1], WORDS_IN_BLOCK * num_warps * _WARP)
    return weight.bits == 4 and loads * WORDS_IN_BLOCK * weight.places <= _KEPT_INPUTS


def _has_dots(weight: Quantized) -> bool:
    """Return whether codes are multiplied as integers."""
    return (weight.code, weight.bits) in INPUT_BITS


def linear(
    x: Array,
    weight: Quantized,
    *,
    norm: tuple[Array, float] | tuple[Array, float, float] | None = None,
    activation: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    tiling: RowTiling | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply a row by each row of a matrix, summing in float32.

    Args:
        x: [K] float32, bfloat16 or float16.
        weight: [N, K].
        norm: scale [K], epsilon and optionally an offset: x is first divided by its root mean square and multiplied by
            the scale, to which the offset is added.
        activation: function that the first half of the products goes through before the second half multiplies it.
        residual: [N], or [N / 2] with an activation: added at the end.
        dtype: of the result; None is the dtype of x.
        tiling: how the matrix is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        [N], or with an activation [N / 2].
    """
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    tiling = tiling or default_tiling(weight, num_outputs)
    num_programs = tiling.num_programs_of(num_outputs)
    return call(
        partial(
            quantized_linear_kernel,
            epsilon=None if norm is None else norm[1],
            offset=0.0 if norm is None else sum(norm[2:]),
            gate=None if activation is None else _Gated(activation),
            is_interleaved=False,
            tile=(tiling.outputs, tiling.num_warps * _WARP),
            num_programs=num_programs,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((num_outputs,), dtype or x.dtype),
        (x, weight, None if norm is None else norm[0], None, residual),
        grid=(num_programs,),
        num_warps=tiling.num_warps,
        interpret=interpret,
    )


def quantized_linear_kernel(
    inputs,
    out_ref,
    *,
    epsilon: float | None,
    offset: float,
    gate: Callable[[Array, Array], Array] | None,
    is_interleaved: bool,
    tile: tuple[int, int],
    num_programs: int,
    interpret: bool,
    program: Array | None = None,
):
    """Store the product of a row with a matrix, as `linear` describes it; inside a kernel.

    The products have a bias and then go through a gate, a function of their two halves. The halves alternate where they
    are interleaved; otherwise one comes after the other. Inside a condition `program` is the program's number, which is
    asked for outside.
    """
    x_ref, weight, norm_ref, bias_ref, residual_ref = inputs
    (size,), (num_outputs,) = x_ref.shape, out_ref.shape
    outputs, lanes = tile
    num_loads = weight.values.shape[1] // WORDS_IN_BLOCK  # of a row, by all threads
    block = WORDS_IN_BLOCK * weight.places  # inputs of a load
    num_steps, num_groups = pl.cdiv(num_loads, lanes), pl.cdiv(num_outputs, outputs)
    halves = (0,) if gate is None else (0, 1)
    lane, word = (jax.lax.iota(jnp.int32, n) for n in (lanes, WORDS_IN_BLOCK))
    is_raised = field_of(weight, interpret) != 1 and not (is_converted(weight) or _has_dots(weight))
    num_parts = 3 if x_ref.dtype == jnp.float32 else 2
    unit = field_of(weight, interpret) / RAISE if is_raised else 1.0  # sums are of numbers without this factor
    all_inputs = weight.group[1] == 0  # whether a row has one scale
    group_refs = weight.scale, weight.zero, weight.minimum
    keeps_inputs = num_programs < num_groups
    # A program that keeps its inputs also asks for outputs after its last ones.
    exists_always = num_outputs % outputs == 0 and not keeps_inputs

    has_tables = weight.code == "e2m1" and not interpret
    tables = [kept_in_register(table, lane)[None, :, None] for table in TABLES if has_tables]

    def outputs_of(group) -> Array:
        return group * outputs + jax.lax.iota(jnp.int32, outputs)

    def row_of(output: Array, half: int) -> Array:
        """Return the rows of the matrix that outputs have in a half of it."""
        return 2 * output + half if is_interleaved else half * num_outputs + output

    def load(ref, *index, exists: Array | None = None) -> Array:
        return plgpu.load(ref.at[index], mask=exists, other=None if exists is None else jnp.zeros((), ref.dtype))

    def load_codes(group, step) -> _Codes:
        """Load the codes that the threads have of a group of outputs in a step."""
        output, at = outputs_of(group)[:, None], step * lanes + lane[None]
        masks = [at < num_loads] if num_loads % lanes else []
        masks += [] if exists_always else [output < num_outputs]
        exists = jnp.broadcast_to(masks[0] & masks[-1], (outputs, lanes)) if masks else None
        column = at[:, :, None] * WORDS_IN_BLOCK + word[None, None]
        of_words = None if exists is None else jnp.broadcast_to(exists[:, :, None], (outputs, lanes, WORDS_IN_BLOCK))
        rows = [row_of(output, half) for half in halves]
        words = [load(weight.values, row[:, :, None], column, exists=of_words) for row in rows]

        def of_group(ref, row: Array) -> Array | None:
            if ref is None or all_inputs:
                return None
            return load(ref, row // weight.group[0], at * block // weight.inputs_of_scale, exists=exists)

        return _Codes(words, [tuple(of_group(ref, row) for ref in group_refs) for row in rows])

    def load_inputs(step) -> list[tuple[Array, Array | None]]:
        """Load the inputs of the threads in a step, and the numbers of the norm that scale them, of each place."""
        found = []
        for place in range(weight.places):
            column = (step * lanes + lane[None, :, None]) * block + place * WORDS_IN_BLOCK + word[None, None]
            exists = column < size if size % (block * lanes) else None
            scale = None if norm_ref is None else load(norm_ref, column, exists=exists)
            found.append((load(x_ref, column, exists=exists), scale))
        return found

    def prepare(inputs: list[tuple[Array, Array | None]]) -> _Inputs:
        """Prepare inputs for the codes."""
        squares, xs = jnp.zeros((1, lanes), jnp.float32), []
        for x, scale in inputs:
            x = x.astype(jnp.float32)
            if scale is not None:
                squares += jnp.sum(x * x, axis=-1)
                x *= scale.astype(jnp.float32) + offset if offset else scale.astype(jnp.float32)
            xs.append(x)
        total = jnp.sum(reduce(jnp.add, xs), axis=-1)
        if not _has_dots(weight):
            return _Inputs([x * RAISE for x in xs] if is_raised else xs, None, 0, total / unit, squares)
        integers, one = as_integers(xs, weight.code, weight.bits, num_parts, interpret)
        one += 0 * total  # NaN where an input is not finite
        if weight.code == "e2m1":  # codes are twice a number
            middle = MIDDLE_OF_E2M1
        elif weight.bits == 8:
            middle = BIAS
        else:
            middle = MIDDLE if weight.zero is None and weight.minimum is None else 0
        ones = jnp.full((1, lanes, WORDS_IN_BLOCK), 0x01010101, jnp.int32)
        count = dots([ones] * len(integers[0]), integers, interpret)
        unit_of_code = one / 2 if weight.code == "e2m1" else one
        return _Inputs(integers, unit_of_code, middle * count, count.astype(jnp.float32) * one, squares)

    def contribution(words: Array, of_group: tuple[Array | None, ...], x: _Inputs) -> Array:
        """Return the sum of each thread for each output, [outputs, lanes], without the scale where a row has one."""
        if x.unit is not None:
            codes = bytes_of(weight.code, weight.bits, words, tables, interpret)
            y = (dots(codes, x.numbers, interpret) - x.added).astype(jnp.float32) * x.unit
        else:
            if is_converted(weight):
                codes = [code.astype(jnp.float32) for code in convert_e4m3(words, interpret)]
            else:
                codes = [decode(weight, words, place, interpret) for place in range(weight.places)]
            y = jnp.sum(sum(code * one for code, one in zip(codes, x.numbers, strict=True)), axis=-1)
        scale, zero, minimum = of_group
        if scale is None:
            return y
        if zero is not None:
            y -= zero.astype(jnp.float32) * x.total
        y *= as_scale(scale)
        return y if minimum is None else y + minimum.astype(jnp.float32) * x.total

    def contributions(codes: _Codes, x: _Inputs) -> list[Array]:
        return [contribution(*one, x) for one in zip(*codes, strict=True)]

    def finish(group, sums: list[Array], factor: Array, total: Array) -> None:
        """Add up the sums [outputs, lanes] of a group of outputs, and store it."""
        output = outputs_of(group)
        exists = output < num_outputs
        rows, y = [row_of(output, half) for half in halves], [jnp.sum(one, axis=-1) for one in sums]
        if all_inputs:

            def of_row(ref, row: Array) -> Array:
                row = row // weight.group[0]
                return load(ref, row, jnp.zeros_like(row), exists=exists)

            for i, row in enumerate(rows):
                if weight.zero is not None:
                    y[i] -= of_row(weight.zero, row).astype(jnp.float32) * total
                y[i] *= as_scale(of_row(weight.scale, row))
                if weight.minimum is not None:
                    y[i] += of_row(weight.minimum, row).astype(jnp.float32) * total
        y = [one * factor for one in y]
        if bias_ref is not None:
            y = [one + load(bias_ref, row, exists=exists).astype(jnp.float32) for one, row in zip(y, rows, strict=True)]
        y = y[0] if gate is None else gate(*y)
        if residual_ref is not None:
            y += load(residual_ref, output, exists=exists).astype(jnp.float32)
        plgpu.store(out_ref.at[output], y.astype(out_ref.dtype), mask=exists)

    def factor_of(squares: Array) -> Array:
        """Return the factor of all outputs."""
        if epsilon is None:
            return jnp.float32(unit)
        return jax.lax.rsqrt(jnp.sum(squares) / size + epsilon) * unit

    program = pl.program_id(0) if program is None else program
    if keeps_inputs:

        def load_group(index) -> list[_Codes]:
            return [load_codes(program + index * num_programs, step) for step in range(num_steps)]

        loads_ahead = num_steps == 1  # there are registers for codes of one load
        first = load_group(0) if loads_ahead else None
        kept = [prepare(load_inputs(step)) for step in range(num_steps)]
        factor = factor_of(reduce(jnp.add, [x.squares for x in kept]))
        total = jnp.sum(reduce(jnp.add, [x.total for x in kept]))

        def add_group(index, codes):
            following = load_group(index + 1) if loads_ahead else None  # in flight in the meantime
            each = [contributions(*one) for one in zip(codes or load_group(index), kept, strict=True)]
            sums = [reduce(jnp.add, one) for one in zip(*each, strict=True)]
            finish(program + index * num_programs, sums, factor, total)
            return following

        jax.lax.fori_loop(0, pl.cdiv(num_groups, num_programs), add_group, first)
        return

    def add(step, codes: _Codes, sums: _Sums) -> _Sums:
        x = prepare(load_inputs(step))
        added = [y + one for y, one in zip(sums.outputs, contributions(codes, x), strict=True)]
        return _Sums(added, sums.squares + x.squares, sums.inputs + x.total)

    def next_step(step, carry):
        codes, sums = carry
        following = load_codes(program, step + 1)  # in flight while this step is summed
        return following, add(step, codes, sums)

    none = jnp.zeros((1, lanes), jnp.float32)
    sums = _Sums([jnp.zeros((outputs, lanes), jnp.float32)] * len(halves), none, none)
    if weight.code == "int" and weight.bits == 8:
        codes = load_codes(program, 0)
        if num_steps > 1:
            codes, sums = jax.lax.fori_loop(0, num_steps - 1, next_step, (codes, sums))
        sums = add(num_steps - 1, codes, sums)
    else:
        sums = jax.lax.fori_loop(0, num_steps, lambda i, sums: add(i, load_codes(program, i), sums), sums)
    finish(program, sums.outputs, factor_of(sums.squares), jnp.sum(sums.inputs))
