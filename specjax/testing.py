"""Exact checks of verifiers: the law of what they emit, enumerated, against the target's.

A verifier made by `specjax.verifiers.from_core` takes all its chance from a `Draw`. Here the draw is replaced by one
that runs through every outcome with its probability, so the shipped code is what is checked, and an error of 1e-6
shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, distributions, verifiers
from specjax import keys as streams
from specjax.distributions import Residual
from specjax.sampling import Sampling
from specjax.types import Array, Categorical, Context, Draft, Model, ModelInput, ModelOutput, Proposer, PyTree, Verified
from specjax.verifiers.core import canonical

Table = np.ndarray  # level i of a conditional table: [V] * i + [V], the law of token i + 1 given the first i


class _Record:
    """A draw that notes which outcomes each call can have."""

    def __init__(self):
        self.outcomes: list[np.ndarray] = []

    def flip(self, probabilities: Array) -> Array:
        self.outcomes.append(np.array(list(product((False, True), repeat=probabilities.shape[1]))))
        return jnp.zeros(probabilities.shape, bool)

    def pick(self, residual: Residual) -> Array:
        self.outcomes.append(np.arange(residual.target.distribution.logits.shape[-1], dtype=np.int32))
        return jnp.zeros(residual.target.shift.shape[:1], jnp.int32)

    def sample(self, target: Categorical) -> Array:
        batch_size, num_rows, vocab_size = distributions.shape_of(target)
        self.outcomes.append(np.array(list(product(range(vocab_size), repeat=num_rows)), np.int32))
        return jnp.zeros((batch_size, num_rows), jnp.int32)


class _Replay:
    """A draw whose every call gives the outcome that its row stands for; `weight` [B] is their probability."""

    def __init__(self, outcomes: list[np.ndarray]):
        self.outcomes = iter(outcomes)
        self.weight: Array | float = 1.0

    def flip(self, probabilities: Array) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        chance = jnp.clip(jnp.where(jnp.isnan(probabilities), 0, probabilities), 0, 1)
        self.weight = self.weight * jnp.prod(jnp.where(outcome, chance, 1 - chance), axis=1)
        return outcome

    def pick(self, residual: Residual) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        probs = distributions.residual_probs(residual)
        self.weight = self.weight * jnp.take_along_axis(probs, outcome[:, None], axis=1)[:, 0]
        return outcome

    def sample(self, target: Categorical) -> Array:
        outcome = jnp.asarray(next(self.outcomes))
        log_prob = distributions.token_log_prob(distributions.normalize(target), outcome)
        self.weight = self.weight * jnp.exp(jnp.sum(log_prob, axis=1))
        return outcome


def enumerate_outcomes(
    verifier: Callable[..., Verified], draft: Draft, target: Categorical | Array, **options: Any
) -> tuple[Verified, np.ndarray]:
    """Run a verifier on every outcome of its chance.

    Args:
        verifier: with a `core` (made by `from_core`).
        draft: of B rows.
        target: of B rows.
        **options: of the verifier.

    Returns:
        Verified with a leading axis of B * N outcomes, those of one row together, and the probability [B, N] of each.
    """
    target = distributions.as_categorical(target)
    static = tuple((k, v) for k, v in options.items() if v is None or isinstance(v, bool | str))
    traced = {k: v for k, v in options.items() if (k, v) not in static}
    record = _Record()
    jax.eval_shape(lambda: verifier.core(record, canonical(draft), target, **options))
    sizes = [len(outcome) for outcome in record.outcomes]
    index = np.indices(sizes).reshape(len(sizes), -1)
    num_outcomes = index.shape[1]
    batch_size = draft.tokens.shape[0]
    outcomes = [
        np.tile(outcome[i], (batch_size,) + (1,) * (outcome.ndim - 1))
        for outcome, i in zip(record.outcomes, index, strict=True)
    ]
    draft, target = jax.tree.map(lambda x: jnp.repeat(x, num_outcomes, axis=0), (draft, target))
    verified, weight = _replay(verifier.core, static, traced, outcomes, draft, target)
    return verified, np.asarray(weight).reshape(batch_size, num_outcomes)


@partial(jax.jit, static_argnames=("core", "static"))
def _replay(core, static, traced, outcomes, draft, target):
    replay = _Replay(outcomes)
    verified = core(replay, canonical(draft), target, **dict(static), **traced)
    return verified, jnp.broadcast_to(replay.weight, draft.tokens.shape[:1])


def enumerate_law(
    verifier: Callable[..., Verified],
    target: Sequence[Table],
    draft: Sequence[Table] | Sequence[int],
    *,
    num_tokens: int | None = None,
    dtype: Any = jnp.float32,
    target_temperature: float | None = None,
    draft_temperature: float | None = None,
    min_logit: float | None = None,
    **options: Any,
) -> np.ndarray:
    """Compute the exact law of the next K+1 tokens: those that one step emits, then the target's own.

    Args:
        verifier: with a `core` (made by `from_core`).
        target: conditional logits of the target, levels 0 to K: level i has shape [V] * i + [V].
        draft: conditional logits of the draft, levels 0 to K-1, or K token ids of deterministic drafts.
        num_tokens: drafts that the row has, at most K; None is K.
        dtype: of the logits given to the verifier.
        target_temperature: None is 1.
        draft_temperature: None is 1.
        min_logit: the cut of all rows of target and draft; None is none.
        **options: of the verifier.

    Returns:
        float64 array [V] * (K + 1). A lossless verifier gives `product_law(target)`.
    """
    num_draft_tokens, vocab_size = len(target) - 1, target[0].shape[-1]
    deterministic = len(draft) == 0 or np.ndim(draft[0]) == 0
    paths = [tuple(draft)] if deterministic else list(product(range(vocab_size), repeat=num_draft_tokens))
    batch_size = len(paths)

    def rows(tables: Sequence[Table]) -> Array:
        return jnp.asarray(np.stack([[t[p[:i]] for i, t in enumerate(tables)] for p in paths]), dtype)

    def constant(value: float | int | None, kind: Any) -> Array | None:
        return None if value is None else jnp.full(batch_size, value, kind)

    def distribution(tables: Sequence[Table], temperature: float | None) -> Categorical:
        cut = None if min_logit is None else jnp.full((batch_size, len(tables)), min_logit, jnp.float32)
        return Categorical(rows(tables), constant(temperature, jnp.float32), cut)

    drafted = Draft(
        jnp.asarray(np.array(paths, np.int32).reshape(batch_size, num_draft_tokens)),
        None if deterministic else distribution(draft, draft_temperature),
        constant(num_tokens, jnp.int32),
    )
    scored = distribution(target, target_temperature)
    verified, weight = enumerate_outcomes(verifier, drafted, scored, **options)
    target_law = [probabilities(t, target_temperature, min_logit) for t in target]
    if deterministic:
        path_weight = np.ones(1)
    else:
        draft_law = [probabilities(t, draft_temperature, min_logit) for t in draft]
        path_weight = np.array([np.prod([t[p[: i + 1]] for i, t in enumerate(draft_law)]) for p in paths])

    return completed_law(verified.tokens, (path_weight[:, None] * weight).reshape(-1), target_law)


def completed_law(tokens: Array, weight: np.ndarray, target: Sequence[Table]) -> np.ndarray:
    """The law [V] * (K + 1) of emitted tokens [N, K+1] of probability [N], each completed with the target's own."""
    law = np.zeros((target[0].shape[-1],) * len(target))
    emitted, inverse = np.unique(np.asarray(tokens), axis=0, return_inverse=True)
    for row, mass in zip(emitted, np.bincount(inverse.reshape(-1), np.asarray(weight, np.float64)), strict=True):
        prefix = tuple(int(t) for t in row if t >= 0)
        law[prefix] += mass * product_law(target, prefix)
    return law


