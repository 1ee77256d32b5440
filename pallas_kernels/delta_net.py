"""Gated delta nets: a step of a few tokens a sequence after the replay of earlier ones, and the chunks of prompts.

The columns of a state never mix: column j of the state S of a head depends on entry j of the values alone. So a program
holds some columns of one state in registers and takes one token after the other, or one chunk after the other. Each
state is read once and written once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import NUM_MULTIPROCESSORS, Ref, call
from pallas_kernels.triton import plgpu

CHUNK = 64  # tokens of a chunk
_BLOCK = 16  # tokens of a block on the diagonal of a triangular system
_MIN_SIZE, _MAX_SIZE = 16, 256  # entries of keys and values


class Heads(NamedTuple):
    """Static sizes of a layer. Consecutive value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


class Replayed(NamedTuple):
    """The rows that a layer keeps, and how much of them a step uses."""

    state: Any  # [R, H, key size, value size] float32, before the inputs
    window: Any  # [R, W - 1, C], the inputs before them
    inputs: Any  # [R, M, C], of the convolution
    rates: Any  # [R, M, 2, H] float32: beta and g
    count: Any  # [R] int32 in [0, M], the number of inputs that are applied
    from_nothing: Any  # [R] int32, whether they begin the sequence, so that the state before them is zero
    begins: Any  # [R] int32, whether the new tokens begin the sequence


class StepTiling(NamedTuple):
    """How the states are split among programs."""

    columns: int  # columns of a state that a program holds, a power of two
    num_warps: int


class ChunkTiling(NamedTuple):
    """How the columns of states are split among the programs that walk through the chunks."""

    columns: int = 32  # a power of two from 16 on
    num_warps: int = 4


def step_tiling(heads: Heads, num_rows: int) -> StepTiling:
    """Choose a tiling: four warps for each program of a few sequences, and one where programs fill the device."""
    columns = min(32, heads.value_size)
    num_programs = num_rows * heads.num_value_heads * heads.value_size // columns
    return StepTiling(columns, 4 if num_programs < 4 * NUM_MULTIPROCESSORS else 1)


def unsupported(heads: Heads) -> str | None:
    """Return why the kernels cannot run a layer, or None where they can."""
    sizes = heads.key_size, heads.value_size
    if any(size & (size - 1) or not _MIN_SIZE <= size <= _MAX_SIZE for size in sizes):
        return f"the kernels take sizes of keys and values that are powers of two in [16, 256], got {sizes}"
    return None


