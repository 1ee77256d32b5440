"""Calls of a model, whose results are checked against the contract of `Model`, and of its three forms of a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.operations.groups import check_groups
from specjax.operations.pieces import check_pieces
from specjax.parallel import shards
from specjax.types import Memory, Model, ModelInput, ModelOutput, PyTree
from specjax.validation import check_array


def run(model: Model, inputs: ModelInput, memory: PyTree) -> tuple[ModelOutput, PyTree]:
    """Call a model on query tokens.

    Args:
        model: the model whose `apply` is called.
        inputs: the query tokens, [R, T].
        memory: result of `model.init_memory` or of an earlier call. A cache that `model.init_cache` returned is taken,
            too, where the model has no `init_rows`; the call then has all rows of it.

    Returns:
        The output, and the new memory or cache.

    Raises:
        ValueError: the inputs have pages, pieces or groups and the model takes none, or pieces or groups of other
            shapes than `ModelInput` says, or `apply` does not return (ModelOutput, cache), its
            logits are not floating numbers [R, T, V], or its cache has not the structure, dtypes and shapes of the one
            it was given. The error comes when the call is traced.
    """
    check_groups(inputs, model.takes_groups, model.takes_ragged)
    for call in inputs.groups or (inputs,):
        check_pieces(call, model.takes_groups)
    if inputs.pages is not None:
        num_rows = (inputs.tokens if inputs.pieces is None else inputs.pieces).shape[0]
        check_array("inputs.pages", inputs.pages, "[R, P]", (num_rows, None), jnp.integer)
        inputs = inputs._replace(pages=jnp.asarray(inputs.pages, jnp.int32))
    if not isinstance(memory, Memory):
        if inputs.pages is not None and not model.takes_pages:
            raise ValueError(
                f"inputs.pages must be None for a model whose takes_pages is False, got a table {inputs.pages.shape}"
            )
        return _apply(model, inputs, memory)
    if model.init_rows is not None:
        return _apply(model, inputs, memory)
    if model.takes_pages:
        output, pools = _apply(model, inputs, memory.pools)
        return output, Memory(pools, memory.rows)
    part = memory.take(inputs.rows)
    own = ModelInput(inputs.tokens, inputs.positions, inputs.mask, num_tokens=inputs.num_tokens)
    output, rows = _apply(model, own, part.rows)
    return output, memory.put(inputs.rows, Memory(rows=rows))


def _apply(model: Model, inputs: ModelInput, cache: PyTree) -> tuple[ModelOutput, PyTree]:
    result = model.apply(model.params, inputs, cache)
    check_result(model, inputs, cache, result)
    return result


def check_result(model: Model, inputs: ModelInput, cache: PyTree, result: Any) -> None:
    """Raise ValueError unless `result` has the structure, dtypes and shapes that `apply` must return."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], ModelOutput)):
        raise ValueError(
            f"apply must return (ModelOutput, cache), got {_describe(result)}: wrap the logits, "
            "`return ModelOutput(logits), cache`"
        )
    output, new_cache = result
    vocab_size = model.vocab_size
    if model.axis_name is not None:
        vocab_size = shards.part_size(vocab_size, shards.num_shards(model.axis_name))
    shape = (*inputs.tokens.shape, vocab_size)
    check_array("the logits that apply returns", output.logits, "[B, T, V]", shape, jnp.floating)
    if jax.tree.structure(new_cache) != jax.tree.structure(cache):
        raise ValueError(
            f"apply must return a cache of the structure that it was given, {jax.tree.structure(cache)}, got "
            f"{jax.tree.structure(new_cache)}"
        )
    old_leaves, new_leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (cache, new_cache))
    for (path, old), (_, new) in zip(old_leaves, new_leaves, strict=True):
        old, new = (f"{jnp.result_type(leaf)} {jnp.shape(leaf)}" for leaf in (old, new))
        if new != old:
            name = f"cache{jax.tree_util.keystr(path)}"
            raise ValueError(f"apply must return {name} with the dtype and shape that it was given, {old}, got {new}")


def _describe(result: Any) -> str:
    if type(result) is tuple:
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__
