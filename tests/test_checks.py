"""Every wrong value is found and named; right ones pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checks, proposers, ragged, sampling, testing, verifiers
from specjax.types import Categorical, Context, Draft, DraftTree

B, K, V = 2, 2, 5


def categorical(num_rows, seed, dtype=np.float32):
    """A distribution with every field, greedy in its last sequence."""
    logits = np.random.default_rng(seed).normal(size=(B, num_rows, V)).astype(dtype)
    logits[0, 0, 4] = -np.inf
    temperature, min_logit = np.array([0.5, 0.0], np.float32), np.sort(logits, axis=-1)[..., 1]
    kept = np.exp(logits.astype(np.float64) / 0.5, where=logits >= min_logit[..., None], out=np.zeros(logits.shape))
    return Categorical(logits, temperature, min_logit, np.log(kept.sum(axis=-1)).astype(np.float32))


def batch(dtype=np.float32):
    target, distribution = categorical(K + 1, 0, dtype), categorical(K, 1, dtype)
    return Draft(distribution.logits.argmax(axis=-1), distribution, np.array([2, 1])), target


def edited(record, path, index, value):
    """The record with one entry changed, of the field at a path such as "distribution.logits"."""
    field, _, rest = path.partition(".")
    old = getattr(record, field)
    if rest:
        return record._replace(**{field: edited(old, rest, index, value)})
    new = np.array(old)
    new[index] = value
    return record._replace(**{field: new})


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_right_values_pass(dtype):
    draft, target = batch(dtype)
    checks.validate(draft, target, bonus_tokens=jnp.array([0, V - 1]))
    checks.validate(Draft(draft.tokens), target.logits)
    checks.validate(Draft(jnp.zeros((B, 0), jnp.int32)), jnp.zeros((B, 1, V)))
    checks.validate(Draft(jnp.array([[-1, -1], [3, -1]])), target)


@pytest.mark.parametrize(
    "path, index, value",
    [
        ("tokens", (1, 1), 99),  # past num_tokens
        ("distribution.logits", (1, 0), np.nan),  # of draft temperature 0
        ("distribution.logits", (1, 1), np.nan),
        ("distribution.log_normalizer", (1, 0), 99),
    ],
)
def test_what_is_not_read_may_be_anything(path, index, value):
    draft, target = batch()
    checks.validate(edited(draft, path, index, value), target)


class TestStrict:
    """Values that no rule reads are checked too."""

    @pytest.mark.parametrize(
        "name, path, index, value, message",
        [
            ("draft", "tokens", (1, 1), V, r"draft.tokens\[1, 1\] must be -1 or in \[0, V = 5\), got 5"),
            ("draft", "tokens", (1, 1), -2, r"draft.tokens\[1, 1\] must be -1 or in \[0, V = 5\), got -2"),
            ("draft", "distribution.logits", (1, 1, 2), np.nan, r"logits\[1, 1, 2\] must be finite or -inf, got nan"),
            ("draft", "distribution.logits", (1, 0, 2), np.inf, r"logits\[1, 0, 2\] must be finite or -inf, got inf"),
            ("draft", "distribution.min_logit", (1, 1), np.nan, r"min_logit\[1, 1\] must be finite or -inf, got nan"),
            ("target", "logits", (1, 2, 0), np.nan, r"target.logits\[1, 2, 0\] must be finite or -inf, got nan"),
            ("target", "log_normalizer", (1, 2), np.inf, r"log_normalizer\[1, 2\] must be finite or -inf, got inf"),
        ],
    )
    def test_wrong_values_past_the_drafts(self, name, path, index, value, message):
        arguments = dict(zip(("draft", "target"), batch(), strict=True))
        arguments[name] = edited(arguments[name], path, index, value)
        checks.validate(**arguments)
        with pytest.raises(ValueError, match=message):
            checks.validate(**arguments, strict=True)

    def test_an_id_after_the_end(self):
        draft, target = Draft(jnp.array([[1, -1, 2]]), None, jnp.array([1])), jnp.zeros((1, 4, V))
        checks.validate(draft, target)
        with pytest.raises(ValueError, match=r"draft.tokens\[0, 2\] must be -1 after a -1, got 2"):
            checks.validate(draft, target, strict=True)

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_right_values_pass(self, dtype):
        checks.validate(*batch(dtype), bonus_tokens=jnp.array([0, V - 1]), strict=True)

    def test_what_a_proposer_makes_passes(self):
        """Rows that may not speculate have logits of zeros and no ids."""
        model = testing.bigram_model(jnp.zeros((V, V)))
        proposer = proposers.draft_model(model, K, max_length=5)
        context = Context(jnp.array([[1, 2, 0, 0], [1, 2, 3, 4]]), jnp.array([2, 4]), jnp.ones(2, bool))
        params = sampling.batch([sampling.SamplingParams(top_k=3)] * 2)
        keys = jax.random.split(jax.random.key(0), (2, K + 1))
        draft = jax.jit(lambda state: proposer.propose(keys, context, params, state)[0])(proposer.init(2, 8))
        assert draft.num_tokens.tolist() == [K, 0]
        checks.validate(draft, jnp.zeros((2, K + 1, V)), strict=True)


def test_target_rows_that_are_not_read_may_be_anything():
    draft, target = batch()
    checks.validate(draft, edited(target, "logits", (1, 2), np.nan))


@pytest.mark.parametrize(
    "path, index, value, message",
    [
        ("num_tokens", 1, 3, r"draft.num_tokens\[1\] must be in \[0, K = 2\], got 3"),
        ("num_tokens", 0, -1, r"draft.num_tokens\[0\] must be in \[0, K = 2\], got -1"),
        ("tokens", (0, 1), V, r"draft.tokens\[0, 1\] must be -1 or in \[0, V = 5\), got 5"),
        ("tokens", (1, 0), -2, r"draft.tokens\[1, 0\] must be -1 or in \[0, V = 5\), got -2"),
        ("tokens", (0, 0), -1, r"draft.tokens\[0, 1\] must be -1 after a -1, got"),
        ("tokens", (0, 0), 4, r"draft.tokens\[0, 0\] must be of positive probability under draft.distribution, got 4"),
        ("distribution.temperature", 0, -1, r"draft.distribution.temperature\[0\] must be finite and >= 0, got -1"),
        (
            "distribution.temperature",
            1,
            np.nan,
            r"distribution.temperature\[1\] must be finite and >= 0, got nan",
        ),
        (
            "distribution.logits",
            (0, 1, 3),
            np.nan,
            r"distribution.logits\[0, 1, 3\] must be finite or -inf, got nan",
        ),
        ("distribution.min_logit", (0, 1), 90, r"draft.distribution.min_logit\[0, 1\] must be at most the greatest"),
        ("distribution.log_normalizer", (0, 1), 9, r"draft.distribution.log_normalizer\[0, 1\] must be .*, got 9"),
    ],
)
def test_wrong_drafts(path, index, value, message):
    draft, target = batch()
    with pytest.raises(ValueError, match=message):
        checks.validate(edited(draft, path, index, value), target)


@pytest.mark.parametrize(
    "path, index, value, message",
    [
        ("logits", (0, 2, 1), np.nan, r"target.logits\[0, 2, 1\] must be finite or -inf, got nan"),
        ("logits", (1, 0, 3), np.inf, r"target.logits\[1, 0, 3\] must be finite or -inf, got inf"),
        ("logits", (1, 1), -np.inf, r"target.logits\[1, 1\] must be more than -inf for some token, got -inf"),
        ("temperature", 1, np.inf, r"target.temperature\[1\] must be finite and >= 0, got inf"),
        ("min_logit", (1, 0), np.nan, r"target.min_logit\[1, 0\] must be at most the greatest logit, .*, got nan"),
        ("log_normalizer", (0, 2), np.nan, r"target.log_normalizer\[0, 2\] must be .*, got nan"),
    ],
)
def test_wrong_targets(path, index, value, message):
    draft, target = batch()
    with pytest.raises(ValueError, match=message):
        checks.validate(draft, edited(target, path, index, value))


def test_log_normalizer_of_other_numbers():
    """The slip it is there for: logits changed after it was taken."""
    draft, target = batch()
    with pytest.raises(ValueError, match=r"target.log_normalizer\[0, \d\]"):
        checks.validate(draft, target._replace(min_logit=None))
    with pytest.raises(ValueError, match=r"target.log_normalizer\[0, \d\]"):
        checks.validate(draft, target._replace(temperature=np.array([0.51, 0.0])))


def test_a_token_that_the_cut_removes():
    draft, target = batch()
    index = draft.distribution.logits[0, 1].argmin()
    with pytest.raises(ValueError, match=r"draft.tokens\[0, 1\] must be of positive probability"):
        checks.validate(edited(draft, "tokens", (0, 1), index), target)


@pytest.mark.parametrize("token", [-1, V])
def test_bonus_tokens(token):
    draft, target = batch()
    with pytest.raises(ValueError, match=rf"bonus_tokens\[1\] must be in \[0, V = 5\), got {token}"):
        checks.validate(draft, target, bonus_tokens=jnp.array([0, token]))


@pytest.mark.parametrize("token", [-1, V])
def test_verifiers_refuse_bonus_tokens_outside_the_vocabulary(token):
    """Where they have values: eagerly, and as constants under jit."""
    draft, target, bonus = Draft(jnp.array([[1]] * 2)), jnp.zeros((2, 2, V)), jnp.array([0, token])
    verify = partial(verifiers.rejection, jax.random.key(0))
    message = rf"bonus_tokens\[1\] must be in \[0, V = 5\), got {token}"
    with pytest.raises(ValueError, match=message):
        verify(draft, target, bonus_tokens=bonus)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda target: verify(draft, target, bonus_tokens=np.asarray(bonus)))(target)
    with pytest.raises(ValueError, match=message):
        ragged.verify(
            verifiers.block,
            jax.random.key(0),
            jnp.array([1, 1]),
            jnp.array([1, 2]),
            None,
            target.reshape(4, V),
            max_draft_tokens=1,
            bonus_tokens=bonus,
        )
    jax.eval_shape(lambda bonus: verify(draft, target, bonus_tokens=bonus), bonus)


def test_shapes():
    with pytest.raises(ValueError, match="target must have shape"):
        checks.validate(Draft(jnp.zeros((B, K), jnp.int32)), jnp.zeros((B, K, V)))


def test_traced_values():
    with pytest.raises(ValueError, match="must be concrete arrays"):
        jax.jit(checks.validate)(*batch())


def packed(tokens=(1, 2, 3), counts=(2, 2, 3), distribution=None, target=None):
    def validator(keys, draft, target):
        return checks.validate(draft, target)

    tokens, counts = jnp.array(tokens), jnp.array(counts)
    target = jnp.zeros((6, V)) if target is None else target
    return ragged.verify(validator, None, tokens, counts, distribution, target, max_draft_tokens=K)


def test_packed():
    temperature = jnp.array([0.5, 0.0, 2.0])
    packed(distribution=Categorical(jnp.zeros((3, V)), temperature), target=Categorical(jnp.zeros((6, V)), temperature))
    with pytest.raises(ValueError, match=r"draft.tokens\[2, 0\] must be -1 or in"):
        packed(tokens=(1, 2, V))
    with pytest.raises(ValueError, match=r"target.logits\[5, 1\] must be finite or -inf, got nan"):
        packed(target=jnp.zeros((6, V)).at[5, 1].set(jnp.nan))
    with pytest.raises(ValueError, match=r"draft.tokens\[2, 0\] must be of positive probability"):
        packed(distribution=jnp.zeros((3, V)).at[2, 3].set(-jnp.inf))


def test_rows():
    draft, rows = Draft(jnp.zeros((2, 0), jnp.int32)), jnp.array([[0], [1]])
    target = Categorical(jnp.zeros((2, V)), jnp.array([1.0, 2.0]), rows=rows)
    checks.validate(draft, target)
    with pytest.raises(ValueError, match=r"target.rows\[1, 0\] must be in \[0, R = 2\), got 2"):
        checks.validate(draft, target._replace(rows=rows.at[1].set(2)))
    with pytest.raises(ValueError, match=r"target.rows\[0, 0\] must be a row that sequences of one temperature read"):
        checks.validate(draft, target._replace(rows=rows.at[0].set(1)))


def drawn_tree():
    """Two rows: node 3 of the first and nodes 3 and 4 of the second are none."""
    logits = np.random.default_rng(2).normal(size=(B, 5, V)).astype(np.float32)
    logits[0, 0, 2] = -np.inf
    distribution = Categorical(logits, np.array([1.0, 0.0], np.float32))
    nodes = np.array([[0, 1, 3, -1, 4]] * B), np.array([[-1, 0, 0, 0, 2]] * B), np.array([[0, 1, 1, 1, 2]] * B)
    return DraftTree(*nodes, np.array([5, 3]), distribution), Categorical(-logits.clip(-9))


def test_right_trees_pass():
    tree, target = drawn_tree()
    checks.validate(tree, target)
    checks.validate(edited(tree, "tokens", (1, 4), 99), target)  # past num_nodes
    checks.validate(edited(tree, "tokens", (0, 2), 1)._replace(distribution=None), target.logits)


@pytest.mark.parametrize(
    "path, index, value, message",
    [
        ("num_nodes", 0, 6, r"tree.num_nodes\[0\] must be in \[1, N = 5\], got 6"),
        ("parents", (1, 0), 0, r"tree.parents\[1, 0\] must be -1, as node 0 has no parent, got 0"),
        ("parents", (0, 2), 2, r"tree.parents\[0, 2\] must be the index of an earlier node, got 2"),
        ("depth", (0, 4), 1, r"tree.depth\[0, 4\] must be the depth of its parent plus 1, or 0 of node 0, got 1"),
        ("tokens", (0, 0), -1, r"tree.tokens\[0, 0\] must be in \[0, V = 5\), or -1 after node 0, got -1"),
        ("tokens", (0, 1), 5, r"tree.tokens\[0, 1\] must be in \[0, V = 5\), or -1 after node 0, got 5"),
        ("tokens", (0, 2), 1, r"tree.tokens\[0, 2\] must be another token than its earlier siblings, got 1"),
        ("tokens", (0, 1), -1, r"tree.tokens\[0, 2\] must be -1 after a sibling that is -1, got 3"),
        ("tokens", (0, 1), 2, r"tree.tokens\[0, 1\] must be of positive probability under tree.distribution, got 2"),
        ("distribution.logits", (0, 2), np.nan, r"tree.distribution.logits\[2, 0\] must be finite or -inf, got nan"),
    ],
)
def test_a_wrong_value_of_a_tree_is_named(path, index, value, message):
    tree, target = drawn_tree()
    with pytest.raises(ValueError, match=message):
        checks.validate(edited(tree, path, index, value), target)
