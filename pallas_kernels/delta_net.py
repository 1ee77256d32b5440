"""Gated delta nets: a step of a few tokens a sequence after the replay of earlier ones, and the chunks of prompts.

The columns of a state never mix: column j of the state S of a head depends on entry j of the values alone. So a program
holds some columns of one state in registers and takes one block of tokens after the other, or one chunk after the
other. Each state is read once and written once. A launch before a step computes its queries, keys and values, and their
products, since many programs want the same ones. A replayed token adds its key times a vector that the step before has
computed; the sums over keys that a new token needs are of the state before its block, so that none waits for another.
"""

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Ref, call, runtime_zero
from pallas_kernels.triton import plgpu

CHUNK = 64  # tokens of a chunk
_BLOCK = 16  # tokens of a block on the diagonal of a triangular system
_MIN_SIZE, _MAX_SIZE = 16, 256  # entries of keys and values
_BLOCK_OF_STEP = 4  # tokens of a step that a program takes at a time
_MANY_STATES = 1024  # of all rows, from which on a program takes some rows of a state after the others


class Heads(NamedTuple):
    """Static sizes of a layer. Consecutive value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    beta_factor: float = 1.0  # on the sigmoid that beta is


class Held(NamedTuple):
    """The rows that a layer keeps. The slot of a token is its position modulo the number of slots.

    Token t changes the state S to exp(g) S + k u^T, where k is its key and u its change, beta (v - exp(g) S^T k).
    """

    state: Any  # [R, H, key size, value size] float32, before the replayed tokens
    inputs: Any  # [R, I, C] floats, of the convolution
    keys: Any  # [R, S, key heads, key size] float32
    changes: Any  # [R, S, H, value size] float32
    decays: Any  # [R, S, H] float32, g


class Tokens(NamedTuple):
    """The new tokens of a step, and which of the earlier ones it replays."""

    inputs: Any  # [R, T, C] floats, of the convolution; more numbers of a token after them are not read
    rates: Any  # [R, T, 2, H] floats, from which beta and g are computed
    weight: Any  # [C, 1, W], of the convolution
    decay: Any  # [H] floats, the logarithm of the factor of g
    bias: Any  # [H] floats, added to the second of the rates
    start: Any  # [R] int32, position of the first token that is replayed; 0 is the begin of a sequence
    count: Any  # [R] int32, the number of tokens that are replayed, which the new ones follow


class _Mixed(NamedTuple):
    """The new tokens after the convolution; keys and decays lie among the rows that a layer keeps."""

    query: Any  # [R, T, key heads, key size] float32
    value: Any  # [R, T, H, value size] float32
    beta: Any  # [R, T, H] float32
    products: Any  # [R, key heads, 2, T, b] float32: queries, and keys, times the keys of the block up to the own one


class _New(NamedTuple):
    """A new token, as a program of a step holds it."""

    value: Array  # [columns]
    g: Array
    beta: Array
    by_query: list[Array]  # products of the query and the keys of its block, up to the own one
    by_key: list[Array]  # of the key and the keys before it


class StepTiling(NamedTuple):
    """How the states are split among programs, and in time."""

    columns: int  # columns of a state that a program holds, a power of two
    num_warps: int
    entries: int  # rows of them that it holds at a time, a power of two; all where a step has more than one block


class ChunkTiling(NamedTuple):
    """How the columns of states are split among the programs that walk through the chunks."""

    columns: int = 32  # a power of two from 16 on
    num_warps: int = 4


def step_tiling(heads: Heads, num_rows: int, num_tokens: int) -> StepTiling:
    """Choose a tiling for an H100.

    Few states are cut into few columns, which two warps hold. Where states are many, a warp takes more columns, some
    rows after the others, and loads the next rows meanwhile.
    """
    if num_tokens <= _BLOCK_OF_STEP and num_rows * heads.num_value_heads >= _MANY_STATES:
        return StepTiling(min(64, heads.value_size), 1, 8)
    return StepTiling(min(16, heads.value_size), 2, heads.key_size)


def unsupported(heads: Heads) -> str | None:
    """Return why the kernels cannot run a layer, or None where they can."""
    sizes = heads.key_size, heads.value_size
    if any(size & (size - 1) or not _MIN_SIZE <= size <= _MAX_SIZE for size in sizes):
        return f"the kernels take sizes of keys and values that are powers of two in [16, 256], got {sizes}"
    return None


def step(
    held: Held, tokens: Tokens, heads: Heads, *, tiling: StepTiling | None = None, interpret: bool = False
) -> tuple[Array, Held]:
    """Apply the kept tokens of the last step to each state, and run new tokens, whose changes are kept beside it.

    Args:
        held: the rows of the layer. W - 1 + T slots of inputs are enough, and S slots for T and the most of `count`, so
            that no slot is both read and written; S is a power of two.
        tokens: the new tokens.
        heads: the sizes of the layer.
        tiling: how the work is split; None chooses it by the sizes.
        interpret: run the kernels interpreted, on any platform.

    Returns:
        The outputs of the new tokens [R, T, H, value size] float32, and the rows with the states after the replayed
        tokens, and with the inputs, keys, changes and decays of the new tokens.
    """
    num_rows, num_tokens = tokens.inputs.shape[:2]
    tiling = tiling or step_tiling(heads, num_rows, num_tokens)
    if num_tokens > _BLOCK_OF_STEP and tiling.entries < heads.key_size:
        raise ValueError(f"tiling.entries must be {heads.key_size} for more than {_BLOCK_OF_STEP} tokens, got {tiling}")
    number = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_keys = heads.num_key_heads, heads.key_size
    of_values = heads.num_value_heads, heads.value_size

    def like(x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    rings = held.inputs, held.keys, held.decays
    (inputs, keys, decays), mixed = call(
        partial(_mix_kernel, heads=heads),
        (
            jax.tree.map(like, rings),
            _Mixed(
                number((num_rows, num_tokens, *of_keys)),
                number((num_rows, num_tokens, *of_values)),
                number((num_rows, num_tokens, heads.num_value_heads)),
                number((num_rows, heads.num_key_heads, 2, num_tokens, _BLOCK_OF_STEP)),
            ),
        ),
        (tokens, rings),
        grid=(heads.num_key_heads + heads.num_value_heads, pl.cdiv(num_tokens, _BLOCK_OF_STEP), num_rows),
        num_warps=1,
        interpret=interpret,
        begun=rings,
    )
    begun = held.changes, held.state
    (changes, state), output = call(
        partial(_step_kernel, heads=heads, tiling=tiling),
        (jax.tree.map(like, begun), number((num_rows, num_tokens, *of_values))),
        (tokens.start, tokens.count, mixed, keys, decays, begun),
        grid=(heads.value_size // tiling.columns, heads.num_value_heads, num_rows),
        num_warps=tiling.num_warps,
        interpret=interpret,
        begun=begun,
    )
    return output, Held(state, inputs, keys, changes, decays)


def _slot(ref: Ref, position: Array) -> Array:
    """Return the slot of a position, and slot 0 for a negative one, which nobody reads."""
    return lax.rem(jnp.maximum(position, 0), jnp.int32(ref.shape[1]))


def _mix_kernel(refs, out, *, heads: Heads):
    """Store queries and keys, or values and rates, of a head and a block of new tokens, and keep the inputs."""
    new, (held_inputs, *_) = refs
    (inputs_out, keys_out, decays_out), mixed = out
    part, block, row = (pl.program_id(axis) for axis in range(3))
    num_key_heads, num_tokens, taps = heads.num_key_heads, new.inputs.shape[1], new.weight.shape[2]
    position = plgpu.load(new.start.at[row]) + plgpu.load(new.count.at[row])  # of the first new token
    first = block * _BLOCK_OF_STEP  # token of the block

    def convolved(channel: Array) -> list[Array]:
        """Return the tokens' numbers after the convolution, and keep its inputs."""

        def load_old(token: Array) -> Array:
            mask = (channel >= 0) & (token < 0) & (position + token >= 0)
            slot = _slot(held_inputs, position + token)
            return plgpu.load(held_inputs.at[row, slot, channel], mask=mask, other=jnp.zeros((), held_inputs.dtype))

        def load_new(token: Array) -> Array:
            mask = (channel >= 0) & (token >= 0) & (token < num_tokens)
            place = new.inputs.at[row, jnp.clip(token, 0, num_tokens - 1), channel]
            return plgpu.load(place, mask=mask, other=jnp.zeros((), new.inputs.dtype))

        weights = [
            plgpu.load(new.weight.at[channel, jnp.int32(0), jnp.int32(i)]).astype(jnp.float32) for i in range(taps)
        ]
        before = [first + i for i in range(1 - taps, 0)]
        line = [load_old(token).astype(jnp.float32) + load_new(token).astype(jnp.float32) for token in before]
        numbers = []
        for i in range(_BLOCK_OF_STEP):
            own = load_new(first + i)
            place = inputs_out.at[row, _slot(inputs_out, position + first + i), channel]
            plgpu.store(place, own.astype(inputs_out.dtype), mask=(channel >= 0) & exists[i])
            line.append(own.astype(jnp.float32))
            x = line[i] * weights[0]
            for j in range(1, taps):
                x += line[i + j] * weights[j]
            numbers.append(x / (1 + jnp.exp(-x)))
        return numbers

    exists = [first + i < num_tokens for i in range(_BLOCK_OF_STEP)]

    @pl.when(part < num_key_heads)
    def store_queries_and_keys():
        entry = lax.iota(jnp.int32, heads.key_size)
        channel = part * heads.key_size + entry
        queries = [_unit(x) * heads.key_size**-0.5 for x in convolved(channel)]
        keys = [_unit(x) for x in convolved(num_key_heads * heads.key_size + channel)]
        for i in range(_BLOCK_OF_STEP):
            mask = (entry >= 0) & exists[i]
            plgpu.store(mixed.query.at[row, first + i, part, entry], queries[i], mask=mask)
            slot = _slot(keys_out, position + first + i)
            plgpu.store(keys_out.at[row, slot, part, entry], keys[i], mask=mask)
            for which, (x, number) in enumerate(((queries[i], i + 1), (keys[i], i))):
                for j in range(number):
                    place = mixed.products.at[row, part, jnp.int32(which), first + i, jnp.int32(j)]
                    plgpu.store(place, jnp.sum(x * keys[j]), mask=exists[i])

    @pl.when(part >= num_key_heads)
    def store_values_and_rates():
        entry, head = lax.iota(jnp.int32, heads.value_size), part - num_key_heads
        channel = 2 * num_key_heads * heads.key_size + head * heads.value_size + entry
        decay, bias = (plgpu.load(ref.at[head]).astype(jnp.float32) for ref in (new.decay, new.bias))
        for i, value in enumerate(convolved(channel)):
            token = jnp.minimum(first + i, num_tokens - 1)
            raw = (plgpu.load(new.rates.at[row, token, jnp.int32(j), head]).astype(jnp.float32) for j in range(2))
            of_beta, of_g = raw
            beta, g = rates_of(of_beta, of_g, decay, bias, heads.beta_factor)
            plgpu.store(mixed.value.at[row, first + i, head, entry], value, mask=(entry >= 0) & exists[i])
            plgpu.store(mixed.beta.at[row, first + i, head], beta, mask=exists[i])
            plgpu.store(decays_out.at[row, _slot(decays_out, position + first + i), head], g, mask=exists[i])


