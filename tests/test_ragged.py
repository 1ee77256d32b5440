"""Packed batches against the same batches padded."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distributions, ragged, testing, verifiers
from specjax.types import Categorical, Draft
from specjax.verifiers.core import canonical, count_accepted, emit, from_core

K, V = 3, 11
COUNTS = [[2, 0, 3, 1], [0, 0, 1, 0], [3, 3, 3, 3], [0, 3, 0, 0], [1, 0, 0, 2]]
ALL_FIELDS = ("temperature", "min_logit", "log_normalizer")
verify = jax.jit(ragged.verify, static_argnames=("verifier", "max_draft_tokens", "implementation"))


@from_core
def first_only(draw, draft, target, *, chance=0.7, log_probs=False, **options):
    """A user's verifier: it keeps drafts by the chance `chance`, and replaces them by draws from the target."""
    normalized = distributions.normalize(target)
    num_accepted = count_accepted(draft, draw.flip(jnp.where(draft.tokens > 1, chance, 0.3)))
    last = draw.pick(distributions.Residual(distributions.take_row(normalized, num_accepted)))
    return emit(draft, num_accepted, last, normalized if log_probs else None)


VERIFIERS = {name: getattr(verifiers, name) for name in verifiers.__all__}
VERIFIERS |= {"synthetic": partial(verifiers.synthetic, acceptance_length=2.5), "first_only": first_only}


def random_categorical(rng, batch_size, num_rows, fields=()):
    """Logits and the given fields, padded, as NumPy arrays."""
    logits = 2 * rng.normal(size=(batch_size, num_rows, V)).astype(np.float32)
    temperature = min_logit = log_normalizer = None
    if "temperature" in fields:
        temperature = rng.permutation(np.array([0, 0.6, 1.5, 0.9], np.float32))
    if "min_logit" in fields:
        min_logit = np.sort(logits, axis=-1)[..., -5]
    if "log_normalizer" in fields:
        scaled = logits / np.where(temperature > 0, temperature, 1)[:, None, None]
        log_normalizer = np.log(np.sum(np.exp(scaled), axis=-1, where=logits >= min_logit[..., None]))
    return Categorical(logits, temperature, min_logit, log_normalizer)


def random_batch(counts, seed=0, fields=(), is_deterministic=False):
    """A padded draft and target, with NaN in the draft rows that must not be read."""
    rng = np.random.default_rng(seed)
    target = random_categorical(rng, len(counts), K + 1, fields)
    distribution = random_categorical(rng, len(counts), K, fields)
    is_draft = np.arange(K) < np.array(counts)[:, None]
    tokens = np.where(is_draft, distribution.logits.argmax(axis=-1), -1).astype(np.int32)
    distribution.logits[~is_draft] = np.nan
    draft = Draft(tokens, None if is_deterministic else distribution, np.array(counts, np.int32))
    return jax.tree.map(jnp.asarray, (draft, target))


def pack_rows(distribution, is_row, num_rows):
    """The rows of a padded distribution where `is_row`, one after the other, then others up to `num_rows`."""
    order = jnp.argsort(~is_row.reshape(-1), stable=True)[:num_rows]
    logits, temperature, *fields, _ = distribution
    logits = logits.reshape(-1, logits.shape[-1])[order]
    return Categorical(logits, temperature, *(f if f is None else f.reshape(-1)[order] for f in fields))


def packed(draft, target, num_tokens):
    """The arguments of `ragged.verify` for a padded batch; the last of the `num_tokens` rows may be unused."""
    batch_size, num_draft_tokens = draft.tokens.shape
    index = np.arange(num_draft_tokens + 1)[None]
    is_draft, is_row = index[:, :-1] < draft.num_tokens[:, None], index <= draft.num_tokens[:, None]
    order = jnp.argsort(~is_draft.reshape(-1), stable=True)[:num_tokens]
    return (
        draft.tokens.reshape(-1)[order],
        jnp.cumsum(draft.num_tokens),
        None if draft.distribution is None else pack_rows(draft.distribution, is_draft, num_tokens),
        pack_rows(target, is_row, num_tokens + batch_size),
    )


