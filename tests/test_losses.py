"""Losses of drafters: their gradients by formula and by finite differences, and the rates that verifiers have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Categorical, Draft, theory, verifiers
from specjax.testing import enumerate_outcomes
from specjax.training import losses, vocabulary

VOCAB = 7
RNG = np.random.default_rng(0)
DRAFT, TARGET = 2 * RNG.normal(size=(2, 5, VOCAB))
Q, P = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (DRAFT, TARGET))
ALPHA = np.minimum(P, Q).sum(-1, keepdims=True)
SUBSET = vocabulary([3, 0, 9, 4, 0, 4, 1], 4)
LOSSES = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "total_variation": losses.total_variation,
    "jensen_shannon": losses.jensen_shannon,
    "negative_log_acceptance": losses.negative_log_acceptance,
    "lk_hybrid": losses.lk_hybrid,
}


def of_variation():
    lower = Q < P
    return Q * ((Q * lower).sum(-1, keepdims=True) - lower)


def of_reverse():
    log_ratio = np.log(Q / P)
    return Q * (log_ratio - (Q * log_ratio).sum(-1, keepdims=True))


def of_hybrid():
    weight = np.exp(-3 * ALPHA)
    return weight * (Q - P) + (1 - weight) * of_variation()


FORMULAS = {
    "forward_kl": Q - P,
    "reverse_kl": of_reverse(),
    "total_variation": of_variation(),
    "negative_log_acceptance": of_variation() / ALPHA,
    "lk_hybrid": of_hybrid(),
}


def gradient(loss, draft):
    return jax.jit(jax.grad(lambda x: jnp.sum(loss(x))))(jnp.asarray(draft))


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_the_formulas(name, x64):
    found = gradient(partial(LOSSES[name], target_logits=jnp.asarray(TARGET)), DRAFT)
    np.testing.assert_allclose(found, FORMULAS[name], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, SUBSET], ids=["whole", "reduced"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_hybrid"])
def test_gradients_are_those_of_finite_differences(name, vocab, x64):
    loss = jax.jit(partial(LOSSES[name], target_logits=jnp.asarray(TARGET), vocab=vocab))
    draft = jnp.asarray(DRAFT if vocab is None else DRAFT[:, : len(vocab.ids)])
    found, step = gradient(loss, draft), 1e-6
    for v in range(draft.shape[-1]):
        shift = step * np.eye(draft.shape[-1])[v : v + 1]
        expected = (loss(draft + shift) - loss(draft - shift)) / (2 * step)
        np.testing.assert_allclose(found[:, v], expected, atol=1e-7)


def test_values(x64):
    kl, reverse = (P * np.log(P / Q)).sum(-1), (Q * np.log(Q / P)).sum(-1)
    mean = (P + Q) / 2
    shannon = ((P * np.log(P / mean)).sum(-1) + (Q * np.log(Q / mean)).sum(-1)) / 2
    variation = 1 - ALPHA[:, 0]
    weight = 0.5 * np.exp(-2 * ALPHA[:, 0])
    given = jnp.asarray(DRAFT), jnp.asarray(TARGET)
    np.testing.assert_allclose(losses.forward_kl(*given), kl, atol=1e-12)
    np.testing.assert_allclose(losses.reverse_kl(*given), reverse, atol=1e-12)
    np.testing.assert_allclose(losses.jensen_shannon(*given), shannon, atol=1e-12)
    np.testing.assert_allclose(losses.total_variation(*given), variation, atol=1e-12)
    hybrid = losses.lk_hybrid(*given, scale=0.5, decay=2.0)
    np.testing.assert_allclose(hybrid, weight * kl + (1 - weight) * variation, atol=1e-12)
    tokens = jnp.array([0, 3, 6, 2, 2])
    np.testing.assert_allclose(losses.cross_entropy(given[0], tokens), -np.log(Q[np.arange(5), tokens]), atol=1e-12)


@pytest.mark.slow
def test_excluded_tokens_of_the_target_add_nothing():
    target = jnp.asarray(TARGET, jnp.float32).at[:, 2].set(-jnp.inf)
    draft = jnp.asarray(DRAFT, jnp.float32)
    for name in ("forward_kl", "jensen_shannon", "total_variation", "negative_log_acceptance"):
        loss = partial(LOSSES[name], target_logits=target)
        assert np.isfinite(loss(draft)).all() and np.isfinite(gradient(loss, draft)).all(), name


def test_log_acceptance_of_a_certain_target_is_its_cross_entropy(x64):
    tokens = jnp.array([0, 3, 6, 2, 5])
    certain = jnp.where(jax.nn.one_hot(tokens, VOCAB, dtype=bool), 0.0, -jnp.inf)
    draft = jnp.asarray(DRAFT)
    given, wanted = partial(losses.negative_log_acceptance, target_logits=certain), losses.cross_entropy(draft, tokens)
    np.testing.assert_allclose(given(draft), wanted, atol=1e-12)
    of_entropy = gradient(partial(losses.cross_entropy, tokens=tokens), draft)
    np.testing.assert_allclose(gradient(given, draft), of_entropy, atol=1e-12)


def test_text_and_variation(x64):
    """Its value, and its gradient by formula: the sum of the gradients of cross entropy and of 2 TV."""
    tokens = jnp.array([0, 3, 6, 2, 5])
    given = partial(losses.text_and_variation, target_logits=jnp.asarray(TARGET), tokens=tokens, text_weight=0.3)
    expected = -0.3 * np.log(Q[np.arange(5), tokens]) + 0.7 * np.abs(P - Q).sum(-1)
    np.testing.assert_allclose(given(jnp.asarray(DRAFT)), expected, atol=1e-12)
    formula = 0.3 * (Q - np.eye(VOCAB)[np.asarray(tokens)]) + 0.7 * 2 * of_variation()
    np.testing.assert_allclose(gradient(given, DRAFT), formula, atol=1e-12)


def test_the_floor_of_the_log_acceptance():
    far = losses.negative_log_acceptance(jnp.array([60.0, 0.0]), jnp.array([0.0, 60.0]), floor=1e-3)
    np.testing.assert_allclose(far, -np.log(1e-3), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, SUBSET], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_rate_is_that_of_the_verifier(vocab, temperature):
    """Every outcome of `verifiers.rejection`, on a batch with each token drafted, weighed by its probability."""
    size = VOCAB if vocab is None else len(vocab.ids)
    ids = np.arange(VOCAB) if vocab is None else vocab.ids
    draft_logits, target_logits = jnp.asarray(DRAFT[0, :size], jnp.float32), jnp.asarray(TARGET[0], jnp.float32)
    scattered = jnp.full(VOCAB, -jnp.inf).at[ids].set(draft_logits)
    rows = jnp.full(size, temperature)
    drafted = Categorical(jnp.broadcast_to(scattered, (size, 1, VOCAB)), rows)
    target = Categorical(jnp.broadcast_to(target_logits, (size, 2, VOCAB)), rows)
    verified, chance = enumerate_outcomes(verifiers.rejection, Draft(jnp.asarray(ids)[:, None], drafted), target)
    accepted = (np.asarray(verified.num_accepted).reshape(size, -1) * chance).sum(1)
    if temperature:
        drawn = np.asarray(jax.nn.softmax(draft_logits / temperature))
    else:
        drawn = np.eye(size)[int(draft_logits.argmax())]
    rate = losses.acceptance_rate(draft_logits, target_logits, temperature=temperature, vocab=vocab)
    np.testing.assert_allclose(rate, (drawn * accepted).sum(), atol=1e-6)


def test_greedy_drafts_agree_by_the_ids_of_the_target():
    """The most likely draft tokens 0 to 3 are tokens 0, 2, 3 and 5 of the target."""
    target = jax.nn.one_hot(jnp.array([0, 2, 3, 5, 1, 3]), VOCAB)
    draft = jax.nn.one_hot(jnp.array([0, 1, 2, 3, 1, 3]), 4)
    rate = losses.acceptance_rate(draft, target, temperature=0, vocab=SUBSET)
    assert rate.tolist() == [1, 1, 1, 1, 0, 0]


def test_expected_tokens_are_those_of_rows_that_do_not_depend_on_the_draft():
    """The mean length by enumeration over all drafts of three tokens of three."""
    logits = RNG.normal(size=(2, 4, 3))
    draft, target = jnp.asarray(logits[0, :3], jnp.float32), jnp.asarray(logits[1], jnp.float32)
    paths = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)
    drafted = Categorical(jnp.broadcast_to(draft, (len(paths), 3, 3)))
    target_rows = Categorical(jnp.broadcast_to(target, (len(paths), 4, 3)))
    verified, chance = enumerate_outcomes(verifiers.rejection, Draft(jnp.asarray(paths), drafted), target_rows)
    length = ((np.asarray(verified.num_accepted).reshape(len(paths), -1) + 1) * chance).sum(1)
    drawn = np.prod(np.asarray(jax.nn.softmax(draft))[np.arange(3), paths], axis=1)
    rates = losses.acceptance_rate(draft, target[:3])
    np.testing.assert_allclose(losses.expected_tokens(rates), (drawn * length).sum(), atol=1e-6)
    assert float(losses.expected_tokens(jnp.full(4, 0.3))) == pytest.approx(float(theory.expected_tokens(0.3, 4)))


def test_gradient_of_expected_tokens():
    rates = jnp.array([0.5, 0.0, 0.8])
    found = jax.grad(losses.expected_tokens)(rates)
    np.testing.assert_allclose(found, [1, 0.5 * (1 + 0.8), 0], atol=1e-6)


def test_a_reduced_vocabulary_renormalises_divergences_and_not_rates(x64):
    draft, target = jnp.asarray(DRAFT[:, :4]), jnp.asarray(TARGET)
    inside = P[:, SUBSET.ids]
    q = np.asarray(jax.nn.softmax(draft))
    on_subset = inside / inside.sum(-1, keepdims=True)
    kl = losses.forward_kl(draft, target, vocab=SUBSET)
    np.testing.assert_allclose(kl, (on_subset * np.log(on_subset / q)).sum(-1), atol=1e-12)
    alpha = np.minimum(inside, q).sum(-1)
    np.testing.assert_allclose(losses.acceptance_rate(draft, target, vocab=SUBSET), alpha, atol=1e-12)
    np.testing.assert_allclose(losses.total_variation(draft, target, vocab=SUBSET), 1 - alpha, atol=1e-12)
    entropy = losses.cross_entropy(draft, jnp.array([0, 2, 4, 5, 6]), vocab=SUBSET)
    np.testing.assert_allclose(entropy, [*-np.log([q[0, 0], q[1, 1]]), 0, -np.log(q[3, 3]), 0], atol=1e-12)


def test_vocabulary():
    assert SUBSET.ids.tolist() == [0, 2, 3, 5]
    assert SUBSET.d2t.tolist() == [0, 1, 1, 2]
    assert SUBSET.t2d.tolist() == [True, False, True, True, False, True, False]
    assert vocabulary([0, 0, 0, 2], 3).ids.tolist() == [0, 1, 3]  # unused ids, lowest first
    assert vocabulary([1, 2, 2, 2], 2).ids.tolist() == [1, 2]
    for counts, size in (([[1]], 1), ([1.0], 1), ([-1, 2], 1), ([1, 2], 3), ([1, 2], 0), ([1], True)):
        with pytest.raises(ValueError, match=r"^(counts|size) must be"):
            vocabulary(counts, size)


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("vocab", [None, SUBSET], ids=["whole", "reduced"])
def test_chunks_give_what_all_rows_at_once_give(vocab):
    key = jax.random.split(jax.random.key(0), 4)
    hidden, features = jax.random.normal(key[0], (2, 5, 3)), jax.random.normal(key[1], (2, 5, 4))
    head = jax.random.normal(key[2], (VOCAB if vocab is None else len(vocab.ids), 3))
    target_head = jax.random.normal(key[3], (VOCAB, 4))
    mask = jnp.arange(10).reshape(2, 5) % 3 != 1

    def chunked(hidden, head):
        values = losses.from_hidden(both, hidden, head, features, target_head, mask=mask, chunk=4, vocab=vocab)
        return values[0].sum(), values

    def dense(hidden, head):
        values = both(hidden @ head.T, features @ target_head.T, vocab=vocab)
        values = jax.tree.map(lambda x: jnp.where(mask, x, 0), values)
        return values[0].sum(), values

    def both(draft, target, vocab=None):
        return losses.lk_hybrid(draft, target, vocab=vocab), losses.acceptance_rate(draft, target, vocab=vocab)

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(hidden, head) for f in (chunked, dense)
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("float32_products")
def test_chunks_of_pytrees_with_tokens():
    """A head of two arrays, and a loss that reads the text."""
    key = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(key[0], (2, 5, VOCAB)), jnp.arange(10).reshape(2, 5) % 3
    target, table = jax.random.normal(key[1], (2, 5, VOCAB)), jax.random.normal(key[2], (3, VOCAB))
    tokens = jnp.arange(10).reshape(2, 5) % VOCAB

    def head(rows):
        return rows[0] + table[rows[1]]

    given = losses.text_and_variation, hidden, head, target, jnp.eye(VOCAB)
    found = losses.from_hidden(*given, mask=jnp.ones((2, 5), bool), tokens=tokens, chunk=4)
    expected = losses.text_and_variation(head(hidden), target, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)


def test_no_chunk_keeps_logits_of_all_rows():
    """Neither the loss nor its gradient holds an array of as many numbers as all rows have logits."""
    rows, size = 64, 512
    shapes = ((rows, 8), (size, 8), (rows, 8), (size, 8))

    def loss(hidden, head, features, target_head):
        mask = jnp.ones(rows, bool)
        return losses.from_hidden(losses.forward_kl, hidden, head, features, target_head, mask=mask, chunk=8).sum()

    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*given))
    assert f"f32[8,{size}]" in text and f"f32[8,8,{size}]" not in text and f"f32[{rows},{size}]" not in text


def test_weights_of_positions():
    probs = jnp.array([[0.2, 0.8, 0.4]])
    s = 0.5 + 0.5 * np.asarray(probs[0])
    prefix = np.cumprod(s)
    np.testing.assert_allclose(losses.prefix_weights(probs)[0], prefix[::-1].cumsum()[::-1], rtol=1e-6)
    assert not jax.grad(lambda x: losses.prefix_weights(x).sum())(probs).any()
    np.testing.assert_allclose(losses.position_decay(3, ratio=0.8), [1, 0.8, 0.64], rtol=1e-6)
    np.testing.assert_allclose(losses.position_decay(3, gamma=4), np.exp([0, -0.25, -0.5]), rtol=1e-6)


def test_confidence():
    logits, rates = jnp.array([-2.0, 0.0, 1.0]), jnp.array([0.1, 0.5, 0.9])
    chance = np.asarray(jax.nn.sigmoid(logits))
    expected = -(rates * np.log(chance) + (1 - rates) * np.log(1 - chance))
    np.testing.assert_allclose(losses.confidence_loss(logits, rates), expected, rtol=1e-5)
    found = jax.grad(lambda x, y: losses.confidence_loss(x, y).sum(), argnums=(0, 1))(logits, rates)
    np.testing.assert_allclose(found[0], chance - rates, atol=1e-6)
    assert not found[1].any()


@pytest.mark.slow
def test_calibration_finds_the_temperatures_that_made_the_outcomes():
    rng = np.random.default_rng(1)
    true = np.array([2.0, 0.5, 1.5])
    logits = 3 * rng.normal(size=(30000, 3)) + 2
    accepted = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits / true)), axis=1).astype(bool)
    np.testing.assert_allclose(losses.calibrate(logits, accepted), true, rtol=0.07)


def test_errors():
    row = jnp.zeros((2, 7))
    cases = [
        (lambda: losses.forward_kl(jnp.zeros((3, 7)), row), "draft and target logits must have the same rows"),
        (lambda: losses.forward_kl(jnp.zeros((2, 4)), row), "draft_logits must have the target's vocabulary, 7"),
        (lambda: losses.acceptance_rate(row, row, vocab=SUBSET), "draft_logits must have D = 4"),
        (lambda: losses.acceptance_rate(jnp.zeros((2, 4)), jnp.zeros((2, 8)), vocab=SUBSET), "must have V = 7"),
        (lambda: losses.acceptance_rate(row, row, temperature=-1), "temperature must be one number >= 0"),
        (lambda: losses.cross_entropy(row, jnp.zeros(3, int)), "tokens must have the shape"),
        (lambda: losses.position_decay(3), "give exactly one of ratio and gamma"),
        (lambda: losses.position_decay(0, ratio=0.5), "num_positions must be"),
        (lambda: losses.calibrate([1.0], [True]), "one shape"),
        (lambda: losses.from_hidden(losses.forward_kl, row, row, row, row, mask=jnp.ones(3, bool)), "same rows"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
