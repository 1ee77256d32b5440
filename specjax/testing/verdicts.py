"""Verdicts on verifiers and proposers, which raise AssertionError and say where they fail and by how much."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax import verifiers
from specjax.testing import cases
from specjax.testing.cases import Case
from specjax.testing.enumeration import (
    Table,
    completed_law,
    enumerate_outcomes,
    probabilities,
    product_law,
    row_probabilities,
    total_variation,
)
from specjax.testing.statistics import assert_sampled_distribution, describe_worst, sampled_tokens
from specjax.testing.toys import BigramProposer, first_token, sample_draft
from specjax.types import Array, Categorical, Draft, Proposer, Verified
from specjax.validation import is_integer


def assert_lossless(
    verifier: Callable[..., Verified],
    *,
    drafter: Callable[[Array, Categorical], tuple[Array, Categorical]] | None = None,
    num_draft_tokens: int = 3,
    num_samples: int = 600_000,
    tolerance: float = 1e-6,
    **options: Any,
) -> None:
    """Raise AssertionError unless the tokens that a verifier emits follow the target's distribution.

    A verifier that `from_core` made is checked exactly, by enumeration of all outcomes of one step; one step is enough
    because a core cannot touch keys. The cases have 0, 1 and K drafts: sampled and deterministic drafts, temperatures,
    greedy rows, ties, cuts, impossible tokens, rows with fewer drafts and garbage after them, and bonus tokens. The
    check also covers that a row does not depend on the rest of its batch, that ids are in range, and that
    log-probabilities are the target's.

    Any other verifier, and any verifier with a drafter, is checked by chi-square tests of six tokens that several steps
    of `specjax.generate` decode.

    Args:
        verifier: `(keys, draft, target, **options) -> Verified`.
        drafter: `(keys [B, 1], Categorical [B, 1, V]) -> (tokens [B, 1], Categorical)`, which draws each draft and
            reports its distribution; None draws from the distribution that it reports.
        num_draft_tokens: K, the largest number of drafts.
        num_samples: the number of sequences of the chi-square tests.
        tolerance: the largest total variation that passes the exact check.
        **options: the verifier's options.

    Raises:
        AssertionError: the verifier fails. The message names the case, the distance and the tokens at which the
            distributions differ most.
        ValueError: `num_draft_tokens` is not an integer >= 0.

    Example:
        >>> from specjax import verifiers
        >>> assert_lossless(verifiers.rejection, num_draft_tokens=2)
    """
    if not (is_integer(num_draft_tokens) and num_draft_tokens >= 0):
        raise ValueError(f"num_draft_tokens must be an integer >= 0, got {num_draft_tokens!r}")
    if drafter is None and hasattr(verifier, "core"):
        for count in dict.fromkeys((num_draft_tokens, 1, 0)):
            for batch in cases.batches(count):
                _assert_exact(verifier, batch, tolerance, options)
            _assert_bonus_tokens(verifier, count, tolerance, options)
        assert_rows_independent(verifier, **options)
        return
    bound = jax.tree_util.Partial(verifier, **options) if options else verifier
    for name, target, draft in _sampled_cases():
        proposer = BigramProposer(jnp.log(draft), num_draft_tokens, drafter or sample_draft)
        tokens = sampled_tokens(bound, jnp.log(target), proposer, num_samples=num_samples)
        assert_sampled_distribution(name, tokens, target)
    if drafter is None:
        assert_rows_independent(verifier, **options)
        _assert_mixed_batches(bound, num_draft_tokens, num_samples)


def _assert_mixed_batches(verifier: Callable[..., Verified], num_draft_tokens: int, num_samples: int) -> None:
    """Raise AssertionError unless batches of two temperatures follow the target, with fewer or deterministic drafts."""
    *_, (_, target, draft) = _sampled_cases()
    temperature = jnp.where(jnp.arange(num_samples) % 2 == 0, 1.7, 0.5)
    proposers = {
        "ragged rows": BigramProposer(jnp.log(draft), num_draft_tokens, is_ragged=True),
        "deterministic drafts": BigramProposer(jnp.log(draft), num_draft_tokens, first_token),
    }
    for name, proposer in proposers.items():
        tokens = sampled_tokens(verifier, jnp.log(target), proposer, num_samples=num_samples, temperature=temperature)
        for start, value in enumerate((1.7, 0.5)):
            expected = probabilities(np.log(target), value)
            assert_sampled_distribution(f"{name} at temperature {value} among others", tokens[start::2], expected)


def assert_proposer_lossless(
    proposer: Proposer, target: Array | None = None, *, num_samples: int = 200_000, num_tokens: int = 6
) -> None:
    """Raise AssertionError unless decoding with a proposer follows the target, under every lossless verifier.

    The tokens that several steps of `specjax.generate` decode are compared with the target by chi-square tests. These
    find drafts that were not drawn from the distribution that the proposer reports, noise that verification uses again,
    and a number of drafts that depends on the dropped drafts.

    Args:
        proposer: a proposer with the vocabulary of `target`.
        target: logits [V, V] of a bigram target, V small; None is a target with 8 tokens.
        num_samples: the number of sequences.
        num_tokens: the number of tokens of each sequence.

    Raises:
        AssertionError: the output does not follow the target. The message names the verifier, the distance and the
            tokens at which the distributions differ most.

    Example:
        >>> from specjax import proposers
        >>> assert_proposer_lossless(proposers.ngram(3), num_samples=10_000)
    """
    if target is None:
        target = jax.random.normal(jax.random.key(0), (8, 8))
    expected = probabilities(np.asarray(target))
    for index, verifier in enumerate(_LOSSLESS):
        one = Partial(_lossless, index=index)
        tokens = sampled_tokens(one, target, proposer, num_samples=num_samples, num_tokens=num_tokens)
        assert_sampled_distribution(verifier.__name__, tokens, expected)


_LOSSLESS = verifiers.rejection, verifiers.block, verifiers.match


def _lossless(keys: Array, draft: Draft, target: Categorical | Array, *, index: Array) -> Verified:
    """Verify by the verifier of a traced index, so that one program decodes with all verifiers."""
    return jax.lax.switch(index, _LOSSLESS, keys, draft, target)


def _sampled_cases():
    """Yield (name, target, draft), where target and draft are bigram tables [V, V] of probabilities."""
    target = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
    close = np.array([0.35, 0.2, 0.15, 0.1, 0.08, 0.05, 0.04, 0.03])
    table, close_table = np.broadcast_to(target, (8, 8)), np.broadcast_to(close, (8, 8))
    yield "8 tokens, a draft far from the target", table, table[:, ::-1]
    yield "8 tokens, a draft close to the target", table, close_table
    yield "2 tokens", np.array([[1, 2], [1, 2]]) / 3, np.array([[2, 1], [2, 1]]) / 3
    rng = np.random.default_rng(1)
    yield "3 tokens, each with its own next distribution", *(probabilities(rng.normal(size=(3, 3))) for _ in range(2))


def _assert_exact(verifier: Callable[..., Verified], batch: list[Case], tolerance: float, options: dict) -> None:
    """Raise AssertionError unless the verifier gives every case of a batch the expected distribution."""
    draft, target = cases.stack(batch)
    given: dict[str, Any] = {"log_probs": True} | options
    verified, weight = enumerate_outcomes(verifier, draft, target, **given)
    tokens, num_tokens, probs = np.asarray(draft.tokens), _num_tokens(draft), row_probabilities(target)
    start = 0
    for case in batch:
        rows = slice(start, start + len(case.weight))
        start = rows.stop
        outputs = slice(rows.start * weight.shape[1], rows.stop * weight.shape[1])
        own = jax.tree.map(lambda x: np.asarray(x)[outputs], verified)  # noqa: B023
        mass = (case.weight[:, None] * weight[rows]).reshape(-1)
        drafted, most, chances = (np.repeat(x[rows], weight.shape[1], axis=0) for x in (tokens, num_tokens, probs))
        _assert_form(case.name, own, drafted, most, mass)
        assert_distribution(case.name, completed_law(own.tokens, mass, case.expected), case.expected, tolerance)
        if own.log_probs is None:
            if options.get("log_probs", True):
                raise AssertionError(f"{case.name!r}: log_probs=True must fill Verified.log_probs, got None")
            continue
        assert_log_probs(case.name, own.tokens, own.log_probs, chances, mass)


def _assert_bonus_tokens(verifier: Callable[..., Verified], count: int, tolerance: float, options: dict) -> None:
    """Raise AssertionError unless given bonus tokens are emitted exactly where all drafts are accepted.

    A verifier may refuse them by a ValueError that names `bonus_tokens`.
    """
    batch = next(batch for batch in cases.batches(count) if len(batch) > 3)
    draft, target = cases.stack(batch)
    size = cases.VOCAB_SIZE
    draft, target = jax.tree.map(lambda x: np.repeat(x, size, axis=0), (draft, target))
    bonus = np.tile(np.arange(size, dtype=np.int32), draft.tokens.shape[0] // size)
    try:
        verified, weight = enumerate_outcomes(verifier, draft, target, bonus_tokens=jnp.asarray(bonus), **options)
    except ValueError as error:
        if "bonus_tokens" in str(error):
            return
        raise
    num_tokens = _num_tokens(draft)
    chance = row_probabilities(target)[np.arange(len(bonus)), num_tokens, bonus]
    start = 0
    for case in batch:
        rows = slice(start, start + len(case.weight) * size)
        start = rows.stop
        outputs = slice(rows.start * weight.shape[1], rows.stop * weight.shape[1])
        own = jax.tree.map(lambda x: np.asarray(x)[outputs], verified)  # noqa: B023
        mass = ((np.repeat(case.weight, size) * chance[rows])[:, None] * weight[rows]).reshape(-1)
        name = f"{case.name}, with bonus tokens"
        assert_distribution(name, completed_law(own.tokens, mass, case.expected), case.expected, tolerance)
        full = (own.num_accepted == np.repeat(num_tokens[rows], weight.shape[1])) & (mass > 0)
        last = own.tokens[np.arange(len(mass)), own.num_accepted]
        if not np.array_equal(last[full], np.repeat(bonus[rows], weight.shape[1])[full]):
            raise AssertionError(f"{name!r}: rows whose drafts are all accepted must end with their bonus token")


def _num_tokens(draft: Draft) -> np.ndarray:
    """Return the number of drafts of each row: those before the first negative id, and at most `num_tokens`."""
    num_tokens = np.cumprod(np.asarray(draft.tokens) >= 0, axis=1).sum(axis=1)
    return num_tokens if draft.num_tokens is None else np.minimum(num_tokens, draft.num_tokens)


def _assert_form(name: str, verified: Verified, drafted: np.ndarray, most: np.ndarray, mass: np.ndarray) -> None:
    """Raise AssertionError unless every possible output holds accepted drafts, one more token, then -1."""
    tokens, count = verified.tokens, verified.num_accepted
    index = np.arange(tokens.shape[1])
    kept = index[:-1] < count[:, None]
    is_right = (
        (count >= 0)
        & (count <= most)
        & np.all((tokens >= 0) == (index <= count[:, None]), axis=1)
        & np.all(tokens < cases.VOCAB_SIZE, axis=1)
        & np.all(~kept | (tokens[:, :-1] == drafted), axis=1)
    )
    wrong = np.flatnonzero(~is_right & ~(mass == 0))
    if wrong.size:
        row = wrong[0]
        raise AssertionError(
            f"{name!r}: tokens must be num_accepted of the {most[row]} drafts {drafted[row].tolist()}, one more "
            f"token in [0, V = {cases.VOCAB_SIZE}), then -1; got {tokens[row].tolist()} with num_accepted {count[row]}"
        )


def assert_distribution(name: str, found: np.ndarray, expected: list[Table], tolerance: float) -> None:
    """Raise AssertionError unless a joint distribution is the target's, whose conditional probabilities are given."""
    exact = product_law(expected)
    distance = total_variation(found, exact)
    if not distance <= tolerance:
        raise AssertionError(
            f"not lossless on {name!r}: total variation {distance:.3g} from the target's distribution, expected at "
            f"most {tolerance:g}; {describe_worst(found, exact)}"
        )