@cache
def jitted(name):
    """A verifier of padded batches, and of packed ones."""
    packed = partial(ragged.verify, VERIFIERS[name], max_draft_tokens=K, log_probs=True)
    return jax.jit(partial(VERIFIERS[name], log_probs=True)), jax.jit(packed)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.num_accepted, expected.num_accepted)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, fields, is_deterministic",
    [
        ("rejection", ALL_FIELDS, False),
        ("block", (), False),
        *((name, ALL_FIELDS, False) for name in VERIFIERS if name != "rejection"),
        ("rejection", (), False),
        ("match", ("temperature",), True),
        ("synthetic", ("temperature",), True),
    ],
)
def test_packed_is_padded(name, fields, is_deterministic):
    """For any counts and, under jit, with unused rows at the end of the packed arrays."""
    verify, verify_packed = jitted(name)
    for seed, counts in enumerate(COUNTS):
        draft, target = random_batch(counts, seed, fields, is_deterministic)
        shape = (len(counts), K + 1) if fields == ALL_FIELDS else len(counts)
        keys = jax.random.split(jax.random.key(seed), shape)
        assert_same(verify_packed(keys, *packed(draft, target, len(counts) * K)), verify(keys, draft, target))


@pytest.mark.parametrize(
    "name, counts",
    [
        ("rejection", [2, 0, 3, 1]),
        ("match", [0, 0, 0, 0]),
        pytest.param("block", [2, 0, 3, 1], marks=pytest.mark.slow),
        pytest.param("block", [0, 0, 0, 0], marks=pytest.mark.slow),
    ],
)
def test_without_unused_rows(name, counts):
    draft, target = random_batch(counts, fields=ALL_FIELDS)
    keys = jax.random.split(jax.random.key(3), (len(counts), K + 1))
    verify, verify_packed = jitted(name)
    assert_same(verify_packed(keys, *packed(draft, target, sum(counts))), verify(keys, draft, target))


@pytest.mark.slow
def test_bonus_tokens_and_options():
    draft, target = random_batch([2, 0, 3, 1])
    bonus_tokens = jnp.array([90, 91, 92, 93])
    options = {"acceptance_length": K + 1.0, "bonus_tokens": bonus_tokens, "implementation": "xla"}
    found = verify(verifiers.synthetic, jax.random.key(0), *packed(draft, target, 6), max_draft_tokens=K, **options)
    np.testing.assert_array_equal(found.num_accepted, [2, 0, 3, 1])
    np.testing.assert_array_equal(found.tokens[jnp.arange(4), found.num_accepted], bonus_tokens)