def probabilities(logits: Table, temperature: float | None = None, min_logit: float | None = None) -> np.ndarray:
    """Softmax of logits / temperature over the last axis in float64; temperature 0 is one-hot at the lowest argmax."""
    logits = np.asarray(logits, np.float64)
    if min_logit is not None:
        logits = np.where(logits >= min_logit, logits, -np.inf)
    if temperature == 0:
        return np.eye(logits.shape[-1])[np.argmax(logits, axis=-1)]
    logits = logits / (1.0 if temperature is None else temperature)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def product_law(tables: Sequence[Table], prefix: tuple[int, ...] = ()) -> np.ndarray:
    """The joint law of the tokens after `prefix` from conditional ones: an array [V] * (levels - len(prefix))."""
    law = np.ones(())
    for table in tables[len(prefix) :]:
        law = law[..., None] * table[prefix]
    return law


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the L1 distance of two laws."""
    return 0.5 * float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).sum())


class ChiSquare(NamedTuple):
    """A chi-square test: `statistic` exceeds `bound` less than once in 1e9 runs when the law is right."""

    statistic: float
    degrees: int
    bound: float


def chi_square(counts: np.ndarray, probs: np.ndarray, min_expected: float = 5.0) -> ChiSquare:
    """Compare counts with a law, the cells that expect fewer than `min_expected` merged into one.

    Args:
        counts: of each outcome, any shape.
        probs: the law, the same shape.
        min_expected: below it the chi-square law is a bad approximation of a cell.

    Returns:
        ChiSquare; infinite where an impossible outcome was counted.

    Example:
        >>> chi_square(np.array([500, 500]), np.array([0.5, 0.5])).statistic
        0.0
    """
    counts, probs = np.ravel(np.asarray(counts, np.float64)), np.ravel(np.asarray(probs, np.float64))
    if counts.shape != probs.shape:
        raise ValueError(f"counts and probs must have the same shape, got {counts.shape} and {probs.shape}")
    expected = counts.sum() * probs / probs.sum()
    small = expected < min_expected
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(expected > 0, (counts - expected) ** 2 / expected, np.where(counts > 0, np.inf, 0.0))
    degrees = max(len(counts) - 1, 1)
    return ChiSquare(float(terms.sum()), degrees, degrees + 9.1 * degrees**0.5 + 41.4)


def bigram_model(logits: Array) -> Model:
    """A target whose law depends on the last token alone: row v of logits [V, V] is the law after token v."""
    return Model(params=logits, apply=_bigram_apply, init_cache=_no_cache, vocab_size=logits.shape[-1])


def _bigram_apply(params: Array, inputs: ModelInput, cache: tuple) -> tuple[ModelOutput, tuple]:
    return ModelOutput(params[inputs.tokens]), cache


def _no_cache(batch_size: int, max_length: int) -> tuple:
    return ()


def sample_draft(keys: Array, distribution: Categorical) -> tuple[Array, Categorical]:
    """The honest drafter: a token [B, 1] from each row, and the law that it came from."""
    return distributions.sample(keys, distribution), distribution


@partial(
    jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=["num_draft_tokens", "drafter", "is_ragged"]
)
@dataclass(frozen=True)
class BigramProposer:
    """Drafts from a bigram table by a drafter, `(keys [B, 1], Categorical [B, 1, V]) -> (tokens, Categorical)`.

    A drafter that claims None makes deterministic drafts. Ragged rows have as many drafts as their length says, modulo.
    """

    logits: Array  # [V, V]
    num_draft_tokens: int
    drafter: Callable[[Array, Categorical], tuple[Array, Categorical | None]] = sample_draft
    is_ragged: bool = False

    def init(self, batch_size: int, max_length: int) -> PyTree:
        return ()

    def prefill(self, context: Context, features: Any, state: PyTree) -> PyTree:
        return state

    def propose(self, keys: Array, context: Context, sampling: Any, state: PyTree) -> tuple[Draft, PyTree]:
        token = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        drawn = []
        for i in range(self.num_draft_tokens):
            noise = streams.stream(keys[:, :1], streams.DRAFT, i)
            drawn.append(self.drafter(noise, Categorical(self.logits[token])))
            token = drawn[-1][0]
        tokens = jnp.concatenate([tokens for tokens, _ in drawn], axis=1)
        num_tokens = context.length % (self.num_draft_tokens + 1) if self.is_ragged else None
        if drawn[0][1] is None:
            return Draft(tokens, None, num_tokens), state
        logits = jnp.concatenate([reported.logits for _, reported in drawn], axis=1)
        return Draft(tokens, Categorical(logits), num_tokens), state

    def update(self, context: Context, verified: Verified, features: Any, state: PyTree) -> PyTree:
        return state


def sampled_tokens(
    verifier: Callable[..., Verified],
    target: Array,
    proposer: Any,
    *,
    num_samples: int,
    num_tokens: int = 6,
    temperature: Array | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Decode `num_samples` sequences from token 0 through the public loop.

    Args:
        verifier: with its options bound.
        target: logits [V, V] of a bigram target.
        proposer: of the same vocabulary.
        num_samples: rows of the batch.
        num_tokens: decoded after token 0, over several steps.
        temperature: [num_samples] of the target; None is 1.
        seed: of the keys.

    Returns:
        Tokens [num_samples, num_tokens].
    """
    state = decode.prefill(
        bigram_model(target),
        proposer,
        jnp.zeros((num_samples, 1), jnp.int32),
        jnp.ones(num_samples, jnp.int32),
        Sampling(max_tokens=jnp.full(num_samples, num_tokens, jnp.int32), temperature=temperature),
        jax.random.key(seed),
        max_length=num_tokens + 1,
    )
    return np.asarray(decode.generate(bigram_model(target), proposer, state, verifier=verifier).context.tokens)[:, 1:]


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
        _assert_sampled_law(name, tokens, target)
    if drafter is None:
        temperature = jnp.where(jnp.arange(num_samples) % 2 == 0, 1.7, 0.5)
        for name, kind in (("ragged rows", {"is_ragged": True}), ("deterministic drafts", {"drafter": _first_token})):
            proposer = BigramProposer(jnp.log(draft), num_draft_tokens, **kind)
            tokens = sampled_tokens(bound, jnp.log(target), proposer, num_samples=num_samples, temperature=temperature)
            for start, value in enumerate((1.7, 0.5)):
                law = probabilities(np.log(target), value)
                _assert_sampled_law(f"{name} at temperature {value} among others", tokens[start::2], law)


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
        _assert_sampled_law(verifier.__name__, tokens, law)


