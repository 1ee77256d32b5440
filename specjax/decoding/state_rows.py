"""Rows of a decoding state: some of them taken out for a step of their number, and put back after it.

The pools of caches stay where they are. A filler, the row number B, is a row that is not active: nothing is kept of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from specjax.parallel import WHOLE
from specjax.sampling import Sampling
from specjax.types import Array, Proposer
from specjax.validation import check_array, is_traced

if TYPE_CHECKING:
    from specjax.decode import State


def check(rows: Any, batch_size: int) -> Array:
    """Return rows [R] as int32.

    Raises:
        ValueError: they are not integers [R]. Outside jit also: a row is not in [0, B], or stands twice below B.
    """
    check_array("rows", rows, "[R]", (None,), jnp.integer)
    if not is_traced(rows):
        numbers = np.asarray(rows)
        values, counts = np.unique(numbers, return_counts=True)
        if values.size and not 0 <= values[0] <= values[-1] <= batch_size:
            raise ValueError(f"rows must be in [0, B = {batch_size}], where B is no row, got {numbers.tolist()}")
        if (counts[values < batch_size] > 1).any():
            raise ValueError(f"rows must have no row twice, got {numbers.tolist()}")
    rows = jnp.asarray(rows, jnp.int32)
    return jnp.where(rows < 0, batch_size, rows)  # under jit, where a negative number would be another row


def take_temperatures(proposer: Proposer, rows: Array) -> Proposer:
    """Return a proposer with the draft temperatures of some rows, where it has one for each row of the batch."""

    def take(path: tuple, leaf: Any) -> Any:
        is_of_rows = bool(path) and getattr(path[-1], "name", None) == "temperature" and jnp.ndim(leaf) == 1
        return leaf.at[rows].get(mode="clip") if is_of_rows else leaf

    return jax.tree_util.tree_map_with_path(take, proposer)


def take(state: "State", rows: Array) -> "State":
    """Return the state of some rows.

    Args:
        state: a state of B rows.
        rows: [R] int32, no row twice; B is a filler.
    """
    table, batch_size = state.context.pages, state.context.length.shape[0]

    def read(x: Array) -> Array:
        return x.at[rows].get(mode="clip")

    context = jax.tree.map(read, state.context)
    if table is None:
        context = context._replace(pages=rows[:, None])  # of a dense cache, where row b owns page b
    return state._replace(
        context=context._replace(active=context.active & (rows < batch_size)),
        cache=state.cache.take(rows),
        proposer=state.proposer.take(rows),
        sampling=take_sampling(state.sampling, read),
        keys=read(state.keys),
        finished=read(state.finished),
        totals=jax.tree.map(read, state.totals),
        log_probs=jax.tree.map(read, state.log_probs),
    )


def put(state: "State", rows: Array, part: "State") -> "State":
    """Return a state with the rows that `take` has taken out and a step has changed; a step draws no new keys."""

    def write(x: Array, new: Array) -> Array:
        return x.at[rows].set(new, mode="drop")

    context, finished, totals, log_probs = jax.tree.map(write, _changed(state), _changed(part))
    return state._replace(
        context=context._replace(pages=state.context.pages),
        cache=state.cache.put(rows, part.cache),
        proposer=state.proposer.put(rows, part.proposer),
        finished=finished,
        totals=totals,
        log_probs=log_probs,
    )


def _changed(state: "State") -> tuple:
    """Return the parts of a state that a step changes, beside the memories."""
    return state.context._replace(pages=None), state.finished, state.totals, state.log_probs


def take_sampling(sampling: Sampling, read: Callable[[Array], Array]) -> Sampling:
    """Return the parameters with `read` of every array that has a row for each request.

    The tables of grammars and arrays that are bound to logits processors are of all rows.
    """
    guide, processors = sampling.guide, sampling.logits_processors
    taken = jax.tree.map(read, sampling._replace(guide=None, logits_processors=None))
    if guide is not None:
        guide = guide._replace(grammar=read(guide.grammar), initial=read(guide.initial))
    if processors is not None:
        processors = tuple((function, read(uses)) for function, uses in processors)
    return taken._replace(guide=guide, logits_processors=processors)


def specs(state: "State", of_rows: PartitionSpec) -> "State":
    """Return how devices share the arrays of a state: `of_rows` those with a row for each sequence; the rest is whole.

    Grammars, and arrays that are bound to logits processors, serve all rows.
    """
    specs = jax.tree.map(lambda _: of_rows, state)
    guide, processors = specs.sampling.guide, specs.sampling.logits_processors
    if guide is not None:
        guide = guide._replace(token_classes=WHOLE, transitions=WHOLE)
    if processors is not None:
        processors = tuple((jax.tree.map(lambda _: WHOLE, function), rows) for function, rows in processors)
    return specs._replace(sampling=specs.sampling._replace(guide=guide, logits_processors=processors))