class _Program(NamedTuple):
    """The row and the head of a program of a step, and where their tokens lie."""

    start: Array
    count: Array
    row: Array
    head: Array
    key_head: Array
    mixed: _Mixed
    keys: Ref
    decays: Ref
    changes: Ref  # of the replayed tokens

    def slot(self, token: Array | int) -> Array:
        """Return the slot of a token, counted from the first replayed one."""
        return _slot(self.keys, self.start + token)

    def load_decays(self) -> Array:
        """Load the decays of all replayed tokens, and 0 for others."""
        token = lax.iota(jnp.int32, self.decays.shape[1])
        return plgpu.load(self.decays.at[self.row, self.slot(token), self.head], mask=token < self.count, other=0.0)

    def load_changes(self, block: Array | int, column: Array) -> list[tuple[Array, Array]]:
        """Load changes and decays of a block of replayed tokens, 0 where there is none."""
        loaded = []
        for i in range(_BLOCK_OF_STEP):
            token = block * _BLOCK_OF_STEP + i
            place, exists = (self.row, self.slot(token), self.head), token < self.count
            change = plgpu.load(self.changes.at[*place, column], mask=(column >= 0) & exists, other=0.0)
            loaded.append((change, plgpu.load(self.decays.at[place], mask=exists, other=0.0)))
        return loaded

    def load_old_keys(self, block: Array | int, entry: Array) -> list[Array]:
        """Load entries of the keys of a block of replayed tokens, 0 where there is none."""
        tokens = [block * _BLOCK_OF_STEP + i for i in range(_BLOCK_OF_STEP)]
        return [
            plgpu.load(
                self.keys.at[self.row, self.slot(token), self.key_head, entry],
                mask=(entry >= 0) & (token < self.count),
                other=0.0,
            )
            for token in tokens
        ]

    def load_new_keys(self, tokens: range, entry: Array) -> list[tuple[Array, Array]]:
        """Load entries of the queries and keys of new tokens."""
        return [
            (
                plgpu.load(self.mixed.query.at[self.row, jnp.int32(token), self.key_head, entry]),
                plgpu.load(self.keys.at[self.row, self.slot(self.count + token), self.key_head, entry]),
            )
            for token in tokens
        ]

    def load_new(self, tokens: range, column: Array) -> list[_New]:
        """Load the rest of a block of new tokens."""
        loaded = []
        for token in tokens:
            place = self.row, jnp.int32(token), self.head
            products = [
                [
                    plgpu.load(self.mixed.products.at[self.row, self.key_head, jnp.int32(i), place[1], jnp.int32(j)])
                    for j in range(token - tokens.start + 1 - i)
                ]
                for i in range(2)
            ]
            g = plgpu.load(self.decays.at[self.row, self.slot(self.count + token), self.head])
            value, beta = plgpu.load(self.mixed.value.at[*place, column]), plgpu.load(self.mixed.beta.at[place])
            loaded.append(_New(value, g, beta, *products))
        return loaded


