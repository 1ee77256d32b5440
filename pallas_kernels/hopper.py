"""The kernel of `quantized_tiles`, by Mosaic GPU.

A group of warps copies tiles of words and of inputs to shared memory, several tiles ahead. Two others turn words into
numbers of 16 bits in their registers, from where the tensor cores take them, while the tensor cores multiply the codes
before. Products are transposed, [outputs, rows], since the tensor cores take the left factor alone from registers.

Pallas has no operation that turns a word into pairs of numbers, so that the module also calls Mosaic GPU below Pallas.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.quantized import Quantized, as_pair, assembly, field_of, offset_of
from pallas_kernels.quantized_inputs import Inputs
from pallas_kernels.quantized_tiles import CODES, Tiling, num_stages

_CHUNK = 64  # codes of a row that are decoded while the tensor cores multiply the codes before
_WARPGROUPS = 2  # that multiply
_REGISTERS = 40  # of a thread that copies
_SWIZZLE = 128  # bytes of a row of a tile in shared memory, the most
_STAGED_BYTES = 32 * 1024  # of results on their way out
_UNIT = 2.0**63  # by which e4m3 with scales of groups are smaller in bfloat16, so that any scale fits
_OF_OUTPUTS, _OF_ROWS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # a number of each output, or row


def has_half(weight: Quantized) -> bool:
    """Return whether codes become float16, exactly: codes of 8 bits whose scale multiplies the sums."""
    return weight.bits == 8 and weight.group[1] == 0


def product(
    inputs: Inputs,
    weight: Quantized,
    tiling: Tiling,
    activation: Callable[[Array], Array] | None,
    dtype: jnp.dtype,
) -> Array:
    """Return the products of rows with a matrix, or the parts of their sums.

    Args:
        inputs: of T rows, a multiple of 8, in `order_of_tiles`; float16 with factors where `has_half` says so, else
            bfloat16.
        weight: [N, K].
        tiling: how the product is split.
        activation: function that the first half of the products goes through before the second half multiplies it.
        dtype: of the result; float32 for parts of sums.

    Returns:
        [T, N], or with an activation [T, N / 2]. Where programs share inputs, [splits, halves, T, N / halves].
    """
    halves, num_rows = 1 if activation is None else 2, inputs.num_rows
    num_outputs, words = weight.shape[0] // halves, CODES // weight.places
    outputs, rows, num_splits = tiling.outputs // halves, tiling.rows, tiling.num_splits
    own = outputs // _WARPGROUPS  # outputs of a half that a group of warps multiplies
    num_tiles = pl.cdiv(weight.values.shape[1], words * num_splits)  # of a program
    is_split, has_groups = num_splits > 1, weight.group[1] != 0
    parts = halves if is_split else 1
    staged_rows = _staged_rows(rows, _WARPGROUPS * parts * own * dtype.itemsize)
    staged_tile = _transforms(dtype.itemsize, own)
    tables = (weight.scale,) if weight.zero is None else (weight.scale, weight.zero)

    def kernel(values, x, factor, tables, out, staged):
        warpgroup, split, at_row, at = map(jax.lax.axis_index, ("warpgroup", "split", "rows", "outputs"))
        first_tile = split * num_tiles

        def own_numbers(table, half: int, column) -> Array:
            first = half * num_outputs + at * outputs + warpgroup * own
            return _load_numbers(table, own, _OF_OUTPUTS, first, column, rows_of_number=weight.group[0])

        def numbers_of(tile) -> list[list[Array]]:
            """Load the scales and zeros of a tile, of each half."""
            if not has_groups:
                return [[]] * halves
            column = jnp.minimum(tile * CODES, weight.shape[1] - 1) // weight.group[1]
            return [[own_numbers(table, half, column) for table in tables] for half in range(halves)]

        def body(index, *refs_and_carry) -> Any:
            *words_of_halves, x_of_tile, (sums, numbers) = refs_and_carry
            following = numbers_of(first_tile + index[0] + 1)
            loaded = [
                plgpu.layout_cast(ref[pl.ds(warpgroup * own, own)], plgpu.Layout.WGMMA) for ref in words_of_halves
            ]
            for chunk in range(CODES // _CHUNK):
                x_of_chunk = x_of_tile.at[:, pl.ds(chunk * _CHUNK, _CHUNK)].transpose((1, 0))
                for total, tile, of_tile in zip(sums, loaded, numbers, strict=True):
                    plgpu.wgmma(total, _decoded(weight, tile, chunk, of_tile), x_of_chunk)
                    # The product before this one has ended, so that its registers are free for the next codes.
                    plgpu.wgmma_wait(1)
            return sums, following

        def finish(totals: list[Array]) -> list[Array]:
            """Return the results of sums [outputs, rows]."""
            if has_groups and field_of(weight, False) != 1:
                totals = [total * _UNIT for total in totals]
            if not has_groups:
                scales = [own_numbers(tables[0], half, 0) for half in range(halves)]
                totals = [x * jax.lax.broadcast_in_dim(s, x.shape, (0,)) for x, s in zip(totals, scales, strict=True)]
            if factor is not None:
                of_rows = _load_numbers(factor, rows, _OF_ROWS, at_row * rows)
                totals = [x * jax.lax.broadcast_in_dim(of_rows, x.shape, (1,)) for x in totals]
            if activation is not None and not is_split:
                totals = [activation(totals[0]) * totals[1]]
            return [x.astype(dtype) for x in totals]

        def store(results: list[Array]) -> None:
            for begin in range(0, rows, staged_rows):
                if begin:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part, result in enumerate(results):
                    _stage(staged.at[warpgroup, part], result[:, begin : begin + staged_rows], staged_tile)
                plgpu.commit_smem()
                for part in range(parts):
                    place = pl.ds(at_row * rows + begin, staged_rows), pl.ds(at * outputs + warpgroup * own, own)
                    target = out.at[(split, part, *place)] if is_split else out.at[place]
                    plgpu.copy_smem_to_gmem(staged.at[warpgroup, part], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def compute(run) -> None:
            def with_sums(*sums):
                run((sums, numbers_of(first_tile)))
                store(finish([total[...] for total in sums]))

            pl.run_scoped(with_sums, *[plgpu.WGMMAAccumulatorRef((own, rows), jnp.float32)] * halves)

        def spec(shape: tuple[int, int], place, itemsize: int) -> plgpu.BlockSpec:
            transforms = _transforms(itemsize, shape[1])
            return plgpu.BlockSpec(shape, lambda i: (place, first_tile + i), transforms=transforms, delay_release=1)

        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(num_tiles,),
            memory_registers=_REGISTERS,
            in_specs=[*[spec((outputs, words), at, 4)] * halves, spec((rows, CODES), at_row, 2)],
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS,
            max_concurrent_steps=num_stages(weight, tiling, _STAGED_BYTES),
            compute_context=compute,
        )(*[values.at[pl.ds(half * num_outputs, num_outputs)] for half in range(halves)], x)

    shape = (num_splits, halves, num_rows, num_outputs) if is_split else (num_rows, num_outputs)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[plgpu.SMEM((_WARPGROUPS, parts, staged_rows, own), dtype, transforms=staged_tile)],
        grid=(num_splits, pl.cdiv(num_rows, rows), pl.cdiv(num_outputs, outputs)),
        grid_names=("split", "rows", "outputs"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(weight.values, inputs.numbers[0], inputs.factor, tables)


def _staged_rows(rows: int, row_bytes: int) -> int:
    """Return how many rows of results are on their way out at a time: a divisor of all, a multiple of 8."""
    return next(n for n in range(rows, 0, -8) if rows % n == 0 and n * row_bytes <= _STAGED_BYTES)


def _transforms(itemsize: int, width: int) -> tuple[Any, ...]:
    """Return how an array [rows, width] lies in shared memory: in tiles of 8 rows whose banks are exchanged."""
    swizzle = min(_SWIZZLE, width * itemsize)  # bytes
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _load_numbers(
    ref: Any, size: int, layout: Any, first: Any, column: Any | None = None, *, rows_of_number: int = 1
) -> Array:
    """Load numbers as float32 [size].

    Args:
        ref: to [numbers] or [numbers, columns].
        size: how many rows want a number.
        layout: of the result.
        first: of the rows. Those after the last number get the last one.
        column: of a table.
        rows_of_number: how many rows share a number.
    """
    places = [jnp.asarray(x, jnp.int32) for x in (first, column) if x is not None]
    is_unsigned = jnp.dtype(ref.dtype).kind == "u"

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(places)),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout),
    )
    def load(_: Any, table: Any, *places: Any) -> Any:
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        first, *column = (arith.index_cast(index, x.registers.flat[0]) for x in places)
        last = table.type.shape[0] * rows_of_number - 1

        def number(_, place):
            row = arith.minui(arith.addi(first, place[0]), arith.constant(index, last))
            if rows_of_number > 1:
                row = arith.divui(row, arith.constant(index, rows_of_number))
            x = memref.load(table, [row, *column])
            if x.type == f32:
                return x
            if isinstance(x.type, ir.IntegerType):
                return (arith.uitofp if is_unsigned else arith.sitofp)(f32, x)
            return arith.extf(f32, x)

        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        empty = mgpu.FragmentedArray.splat(zero, (size,), layout=layout.to_mgpu())
        return empty.foreach(number, create_array=True)

    return load(ref, *places)


def _decoded(weight: Quantized, words: Array, chunk: int, numbers: list[Array]) -> Array:
    """Return the numbers of a chunk of words, in `order_of_tiles`.

    Args:
        weight: of which the words are.
        words: [outputs, words of a tile].
        chunk: which codes of the tile.
        numbers: the scale and the zero of each output, if it has any for the tile.

    Returns:
        [outputs, codes of a chunk] bfloat16, or float16.
    """
    places, half = weight.places, weight.places // 2
    size = _CHUNK // places  # words of a chunk
    dtype = jnp.float16 if has_half(weight) else jnp.bfloat16

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[_OF_OUTPUTS] * len(numbers)),
        return_type=plgpu.ShapeDtypeStruct((words.shape[0], _CHUNK), dtype, layout=plgpu.Layout.WGMMA),
    )
    def decode(_: Any, words: Any, *numbers: Any) -> Any:
        pair = ir.VectorType.get((2,), (ir.F16Type if has_half(weight) else ir.BF16Type).get())
        # By 64 outputs, 8 words, and the two outputs of a thread; a thread has two words side by side.
        registers = words.registers[:, chunk * size // 8 : (chunk + 1) * size // 8]
        found = np.empty((registers.shape[0], registers.shape[1] * places, *registers.shape[2:]), object)
        of_outputs = [x.registers.reshape(registers.shape[0], 2) for x in numbers]
        programs = {
            place: list(_programs(weight, [_element(x[place], 0) for x in of_outputs]))
            for place in np.ndindex(registers.shape[0], 2)
        }
        for at, register in np.ndenumerate(registers):
            for second in range(2):
                word = _element(register, second)
                for i, (text, operands) in enumerate(programs[at[0], at[4]]):
                    number = _assembled(text, word, *operands)
                    column = at[1] * places + second * half + i
                    found[(at[0], column, *at[2:])] = llvm.bitcast(pair, number)
        return mgpu.FragmentedArray(_registers=found, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return decode(words, *numbers)


def _programs(weight: Quantized, numbers: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the PTX that turns each pair of codes of a word into numbers, and its operands after the word.

    Args:
        weight: of which the word is.
        numbers: the scale and the zero of the output, float32 registers, if it has any for the tile.
    """
    if has_half(weight):
        yield from ((_half_assembly(weight.code, i), []) for i in range(2))
        return
    field, offset = field_of(weight, False), offset_of(weight) if weight.bits == 4 else 0.0
    zero = as_pair(-offset) if offset else None
    scales = [] if field == 1 else [as_pair(field)]
    operands = []
    if numbers:
        scale, *zeros = numbers
        scaled = f"mul.rn.f32 t, $1, {_float(1.0 if field == 1 else field / _UNIT)};"
        if zeros:
            operands.append(_assembled(_pair_assembly(f"sub.rn.f32 t, {_float(-offset)}, $1;"), zeros[0]))
            zero = np.zeros(())  # not a number that is known
        scales = [np.zeros(())]
        operands.append(_assembled(_pair_assembly(scaled), scale))
        if weight.scale.dtype != jnp.bfloat16:
            lower = "cvt.rn.bf16x2.f32 p, t, t; shl.b32 p, p, 16; mov.b32 u, p; sub.rn.f32 t, t, u;"
            operands.append(_assembled(_pair_assembly(scaled + lower), scale))
            scales.append(np.zeros(()))
    yield from ((assembly(weight.code, weight.bits, i, zero, scales), operands) for i in range(weight.places // 2))


def _pair_assembly(lines: str) -> str:
    """Return the PTX that computes t from $1, rounds it to bfloat16 and puts it into both halves of $0."""
    return f"{{ .reg .f32 t, u; .reg .b32 p; {lines} cvt.rn.bf16x2.f32 $0, t, t; }}"


def _half_assembly(code: str, i: int) -> str:
    """Return the PTX that turns the bytes i and i + 2 of the word $1 into two float16."""
    if code == "e4m3":
        lines = f"prmt.b32 t, $1, 0, {0x5520 + 0x11 * i:#x}; cvt.u16.u32 a, t; cvt.rn.f16x2.e4m3x2 $0, a;"
    else:
        # 1024 and the byte, and -1152: words hold 128 more than a code.
        lines = f"prmt.b32 t, $1, 0x64646464, {0x4240 + 0x101 * i:#x}; mov.b32 u, 0xe480e480; add.rn.f16x2 $0, t, u;"
    return f"{{ .reg .b32 t, u; .reg .b16 a; {lines} }}"


def _float(x: float) -> str:
    """Return a float32 as PTX writes it."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


def _assembled(text: str, *operands: Any) -> Any:
    """Return the int32 that PTX computes of registers."""
    kinds = ["f" if isinstance(x.type, ir.F32Type) else "r" for x in operands]
    return llvm.inline_asm(ir.IntegerType.get_signless(32), list(operands), text, ",".join(["=r", *kinds]))


def _element(register: Any, i: int) -> Any:
    """Return a number of a register that may be a vector."""
    if not isinstance(register.type, ir.VectorType):
        return register
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def _stage(ref: Any, x: Array, transforms: tuple[Any, ...]) -> None:
    """Store x [outputs, rows] in shared memory as [rows, outputs], so that the threads of a warp meet all banks."""
    itemsize = x.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WGMMA))
    def store(_: Any, *operands: Any) -> Any:
        target, x = operands
        index = ir.IndexType.get()
        constant, add = partial(arith.constant, index), arith.addi
        width = target.type.shape[3]  # outputs of a tile
        in_unit = 16 // itemsize  # outputs that stay together where banks are exchanged
        thread = arith.remui(gpu.thread_id(gpu.Dimension.x), constant(128))
        warp, lane = arith.divui(thread, constant(32)), arith.remui(thread, constant(32))
        of_eight, of_four = arith.divui(lane, constant(4)), arith.remui(lane, constant(4))
        for at, register in np.ndenumerate(x.registers):
            for second in range(2):
                # The register holds output 64 at[0] + 16 warp + 8 at[4] + of_eight of two rows, 8 at[1] + 2 of_four.
                output = add(add(arith.muli(warp, constant(16)), constant(8 * at[4])), of_eight)
                row = add(arith.muli(of_four, constant(2)), constant(second))
                tile = add(arith.divui(output, constant(width)), constant(64 * at[0] // width))
                unit = arith.divui(arith.remui(output, constant(width)), constant(in_unit))
                unit = arith.xori(unit, row)
                column = add(arith.muli(unit, constant(in_unit)), arith.remui(output, constant(in_unit)))
                memref.store(_element(register, second), target, [constant(at[1]), tile, row, column])

    store(ref, x)
