"""Gated delta nets: a step of a few tokens a sequence after the replay of earlier ones, and the chunks of prompts.

The columns of a state never mix: column j of the state S of a head depends on entry j of the values alone. So a program
holds some columns of one state in registers and takes one token after the other, or one chunk after the other. Each
state is read once and written once. The queries, keys and values of a step are computed by a launch before, since many
programs want the same ones.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Ref, call
from pallas_kernels.triton import plgpu

CHUNK = 64  # tokens of a chunk
_BLOCK = 16  # tokens of a block on the diagonal of a triangular system
_MIN_SIZE, _MAX_SIZE = 16, 256  # entries of keys and values
_BLOCK_OF_STEP = 4  # tokens of a step that a program loads at a time


class Heads(NamedTuple):
    """Static sizes of a layer. Consecutive value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int


class Held(NamedTuple):
    """The rows that a layer keeps. The slot of a token is its position modulo the number of slots S."""

    state: Any  # [R, H, key size, value size] float32, before the replayed tokens
    inputs: Any  # [R, S, C] floats, of the convolution
    rates: Any  # [R, S, 2, H] float32: beta and g


class Tokens(NamedTuple):
    """The new tokens of a step, and which of the earlier ones it replays."""

    inputs: Any  # [R, T, C] floats, of the convolution; more numbers of a token after them are not read
    rates: Any  # [R, T, 2, H] floats, from which beta and g are computed
    weight: Any  # [C, 1, W], of the convolution
    decay: Any  # [H] floats, the logarithm of the factor of g
    bias: Any  # [H] floats, added to the second of the rates
    start: Any  # [R] int32, position of the first token that is replayed; 0 is the begin of a sequence
    count: Any  # [R] int32 in [0, M], the number of tokens that are replayed, which the new ones follow


class StepTiling(NamedTuple):
    """How the states are split among programs."""

    columns: int  # columns of a state that a program holds, a power of two
    num_warps: int


class ChunkTiling(NamedTuple):
    """How the columns of states are split among the programs that walk through the chunks."""

    columns: int = 32  # a power of two from 16 on
    num_warps: int = 4


def step_tiling(heads: Heads) -> StepTiling:
    """Choose a tiling with few columns, so that one warp holds them, and its sums need no barrier."""
    return StepTiling(min(16, heads.value_size), 1)


def unsupported(heads: Heads) -> str | None:
    """Return why the kernels cannot run a layer, or None where they can."""
    sizes = heads.key_size, heads.value_size
    if any(size & (size - 1) or not _MIN_SIZE <= size <= _MAX_SIZE for size in sizes):
        return f"the kernels take sizes of keys and values that are powers of two in [16, 256], got {sizes}"
    return None


