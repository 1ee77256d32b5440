"""Gated delta nets: a step of a few tokens a sequence after the replay of earlier ones, and the chunks of prompts.

The columns of a state never mix: column j of the state S of a head depends on entry j of the values alone. So a program
holds some columns of one state in registers and takes one block of tokens after the other, or one chunk after the
other. Each state is read once and written once.

In a block of a step every change of the state is one vector of values, less one product of a vector of keys with the
state before the block. These vectors need no state. So the products of all tokens with the state are independent, where
the rule itself takes one token after the other.
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
    count: Any  # [R] int32 in [0, S - W + 1 - T], the number of tokens that are replayed, which the new ones follow


class StepTiling(NamedTuple):
    """How the states are split among programs, and the tokens over time."""

    columns: int  # columns of a state that a program holds, a power of two
    num_warps: int
    block: int = 4  # tokens of a block


class ChunkTiling(NamedTuple):
    """How the columns of states are split among the programs that walk through the chunks."""

    columns: int = 32  # a power of two from 16 on
    num_warps: int = 4


def step_tiling(heads: Heads, num_tokens: int) -> StepTiling:
    """Choose a tiling with few columns, so that few warps share a sum; blocks in a loop need more registers."""
    return StepTiling(min(16, heads.value_size), 1 if num_tokens <= 4 else 2, min(4, pl.next_power_of_2(num_tokens)))


def unsupported(heads: Heads) -> str | None:
    """Return why the kernels cannot run a layer, or None where they can."""
    sizes = heads.key_size, heads.value_size
    if any(size & (size - 1) or not _MIN_SIZE <= size <= _MAX_SIZE for size in sizes):
        return f"the kernels take sizes of keys and values that are powers of two in [16, 256], got {sizes}"
    return None


def step(
    held: Held, tokens: Tokens, heads: Heads, *, tiling: StepTiling | None = None, interpret: bool = False
) -> tuple[Array, Held]:
    """Apply the kept inputs of the last step to each state, and run new tokens without keeping how they change it.

    Args:
        held: the rows of the layer.
        tokens: the new tokens.
        heads: the sizes of the layer.
        tiling: how the work is split; None chooses it by the sizes.
        interpret: run the kernel interpreted, on any platform.

    Returns:
        The outputs of the new tokens [R, T, H, value size] float32, and the rows with the states after the replayed
        tokens, and with the inputs and rates of the new tokens.
    """
    num_rows, num_tokens = tokens.inputs.shape[:2]
    columns, num_warps, block = tiling or step_tiling(heads, num_tokens)
    output = jax.ShapeDtypeStruct((num_rows, num_tokens, heads.num_value_heads, heads.value_size), jnp.float32)
    after, output = call(
        partial(_step_kernel, heads=heads, columns=columns, block=block),
        (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held), output),
        (tokens, held),
        grid=(heads.value_size // columns, heads.num_value_heads, num_rows),
        num_warps=num_warps,
        interpret=interpret,
        begun=held,
    )
    return output, after


class _Block(NamedTuple):
    """Consecutive tokens of a head: a token adds its key times c - m^T S to the state, which was S before the block."""

    keys: list[Array]  # [key size] of each
    totals: list[Array]  # sums of g up to each
    m: list[Array]  # [key size] of each
    c: list[Array]  # [columns] of each


def _step_kernel(refs, out, *, heads: Heads, columns: int, block: int):
    new, held = refs
    after, output_ref = out
    head, row = pl.program_id(1), pl.program_id(2)
    column = pl.program_id(0) * columns + lax.iota(jnp.int32, columns)
    entry = lax.iota(jnp.int32, heads.key_size)
    of_query, of_key, of_value = _channels(heads, head, entry, column)
    num_tokens, num_slots, taps = new.inputs.shape[1], held.inputs.shape[1], new.weight.shape[2]
    start, count = plgpu.load(new.start.at[row]), plgpu.load(new.count.at[row])
    position = start + count  # of the first new token
    # Programs of other columns and heads have the same rates, queries and keys: one of them stores these.
    is_first = pl.program_id(0) == 0
    is_first_of_key = is_first & (lax.rem(head, jnp.int32(heads.num_value_heads // heads.num_key_heads)) == 0)
    decay, bias = (plgpu.load(ref.at[head]).astype(jnp.float32) for ref in (new.decay, new.bias))

    def load(ref: Ref, *index, exists: Array) -> Array:
        mask = jnp.broadcast_to(exists, jnp.broadcast_shapes(*(jnp.shape(i) for i in index)))
        return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype)).astype(jnp.float32)

    def store(ref: Ref, *index, value: Array, exists: Array) -> None:
        plgpu.store(ref.at[index], value.astype(ref.dtype), mask=jnp.broadcast_to(exists, value.shape))

    def slot_of(at: Array) -> Array:
        return lax.rem(jnp.maximum(at, 0), jnp.int32(num_slots))

    def weights_of(channel: Array) -> list[Array]:
        return [plgpu.load(new.weight.at[channel, jnp.int32(0), jnp.int32(i)]).astype(jnp.float32) for i in range(taps)]

    def earlier(channel: Array, at: Array) -> Array:
        """Load inputs of a token at a position before the new ones; 0 before the sequence."""
        return load(held.inputs, row, slot_of(at), channel, exists=(at >= 0) & (at < position))

    def convolved(line: list[Array], weights: list[Array]) -> list[Array]:
        """Return the numbers of the tokens of a block after the convolution and SiLU."""
        sums = [
            sum((x * w for x, w in zip(line[i + 1 :], weights[1:], strict=False)), line[i] * weights[0])
            for i in range(block)
        ]
        return [x / (1 + jnp.exp(-x)) for x in sums]

    key_weights, value_weights = weights_of(of_key), weights_of(of_value)

    def replay(index, state):
        first = start + index * block
        lines = ([earlier(c, first + i) for i in range(1 - taps, block)] for c in (of_key, of_value))
        keys, values = (convolved(x, w) for x, w in zip(lines, (key_weights, value_weights), strict=True))
        ats = [first + i for i in range(block)]
        beta, g = (
            [load(held.rates, row, slot_of(at), jnp.int32(i), head, exists=at < position) for at in ats]
            for i in range(2)
        )
        return _state_after(_block(keys, values, beta, g), state)

    place = row, head, entry[:, None], column[None]
    state = jnp.where(start == 0, 0.0, plgpu.load(held.state.at[place]))
    state = lax.fori_loop(0, pl.cdiv(count, block), replay, state)
    plgpu.store(after.state.at[place], state)
    query_weights = weights_of(of_query)

    def line_of(channel: Array, first: Array, is_owner: Array | bool) -> list[Array]:
        """Load the inputs that the tokens of a block read, and keep these of the tokens."""
        line = []
        for i in range(1 - taps, block):
            number = first + i  # of the new tokens
            is_new = (number >= 0) & (number < num_tokens)
            x = load(new.inputs, row, jnp.clip(number, 0, num_tokens - 1), channel, exists=is_new)
            if i >= 0:
                store(after.inputs, row, slot_of(position + number), channel, value=x, exists=is_new & is_owner)
            else:
                x += jnp.where(number < 0, earlier(channel, position + number), 0.0)
            line.append(x)
        return line

    def new_block(first) -> tuple[list[Array], _Block]:
        """Return the queries and the rest of a block of new tokens, which are kept."""
        queries = convolved(line_of(of_query, first, is_first_of_key), query_weights)
        keys = convolved(line_of(of_key, first, is_first_of_key), key_weights)
        values = convolved(line_of(of_value, first, True), value_weights)
        betas, gs = [], []
        for i in range(block):
            number, exists = first + i, first + i < num_tokens
            raw = (load(new.rates, row, number, jnp.int32(j), head, exists=exists) for j in range(2))
            for j, (found, x) in enumerate(zip((betas, gs), rates_of(*raw, decay, bias), strict=True)):
                x = jnp.where(exists, x, 0.0)
                store(
                    after.rates, row, slot_of(position + number), jnp.int32(j), head, value=x, exists=exists & is_first
                )
                found.append(x)
        return [_unit(x) * heads.key_size**-0.5 for x in queries], _block(keys, values, betas, gs)

    def run(first, state) -> _Block:
        """Store the outputs of a block of new tokens, and return it."""
        queries, found = new_block(first)
        for i, output in enumerate(_outputs(queries, found, state)):
            exists = jnp.broadcast_to(first + i < num_tokens, output.shape)
            plgpu.store(output_ref.at[row, first + i, head, column], output, mask=exists)
        return found

    def next_block(index, state):
        return _state_after(run(index * block, state), state)

    num_blocks = pl.cdiv(num_tokens, block)
    if num_blocks > 1:
        state = lax.fori_loop(0, num_blocks - 1, next_block, state)
    run(count * 0 + (num_blocks - 1) * block, state)


def rates_of(first: Array, second: Array, decay: Array, bias: Array) -> tuple[Array, Array]:
    """Return beta and g of a token and head from its two rates, all float32."""
    return jax.nn.sigmoid(first), -jnp.exp(decay) * jax.nn.softplus(second + bias)


def _block(keys: list[Array], values: list[Array], beta: list[Array], g: list[Array]) -> _Block:
    """Return a block, given keys that are not yet units; a token with beta = 0 and g = 0 changes nothing."""
    keys, totals = [_unit(key) for key in keys], [g[0]]
    for one in g[1:]:
        totals.append(totals[-1] + one)
    ms: list[Array] = []
    cs: list[Array] = []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        m, c = beta[i] * jnp.exp(totals[i]) * key, beta[i] * value
        for j in range(i):
            factor = beta[i] * jnp.exp(totals[i] - totals[j]) * jnp.sum(key * keys[j])
            m, c = m - factor * ms[j], c - factor * cs[j]
        ms.append(m)
        cs.append(c)
    return _Block(keys, totals, ms, cs)


def _state_after(block: _Block, state: Array) -> Array:
    """Return the state [key size, columns] after the tokens of a block."""
    changes = [c - jnp.sum(m[:, None] * state, axis=0) for m, c in zip(block.m, block.c, strict=True)]
    state = state * jnp.exp(block.totals[-1])
    for key, total, change in zip(block.keys, block.totals, changes, strict=True):
        state += (key * jnp.exp(block.totals[-1] - total))[:, None] * change[None]
    return state


def _outputs(queries: list[Array], block: _Block, state: Array) -> list[Array]:
    """Return the outputs [columns] of the tokens of a block, given the state before it."""
    outputs = []
    for i, query in enumerate(queries):
        z, output = jnp.exp(block.totals[i]) * query, jnp.zeros_like(block.c[0])
        for j in range(i + 1):
            factor = jnp.exp(block.totals[i] - block.totals[j]) * jnp.sum(query * block.keys[j])
            z, output = z - factor * block.m[j], output + factor * block.c[j]
        outputs.append(output + jnp.sum(z[:, None] * state, axis=0))
    return outputs


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