def test_what_the_verifier_gets():
    """The caller's own logits, rows inside them, and one temperature for all that point at a row."""
    target = Categorical(jnp.zeros((9, V)), jnp.array([1.0, 2.0, 3.0, 4.0]))
    distribution = Categorical(jnp.zeros((5, V)), jnp.array([5.0, 6.0, 7.0, 8.0]))
    tokens, counts = jnp.array([1, 2, 3, 4, 5]), jnp.array([0, 2, 2, 5])
    _, draft, scored = ragged.verify(lambda *args: args, None, tokens, counts, distribution, target, max_draft_tokens=3)
    assert scored.logits is target.logits
    assert draft.distribution.logits is distribution.logits
    np.testing.assert_array_equal(draft.tokens, [[-1, -1, -1], [1, 2, -1], [-1, -1, -1], [3, 4, 5]])
    np.testing.assert_array_equal(draft.num_tokens, [0, 2, 0, 3])
    np.testing.assert_array_equal(scored.rows, [[0, 0, 0, 0], [1, 2, 3, 3], [4, 4, 4, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(draft.distribution.rows, [[0, 0, 0], [0, 1, 1], [2, 2, 2], [2, 3, 4]])
    np.testing.assert_array_equal(draft.distribution.temperature, [6, 6, 8, 8])
    np.testing.assert_array_equal(scored.temperature, [1, 2, 3, 4])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_rows_of_a_sequence(counts, num_tokens):
    """Each row in memory belongs to at most one temperature, and unused ones to none of the target's."""
    size = sum(counts) + num_tokens
    distribution = Categorical(jnp.zeros((size, V)), jnp.arange(1.0, 5.0))
    target = Categorical(jnp.zeros((size + 4, V)), jnp.arange(1.0, 5.0))
    args = jnp.zeros(size, jnp.int32), jnp.cumsum(jnp.array(counts)), distribution, target
    _, draft, scored = ragged.verify(lambda *args: args, None, *args, max_draft_tokens=K)
    for distribution in (draft.distribution, scored):
        assert distribution.rows.min() >= 0 and distribution.rows.max() < len(distribution.logits)
        for row in np.unique(distribution.rows):
            assert len(np.unique(distribution.temperature[np.any(distribution.rows == row, axis=1)])) == 1
    own = [np.unique(row) for row in np.asarray(scored.rows)]
    np.testing.assert_array_equal(np.concatenate(own), np.arange(sum(counts) + 4))


def repacked(verifier):
    """The verifier on its padded batch packed again, for `testing`."""

    @from_core
    def verify(draw, draft, target, **options):
        def inner(keys, draft, target):
            return verifier.core(draw, canonical(draft), target, **options)

        batch_size, num_draft_tokens = draft.tokens.shape
        args = packed(draft, target, batch_size * num_draft_tokens)
        return ragged.verify(inner, None, *args, max_draft_tokens=num_draft_tokens)

    return verify


@pytest.mark.parametrize("name", ["rejection", "block", "match"])
def test_exact_distribution(name):
    """Sequences of 0 to 2 drafts in one packed batch, each with another temperature, emit the target's distribution."""
    rng = np.random.default_rng(5)
    vocab_size, temperature = 3, [1.0, 0.7, 1.6]
    target = [2 * rng.normal(size=(vocab_size,) * level) for level in (1, 2, 3)]
    drafted = [2 * rng.normal(size=(vocab_size,) * level) for level in (1, 2)]
    paths = list(np.ndindex(vocab_size, vocab_size))

    def rows(tables):
        return jnp.asarray(np.tile([[t[p[:i]] for i, t in enumerate(tables)] for p in paths], (3, 1, 1)), jnp.float32)

    sequence = np.repeat(np.arange(3), len(paths))
    of_row = jnp.asarray(np.array(temperature, np.float32)[sequence])
    tokens = jnp.asarray(np.tile(paths, (3, 1)), jnp.int32)
    draft = Draft(tokens, Categorical(rows(drafted), of_row), jnp.asarray(sequence, jnp.int32))
    scored = Categorical(rows(target), of_row)
    verified, weight = testing.enumerate_outcomes(repacked(VERIFIERS[name]), draft, scored)
    emitted = np.asarray(verified.tokens).reshape(3, -1, 3)
    for row, value in enumerate(temperature):
        distribution = [testing.probabilities(t, value) for t in target]
        path_weight = testing.product_law([testing.probabilities(t, value) for t in drafted]).reshape(-1, 1)
        found = testing.completed_law(
            emitted[row], (path_weight * weight.reshape(3, 9, -1)[row]).reshape(-1), distribution
        )
        assert testing.total_variation(found, testing.product_law(distribution)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, drafts, best, expected",
    [
        ("rejection", [[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ("match", [[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
        ("block", [[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
        ("rejection", [[1], [], [2, 3]], [[2, 4], [5], [2, 3, 6]], [[2], [5], [2, 3, 6]]),
        ("match", [[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
        ("block", [[], []], [[3], [4]], [[3], [4]]),
        ("rejection", [[16, 5, 129, 86, 939]], [[16, 5, 129, 2949, 47, 655]], [[16, 5, 129, 2949]]),
    ],
)
def test_from_lists_to_lists(name, drafts, best, expected):
    """Greedy requests: what agrees with the target's best tokens is accepted."""
    batch, vocab_size = ragged.pack(drafts), 3000
    target = Categorical(jax.nn.one_hot(np.concatenate(best), vocab_size), jnp.zeros(len(drafts)))
    verified = verify(
        VERIFIERS[name],
        jax.random.key(0),
        batch.draft_tokens,
        batch.cu_num_draft_tokens,
        None,
        target,
        max_draft_tokens=batch.max_draft_tokens,
    )
    assert ragged.parse_output(verified.tokens, vocab_size) == expected


@pytest.mark.slow
def test_longer_drafts_are_cut_under_jit():
    def verify(verifier, counts):
        target = Categorical(jax.nn.one_hot(jnp.array([1, 2, 3, 4, 5]), V), jnp.zeros(1))
        tokens = jnp.array([1, 2, 3, 4])
        return ragged.verify(verifier, jax.random.key(0), tokens, counts, None, target, max_draft_tokens=2)

    counts = jnp.array([4])
    np.testing.assert_array_equal(jax.jit(partial(verify, verifiers.rejection))(counts).tokens, [[1, 2, 3]])
    np.testing.assert_array_equal(jax.jit(partial(verify, lambda keys, draft, target: draft.num_tokens))(counts), [2])


def test_pack():
    batch = ragged.pack([[5, 6], [], [7]])
    np.testing.assert_array_equal(batch.draft_tokens, [5, 6, 7])
    np.testing.assert_array_equal(batch.cu_num_draft_tokens, [2, 2, 3])
    np.testing.assert_array_equal(batch.target_rows, [0, 1, 4])
    np.testing.assert_array_equal(batch.bonus_rows, [2, 3, 5])
    assert batch.max_draft_tokens == 2
    assert all(field.dtype == np.int32 for field in batch[:4])
    assert ragged.pack([]).max_draft_tokens == 0
    assert ragged.pack([[], []]).draft_tokens.dtype == np.int32


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**64, 1.5, True, "a", [1], None])
def test_pack_takes_token_ids(token):
    with pytest.raises(ValueError, match=r"drafts\[1\] must be a list of integers that int32 holds, got \[1, "):
        ragged.pack([[], [1, token]])


@pytest.mark.parametrize("wrong", [1, "ab", b"ab", {1: 2}, {1}, None, np.array([[1, 2]])])
def test_pack_takes_lists(wrong):
    with pytest.raises(ValueError, match=r"drafts\[0\] must be a list of integers that int32 holds, got"):
        ragged.pack([wrong])
    if not isinstance(wrong, np.ndarray):
        with pytest.raises(ValueError, match="drafts must be a list of lists of token ids, got"):
            ragged.pack(wrong)
    np.testing.assert_array_equal(ragged.pack(iter([(5, 6), np.array([7])])).draft_tokens, [5, 6, 7])


@pytest.mark.parametrize(
    "counts, expected", [([2, 5, 6], [7, 7, 8, 8, 8, 9]), ([0, 4, 4], [8, 8, 8, 8, 9, 9]), ([1, 1, 2], [7, 9])]
)
def test_expand_to_tokens(counts, expected):
    values, counts = jnp.array([7, 8, 9]), jnp.array(counts)
    np.testing.assert_array_equal(ragged.expand_to_tokens(values, counts, len(expected)), expected)


def test_parse_output():
    tokens = jnp.array([[5, 3, -1, -1], [2, 7, 9, 0], [-1, -1, -1, -1]])
    assert ragged.parse_output(tokens, 8) == [[5, 3], [2, 7, 0], []]


def zeros(*shape):
    return np.zeros(shape, np.float32)


TOKENS, LOGITS = np.array([1, 2, 3]), zeros(3, V)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"draft_tokens": TOKENS[None]}, r"draft_tokens must have shape \[num_tokens\] = \(any,\), got \(1, 3\)"),
        ({"draft_tokens": TOKENS / 2}, "draft_tokens must be of integer dtype"),
        ({"draft_tokens": "abc"}, "draft_tokens must be an array of numbers, got 'abc'"),
        ({"counts": "ab"}, "cu_num_draft_tokens must be an array of numbers, got 'ab'"),
        ({"counts": np.array([[2, 3]])}, r"cu_num_draft_tokens must have shape \[B\]"),
        ({"counts": np.array([1, 4])}, r"cu_num_draft_tokens must be .* at most num_tokens = 3, got \[1, 4\]"),
        ({"counts": np.array([2, 1])}, r"cu_num_draft_tokens must be non-decreasing .*, got \[2, 1\]"),
        ({"counts": np.array([0, 3])}, "drafts must be at most max_draft_tokens = 2 long, got 3 of sequence 1"),
        ({"target": zeros(3, V)}, r"target.logits must have shape \[num_tokens \+ B, V\] = \(5, any\)"),
        (
            {"draft": zeros(4, V)},
            r"draft_distribution.logits must have shape \[num_tokens, V\] = \(3, 11\)",
        ),
        ({"draft": zeros(3, 5)}, r"draft_distribution.logits must have shape .* = \(3, 11\), got \(3, 5\)"),
        (
            {"draft": Categorical(LOGITS, zeros(3))},
            r"draft_distribution.temperature must have shape \[B\] = \(2,\)",
        ),
        ({"draft": Categorical(LOGITS, rows=np.zeros((2, 2), int))}, "draft_distribution.rows must be None"),
        ({"target": Categorical(zeros(5, V), min_logit=zeros(3))}, r"target.min_logit must have shape \[R\]"),
    ],
)
def test_errors(changes, message):
    args = {"draft_tokens": TOKENS, "counts": jnp.array([2, 3]), "draft": LOGITS, "target": jnp.zeros((5, V))} | changes
    with pytest.raises(ValueError, match=message):
        ragged.verify(verifiers.rejection, jax.random.key(0), *args.values(), max_draft_tokens=2)


def test_expand_to_tokens_errors():
    with pytest.raises(ValueError, match=r"values must have shape \[B\] = \(2,\), got \(3,\)"):
        ragged.expand_to_tokens(jnp.zeros(3), jnp.array([1, 2]), 2)
    for counts in ([2, 1], [-1, 1]):
        with pytest.raises(
            ValueError, match=rf"cu_num_tokens must be non-decreasing, from 0 on, got \[{counts[0]}, 1\]"
        ):
            ragged.expand_to_tokens([7, 8], counts)
    for number in (-1, 1.5, True, "a"):
        with pytest.raises(ValueError, match=rf"num_tokens must be an integer >= 0, got {number!r}"):
            ragged.expand_to_tokens([7, 8], [1, 2], number)
    with pytest.raises(ValueError, match="num_tokens must be an integer >= 0, and 0 without sequences, got 2"):
        ragged.expand_to_tokens(jnp.zeros(0), jnp.zeros(0, jnp.int32), 2)
    assert ragged.expand_to_tokens(jnp.zeros(0), jnp.zeros(0, jnp.int32)).shape == (0,)
    with pytest.raises(ValueError, match="num_tokens must be an integer where cu_num_tokens is traced, got None"):
        jax.jit(ragged.expand_to_tokens)(jnp.zeros(2), jnp.array([1, 2]))
    with pytest.raises(ValueError, match="values must be an array of numbers, got 'ab'"):
        ragged.expand_to_tokens("ab", [1, 2])


@pytest.mark.parametrize(
    "tokens, vocab_size, message",
    [
        ([1, 2], 8, r"tokens must have shape \[B, K\+1\] = \(any, any\), got \(2,\)"),
        ([[1], [2, 3]], 8, r"tokens must have shape \[B, K\+1\], got lists of several lengths"),
        ([[1.5]], 8, "tokens must be of integer dtype, got float32"),
        ([[True]], 8, "tokens must be of integer dtype, got bool"),
        ("ab", 8, r"tokens must have shape .*, got \(\)"),
        ([[1]], "a", "vocab_size must be an integer >= 1, got 'a'"),
        ([[1]], 0, "vocab_size must be an integer >= 1, got 0"),
        ([[1]], True, "vocab_size must be an integer >= 1, got True"),
    ],
)
def test_parse_output_errors(tokens, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        ragged.parse_output(tokens, vocab_size)