def step(
    replayed: Replayed,
    inputs: Array,
    rates: Array,
    weight: Array,
    heads: Heads,
    *,
    tiling: StepTiling | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Apply the kept inputs of the last step to each state, and run new tokens without keeping what they change.

    Args:
        replayed: the rows of the layer.
        inputs: [R, T, C] floats, the inputs of the convolution from the new tokens; more numbers of a token after them
            are not read.
        rates: [R, T, 2, H] float32, their beta and g.
        weight: [C, 1, W], of the convolution.
        heads: the sizes of the layer.
        tiling: how the states are split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The outputs of the new tokens [R, T, H, value size] float32, and the states after the kept inputs.
    """
    num_rows, num_tokens = inputs.shape[:2]
    columns, num_warps = tiling or step_tiling(heads, num_rows)
    output = jax.ShapeDtypeStruct((num_rows, num_tokens, heads.num_value_heads, heads.value_size), jnp.float32)
    state = jax.ShapeDtypeStruct(replayed.state.shape, jnp.float32)
    rest = replayed._replace(state=None)
    after, output = call(
        partial(_step_kernel, heads=heads, columns=columns),
        (state, output),
        (rest, inputs, rates, weight, replayed.state),
        grid=(heads.value_size // columns, heads.num_value_heads, num_rows),
        num_warps=num_warps,
        interpret=interpret,
        begun=replayed.state,
    )
    return output, after


def _step_kernel(refs, out, *, heads: Heads, columns: int):
    replayed, inputs_ref, rates_ref, weight_ref, state_ref = refs
    state_out, output_ref = out
    head, row = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * columns + lax.iota(jnp.int32, columns)
    entry = lax.iota(jnp.int32, heads.key_size)
    channels = _channels(heads, head, entry, column)
    taps = weight_ref.shape[2]
    weights = [
        [plgpu.load(weight_ref.at[channel, jnp.int32(0), jnp.int32(i)]).astype(jnp.float32) for i in range(taps)]
        for channel in channels
    ]
    count = plgpu.load(replayed.count.at[row])
    place = row, head, entry[:, None], column[None]

    def unless(flag_ref: Ref, x: Array) -> Array:
        return jnp.where(plgpu.load(flag_ref.at[row]) != 0, 0.0, x)

    state = unless(replayed.from_nothing, plgpu.load(state_ref.at[place]))
    window = [
        tuple(
            unless(
                replayed.from_nothing, plgpu.load(replayed.window.at[row, jnp.int32(i), channel]).astype(jnp.float32)
            )
            for i in range(taps - 1)
        )
        for channel in channels
    ]

    def token(inputs: Ref, rates: Ref, t: Array | int, window, state):
        """Return the query [key size], the window and the state after a token."""
        beta, g = (plgpu.load(rates.at[row, t, jnp.int32(i), head]) for i in range(2))
        new = [plgpu.load(inputs.at[row, t, channel]).astype(jnp.float32) for channel in channels]
        lines = [(*before, x) for before, x in zip(window, new, strict=True)]
        query, key, value = (_convolved(line, own) for line, own in zip(lines, weights, strict=True))
        query, key = _unit(query) * heads.key_size**-0.5, _unit(key)
        state *= jnp.exp(g)
        change = beta * (value - jnp.sum(key[:, None] * state, axis=0))
        return query, [line[1:] for line in lines], state + key[:, None] * change[None]

    def replay(t, carry):
        return token(replayed.inputs, replayed.rates, t, *carry)[1:]

    window, state = lax.fori_loop(0, count, replay, (window, state))
    plgpu.store(state_out.at[place], state)
    window = [tuple(unless(replayed.begins, x) for x in line) for line in window]
    state = unless(replayed.begins, state)

    def new_token(t, carry):
        query, window, state = token(inputs_ref, rates_ref, t, *carry)
        plgpu.store(output_ref.at[row, t, head, column], jnp.sum(query[:, None] * state, axis=0))
        return window, state

    lax.fori_loop(0, inputs_ref.shape[1], new_token, (window, state))


def _channels(heads: Heads, head: Array, entry: Array, column: Array) -> tuple[Array, Array, Array]:
    """Return the channels of the query, the key and some values of a head."""
    of_key = head // (heads.num_value_heads // heads.num_key_heads) * heads.key_size + entry
    width = heads.num_key_heads * heads.key_size
    return of_key, width + of_key, 2 * width + head * heads.value_size + column


def _convolved(line: tuple[Array, ...], weights: list[Array]) -> Array:
    """Return a token's numbers after the convolution and SiLU, from the inputs that the convolution reads."""
    products = [x * weight for x, weight in zip(line, weights, strict=True)]
    x = sum(products[1:], products[0])
    return x / (1 + jnp.exp(-x))


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + 1e-6)


class Tokens(NamedTuple):
    """The arrays that the delta rule takes; a token with beta = 0 and g = 0 leaves a state as it is."""

    query: Any  # [R, T, key heads, key size] float32
    key: Any  # [R, T, key heads, key size] float32
    value: Any  # [R, T, H, value size] float32
    beta: Any  # [R, T, H] float32
    g: Any  # [R, T, H] float32, at most 0


