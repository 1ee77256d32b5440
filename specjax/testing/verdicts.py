"""Verdicts on verifiers and proposers: pass, or an AssertionError that says where and by how much."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verifiers
from specjax.testing.enumeration import Table, enumerate_law, probabilities, product_law, total_variation
from specjax.testing.statistics import assert_sampled_distribution, describe_worst, sampled_tokens
from specjax.testing.toys import BigramProposer, first_token, sample_draft
from specjax.types import Array, Categorical, Draft, Proposer, Verified


def assert_lossless(
    verifier: Callable[..., Verified],
    *,
    drafter: Callable[[Array, Categorical], tuple[Array, Categorical]] | None = None,
    num_draft_tokens: int = 3,
    num_samples: int = 600_000,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    """Raise AssertionError unless what a verifier emits follows the target's law.

    Exact, by enumeration, where the verifier exposes its core: one step is then enough, because a core cannot touch
    keys. Otherwise, or with a drafter, six tokens over several steps of the public loop are compared by chi-square.

    Args:
        verifier: `(keys, draft, target, **options) -> Verified`.
        drafter: `(keys [B, 1], Categorical [B, 1, V]) -> (tokens [B, 1], the Categorical it claims)`, None draws
            honestly.
        num_draft_tokens: K.
        num_samples: sequences of the statistical check.
        tolerance: in total variation, of the exact check.
        **options: of the verifier.

    Raises:
        AssertionError: says on which case, by how much, and at which tokens the laws differ most.

    Example:
        >>> from specjax import verifiers
        >>> assert_lossless(verifiers.block, num_draft_tokens=2)
    """
    if drafter is None and hasattr(verifier, "core"):
        assert_permutation_equivariant(verifier, **options)
        for name, target, draft, settings in _exact_cases(num_draft_tokens):
            law = enumerate_law(verifier, target, draft, **settings, **options)
            limits = settings.get("target_temperature"), settings.get("min_logit")
            tables = [probabilities(t, *limits) for t in target]
            _report(name, law, product_law(tables), tolerance)
        return
    bound = jax.tree_util.Partial(verifier, **options) if options else verifier
    for name, target, draft in _sampled_cases():
        proposer = BigramProposer(jnp.log(draft), num_draft_tokens, drafter or sample_draft)
        tokens = sampled_tokens(bound, jnp.log(target), proposer, num_samples=num_samples)
        assert_sampled_distribution(name, tokens, target)
    if drafter is None:
        temperature = jnp.where(jnp.arange(num_samples) % 2 == 0, 1.7, 0.5)
        for name, kind in (("ragged rows", {"is_ragged": True}), ("deterministic drafts", {"drafter": first_token})):
            proposer = BigramProposer(jnp.log(draft), num_draft_tokens, **kind)
            tokens = sampled_tokens(bound, jnp.log(target), proposer, num_samples=num_samples, temperature=temperature)
            for start, value in enumerate((1.7, 0.5)):
                law = probabilities(np.log(target), value)
                assert_sampled_distribution(f"{name} at temperature {value} among others", tokens[start::2], law)


def assert_proposer_lossless(
    proposer: Proposer, target: Array | None = None, *, num_samples: int = 200_000, num_tokens: int = 6
) -> None:
    """Raise AssertionError unless decoding with a proposer follows the target's law, under every lossless verifier.

    By chi-square, over several steps of the public loop from token 0. What it finds: drafts that were not drawn from
    the distribution they report, noise that verification meets again, and rows cut after a look at what is cut off.

    Args:
        proposer: of the vocabulary of `target`.
        target: logits [V, V] of a bigram target, V small; None is one of 8 tokens.
        num_samples: sequences.
        num_tokens: of each.

    Raises:
        AssertionError: says under which verifier, by how much, and at which tokens the laws differ most.

    Example:
        >>> from specjax import proposers
        >>> assert_proposer_lossless(proposers.ngram(3), num_samples=10_000)
    """
    if target is None:
        target = jax.random.normal(jax.random.key(0), (8, 8))
    law = probabilities(np.asarray(target))
    for verifier in (verifiers.rejection, verifiers.block, verifiers.match):
        tokens = sampled_tokens(verifier, target, proposer, num_samples=num_samples, num_tokens=num_tokens)
        assert_sampled_distribution(verifier.__name__, tokens, law)


def assert_permutation_equivariant(verifier: Callable[..., Verified], **options: Any) -> None:
    """Raise AssertionError unless permuting the rows of a batch with their keys permutes the output.

    Args:
        verifier: `(keys, draft, target, **options) -> Verified`.
        **options: of the verifier.
    """
    batch_size, num_draft_tokens, vocab_size = 6, 3, 11
    target, draft, order = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(draft, (batch_size, num_draft_tokens, vocab_size))
    tokens = jnp.argmax(logits + jax.random.gumbel(order, logits.shape), axis=-1).astype(jnp.int32)
    num_tokens = jnp.arange(batch_size) % (num_draft_tokens + 1)
    arguments = (
        Draft(tokens, Categorical(logits, jnp.linspace(0.0, 2.0, batch_size)), num_tokens),
        Categorical(
            jax.random.normal(target, (batch_size, num_draft_tokens + 1, vocab_size)),
            jnp.linspace(2.0, 0.0, batch_size),
        ),
    )
    permutation = jax.random.permutation(order, batch_size)
    verify = jax.jit(partial(verifier, **options))
    for shape in ((batch_size,), (batch_size, num_draft_tokens + 1)):
        keys = jax.random.split(jax.random.key(1), shape)
        straight = jax.tree.map(lambda x: x[permutation], verify(keys, *arguments))
        permuted = verify(*jax.tree.map(lambda x: x[permutation], (keys, *arguments)))
        for name, first, second in zip(Verified._fields, straight, permuted, strict=True):
            if first is not None and not bool(jnp.array_equal(first, second)):
                raise AssertionError(
                    f"{name} depends on the order of the batch with keys {shape}: {first} became {second}"
                )


def _exact_cases(num_draft_tokens: int):
    """(name, target levels, draft levels or tokens, settings of enumerate_law)."""
    rng = np.random.default_rng(0)
    size = 3

    def tables(levels: int, zeros: bool = False) -> list[Table]:
        result = [2 * rng.normal(size=(size,) * (level + 1)) for level in range(levels)]
        for table in result if zeros else ():
            hidden = rng.random(table.shape) < 0.4
            hidden[..., 0] &= ~hidden.all(axis=-1)
            table[hidden] = -np.inf
        return result

    target, draft = tables(num_draft_tokens + 1), tables(num_draft_tokens)
    yield "sampled drafts", target, draft, {}
    yield "impossible tokens", tables(num_draft_tokens + 1, True), tables(num_draft_tokens, True), {}
    yield "temperatures", target, draft, {"target_temperature": 0.6, "draft_temperature": 1.4}
    yield "greedy row", target, draft, {"target_temperature": 0.0}
    yield "draft of temperature 0", target, draft, {"draft_temperature": 0.0}
    kept = [[np.where(np.arange(size) == 0, np.maximum(t, 0.5), t) for t in tables] for tables in (target, draft)]
    yield "cut", *kept, {"min_logit": 0.0}
    for num_tokens in range(num_draft_tokens):
        yield f"row with {num_tokens} drafts", target, draft, {"num_tokens": num_tokens}
    yield "deterministic drafts", target, [0] * num_draft_tokens, {}
    if num_draft_tokens >= 2:
        flat = [np.zeros((size,) * (level + 1)) for level in range(num_draft_tokens + 1)]
        target, draft = BLOCK_INSTANCE[0] + flat[3:], BLOCK_INSTANCE[1] + flat[2:-1]
        yield "the instance of block verification", target, draft, {"num_tokens": 2}


def _log(table: list) -> Table:
    with np.errstate(divide="ignore"):
        return np.log(table)


# On this target and draft the usual mistakes of block verification show: levels of conditional logits.
BLOCK_INSTANCE = (
    [
        _log([0.25, 0.5, 0.25]),
        _log([[0.6, 0.4, 0.0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]),
        np.broadcast_to(_log([0.2, 0.3, 0.5]), (3, 3, 3)),
    ],
    [_log([0.5, 0.25, 0.25]), _log([[0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3]])],
)


def _sampled_cases():
    """(name, target, draft): bigram tables [V, V] of probabilities."""
    target = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    close = np.array([0.35, 0.2, 0.15, 0.1, 0.08, 0.05, 0.04, 0.03])
    table, close_table = np.broadcast_to(target, (8, 8)), np.broadcast_to(close, (8, 8))
    yield "8 tokens, a draft far from the target", table, table[:, ::-1]
    yield "8 tokens, a draft close to the target", table, close_table
    yield "2 tokens", np.array([[1, 2], [1, 2]]) / 3, np.array([[2, 1], [2, 1]]) / 3
    rng = np.random.default_rng(1)
    yield "3 tokens, each law after its own", *(probabilities(rng.normal(size=(3, 3))) for _ in range(2))


def _report(name: str, law: np.ndarray, exact: np.ndarray, tolerance: float) -> None:
    distance = total_variation(law, exact)
    if not distance <= tolerance:
        raise AssertionError(
            f"not lossless on {name!r}: total variation {distance:.3g} from the target's law, expected at most "
            f"{tolerance:g}; {describe_worst(law, exact)}"
        )
