"""Feed the prompts of a batch before its first step, also where rows share a prompt or devices share the rows."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.log_probs import LogProbs
from specjax.pages import Pages, copy_to_rows, first_rows, one_page_a_row
from specjax.parallel import WHOLE, OnMesh, on_devices
from specjax.prompts import Fed, feed
from specjax.types import NO_PAGE, Array, Context, Memory, Model, Proposer, PyTree


def feed_prompts(
    model: Model,
    proposer: Proposer,
    prompt: Context,
    *,
    rows: Array | None,
    pages: Pages | None,
    max_length: int,
    chunk_size: int | None,
    log_probs: LogProbs | None,
) -> tuple[Fed, Array | None]:
    """Feed N prompts; return the memories and log-probabilities of B rows, and their page table.

    A prompt is fed to the first of its rows. The other rows get copies of pages that they do not share.
    """
    num_prompts, width = prompt.tokens.shape
    batch_size = num_prompts if rows is None else rows.shape[0]
    table = None if pages is None else jnp.array(pages.table, jnp.int32)
    num_pages, page_size = (batch_size, max_length) if pages is None else pages.pool
    cache = model.init_memory(batch_size, num_pages, page_size)
    proposer_state = proposer.init_memory(batch_size, num_pages, page_size)
    if rows is None:
        shares_rows = isinstance(model.apply, OnMesh) and model.apply.batch_axis is not None
        fed = (_feed_on_mesh if shares_rows else feed)(
            model,
            proposer,
            prompt._replace(pages=table),
            cache,
            proposer_state,
            chunk_size=chunk_size,
            log_probs=log_probs,
        )
        return fed, table
    pages_of_rows = one_page_a_row(batch_size) if table is None else table
    first = first_rows(rows, num_prompts)
    fed = feed(
        model,
        proposer,
        prompt._replace(pages=pages_of_rows.at[first].get(mode="fill", fill_value=NO_PAGE)),
        cache,
        proposer_state,
        rows=first,
        chunk_size=chunk_size,
        log_probs=log_probs,
    )
    source, num_copied = first[rows], -(-width // page_size)
    fed = Fed(
        cache=copy_to_rows(fed.cache, pages_of_rows, source, num_copied),
        proposer=copy_to_rows(fed.proposer, pages_of_rows, source, num_copied),
        log_probs=jax.tree.map(lambda x: x[source], fed.log_probs),
    )
    return fed, table


def _feed_on_mesh(
    model: Model,
    proposer: Proposer,
    prompt: Context,
    cache: Memory,
    proposer_state: Memory,
    *,
    chunk_size: int | None,
    log_probs: LogProbs | None,
) -> Fed:
    """Feed prompts on the devices that have their rows, as `feed` does."""

    def one_device(model: Model, cache: PyTree, operands: Any) -> tuple[PyTree, Any]:
        proposer, (prompt, proposer_state, log_probs) = operands
        fed = feed(model, proposer, prompt, cache, proposer_state, chunk_size=chunk_size, log_probs=log_probs)
        return fed.cache, (fed.proposer, fed.log_probs)

    of_rows = model.apply.of_rows
    cache, (proposer_state, log_probs) = on_devices(
        model,
        one_device,
        cache,
        operands=(proposer, (prompt, proposer_state, log_probs)),
        specs=(WHOLE, of_rows),
        out=of_rows,
    )
    return Fed(cache, proposer_state, log_probs)