def chunks(
    state: Array, tokens: Tokens, heads: Heads, *, tiling: ChunkTiling | None = None, interpret: bool = False
) -> tuple[Array, Array]:
    """Apply the gated delta rule to T tokens in chunks, as a product of matrices for each chunk.

    One launch solves the triangular systems of all chunks at once. The next walks through the chunks of a sequence.

    Args:
        state: [R, H, key size, value size] float32.
        tokens: the arrays of the tokens.
        heads: the sizes of the layer.
        tiling: how the states are split; None is a tiling that suits an H100.
        interpret: run the kernels interpreted, on any platform.

    Returns:
        The outputs [R, T, H, value size] float32, and the states after the tokens.
    """
    num_rows, num_tokens = tokens.g.shape[:2]
    num_chunks = pl.cdiv(num_tokens, CHUNK)
    columns, num_warps = tiling or ChunkTiling()
    columns = min(columns, heads.value_size)
    square = jax.ShapeDtypeStruct((num_rows, heads.num_value_heads, num_chunks, CHUNK, CHUNK), jnp.float32)
    inverse, scores = call(
        partial(_solve_kernel, heads=heads),
        (square, square),
        tokens._replace(value=None),
        grid=(num_chunks, heads.num_value_heads, num_rows),
        num_warps=4,
        interpret=interpret,
    )
    after, output = call(
        partial(_walk_kernel, heads=heads, columns=columns),
        (jax.ShapeDtypeStruct(state.shape, jnp.float32), jax.ShapeDtypeStruct(tokens.value.shape, jnp.float32)),
        (tokens, inverse, scores, state),
        grid=(heads.value_size // columns, heads.num_value_heads, num_rows),
        num_warps=num_warps,
        interpret=interpret,
        begun=state,
    )
    return output, after


def _solve_kernel(tokens: Tokens, out, *, heads: Heads):
    """Store (I + A)^-1 of a chunk and its masked scores; A is strictly lower triangular.

    The blocks on the diagonal are inverted a row after another. The product of these inverses and the rest of A
    vanishes at the fourth power. Powers of A itself would be sums of large numbers where keys repeat.
    """
    inverse_ref, scores_ref = out
    chunk, head, row = (pl.program_id(axis) for axis in range(3))
    i = lax.iota(jnp.int32, CHUNK)
    query, key = (_load_heads(ref, heads, row, head, chunk) for ref in (tokens.query, tokens.key))
    beta, total = _load_rates(tokens, row, head, chunk)
    decay = jnp.exp(jnp.where(i[:, None] >= i[None], total[:, None] - total[None], -jnp.inf))
    system = jnp.where(i[:, None] > i[None], beta[:, None] * _dot(key, key.T) * decay, 0.0)
    identity = (i[:, None] == i[None]).astype(jnp.float32)
    is_own = i[:, None] // _BLOCK == i[None] // _BLOCK
    own = jnp.where(is_own, system, 0.0)

    def row_of_blocks(k, blocks):
        is_row = is_own & (i % _BLOCK == k)[:, None]
        numbers = jnp.sum(jnp.where(is_row, own, 0.0), axis=0)  # row k of each block, side by side
        return blocks - jnp.where(is_row, jnp.sum(numbers[:, None] * blocks, axis=0)[None], 0.0)

    blocks = lax.fori_loop(1, _BLOCK, row_of_blocks, identity)
    rest = _dot(blocks, system - own)
    inverse = identity - rest
    inverse += _dot(inverse, _dot(rest, rest))
    place = row, head, chunk, i[:, None], i[None]
    plgpu.store(inverse_ref.at[place], _dot(inverse, blocks))
    plgpu.store(scores_ref.at[place], _dot(query, key.T) * decay)


def _walk_kernel(refs, out, *, heads: Heads, columns: int):
    tokens, inverse_ref, scores_ref, state_ref = refs
    state_out, output_ref = out
    head, row = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * columns + lax.iota(jnp.int32, columns)
    entry, i = lax.iota(jnp.int32, heads.key_size), lax.iota(jnp.int32, CHUNK)
    num_tokens = output_ref.shape[1]
    place = row, head, entry[:, None], column[None]

    def visit(chunk, state):
        token = chunk * CHUNK + i
        exists = (token < num_tokens)[:, None]
        values = row, token[:, None], head, column[None]
        beta, total = _load_rates(tokens, row, head, chunk)
        grown, end = jnp.exp(total), jnp.sum(jnp.where(i == CHUNK - 1, total, 0.0))
        key = _load_heads(tokens.key, heads, row, head, chunk)
        value = beta[:, None] * plgpu.load(tokens.value.at[values], mask=exists, other=0.0)
        square = row, head, chunk, i[:, None], i[None]
        change = _dot(plgpu.load(inverse_ref.at[square]), value - (beta * grown)[:, None] * _dot(key, state))
        output = grown[:, None] * _dot(_load_heads(tokens.query, heads, row, head, chunk), state)
        output += _dot(plgpu.load(scores_ref.at[square]), change)
        plgpu.store(output_ref.at[values], output, mask=exists)
        return state * jnp.exp(end) + _dot(key.T, change * jnp.exp(end - total)[:, None])

    state = lax.fori_loop(0, pl.cdiv(num_tokens, CHUNK), visit, plgpu.load(state_ref.at[place]))
    plgpu.store(state_out.at[place], state)


def _load_heads(ref: Ref, heads: Heads, row: Array, head: Array, chunk: Array) -> Array:
    """Return the queries or keys [chunk, key size] of a value head; those after the last token are 0."""
    entry, token = lax.iota(jnp.int32, heads.key_size), chunk * CHUNK + lax.iota(jnp.int32, CHUNK)
    key_head = head // (heads.num_value_heads // heads.num_key_heads)
    exists = (token < ref.shape[1])[:, None]
    return plgpu.load(ref.at[row, token[:, None], key_head, entry[None]], mask=exists, other=0.0)


def _load_rates(tokens: Tokens, row: Array, head: Array, chunk: Array) -> tuple[Array, Array]:
    """Return beta [chunk] of a head, and the sums of g [chunk] up to each token."""
    token = chunk * CHUNK + lax.iota(jnp.int32, CHUNK)
    exists = token < tokens.g.shape[1]
    beta, g = (plgpu.load(ref.at[row, token, head], mask=exists, other=0.0) for ref in (tokens.beta, tokens.g))
    return beta, jnp.cumsum(g)


def _dot(x: Array, y: Array) -> Array:
    return plgpu.dot(x, y)  # in TF32, which has more digits than the activations that the kernels take