def step(
    held: Held,
    tokens: Tokens,
    heads: Heads,
    most: int,
    *,
    tiling: StepTiling | None = None,
    interpret: bool = False,
) -> tuple[Array, Held]:
    """Apply the kept inputs of the last step to each state, and run new tokens without keeping how they change it.

    Args:
        held: the rows of the layer.
        tokens: the new tokens.
        heads: the sizes of the layer.
        most: M, the most tokens that are replayed. With W - 1 + M + T slots or more, no slot is both read and written.
        tiling: how the work is split; None chooses it by the sizes.
        interpret: run the kernels interpreted, on any platform.

    Returns:
        The outputs of the new tokens [R, T, H, value size] float32, and the rows with the states after the replayed
        tokens, and with the inputs and rates of the new tokens.
    """
    num_rows, num_tokens = tokens.inputs.shape[:2]
    columns, num_warps = tiling or step_tiling(heads)
    shape = jax.ShapeDtypeStruct
    rings = held.inputs, held.rates
    num_old_blocks = pl.cdiv(most, _BLOCK_OF_STEP)
    first_new = num_old_blocks * _BLOCK_OF_STEP  # place of the first new token among the mixed ones
    (inputs, rates), mixed = call(
        partial(_mix_kernel, heads=heads, num_old_blocks=num_old_blocks),
        (
            jax.tree.map(lambda x: shape(x.shape, x.dtype), rings),
            shape((num_rows, first_new + num_tokens, held.inputs.shape[2]), jnp.float32),
        ),
        (tokens, rings),
        grid=(
            2 * heads.num_key_heads + heads.num_value_heads,
            num_old_blocks + pl.cdiv(num_tokens, _BLOCK_OF_STEP),
            num_rows,
        ),
        num_warps=1,
        interpret=interpret,
        begun=rings,
    )
    state, output = call(
        partial(_step_kernel, heads=heads, columns=columns, first_new=first_new),
        (
            shape(held.state.shape, held.state.dtype),
            shape((num_rows, num_tokens, heads.num_value_heads, heads.value_size), jnp.float32),
        ),
        (tokens.start, tokens.count, mixed, rates, held.state),
        grid=(heads.value_size // columns, heads.num_value_heads, num_rows),
        num_warps=num_warps,
        interpret=interpret,
        begun=held.state,
    )
    return output, Held(state, inputs, rates)


def _mix_kernel(refs, out, *, heads: Heads, num_old_blocks: int):
    """Store the queries, keys or values of a head, of a block of replayed tokens or of new ones, which are kept."""
    new, (held_inputs, _) = refs
    (inputs_out, rates_out), mixed_ref = out
    part, block, row = (pl.program_id(axis) for axis in range(3))
    is_new = block >= num_old_blocks
    num_key_heads, num_tokens = heads.num_key_heads, new.inputs.shape[1]
    num_slots, taps = inputs_out.shape[1], new.weight.shape[2]
    start, count = plgpu.load(new.start.at[row]), plgpu.load(new.count.at[row])
    position = start + count  # of the first new token
    number = jnp.where(is_new, block - num_old_blocks, block) * _BLOCK_OF_STEP  # of the first token of the block
    end = jnp.where(is_new, num_tokens, count)
    of_values, head = part >= 2 * num_key_heads, part - 2 * num_key_heads
    entry = lax.iota(jnp.int32, max(heads.key_size, heads.value_size))
    in_head = jnp.where(of_values, entry < heads.value_size, entry < heads.key_size)
    channel = entry + jnp.where(
        of_values, 2 * num_key_heads * heads.key_size + head * heads.value_size, part * heads.key_size
    )
    owner = jnp.maximum(head, 0)  # of rates

    def load(ref: Ref, *index, exists: Array) -> Array:
        mask = in_head & exists
        return plgpu.load(ref.at[row, *index, channel], mask=mask, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    def slot_of(at: Array) -> Array:
        return lax.rem(jnp.maximum(at, 0), jnp.int32(num_slots))

    def own_input(i: int) -> tuple[Array, Array]:
        """Load the inputs of a new token, given its place in the block, and return whether there is one."""
        own = number + i
        exists = is_new & (own >= 0) & (own < num_tokens)
        return load(new.inputs, jnp.clip(own, 0, num_tokens - 1), exists=exists), exists

    def run(_, carry):
        at = jnp.where(is_new, position, start) + number
        places = range(1 - taps, _BLOCK_OF_STEP)
        olds = [load(held_inputs, slot_of(at + i), exists=(at + i >= 0) & (at + i < position)) for i in places]
        owns = [own_input(i) for i in places]
        line = [old + own for old, (own, _) in zip(olds, owns, strict=True)]
        weights = [
            plgpu.load(new.weight.at[channel, jnp.int32(0), jnp.int32(i)], mask=in_head, other=0.0) for i in range(taps)
        ]
        weights = [weight.astype(jnp.float32) for weight in weights]
        decay, bias = (plgpu.load(ref.at[owner]).astype(jnp.float32) for ref in (new.decay, new.bias))
        clipped = [jnp.clip(number + i, 0, num_tokens - 1) for i in range(_BLOCK_OF_STEP)]
        raw = [[plgpu.load(new.rates.at[row, i, jnp.int32(j), owner]) for j in range(2)] for i in clipped]
        for i in range(_BLOCK_OF_STEP):
            own, exists = owns[i + taps - 1]
            slot = slot_of(at + i)
            plgpu.store(inputs_out.at[row, slot, channel], own.astype(inputs_out.dtype), mask=in_head & exists)
            rates = rates_of(raw[i][0].astype(jnp.float32), raw[i][1].astype(jnp.float32), decay, bias)
            for j, x in enumerate(rates):
                plgpu.store(rates_out.at[row, slot, jnp.int32(j), owner], x, mask=exists & of_values)
            x = line[i] * weights[0]
            for j in range(1, taps):
                x += line[i + j] * weights[j]
            x = jnp.where(in_head, x / (1 + jnp.exp(-x)), 0.0)
            x = jnp.where(of_values, x, _unit(x))
            x = jnp.where(part < num_key_heads, x * heads.key_size**-0.5, x)
            place = mixed_ref.at[row, block * _BLOCK_OF_STEP + i, channel]
            plgpu.store(place, x, mask=in_head & (number + i < end))
        return carry

    lax.fori_loop(0, (number < end).astype(jnp.int32), run, 0)  # nothing where the block has no tokens


def _step_kernel(refs, out, *, heads: Heads, columns: int, first_new: int):
    start_ref, count_ref, mixed_ref, rates_ref, state_ref = refs
    state_out, output_ref = out
    head, row = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * columns + lax.iota(jnp.int32, columns)
    entry = lax.iota(jnp.int32, heads.key_size)
    of_query, of_key, of_value = _channels(heads, head, entry, column)
    start, count = plgpu.load(start_ref.at[row]), plgpu.load(count_ref.at[row])
    num_tokens, num_slots = output_ref.shape[1], rates_ref.shape[1]

    def load(number: Array, at: Array) -> tuple[Array, ...]:
        """Load the key, some values, beta and g of a token, given its number and its position."""
        slot = lax.rem(at, jnp.int32(num_slots))
        rates = (plgpu.load(rates_ref.at[row, slot, jnp.int32(i), head]) for i in range(2))
        return *(plgpu.load(mixed_ref.at[row, number, channel]) for channel in (of_key, of_value)), *rates

    def load_new(index: int) -> tuple[Array, tuple[Array, ...]]:
        """Load the query and the rest of a new token."""
        number = jnp.int32(first_new + index)
        return plgpu.load(mixed_ref.at[row, number, of_query]), load(number, start + count + index)

    def after(token: tuple[Array, ...], state: Array) -> Array:
        key, value, beta, g = token
        state *= jnp.exp(g)
        change = beta * (value - jnp.sum(key[:, None] * state, axis=0))
        return state + key[:, None] * change[None]

    def replay(index, carry):
        """Apply a token, and load the next one meanwhile: an earlier one where there is no other."""
        token, state = carry
        following = jnp.minimum(index + 1, count - 1)
        return load(following, start + following), after(token, state)

    place = row, head, entry[:, None], column[None]
    state = jnp.where(start == 0, 0.0, plgpu.load(state_ref.at[place]))
    tokens = [load_new(index) for index in range(min(_BLOCK_OF_STEP, num_tokens))]  # ahead
    _, state = lax.fori_loop(0, count, replay, (load(count * 0, start), state))
    plgpu.store(state_out.at[place], state)
    for index in range(num_tokens):
        if index + _BLOCK_OF_STEP < num_tokens:
            tokens.append(load_new(index + _BLOCK_OF_STEP))
        query, token = tokens[index]
        state = after(token, state)
        plgpu.store(output_ref.at[row, jnp.int32(index), head, column], jnp.sum(query[:, None] * state, axis=0))


def rates_of(first: Array, second: Array, decay: Array, bias: Array) -> tuple[Array, Array]:
    """Return beta and g of a token and head from its two rates, all float32."""
    return jax.nn.sigmoid(first), -jnp.exp(decay) * jax.nn.softplus(second + bias)


def _channels(heads: Heads, head: Array, entry: Array, column: Array) -> tuple[Array, Array, Array]:
    """Return the channels of the query, the key and some values of a head."""
    of_key = head // (heads.num_value_heads // heads.num_key_heads) * heads.key_size + entry
    width = heads.num_key_heads * heads.key_size
    return of_key, width + of_key, 2 * width + head * heads.value_size + column


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x) + 1e-6)


class Prompt(NamedTuple):
    """The arrays that the delta rule takes; a token with beta = 0 and g = 0 leaves a state as it is."""

    query: Any  # [R, T, key heads, key size] float32
    key: Any  # [R, T, key heads, key size] float32
    value: Any  # [R, T, H, value size] float32
    beta: Any  # [R, T, H] float32
    g: Any  # [R, T, H] float32, at most 0


def chunks(
    state: Array, tokens: Prompt, heads: Heads, *, tiling: ChunkTiling | None = None, interpret: bool = False
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


def _solve_kernel(tokens: Prompt, out, *, heads: Heads):
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


def _load_rates(tokens: Prompt, row: Array, head: Array, chunk: Array) -> tuple[Array, Array]:
    """Return beta [chunk] of a head, and the sums of g [chunk] up to each token."""
    token = chunk * CHUNK + lax.iota(jnp.int32, CHUNK)
    exists = token < tokens.g.shape[1]
    beta, g = (plgpu.load(ref.at[row, token, head], mask=exists, other=0.0) for ref in (tokens.beta, tokens.g))
    return beta, jnp.cumsum(g)


def _dot(x: Array, y: Array) -> Array:
    return plgpu.dot(x, y)  # in TF32, which has more digits than the activations that the kernels take