def _decayed(changes: list[tuple[Array, Array]], left: Array) -> tuple[list[Array], Array]:
    """Return changes after the decays of later tokens, and the rest of the sum of the decays from the first on."""
    decayed = []
    for change, g in changes:
        left -= g
        decayed.append(jnp.exp(left) * change)
    return decayed, left


def _add(keys: list[Array], changes: list[Array], state: Array) -> Array:
    """Add changes to rows of a state along entries of their keys."""
    for key, change in zip(keys, changes, strict=True):
        state += key[:, None] * change[None]
    return state


def _sums(keys: list[tuple[Array, Array]], state: Array, before: list[Array]) -> list[Array]:
    """Return queries and keys of tokens times rows of a state, in turn, added to the sums of rows before."""
    own = [jnp.sum(x[:, None] * state, axis=0) for token in keys for x in token]
    return [x + y for x, y in zip(before, own, strict=True)] if before else own


def _results(new: list[_New], sums: list[Array]) -> tuple[list[Array], list[Array]]:
    """Return outputs and changes of a block of tokens, given queries and keys times the state before the block."""
    totals = list(accumulate(token.g for token in new))  # from before the block to after a token
    outputs, changes = [], []
    for i, token in enumerate(new):
        output, known = (jnp.exp(totals[i]) * x for x in sums[2 * i : 2 * i + 2])
        for j in range(i):
            change = jnp.exp(totals[i] - totals[j]) * changes[j]
            output, known = output + token.by_query[j] * change, known + token.by_key[j] * change
        changes.append(token.beta * (token.value - known))
        outputs.append(output + token.by_query[i] * changes[i])
    return outputs, changes


