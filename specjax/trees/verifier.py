"""The parts that all verifiers of trees share: the wrapper that makes a core public, checks, and the output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import distributions
from specjax.distributions import Normalized
from specjax.keys import check_step, of_step
from specjax.trees.arrays import is_node, path_to
from specjax.types import Array, Categorical, DraftTree, Verified
from specjax.validation import check_array, check_categorical, is_integer
from specjax.verifiers.core import CoreVerifier, Draw, KeyDraw, check_static


@dataclass(frozen=True, repr=False)
class TreeVerifier(CoreVerifier):
    """A verifier of trees made of a core, as `trees.from_core` makes them."""

    keywords: ClassVar[tuple[str, ...]] = ("max_depth", "log_probs")
    form: ClassVar[str] = "(draw, tree, target, *, max_depth, log_probs=False)"

    def __call__(
        self,
        keys: Array,
        tree: DraftTree,
        target: Categorical | Array,
        *,
        max_depth: int | None = None,
        log_probs: bool = False,
        axis_name: str | None = None,
        implementation: str | None = None,
        **options: Any,
    ) -> Verified:
        """Accept one path of every tree, from node 0 on, and emit one token after it.

        Args:
            keys: typed threefry keys, one for the step [], one for each row [B], or one for each absolute position
                [B, D+1] (`specjax.keys.positions`), where depth d stands at position d. Keys [] and [B] must be fresh
                in every step.
            tree: N nodes of each row, of which node 0 is the pending token.
            target: a Categorical, or logits [B, N, V]. Row n is the distribution of the token after node n.
            max_depth: D, the greatest depth of a node that may be accepted, static; deeper nodes are not read. None is
                D of keys [B, D+1], and N - 1 for other keys.
            log_probs: whether to fill `Verified.log_probs`, static: under `jax.jit`, bind it with
                `functools.partial` or name it in `static_argnames`.
            axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static. Each device then gives
                its part [..., V / n] of the logits of target and tree, and all get the same result. None is a whole
                vocabulary.
            implementation: "xla", "pallas" or "interpret", which interprets the kernels. None takes the kernels on CUDA
                where they support the case, and XLA elsewhere.
            **options: the options of the core.

        Returns:
            Verified: tokens [B, D+1] int32, num_accepted [B] int32, and path [B, D+1] int32.

        Raises:
            NotImplementedError: the named implementation does not support the case.
            ValueError: an argument has a wrong shape or dtype, the keys are of another kind, an option has a wrong
                value, a static argument is traced, or the verifier does not support an argument.
        """
        check_static(log_probs=log_probs, max_depth=max_depth)
        depth, *operands = _checked(keys, tree, target, max_depth)
        own = {"log_probs": log_probs, "max_depth": depth}
        return self._verify((keys, *operands), own | options, {"axis_name": axis_name}, implementation)

    described = __call__

    def with_draw(self, draw: Draw, draft: Any, target: Categorical, *others: Any, **options: Any) -> Verified:
        options = {"max_depth": draft.tokens.shape[1] - 1} | options
        return self.core(draw, canonical(draft, options["max_depth"]), target, **options)

    def _by_core(self, options: dict[str, Any], keys: Array, draft: Any, target: Categorical, *others: Any) -> Verified:
        keys = of_step(keys, draft.tokens.shape[0], options["max_depth"])
        return self.with_draw(KeyDraw(keys, options.get("axis_name")), draft, target._replace(links=None), **options)

    def _by_kernel(
        self, options: dict[str, Any], keys: Array, draft: Any, target: Categorical, *others: Any, interpret: bool
    ) -> Verified:
        assert self.kernel is not None, "without a kernel there is a reason against it"
        keys = of_step(keys, draft.tokens.shape[0], options["max_depth"])
        target = target._replace(links=None)
        return self.kernel(keys, canonical(draft, options["max_depth"]), target, interpret=interpret, **options)


def from_core(
    core: Callable[..., Verified],
    *,
    kernel: Callable[..., Verified] | None = None,
    check_options: Callable[..., None] | None = None,
) -> TreeVerifier:
    """Make a core `(draw, tree, target, *, max_depth, **options) -> Verified` a public verifier of trees.

    The verifier checks the arguments, gives the core a `canonical` tree and a `KeyDraw`, and handles the arguments that
    all verifiers have. `testing.assert_tree_lossless` runs the same core on every outcome.

    Args:
        core: the rule of the verifier, whose random choices all go through `draw`: `draw.flip(probabilities,
            node=nodes)`, `draw.sample(target, depth=tree.depth)` and `draw.pick(residual)`. It takes the keywords
            `max_depth`, an integer, and `log_probs`, and its output comes from `trees.emit`.
        kernel: a function `(keys [B, D+1], tree, target, *, max_depth, interpret, **options) -> Verified` that runs in
            place of the core on CUDA where it supports the case; None is none.
        check_options: a function `(num_draft_tokens, **options)` that raises ValueError for a wrong value of an option.

    Returns:
        The verifier, as `specjax.verifiers.from_core` makes them of drafts.

    Raises:
        ValueError: the core lacks a keyword.
    """
    return TreeVerifier(core, kernel, check_options)


def _checked(
    keys: Array, tree: DraftTree, target: Categorical | Array, max_depth: int | None
) -> tuple[int, DraftTree, Categorical]:
    """Return D and the arguments of a verifier as records of JAX arrays, after the checks."""
    if not isinstance(tree, DraftTree):
        raise ValueError(f"tree must be a specjax.DraftTree, got {type(tree).__name__}")
    if target is None:
        raise ValueError("target must be a specjax.Categorical or its logits [B, N, V], got None")
    scored = target if isinstance(target, Categorical) else Categorical(jnp.asarray(target))
    arrays: tuple[DraftTree, Categorical] = jax.tree.map(jnp.asarray, (tree, scored))
    check_tree(*arrays)
    batch_size, num_nodes = arrays[0].tokens.shape
    if max_depth is None:
        max_depth = keys.shape[1] - 1 if len(jnp.shape(keys)) == 2 else num_nodes - 1
    if not (is_integer(max_depth) and max_depth >= 0):
        raise ValueError(f"max_depth must be None or an integer >= 0, got {max_depth!r}")
    check_step(keys, batch_size, max_depth)
    return max_depth, *arrays


def check_tree(tree: DraftTree, target: Categorical) -> None:
    """Raise ValueError if a tree or its target has a wrong shape or dtype."""
    check_array("tree.tokens", tree.tokens, "[B, N]", (None, None), jnp.integer)
    shape = batch_size, num_nodes = tree.tokens.shape
    if num_nodes == 0:
        raise ValueError("tree.tokens must have at least node 0, the pending token, got N = 0")
    check_array("tree.parents", tree.parents, "[B, N]", shape, jnp.integer)
    check_array("tree.depth", tree.depth, "[B, N]", shape, jnp.integer)
    if tree.num_nodes is not None:
        check_array("tree.num_nodes", tree.num_nodes, "[B]", (batch_size,), jnp.integer)
    vocab_size = check_categorical("target", target, "N", shape)
    if tree.distribution is not None:
        if not isinstance(tree.distribution, Categorical):
            got = type(tree.distribution).__name__
            raise ValueError(f"tree.distribution must be a Categorical or None, got {got}")
        check_categorical("tree.distribution", tree.distribution, "N", shape, vocab_size)


def canonical(tree: DraftTree, max_depth: int) -> DraftTree:
    """Return a tree in the form that cores get.

    Entries that are no nodes up to `max_depth` have the token -1, the parent 0 and the depth 0, and `exists` tells them
    apart. `num_nodes` is None.
    """
    keep, node = is_node(tree, max_depth), jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(keep, tree.tokens.astype(jnp.int32), -1)
    parents = jnp.where(node == 0, -1, jnp.where(keep, tree.parents.astype(jnp.int32), 0))
    depth = jnp.where(keep & (node > 0), tree.depth.astype(jnp.int32), 0)
    return DraftTree(tokens, parents, depth, None, tree.distribution)


def exists(tree: DraftTree) -> Array:
    """Return which entries [B, N] bool of a `canonical` tree are nodes."""
    return (tree.tokens >= 0) | (jnp.arange(tree.tokens.shape[1], dtype=jnp.int32) == 0)[None]


def emit(
    tree: DraftTree, node: Array, token: Array, normalized: Normalized | None, *, max_depth: int, ancestors: Array
) -> Verified:
    """Return the output of a verifier: the accepted path of each row, then one token, then -1.

    Args:
        tree: a `canonical` tree.
        node: [B] int32, the last accepted node; 0 where no draft is accepted.
        token: [B] int32, the token that follows it.
        normalized: the normalised target, to fill `Verified.log_probs`; None leaves them out.
        max_depth: D.
        ancestors: [B, N, N] bool, as `ancestor_mask` returns them.
    """
    num_accepted = jnp.take_along_axis(tree.depth, node[:, None], axis=1)[:, 0]
    path = path_to(tree.depth, ancestors, node, max_depth)
    place = jnp.arange(max_depth + 1, dtype=jnp.int32)[None]
    drafts = jnp.pad(jnp.take_along_axis(tree.tokens, path[:, 1:], axis=1), ((0, 0), (0, 1)))
    tokens = jnp.where(place < num_accepted[:, None], drafts, -1)
    tokens = jnp.where(place == num_accepted[:, None], token[:, None], tokens).astype(jnp.int32)
    log_prob = None
    if normalized is not None:
        of_path = distributions.take_row(normalized, path)
        log_prob = jnp.where(tokens != -1, distributions.token_log_prob(of_path, tokens), 0).astype(jnp.float32)
    return Verified(tokens, num_accepted, log_prob, path=path)
