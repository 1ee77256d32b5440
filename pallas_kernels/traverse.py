"""Walk of traversal verification through the nodes of a tree, in one launch.

Several programs share the vocabulary of a sequence. Each takes the whole walk, from the first leaf to the node that is
accepted, and keeps the numbers of all nodes. A failed node needs two sums over the rows of its parent: every program
adds up its part of the rows, waits for the parts of the others, and adds all of them in the same order, so that all
programs decide the same.

Programs wait for others of their sequence only, which are no more than run at once on the device and are started one
after the other.
"""

from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import Leaf, Ref, call, num_multiprocessors, runtime_zero
from pallas_kernels.rows import Rows, exp, inverse
from pallas_kernels.rules import NodeState, enter_sibling, note_failure
from pallas_kernels.triton import plgpu

LARGEST_TILE = 4096  # tokens of a row that a program holds at a time


class Nodes(NamedTuple, Generic[Leaf]):
    """The nodes of B trees, in the order in which they are tested. Node 0 is the root."""

    tokens: Leaf  # [B, N] int32
    parents: Leaf  # [B, N] int32, not negative
    order: Leaf  # [B, N] int32: the nodes in post-order, then -1
    next_sibling: Leaf  # [B, N] int32, -1 for the last
    previous_sibling: Leaf  # [B, N] int32, -1 for the first
    head: Leaf  # [B, N] int32: the first node that is entered together with each node
    log_ratio: Leaf  # [B, N] log(target / draft probability) of each token
    log_cap: (
        Leaf  # [B, N]: a node is entered with min(exp(log_cap), a * exp(log_run)), where its head is entered with a
    )
    log_run: Leaf  # [B, N]
    uniforms: Leaf  # [B, N]: a node is accepted where its uniform is below its probability
    one_hot: Leaf  # [B] int32, 1 where drafts have probability 1 and the draft's rows are not read


class Density(NamedTuple, Generic[Leaf]):
    """Rows with their normalizers: log p(v) = (logit - shift) / temperature - log_mass; at temperature 0 the argmax."""

    rows: Rows[Leaf]
    shift: Leaf  # [B, N]
    log_mass: Leaf  # [B, N], finite
    best: Leaf | None  # [B, N] int32 argmax; None where no temperature is 0


class _Walked(NamedTuple, Generic[Leaf]):
    arrivals: Leaf  # [B] int32, counts the programs that arrive, over all failures
    residual: Leaf  # [B, N, G] the sums of the G programs for each failure
    rest: Leaf  # [B, N, G]
    node: Leaf  # [B] int32, the accepted node
    ratio: Leaf  # [B] scale / subtracted of that node


class _Place(NamedTuple):
    """Where one program works."""

    sequence: Array
    part: Array  # of the vocabulary
    num_parts: int


class _Walk(NamedTuple):
    """The state of the walk. The numbers of the nodes are arrays of one lane a node."""

    step: Array  # [] int32, index in the order
    tested: Array  # [] int32, the node whose test failed; -1 at the end of the walk
    node: Array  # [] int32, the accepted node
    states: NodeState