def _step_kernel(refs, out, *, heads: Heads, tiling: StepTiling):
    """Replay and run the tokens of some columns, a part of the state's rows after the other."""
    start_ref, count_ref, mixed, keys_ref, decays_ref, (held_changes, state_ref) = refs
    (changes_out, state_out), output_ref = out
    head, row = pl.program_id(1), pl.program_id(2)
    start, count = plgpu.load(start_ref.at[row]), plgpu.load(count_ref.at[row])
    key_head = head // (heads.num_value_heads // heads.num_key_heads)
    program = _Program(start, count, row, head, key_head, mixed, keys_ref, decays_ref, held_changes)
    num_tokens, num_parts = output_ref.shape[1], heads.key_size // tiling.entries
    column = pl.program_id(0) * tiling.columns + lax.iota(jnp.int32, tiling.columns)

    def entries(part: Array | int) -> Array:
        return part * tiling.entries + lax.iota(jnp.int32, tiling.entries)

    def load_state(part: Array | int) -> Array:
        """Load rows of the state; 0 where the sequence begins, and after the last part."""
        mask = ((entries(part) < heads.key_size) & (start > 0))[:, None] & (column >= 0)[None]
        return plgpu.load(state_ref.at[row, head, entries(part)[:, None], column[None]], mask=mask, other=0.0)

    blocks = [range(i, min(i + _BLOCK_OF_STEP, num_tokens)) for i in range(0, num_tokens, _BLOCK_OF_STEP)]
    following, old, decays = load_state(0), program.load_changes(0, column), program.load_decays()
    total = jnp.sum(decays)
    decay = jnp.exp(total)
    old, rest = _decayed(old, total)
    num_old = lax.div(count + (_BLOCK_OF_STEP - 1), jnp.int32(_BLOCK_OF_STEP))

    def run(part: Array | int, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        """Replay tokens on rows of the state, and add what these rows give to the sums of the first new tokens."""
        state, sums = carry
        entry = entries(part)
        following = load_state(part + 1) if num_parts > 1 else state
        keys, new_keys = program.load_old_keys(0, entry), program.load_new_keys(blocks[0], entry)

        def replay(block: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            state, left = carry
            changes, left = _decayed(program.load_changes(block, column), left)
            return _add(program.load_old_keys(block, entry), changes, state), left

        state, _ = lax.fori_loop(1, num_old, replay, (_add(keys, old, state * decay), rest))
        plgpu.store(state_out.at[row, head, entry[:, None], column[None]], state)
        return following if num_parts > 1 else state, _sums(new_keys, state, sums)

    if num_parts > 1:
        nothing = (runtime_zero(start) + jnp.zeros_like(column)).astype(jnp.float32)
        _, sums = lax.fori_loop(0, num_parts, run, (following, [nothing] * (2 * len(blocks[0]))))
        new = program.load_new(blocks[0], column)
    else:
        new = program.load_new(blocks[0], column)  # before stores, after which no load is moved
        state, sums = run(0, (following, []))
    changes = []
    for block, tokens in enumerate(blocks):
        if block:  # the program holds all rows of the state
            keys = [key for _, key in program.load_new_keys(blocks[block - 1], entries(0))]
            total = new[0].g
            for token in new[1:]:
                total += token.g
            decayed, _ = _decayed([(change, token.g) for change, token in zip(changes, new, strict=True)], total)
            state = _add(keys, decayed, state * jnp.exp(total))
            new = program.load_new(tokens, column)
            sums = _sums(program.load_new_keys(tokens, entries(0)), state, [])
        outputs, changes = _results(new, sums)
        for token, output, change in zip(tokens, outputs, changes, strict=True):
            plgpu.store(output_ref.at[row, jnp.int32(token), head, column], output)
            plgpu.store(changes_out.at[row, program.slot(count + token), head, column], change)


def rates_of(first: Array, second: Array, decay: Array, bias: Array, beta_factor: float) -> tuple[Array, Array]:
    """Return beta and g of a token and head from its two rates, all float32."""
    beta = jax.nn.sigmoid(first)
    return beta if beta_factor == 1 else beta_factor * beta, -jnp.exp(decay) * jax.nn.softplus(second + bias)


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