def _first_token(keys: Array, distribution: Categorical) -> tuple[Array, None]:
    """A deterministic drafter."""
    return jnp.zeros(keys.shape, jnp.int32), None


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


def _assert_sampled_law(name: str, tokens: np.ndarray, target: np.ndarray) -> None:
    """Compare the joint law of tokens [N, T] in windows of as many as make at most 1000 outcomes."""
    vocab_size, num_tokens = target.shape[-1], tokens.shape[1]
    width = min(num_tokens, int(np.log(1000) / np.log(vocab_size)))
    marginal = np.eye(vocab_size)[0]  # of the token before the window
    for start in range(num_tokens - width + 1):
        law = marginal @ target
        for _ in range(width - 1):
            law = law[..., None] * target
        window = tokens[:, start : start + width]
        index = np.ravel_multi_index(tuple(window.T), (vocab_size,) * width)
        counts = np.bincount(index, minlength=vocab_size**width).reshape(law.shape)
        test = chi_square(counts, law)
        if test.statistic > test.bound:
            raise AssertionError(
                f"not lossless on {name!r}: tokens {start} to {start + width - 1} of {len(tokens)} sequences give "
                f"chi-square {test.statistic:.0f} with {test.degrees} degrees of freedom, expected at most "
                f"{test.bound:.0f}; {_worst(counts / len(tokens), law)}"
            )
        marginal = marginal @ target


def _report(name: str, law: np.ndarray, exact: np.ndarray, tolerance: float) -> None:
    distance = total_variation(law, exact)
    if not distance <= tolerance:
        raise AssertionError(
            f"not lossless on {name!r}: total variation {distance:.3g} from the target's law, expected at most "
            f"{tolerance:g}; {_worst(law, exact)}"
        )


def _worst(law: np.ndarray, exact: np.ndarray) -> str:
    tokens = np.unravel_index(np.argmax(np.abs(law - exact)), law.shape)
    return f"worst at tokens {[int(t) for t in tokens]}: probability {law[tokens]:.6f}, expected {exact[tokens]:.6f}"


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