def assert_log_probs(name: str, tokens: Array, log_probs: Array, target: np.ndarray, mass: np.ndarray) -> None:
    """Raise AssertionError unless `log_probs` belong to the tokens, given the probabilities of the target's rows."""
    expected = np.take_along_axis(target, np.clip(tokens, 0, target.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    error = np.abs(np.exp(np.asarray(log_probs)) - expected)
    wrong = np.argwhere((tokens >= 0) & (mass > 0)[:, None] & ~(error < 1e-5))
    if wrong.size:
        row, index = wrong[0]
        raise AssertionError(
            f"{name!r}: log_probs must be those of the target, {np.log(expected[row, index]):.5f} for token {index} of "
            f"{tokens[row].tolist()}, got {log_probs[row, index]:.5f}"
        )


def assert_rows_independent(verifier: Callable[..., Verified], **options: Any) -> None:
    """Raise AssertionError if the result of a row depends on its place in the batch or on the other rows.

    The batch mixes greedy and sampled rows, rows with fewer drafts, and target rows without mass, for which the
    verifier must emit some id in range.

    Args:
        verifier: `(keys, draft, target, **options) -> Verified`.
        **options: the verifier's options.

    Raises:
        AssertionError: the message names the row and both results.
    """
    assert_independent(on_key_data(verifier, options), _mixed_batch())


def assert_independent(verify: Callable[..., Verified], batch: tuple[np.ndarray, Any, Categorical]) -> None:
    """Raise AssertionError if the result of a row of a batch depends on its place or on the other rows.

    Args:
        verify: function of key words [B, K+1, 2], of drafts or trees, and of a target, as `on_key_data` makes it.
        batch: its arguments as NumPy arrays.
    """
    _assert_equivariant(verify, batch)
    keys, draft, target = batch
    batch_size, _, vocab_size = target.logits.shape
    for seed in range(4):
        keys = np.random.default_rng(seed).integers(1 << 32, size=keys.shape, dtype=np.uint32)
        together = jax.device_get(verify(keys, draft, target))
        if not np.all(together.tokens < vocab_size) or not np.all(together.tokens[:, 0] >= 0):
            raise AssertionError(
                f"tokens must be in [0, V = {vocab_size}), also where a target row has no mass, got {together.tokens}"
            )
        for i in range(batch_size):
            alone = verify(*jax.tree.map(lambda x: x[i : i + 1], (keys, draft, target)))  # noqa: B023
            if not np.array_equal(np.asarray(alone.tokens)[0], together.tokens[i]):
                raise AssertionError(
                    f"tokens of row {i} must not depend on the rest of the batch, got {together.tokens[i].tolist()} "
                    f"in it and {np.asarray(alone.tokens)[0].tolist()} alone"
                )


def assert_permutation_equivariant(verifier: Callable[..., Verified], **options: Any) -> None:
    """Raise AssertionError unless the output of permuted rows and keys is the permuted output.

    Args:
        verifier: `(keys, draft, target, **options) -> Verified`.
        **options: the verifier's options.

    Raises:
        AssertionError: the message names the field of `Verified` and both results.
    """
    _assert_equivariant(on_key_data(verifier, options), _mixed_batch())


def _assert_equivariant(verify: Callable[..., Verified], batch: tuple[np.ndarray, Any, Categorical]) -> None:
    keys, *arguments = batch
    permutation = np.random.default_rng(1).permutation(keys.shape[0])
    straight = jax.tree.map(lambda x: np.asarray(x)[permutation], verify(keys, *arguments))
    permuted = verify(keys[permutation], *jax.tree.map(lambda x: x[permutation], arguments))
    for name, first, second in zip(Verified._fields, straight, permuted, strict=True):
        if first is None and second is None:
            continue
        if first is None or second is None or not np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
            raise AssertionError(f"{name} depends on the order of the batch: {first} became {second}")


def on_key_data(verifier: Callable[..., Verified], options: dict) -> Callable[..., Verified]:
    """Return the verifier as a compiled function that takes keys as raw words [B, K+1, 2], which NumPy can hold."""

    @jax.jit
    def verify(key_data: Array, draft: Any, target: Categorical) -> Verified:
        return verifier(jax.random.wrap_key_data(key_data, impl="threefry2x32"), draft, target, **options)

    return verify


def _mixed_batch() -> tuple[np.ndarray, Draft, Categorical]:
    """Return key words [B, K+1, 2] and rows that are greedy, sampled, with fewer drafts, or without mass."""
    batch_size, num_draft_tokens, vocab_size = 10, 3, 11
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch_size, num_draft_tokens, vocab_size)).astype(np.float32)
    scores = rng.normal(size=(batch_size, num_draft_tokens + 1, vocab_size)).astype(np.float32)
    scores[7], scores[8] = -np.inf, np.nan
    temperature = np.linspace(0.5, 2.0, batch_size, dtype=np.float32)
    temperature[3::4] = 0
    tokens = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1).astype(np.int32)
    num_tokens = np.arange(batch_size, dtype=np.int32) % (num_draft_tokens + 1)
    keys = rng.integers(1 << 32, size=(batch_size, num_draft_tokens + 1, 2), dtype=np.uint32)
    reported = Categorical(jnp.asarray(logits), jnp.asarray(temperature[::-1]))
    draft = Draft(jnp.asarray(tokens), reported, jnp.asarray(num_tokens))
    return jax.device_get((keys, draft, Categorical(jnp.asarray(scores), jnp.asarray(temperature))))
