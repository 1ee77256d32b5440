"""The random choices of verifiers: their contract, and how keys make them."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from specjax import distributions
from specjax.distributions import Residual
from specjax.keys import ACCEPT, RESIDUAL, TARGET, at_depth, numbered, stream, uniform
from specjax.types import Array, Categorical


class Draw(Protocol):
    """The random choices of a verifier. `KeyDraw` makes them with keys; `specjax.testing` enumerates them instead.

    Where no token of a row counts, because all logits are -inf or NaN, the draw is -2 - id for some id in range, which
    no draft equals. `from_core` emits the id, and says so by `Verified.is_empty`.

    Every call has fresh noise. Calls are told apart by a number that is counted in Python. A function that JAX
    traces by itself, such as the body of a loop, is counted once however often it runs. There a call needs `index`, an
    integer, possibly traced, that no other call of the method has in the same step; the number of the iteration serves
    if each iteration makes one call.
    """

    def flip(self, probabilities: Array, *, index: Array | int | None = None, node: Array | None = None) -> Array:
        """Flip a coin for every draft: return [B, K] bool, true with the given probabilities [B, K].

        The coins of a tree belong to its nodes `node` [B, K] int32. Every node has one coin in a step, so such a call
        needs no `index` in a loop. The coin of node n is the coin of draft n - 1 of a chain.
        """
        ...

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        """Draw a token [B] int32 for every sequence from its residual."""
        ...

    def sample(self, target: Categorical, *, index: Array | int | None = None, depth: Array | None = None) -> Array:
        """Draw a token [B, T] int32 from every row, with the noise of the row's own position.

        Row t stands at position t of the step, or, in a tree, at position `depth` [B, T] int32: the nodes of one depth
        share their noise.
        """
        ...

    def loop(self, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any, limit: int) -> Any:
        """Repeat `carry = body(carry)` while `goes_on(carry)`, at most `limit` times, and return the last carry."""
        ...


class CallNumbers:
    """The numbers that tell the calls of a draw apart."""

    FIRST_INDEXED = 1 << 16  # calls with an index are numbered from here on, the counted calls from 0 on

    def __init__(self):
        self._trace = get_opaque_trace_state(convention="specjax")
        self._counts: dict[str, int] = {}

    def is_in_traced_function(self) -> bool:
        """Return whether the caller is inside a function that JAX traces by itself, such as the body of a loop."""
        return get_opaque_trace_state(convention="specjax") != self._trace

    def next(self, method: str, index: Array | int | None) -> Array | int:
        """Return the number of a call of `method`, which is 0 for the first call without an index.

        Raises:
            ValueError: the call is in a traced function and has no index.
        """
        if index is not None:
            return index + self.FIRST_INDEXED
        if self.is_in_traced_function():
            raise ValueError(
                f"draw.{method} must have index= inside a loop or another traced function, got none: a call is traced "
                "once however often it runs, and would get the same noise again. Give each call another integer, such "
                "as the iteration"
            )
        number = self._counts.get(method, 0)
        self._counts[method] = number + 1
        return number


class KeyDraw:
    """Random choices that are made with keys [B, K+1]; `axis_name` as in `distributions`."""

    def __init__(self, keys: Array, axis_name: str | None = None):
        self.keys, self._axis_name = keys, axis_name
        self._calls = CallNumbers()

    def flip(self, probabilities: Array, *, index: Array | int | None = None, node: Array | None = None) -> Array:
        keys, drafts = self.keys[:, :1], jnp.arange(probabilities.shape[1], dtype=jnp.int32)[None]
        if node is not None:
            drafts = jnp.maximum(node - 1, 0)
        if node is None or index is not None:
            keys = numbered(keys, self._calls.next("flip", index))
        probabilities = distributions.widen(probabilities)
        uniforms = uniform(stream(keys, ACCEPT, drafts))
        return uniforms.astype(probabilities.dtype) < probabilities

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        keys = numbered(self.keys[:, 0], self._calls.next("pick", index))
        return distributions.pick(residual, uniform(stream(keys, RESIDUAL), (2,)))

    def sample(self, target: Categorical, *, index: Array | int | None = None, depth: Array | None = None) -> Array:
        keys = numbered(self.keys, self._calls.next("sample", index))
        keys = stream(keys, TARGET) if depth is None else at_depth(stream(keys, TARGET), depth)
        return distributions.draw(keys, target, self._axis_name)

    def loop(self, goes_on: Callable[[Any], Array], body: Callable[[Any], Any], carry: Any, limit: int) -> Any:
        return jax.lax.while_loop(goes_on, body, carry)