def traverse(
    nodes: Nodes[Array],
    target: Density[Array],
    draft: Density[Array],
    *,
    num_parts: int | None = None,
    num_warps: int = 8,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Return the accepted node [B] of each tree, and the ratio of the factors of its residual [B].

    Args:
        nodes: the trees.
        target: rows that follow the nodes, N of each sequence.
        draft: rows that the children of the nodes were drawn from, N of each sequence.
        num_parts: programs of a sequence; None chooses it. Interpreted, it must be 1, as its programs run in turn.
        num_warps: warps of each program.
        interpret: run the kernel interpreted, on any platform.
    """
    batch_size, num_nodes = nodes.tokens.shape
    vocab_size = target.rows.vocab_size
    if num_parts is None:
        num_parts = 1 if interpret else min(max(num_multiprocessors() // batch_size, 1), pl.cdiv(vocab_size, 1024))
    part_size = pl.cdiv(vocab_size, num_parts)
    tile_size = min(LARGEST_TILE, pl.next_power_of_2(part_size))
    part_size = pl.cdiv(part_size, tile_size) * tile_size if part_size > tile_size else part_size

    def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    sums = array(num_nodes, num_parts)
    arrivals = jnp.zeros_like(nodes.one_hot)
    walked = call(
        partial(_traverse_kernel, part_size=part_size, tile_size=tile_size, num_parts=num_parts, interpret=interpret),
        _Walked(array(dtype=jnp.int32), sums, sums, array(dtype=jnp.int32), array()),
        (nodes, target, draft, arrivals),
        begun=arrivals,
        grid=(batch_size * num_parts,),
        num_warps=num_warps,
        interpret=interpret,
    )
    return walked.node, walked.ratio


def _traverse_kernel(inputs, out: _Walked[Ref], *, part_size: int, tile_size: int, num_parts: int, interpret: bool):
    nodes, target, draft, _ = inputs
    program = pl.program_id(0)
    place = _Place(program // num_parts, program % num_parts, num_parts)
    sequence, num_nodes = place.sequence, nodes.tokens.shape[1]
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_nodes))

    def of_nodes(field: Ref, other: float | int) -> Array:
        return plgpu.load(field.at[sequence, lane], mask=lane < num_nodes, other=other)

    def of_node(field: Ref, node: Array) -> Array:
        return plgpu.load(field.at[sequence, jnp.maximum(node, 0)])

    log_cap, log_run = of_nodes(nodes.log_cap, 0.0), of_nodes(nodes.log_run, 0.0)
    head = of_nodes(nodes.head, -1)
    one_hot = plgpu.load(nodes.one_hot.at[sequence]) > 0

    def pick(field: Array, node: Array) -> Array:
        return jnp.sum(jnp.where(lane == node, field, 0))

    def test(step: Array, node: Array, states: NodeState) -> tuple[Array, Array]:
        """Flip the coin of the next node: return the node if it failed, else -1, and the accepted node."""
        tested = plgpu.load(nodes.order.at[sequence, jnp.minimum(step, num_nodes - 1)])
        tested = jnp.where(step < num_nodes, tested, 0)
        is_accepted = (tested <= 0) | (of_node(nodes.uniforms, tested) < pick(states.accept, tested))
        return jnp.where(is_accepted, -1, tested), jnp.where(is_accepted, jnp.maximum(tested, 0), node)

    def fail(walk: _Walk) -> _Walk:
        child = walk.tested
        parent = of_node(nodes.parents, child)
        own = jax.tree.map(lambda field: pick(field, parent), walk.states)
        scale, subtracted = own.after_failure(one_hot)
        sums = _part_sums(
            nodes, target, draft, place, parent, child, scale, subtracted, one_hot, part_size, tile_size, interpret
        )
        residual, rest = _joined(out, place, walk.step, sums, interpret)
        new = note_failure(own.accept, scale, subtracted, residual, jnp.where(one_hot, 1, rest))
        sibling = of_node(nodes.next_sibling, child)
        log_accept = jnp.log(enter_sibling(new, jnp.exp(of_node(nodes.log_ratio, sibling))))
        states = jax.tree.map(lambda field, value: jnp.where(lane == parent, value, field), walk.states, new)
        accept = jnp.exp(jnp.minimum(log_cap, log_accept + log_run))
        is_entered = (head == sibling) & (sibling >= 0)
        states = states._replace(accept=jnp.where(is_entered, accept, states.accept))
        tested, node = test(walk.step + 1, walk.node, states)
        return _Walk(walk.step + 1, tested, node, states)

    one = jnp.where(lane >= 0, jnp.float32(1), jnp.float32(0))
    states = NodeState(jnp.exp(log_cap), one, 1 - one, one, one)
    zero = runtime_zero(sequence)
    tested, node = test(zero, zero, states)
    walk = jax.lax.while_loop(lambda walk: walk.tested >= 0, fail, _Walk(zero, tested, node, states))

    @pl.when(place.part == 0)
    def _():
        plgpu.store(out.node.at[sequence], walk.node)
        plgpu.store(out.ratio.at[sequence], pick(walk.states.ratio, walk.node))


def _part_sums(
    nodes: Nodes[Ref],
    target: Density[Ref],
    draft: Density[Ref],
    place: _Place,
    parent: Array,
    child: Array,
    scale: Array,
    subtracted: Array,
    one_hot: Array,
    part_size: int,
    tile_size: int,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return the masses of the residual and of the draft in this part, without `child` and the siblings before it."""
    sequence = place.sequence
    first = place.part * part_size

    def probs(density: Density[Ref], ids: Array, where: Array) -> Array:
        rows = density.rows
        temperature = rows.load_temperature(sequence)
        logits = rows.load(rows.locate(sequence, parent), ids, where)
        distance = logits - plgpu.load(density.shift.at[sequence, parent])
        log_mass = plgpu.load(density.log_mass.at[sequence, parent])
        weights = exp(distance, inverse(temperature), log_mass, flush=not interpret)
        if density.best is None:
            return weights
        is_best = (ids == plgpu.load(density.best.at[sequence, parent])) & (logits > -jnp.inf)
        return jnp.where(temperature == 0, jnp.where(is_best, jnp.float32(1), jnp.float32(0)), weights)

    def add(tile: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        index = tile * tile_size + jax.lax.iota(jnp.int32, tile_size)
        ids = first + index

        def exclude(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            sibling, excluded = carry
            token = plgpu.load(nodes.tokens.at[sequence, sibling])
            return plgpu.load(nodes.previous_sibling.at[sequence, sibling]), jnp.where(ids == token, 1, excluded)

        _, excluded = jax.lax.while_loop(lambda carry: carry[0] >= 0, exclude, (child, runtime_zero(ids)))
        is_own = index < part_size
        drafted, wanted = probs(draft, ids, is_own & ~one_hot), probs(target, ids, is_own)
        drafted, wanted = (jnp.where(excluded == 0, x, 0) for x in (drafted, wanted))
        difference = jnp.maximum(scale * wanted - subtracted * drafted, 0)
        return sums[0] + jnp.sum(difference), sums[1] + jnp.sum(drafted)

    zero = runtime_zero(parent).astype(jnp.float32)
    num_tiles = pl.cdiv(part_size, tile_size)
    if num_tiles == 1:
        return add(runtime_zero(parent), (zero, zero))
    return jax.lax.fori_loop(0, num_tiles, add, (zero, zero))


def _joined(
    out: _Walked[Ref], place: _Place, step: Array, sums: tuple[Array, Array], interpret: bool
) -> tuple[Array, Array]:
    """Return the sums of all parts, after all programs of the sequence have stored theirs."""
    sequence, part, num_parts = place
    fields = out.residual, out.rest
    for field, value in zip(fields, sums, strict=True):
        plgpu.store(field.at[sequence, step, part], value)
    if not interpret:
        plgpu.debug_barrier()  # all threads of this program have stored their results
    goal = (step + 1) * num_parts
    zero = runtime_zero(step)
    seen = plgpu.atomic_add(out.arrivals, (sequence,), zero + 1) + 1
    if num_parts > 1:
        jax.lax.while_loop(
            lambda seen: seen < goal, lambda seen: plgpu.atomic_add(out.arrivals, (sequence,), zero), seen
        )
        if not interpret:
            plgpu.debug_barrier()
    lane = jax.lax.iota(jnp.int32, pl.next_power_of_2(num_parts))
    found = (plgpu.load(f.at[sequence, step, lane], mask=lane < num_parts, other=0, volatile=True) for f in fields)
    residual, rest = (jnp.sum(values) for values in found)
    return residual, rest
