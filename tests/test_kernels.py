"""The Pallas kernels against the XLA path: interpreted on a CPU, compiled on a GPU."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import launch, rows, threefry
from specjax import Categorical, Draft, distributions, ragged, verifiers
from specjax.keys import ACCEPT, RESIDUAL, TARGET, gumbel, of_step, stream, uniform
from specjax.verifiers import kernels
from specjax.verifiers.core import from_core

BY_ROW = PartitionSpec("data")
VERIFIERS = ("rejection", "block", "typical", "synthetic", "match")
OF_REQUESTS = {"target_temperature": (0.7, 0, 1.3, 0.9), "draft_temperature": (1.1, 0.8, 0, 0.9), "cut": True}


def on_gpu(*values) -> list:
    """Parameters of a test that has these on a GPU alone: interpreted kernels take seconds to compile."""
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values]


def slow(*values) -> list:
    """Parameters of a test whose other ones find the breaks that these find."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def pairs(some: list[tuple], firsts, seconds) -> list:
    """Some pairs of parameters, and on a GPU all others, too."""
    others = [(first, second) for first in firsts for second in seconds if (first, second) not in some]
    return [*some, *(pytest.param(*pair, marks=pytest.mark.gpu) for pair in others)]


# Common parts of all verifiers are tested on one of each kind elsewhere.
SHARED = ["match", *slow("rejection"), *on_gpu("block", "typical", "synthetic")]
SHARED_AND_BLOCK = ["rejection", "block", *slow("match"), *on_gpu("typical", "synthetic")]


def on_this_device() -> str:
    """The implementation that runs the kernel here. It is asked for in a test, as collecting must start no device."""
    return "pallas" if jax.default_backend() == "gpu" else "interpret"


def options_of(verifier: str) -> dict:
    return {"acceptance_length": 2.2} if verifier == "synthetic" else {}


@lru_cache
def jitted(verifier: str, implementation: str, log_probs: bool):
    options = options_of(verifier) | {"implementation": implementation, "log_probs": log_probs}
    return jax.jit(partial(getattr(verifiers, verifier), **options))


def run(verifier: str, implementation: str, keys, draft, target, *, log_probs: bool = False, **options):
    return jitted(verifier, implementation, log_probs)(keys, draft, target, **options)


@partial(
    jax.jit,  # or each operation is compiled by itself
    static_argnames=(
        "batch_size",
        "num_drafts",
        "vocab_size",
        "dtype",
        "target_temperature",
        "draft_temperature",
        "cut",
        "normalised",
    ),
)
def random_case(
    seed: int,
    batch_size: int = 4,
    num_drafts: int = 3,
    vocab_size: int = 3000,
    dtype=jnp.float32,
    target_temperature=None,
    draft_temperature=None,
    cut: bool = False,
    normalised: bool = True,
) -> tuple[Draft, Categorical]:
    """Drafts drawn from a distribution close to the target's, rows of random numbers of drafts."""
    keys = jax.random.split(jax.random.key(seed), 4)
    target = (2 * jax.random.normal(keys[0], (batch_size, num_drafts + 1, vocab_size))).astype(dtype)
    noise = jax.random.normal(keys[1], (batch_size, num_drafts, vocab_size))
    logits = (target[:, :num_drafts] + 0.7 * noise).astype(dtype)
    temperatures = [
        None if t is None else jnp.resize(jnp.float32(t), batch_size) for t in (target_temperature, draft_temperature)
    ]
    min_logit = jnp.quantile(target.astype(jnp.float32), 0.6, axis=-1) if cut else None
    drawn_from = Categorical(logits, temperatures[1], jnp.full((batch_size, num_drafts), -1.0) if cut else None)
    normalized = distributions.normalize(drawn_from)
    log_probs = distributions.log_probs(normalized)
    tokens = jnp.argmax(log_probs + jax.random.gumbel(keys[2], log_probs.shape), axis=-1).astype(jnp.int32)
    if normalised:
        temperature = jnp.ones(batch_size) if temperatures[1] is None else temperatures[1]
        shift = normalized.shift / jnp.where(temperature > 0, temperature, 1)[:, None]
        drawn_from = drawn_from._replace(log_normalizer=normalized.log_mass + shift)
    num_tokens = jax.random.randint(keys[3], (batch_size,), 0, num_drafts + 1).at[0].set(num_drafts)
    return Draft(tokens, drawn_from, num_tokens), Categorical(target, temperatures[0], min_logit)


def assert_same(kernel, xla, num_mismatches: int = 0):
    """Equal tokens in all rows but `num_mismatches`, and near log-probabilities in those that are equal."""
    same = np.all(np.asarray(kernel.tokens) == np.asarray(xla.tokens), axis=1)
    same &= np.asarray(kernel.num_accepted) == np.asarray(xla.num_accepted)
    assert np.sum(~same) <= num_mismatches, (kernel.tokens, xla.tokens)
    if xla.log_probs is not None:
        np.testing.assert_allclose(kernel.log_probs[same], xla.log_probs[same], atol=3e-5, rtol=1e-5)


def test_threefry_draws_what_jax_draws():
    keys = jax.random.split(jax.random.key(3), 5)
    words = tuple(jax.random.key_data(keys).T)
    folded = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.arange(5) + 70_000))
    np.testing.assert_array_equal(jnp.stack(threefry.fold_in(words, jnp.arange(5) + 70_000), axis=1), folded)
    key = tuple(word[:, None] for word in words)
    index = jnp.arange(300)[None]
    bits = jax.vmap(lambda key: jax.random.bits(key, (300,), jnp.uint32))(keys)
    np.testing.assert_array_equal(threefry.bits(key, index), bits)
    np.testing.assert_array_equal(threefry.uniform(key, index), uniform(keys, (300,)))
    np.testing.assert_array_equal(jax.jit(threefry.gumbel)(key, index), jax.jit(gumbel, static_argnums=1)(keys, (300,)))


@pytest.mark.parametrize("verifier", ["rejection", "block", "match", *slow("typical", "synthetic")])
@pytest.mark.parametrize(
    "options",
    [
        *slow({"dtype": jnp.bfloat16, "normalised": False}),
        OF_REQUESTS,
        *on_gpu({"num_drafts": 9, "batch_size": 2, "vocab_size": 700, "dtype": jnp.float16}),
    ],
)
def test_kernels_emit_the_tokens_of_xla(verifier, options):
    for seed in range(4):
        arguments = jax.random.key(seed + 10), *random_case(seed, **options)
        xla = run(verifier, "xla", *arguments, log_probs=True)
        assert_same(run(verifier, on_this_device(), *arguments, log_probs=True), xla)


@pytest.mark.parametrize(
    "verifier, normalised",
    [
        ("rejection", False),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("match", True), ("block", True), ("typical", False), ("synthetic", True))
        ),
    ],
)
def test_nan_counts_as_minus_infinity(verifier, normalised):
    """In the target and in the draft; row 0 of the last sequence has nothing else. All say what they do of -inf."""
    options = OF_REQUESTS if normalised else OF_REQUESTS | {"cut": False, "normalised": False}
    for seed in range(2):
        draft, target = random_case(seed, **options)
        assert draft.distribution is not None
        keys = jax.random.split(jax.random.key(seed), 2)

        def holes(logits, key):
            hidden = jax.random.bernoulli(key, 0.3, logits.shape)  # and the best one, which a greedy row takes
            return hidden.at[-1, 0].set(True) | (logits == jnp.max(logits, axis=-1, keepdims=True))

        rows = [
            (target, holes(target.logits, keys[0])),
            (draft.distribution, holes(draft.distribution.logits, keys[1])),
        ]
        verified = {}
        for value in (jnp.nan, -jnp.inf):
            scored, drawn_from = (each._replace(logits=jnp.where(mask, value, each.logits)) for each, mask in rows)
            arguments = jax.random.key(seed + 10), draft._replace(distribution=drawn_from), scored
            for implementation in ("xla", on_this_device()):
                verified[value, implementation] = run(verifier, implementation, *arguments, log_probs=True)
        for found in verified.values():
            assert_same(found, verified[-jnp.inf, "xla"])
            assert found.is_empty.tolist() == verified[-jnp.inf, "xla"].is_empty.tolist()
            assert found.is_empty[-1] or verifier == "synthetic"  # which accepts whatever the target says
            assert jnp.all((found.tokens >= -1) & (found.tokens < 3000) & (found.tokens[:, :1] >= 0))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_one_draft(verifier):
    for seed in range(2):
        arguments = jax.random.key(seed), *random_case(seed, num_drafts=1, batch_size=32, vocab_size=600)
        xla = run(verifier, "xla", *arguments, log_probs=True)
        assert_same(run(verifier, on_this_device(), *arguments, log_probs=True), xla)


@pytest.mark.parametrize("verifier", ["synthetic", *slow("rejection")])
def test_deterministic_drafts(verifier):
    for seed in range(4):
        draft, target = random_case(seed, target_temperature=(0.7, 0, 1.3, 0.9))
        arguments = jax.random.key(seed + 10), draft._replace(distribution=None), target
        xla = run(verifier, "xla", *arguments, log_probs=True)
        assert_same(run(verifier, on_this_device(), *arguments, log_probs=True), xla)


@pytest.mark.parametrize("verifier", ["rejection", *slow("match"), *on_gpu("block", "typical", "synthetic")])
def test_large_batches_read_later_drafts_where_they_need_them(verifier, monkeypatch):
    monkeypatch.setattr(rows, "LARGE_READ", 0)
    kernel = jitted.__wrapped__(verifier, on_this_device(), True)  # traced with this size
    for seed in range(4):
        draft, target = random_case(seed, num_drafts=5, batch_size=8)
        if seed == 3:  # nearly all drafts are accepted
            sequence, position = jnp.arange(8)[:, None], jnp.arange(5)[None]
            target = target._replace(logits=target.logits.at[sequence, position, draft.tokens].add(20))
        arguments = jax.random.key(seed), draft, target
        assert_same(kernel(*arguments), run(verifier, "xla", *arguments, log_probs=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, vocab_size",
    pairs(
        [("match", 100), ("match", 513), ("rejection", 100), ("rejection", 151936)],
        VERIFIERS,
        (100, 511, 513, 8193, 10000, 50272, 151936),
    ),
)
def test_edges_of_the_vocabulary(verifier, vocab_size):
    draft, target = random_case(1, batch_size=2, num_drafts=2, vocab_size=vocab_size, dtype=jnp.bfloat16)
    last = draft._replace(tokens=draft.tokens.at[:, 0].set(vocab_size - 1))
    peaked = target._replace(logits=target.logits.at[:, :, vocab_size - 1].add(40))
    for drafts, scored in ((draft, target), (last, peaked)):
        arguments = jax.random.split(jax.random.key(4), 2), drafts, scored
        xla = run(verifier, "xla", *arguments)
        assert_same(run(verifier, on_this_device(), *arguments), xla)
    assert np.all(np.asarray(xla.tokens[:, 0]) == vocab_size - 1)


class TestThresholds:
    """Draws change where the distribution says, to 2e-5: tokens that agree with XLA's would hide an error of 1e-3."""

    BATCH, SLACK = 256, 2e-5
    SIDE = np.where(np.arange(BATCH) % 2 == 0, 1, -1)  # on which side of its threshold a sequence lies

    def chance(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Keys, and the uniforms that they give for one draft: to accept it, and two for the token after it."""
        keys = jax.random.split(jax.random.key(5), self.BATCH)
        step_keys = of_step(keys, self.BATCH, 1)
        accept = uniform(stream(step_keys[:, 0], ACCEPT, 0))
        return keys, accept, uniform(stream(step_keys[:, 0], RESIDUAL), (2,))

    def logits(self, vocab_size: int, probs: dict[int, jax.Array]) -> jax.Array:
        """Logits [B, 1, V] of probabilities [B] of some tokens, which add up to 1."""
        probabilities = jnp.zeros((self.BATCH, vocab_size))
        for token, prob in probs.items():
            probabilities = probabilities.at[:, token].set(prob)
        return jnp.log(probabilities)[:, None]

    def share(self, uniform: jax.Array) -> jax.Array:
        return jnp.clip(uniform + self.SIDE * self.SLACK, 0, 1)

    def verify(self, verifier, keys, drafted, drawn_from, target) -> tuple[np.ndarray, np.ndarray]:
        token = jnp.full((self.BATCH, 1), drafted, jnp.int32)
        target = jnp.concatenate([target, jnp.zeros_like(target)], axis=1)
        verified = run(verifier, on_this_device(), keys, Draft(token, drawn_from), Categorical(target))
        return np.asarray(verified.num_accepted), np.asarray(verified.tokens[:, 0])

    @pytest.mark.slow
    @pytest.mark.parametrize("verifier", ["rejection", *slow("block")])
    def test_acceptance(self, verifier):
        """A draft is accepted iff u < target / draft."""
        keys, accept, _ = self.chance()
        drawn_from = Categorical(self.logits(600, {7: 0.4 * jnp.ones(self.BATCH), 90: 0.6 * jnp.ones(self.BATCH)}))
        prob = 0.4 * self.share(accept)
        num_accepted, _ = self.verify(verifier, keys, 7, drawn_from, self.logits(600, {7: prob, 90: 1 - prob}))
        np.testing.assert_array_equal(num_accepted, self.SIDE > 0)

    def test_joint_acceptance(self):
        """The first of two drafts stays where the second fails iff u < target / draft, if the second row gives all."""
        keys, accept, _ = self.chance()
        one = jnp.ones(self.BATCH)
        drawn_from = [self.logits(600, {7: 0.4 * one, 90: 0.6 * one}), self.logits(600, {8: one})]
        prob = 0.4 * self.share(accept)
        target = [self.logits(600, {7: prob, 90: 1 - prob}), self.logits(600, {9: one}), self.logits(600, {5: one})]
        draft = Draft(jnp.tile(jnp.array([[7, 8]]), (self.BATCH, 1)), Categorical(jnp.concatenate(drawn_from, axis=1)))
        verified = run("block", on_this_device(), keys, draft, Categorical(jnp.concatenate(target, axis=1)))
        np.testing.assert_array_equal(verified.num_accepted, self.SIDE > 0)
        assert np.all(np.asarray(verified.tokens)[self.SIDE > 0, :2] == [7, 9])

    def test_joint_acceptance_is_at_most_one(self):
        """A first draft that the target prefers does not make the second likelier: both stay iff u < its own ratio."""
        keys, _, _ = self.chance()
        step_keys = of_step(keys, self.BATCH, 2)
        one, share = jnp.ones(self.BATCH), self.share(uniform(stream(step_keys[:, 0], ACCEPT, 1)))
        drawn_from = [self.logits(600, {7: 0.4 * one, 90: 0.6 * one}), self.logits(600, {8: 0.5 * one, 9: 0.5 * one})]
        target = [
            self.logits(600, {7: 0.8 * one, 90: 0.2 * one}),
            self.logits(600, {8: 0.5 * share, 9: 1 - 0.5 * share}),
        ]
        target.append(self.logits(600, {5: one}))
        draft = Draft(jnp.tile(jnp.array([[7, 8]]), (self.BATCH, 1)), Categorical(jnp.concatenate(drawn_from, axis=1)))
        verified = run("block", on_this_device(), keys, draft, Categorical(jnp.concatenate(target, axis=1)))
        np.testing.assert_array_equal(verified.num_accepted, np.where(self.SIDE > 0, 2, 1))

    def test_a_row_without_mass_ends_looking_ahead(self):
        """The first of two drafts stays iff u < target / draft where the second has a target row without mass."""
        keys, accept, _ = self.chance()
        one, prob = jnp.ones(self.BATCH), 0.4 * self.share(accept)
        drawn_from = [self.logits(600, {7: 0.4 * one, 90: 0.6 * one}), self.logits(600, {8: one})]
        target = [self.logits(600, {7: prob, 90: 1 - prob}), self.logits(600, {}), self.logits(600, {5: one})]
        draft = Draft(jnp.tile(jnp.array([[7, 8]]), (self.BATCH, 1)), Categorical(jnp.concatenate(drawn_from, axis=1)))
        verified = run("block", on_this_device(), keys, draft, Categorical(jnp.concatenate(target, axis=1)))
        np.testing.assert_array_equal(verified.num_accepted, self.SIDE > 0)

    @pytest.mark.parametrize(("level", "tokens"), [(0, (3, 599)), (1, (3, 400))])
    def test_recovered_token(self, level, tokens):
        """From a residual on two tokens, of one block or of two, the first is drawn iff its share exceeds u."""
        keys, _, uniforms = self.chance()
        share = self.share(uniforms[:, level])
        drawn_from = {450: 0.7, tokens[0]: 0.2, tokens[1]: 0.1}
        drawn_from = Categorical(self.logits(600, {k: v * jnp.ones(self.BATCH) for k, v in drawn_from.items()}))
        target = self.logits(600, {tokens[0]: 0.2 + 0.7 * share, tokens[1]: 0.1 + 0.7 * (1 - share)})
        num_accepted, drawn = self.verify("rejection", keys, 450, drawn_from, target)
        assert not num_accepted.any()
        np.testing.assert_array_equal(drawn, np.where(self.SIDE > 0, *tokens))

    @pytest.mark.parametrize("verifier", ["rejection", "match"])
    def test_greedy_drafts_among_equals(self, verifier):
        """The argmax is the lowest id of the largest logit, of one block or of more."""
        logits = jnp.zeros((4, 2, 9000)).at[:, :, jnp.array([700, 900, 1500, 8999])].set(1)
        tokens, greedy = jnp.array([[700], [900], [99], [1500]]), jnp.zeros(4)
        draft = Draft(tokens, Categorical(logits[:, :1], greedy))
        verified = run(verifier, on_this_device(), jax.random.key(0), draft, Categorical(logits, greedy))
        assert verified.tokens.tolist() == [[700, 700], [700, -1], [700, -1], [700, -1]]

    @pytest.mark.slow
    @pytest.mark.parametrize("tokens", [(3, 9000), (3, 599), (3, 400)])
    def test_sampled_token(self, tokens):
        """The token whose logit and Gumbel number add up to more is drawn from two tokens."""
        vocab_size = max(600, tokens[1] + 1)
        keys = jax.random.split(jax.random.key(6), self.BATCH)
        of_row = stream(of_step(keys, self.BATCH, 1), TARGET)
        noise = gumbel(of_row, (rows.BLOCK_SIZE + 20,))[:, 0]
        index = [rows.BLOCK_SIZE + token // rows.BLOCK_SIZE for token in tokens]
        first, second = (noise[:, i] for i in (index if index[1] > index[0] else tokens))
        odds = second - first + self.SIDE * self.SLACK
        target = self.logits(vocab_size, {tokens[0]: jax.nn.sigmoid(odds), tokens[1]: jax.nn.sigmoid(-odds)})
        _, drawn = self.verify("match", keys, 10, None, target)
        np.testing.assert_array_equal(drawn, np.where(self.SIDE > 0, *tokens))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", SHARED_AND_BLOCK)
def test_what_is_cut_away_does_not_count(verifier):
    """A few tokens are kept, of one block, with logits far below 0: what stands for an empty block is smaller still."""
    draft, target = random_case(7, **OF_REQUESTS)
    logits = (target.logits - 300).at[:, :, 2000:2006].add(20)
    target = target._replace(logits=logits, min_logit=jnp.full(logits.shape[:2], -290, jnp.float32))
    drafts = draft._replace(num_tokens=jnp.arange(4, dtype=jnp.int32))
    arguments = jax.random.key(9), drafts, target
    xla = run(verifier, "xla", *arguments, log_probs=True)
    assert np.all(np.isin(xla.tokens[np.arange(4), xla.num_accepted], range(2000, 2006)))
    assert_same(run(verifier, on_this_device(), *arguments, log_probs=True), xla)


@pytest.mark.parametrize("verifier", ["rejection", "match"])
def test_a_logit_at_the_cut_is_kept(verifier):
    draft, target = random_case(9, dtype=jnp.bfloat16)
    nothing = draft._replace(num_tokens=jnp.zeros(4, jnp.int32))
    best = target.logits[:, 0].astype(jnp.float32)
    target = target._replace(min_logit=jnp.tile(best.max(-1)[:, None], (1, 4)))
    verified = run(verifier, on_this_device(), jax.random.key(12), nothing, target)
    assert verified.tokens[:, 0].tolist() == jnp.argmax(best, axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "temperature", "nan"),
    [("match", None, 5), ("match", 0.0, 5), ("rejection", None, 5), ("rejection", 0.0, 5), ("rejection", 0.0, 1999)],
)
def test_a_nan_does_not_hide_what_is_likely(verifier, temperature, nan):
    draft, target = random_case(8, target_temperature=temperature)
    logits = target.logits.at[:, :, 2000].set(60).at[:, :, nan].set(jnp.nan)
    nothing = draft._replace(num_tokens=jnp.zeros(4, jnp.int32))
    verified = run(verifier, on_this_device(), jax.random.key(10), nothing, target._replace(logits=logits))
    assert verified.tokens[:, 0].tolist() == [2000] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "temperature"), [("match", None), ("match", 0.0), ("rejection", 0.0)])
def test_an_infinite_logit_takes_all(verifier, temperature):
    draft, target = random_case(8, target_temperature=temperature)
    nothing = draft._replace(num_tokens=jnp.zeros(4, jnp.int32))
    arguments = jax.random.key(11), nothing, target._replace(logits=target.logits.at[:, :, 2000].set(jnp.inf))
    for implementation in (on_this_device(), "xla"):
        assert run(verifier, implementation, *arguments).tokens[:, 0].tolist() == [2000] * 4


@pytest.mark.parametrize("shape", [(4, 4), *slow(())])
@pytest.mark.parametrize("verifier", SHARED)
def test_keys_of_every_form(verifier, shape):
    arguments = jax.random.split(jax.random.key(6), shape), *random_case(2, dtype=jnp.bfloat16, normalised=False)
    xla = run(verifier, "xla", *arguments, log_probs=True)
    assert_same(run(verifier, on_this_device(), *arguments, log_probs=True), xla)


@pytest.mark.parametrize("verifier", ["rejection", *slow("block", "match"), *on_gpu("typical", "synthetic")])
def test_odd_drafts_and_rows(verifier):
    """-1 inside a draft, ids past the vocabulary, drafts without mass, no drafts at all, rows without tokens, NaN."""
    draft, target = random_case(3, batch_size=8, num_drafts=3, vocab_size=900)
    tokens = draft.tokens.at[0, 1].set(-1).at[1, 0].set(900).at[2].set(-1).at[3, 0].set(17)
    logits = target.logits.at[3, 0, 17].set(-jnp.inf).at[4, 1].set(-jnp.inf).at[5, 2].set(-jnp.inf)
    drawn_from = draft.distribution.logits.at[6, 0, tokens[6, 0]].set(-jnp.inf)
    draft = Draft(tokens, draft.distribution._replace(logits=drawn_from))
    for drafts in (draft, draft._replace(distribution=None)):
        arguments = jax.random.key(8), drafts, target._replace(logits=logits)
        kernel, xla = run(verifier, on_this_device(), *arguments), run(verifier, "xla", *arguments)
        assert_same(kernel, xla)
        broken = logits.at[6].set(jnp.nan).at[7, :, ::3].set(jnp.nan).at[0].set(-jnp.inf)
        kernel = run(verifier, on_this_device(), jax.random.key(8), drafts, Categorical(broken))
        emitted = np.asarray(kernel.tokens)[np.arange(8), np.asarray(kernel.num_accepted)]
        assert np.all((emitted >= 0) & (emitted < 900))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "typical"])
def test_bonus_tokens(verifier):
    draft, target = random_case(4, batch_size=6)
    draft = draft._replace(num_tokens=jnp.array([0, 1, 1, 2, 3, 3]))
    deterministic = [draft._replace(distribution=None)] if verifier == "rejection" else []  # typical reads none
    for drafts in (draft, *deterministic, Draft(jnp.zeros((6, 0), jnp.int32))):
        rows = target._replace(logits=target.logits[:, : drafts.tokens.shape[1] + 1])
        options = {"bonus_tokens": jnp.arange(6, dtype=jnp.int32) + 5, "log_probs": True}
        xla = run(verifier, "xla", jax.random.key(9), drafts, rows, **options)
        assert_same(run(verifier, on_this_device(), jax.random.key(9), drafts, rows, **options), xla)
        assert xla.tokens[0, 0] == 5


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_draft_tokens(verifier):
    _, target = random_case(5)
    draft, target = Draft(jnp.zeros((4, 0), jnp.int32)), target._replace(logits=target.logits[:, :1])
    options = {"acceptance_length": 1.0} if verifier == "synthetic" else {}
    verify = partial(getattr(verifiers, verifier), jax.random.key(1), draft, target, log_probs=True, **options)
    assert_same(*(jax.jit(partial(verify, implementation=name))() for name in (on_this_device(), "xla")))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", *slow("match"), *on_gpu("block", "typical", "synthetic")])
def test_packed_rows(verifier):
    draft, target = random_case(6, vocab_size=1200)
    lengths = np.asarray(draft.num_tokens)
    is_draft = np.arange(3)[None] < lengths[:, None]
    is_target = np.arange(4)[None] <= lengths[:, None]
    packed = Categorical(draft.distribution.logits[is_draft], None, None, draft.distribution.log_normalizer[is_draft])
    arguments = (
        jax.random.key(2),
        draft.tokens[is_draft],
        jnp.cumsum(jnp.asarray(lengths)),
        packed,
        Categorical(target.logits[is_target]),
    )

    def verify(implementation):
        function = partial(getattr(verifiers, verifier), implementation=implementation, **options_of(verifier))
        return jax.jit(partial(ragged.verify, function, max_draft_tokens=3))(*arguments)

    packed = verify(on_this_device())
    assert_same(packed, verify("xla"))
    assert_same(packed, run(verifier, "xla", jax.random.key(2), draft, target))


def mapped(verify, *whole):
    split = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), whole)
    return jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), jax.jit(jax.vmap(verify))(*split))


def scanned(verify, *whole):
    split = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), whole)
    _, parts = jax.lax.scan(lambda carry, part: (carry, verify(*part)), None, split)
    return jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), parts)


def looped(verify, *whole):
    def body(carry):
        return carry[0] + 1, verify(*whole)

    first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(verify, *whole))
    return jax.jit(lambda: jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, first)))()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, transformed",
    pairs(
        [("rejection", mapped), ("match", mapped), ("match", scanned), ("rejection", looped)],
        VERIFIERS,
        (mapped, scanned, looped),
    ),
)
def test_kernels_work_under_transformations(verifier, transformed, monkeypatch):
    monkeypatch.setattr(rows, "LARGE_READ", 0)
    draft, target = random_case(7, batch_size=6, vocab_size=600)
    keys = jax.random.split(jax.random.key(3), 6)
    verify = partial(getattr(verifiers, verifier), implementation=on_this_device(), **options_of(verifier))
    assert_same(transformed(verify, keys, draft, target), run(verifier, "xla", keys, draft, target))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_kernels_work_in_shard_map(verifier):
    draft, target = random_case(8, vocab_size=600)
    keys = jax.random.split(jax.random.key(3), 4)
    verify = partial(getattr(verifiers, verifier), implementation="pallas", **options_of(verifier))
    if jax.default_backend() == "gpu":
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        sharded = jax.jit(jax.shard_map(verify, mesh=mesh, in_specs=BY_ROW, out_specs=BY_ROW))
        assert_same(sharded(keys, draft, target), run(verifier, "xla", keys, draft, target))
    else:
        from lowering import H200, triton_kernels

        mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=H200)
        sharded = jax.shard_map(verify, mesh=mesh, in_specs=BY_ROW, out_specs=BY_ROW)
        assert len(triton_kernels(sharded, keys, draft, target, mesh=mesh)) in (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, implementation", [*((verifier, None) for verifier in VERIFIERS), ("block", "xla"), ("match", "xla")]
)
def test_xla_works_in_shard_map(verifier, implementation):
    """The branch of XLA is traced there for the kernels' sake too."""
    draft, target = random_case(8, vocab_size=kernels.SMALL_VOCAB)
    keys = jax.random.split(jax.random.key(3), 4)
    verify = partial(getattr(verifiers, verifier), implementation=implementation, **options_of(verifier))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharded = jax.jit(jax.shard_map(verify, mesh=mesh, in_specs=BY_ROW, out_specs=BY_ROW))
    assert_same(sharded(keys, draft, target), run(verifier, "xla", keys, draft, target))


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, is_traced, implementation",
    [*((verifier, True, None) for verifier in VERIFIERS), ("block", True, "xla"), ("match", False, "xla")],
)
def test_a_mesh_of_explicit_axes(verifier, is_traced, implementation):
    draft, target = random_case(8, vocab_size=kernels.SMALL_VOCAB)
    keys = jax.random.split(jax.random.key(3), 4)
    by_row = NamedSharding(jax.make_mesh((1,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:1]), BY_ROW)
    verify = partial(getattr(verifiers, verifier), implementation=implementation, **options_of(verifier))
    result = (jax.jit(verify) if is_traced else verify)(*jax.device_put((keys, draft, target), by_row))
    assert result.tokens.sharding.spec[0] == "data"
    assert_same(result, run(verifier, "xla", keys, draft, target))


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, temperature, normalised",
    [("block", None, False), ("block", None, True), ("rejection", 0.0, False), ("synthetic", None, True)],
)
def test_rows_without_mass(verifier, temperature, normalised):
    """Rows of target and draft, in every place: the same tokens, and no log-probability that is not a number."""
    draft, target = random_case(21, 16, target_temperature=temperature, vocab_size=600)
    distribution, sequence = draft.distribution, np.arange(16)[:, None, None]
    is_empty = sequence % 4 == np.arange(4)[None, :, None]
    target = target._replace(logits=jnp.where(is_empty & (sequence < 8), -jnp.inf, target.logits))
    drawn = jnp.where(is_empty[:, :3] & (sequence >= 8), -jnp.inf, distribution.logits)
    normalizer = jax.scipy.special.logsumexp(drawn, axis=-1) if normalised else None
    draft = draft._replace(distribution=distribution._replace(logits=drawn, log_normalizer=normalizer))
    arguments = jax.random.key(4), draft, target
    by_xla, by_kernel = (run(verifier, i, *arguments, log_probs=True) for i in ("xla", on_this_device()))
    np.testing.assert_array_equal(by_kernel.tokens, by_xla.tokens)
    accepted = np.arange(4)[None] < by_xla.num_accepted[:, None]
    assert not jnp.isnan(by_xla.log_probs[accepted]).any()
    np.testing.assert_allclose(by_kernel.log_probs[accepted], by_xla.log_probs[accepted], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_greedy_row_without_mass_accepts_nothing(verifier):
    """Its draft is rejected, and token 0 stands for what nothing allows."""
    temperature = jnp.zeros(1)
    draft = Draft(jnp.zeros((1, 2), jnp.int32), Categorical(jnp.zeros((1, 2, 600)), temperature))
    target = Categorical(jnp.zeros((1, 3, 600)).at[:, 1].set(-jnp.inf), temperature)
    for implementation in ("xla", on_this_device()):
        assert run(verifier, implementation, jax.random.key(0), draft, target).tokens.tolist() == [[0, 0, -1]]


@pytest.mark.slow
def test_the_default_is_xla_on_a_cpu_and_for_what_kernels_lack():
    draft, target = random_case(9, vocab_size=kernels.SMALL_VOCAB)
    arguments = jax.random.key(0), draft, target
    assert_same(run("rejection", None, *arguments), run("rejection", on_this_device(), *arguments))
    deep = Draft(jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(NotImplementedError, match="at most 64 draft tokens, got 65"):
        verifiers.match(jax.random.key(0), deep, jnp.zeros((1, 66, 8)), implementation="pallas")
    assert jax.jit(verifiers.match)(jax.random.key(0), deep, jnp.zeros((1, 66, 8))).tokens.shape == (1, 66)

    own = from_core(verifiers.rejection.core)
    with pytest.raises(NotImplementedError, match="this verifier has no kernels"):
        own(*arguments, implementation="interpret")
    np.testing.assert_array_equal(jax.jit(own)(*arguments).tokens, run("rejection", "xla", *arguments).tokens)


@pytest.mark.slow
def test_kernels_refuse_float64(x64):
    draft, target = Draft(jnp.zeros((1, 1), jnp.int32)), jnp.zeros((1, 2, 8))
    with pytest.raises(NotImplementedError, match="target of dtype float32, bfloat16 or float16, got float64"):
        verifiers.match(jax.random.key(0), draft, target, implementation=on_this_device())
    arguments = jax.random.key(0), draft, target.astype(jnp.float32)
    assert_same(run("match", on_this_device(), *arguments), run("match", "xla", *arguments))


@pytest.mark.slow
def test_large_offsets_take_64_bits():
    from lowering import triton_kernels

    vocab_size = 151936

    def offset_types(batch_size):
        shape = jax.ShapeDtypeStruct
        logits = shape((batch_size, 10, vocab_size), jnp.bfloat16)
        arguments = jax.eval_shape(lambda: jax.random.key(0)), Draft(shape((batch_size, 9), jnp.int32)), logits
        kernel = triton_kernels(partial(verifiers.match, implementation="pallas"), *arguments)[0]
        return "xi64>" in kernel.triton_ir

    assert 1500 * 10 * vocab_size > 2**31
    assert offset_types(1500) and not offset_types(8)


@pytest.mark.gpu
@pytest.mark.parametrize("verifier", SHARED)
def test_rows_past_two_billion_logits(verifier):
    num_rows, vocab_size = 15000, 151936
    logits = jax.jit(lambda key: jax.random.normal(key, (num_rows, vocab_size), jnp.bfloat16))(jax.random.key(0))
    rows = jnp.array([[0, 7, 14998], [14999, 14000, 3]])
    draft = Draft(jnp.argmax(logits[rows[:, :2]], axis=-1).astype(jnp.int32), Categorical(logits, rows=rows[:, :2]))
    dense = Draft(draft.tokens, Categorical(logits[rows[:, :2]]))
    keys = jax.random.key(1)
    packed = run(verifier, on_this_device(), keys, draft, Categorical(logits, rows=rows))
    assert_same(packed, run(verifier, "xla", keys, dense, Categorical(logits[rows])))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_kernels_at_a_full_vocabulary(verifier, dtype):
    """Rounding may move a draw across the border of two tokens: at most one row of a thousand."""
    draft, target = random_case(1, batch_size=64, num_drafts=5, vocab_size=151936, dtype=dtype)
    kernel, xla = [], []
    for seed in range(16):
        arguments = jax.random.key(seed), draft, target
        kernel.append(run(verifier, on_this_device(), *arguments))
        xla.append(run(verifier, "xla", *arguments))
    stacked = [jax.tree.map(lambda *x: jnp.concatenate(x), *part) for part in (kernel, xla)]
    assert_same(*stacked, num_mismatches=2)


def test_equal_launches_are_traced_once():
    traced = []

    def kernel(inputs, out, *, number):
        traced.append(number)
        out[...] = inputs[...] + number

    def program(x, numbers):
        for number in numbers:
            x = launch.call(partial(kernel, number=number), x, x, grid=(1,), num_warps=1, interpret=True)
        return x

    x = jnp.arange(4.0)
    program(x, [0])  # what JAX imports when it first interprets a kernel adds an option, and all is traced anew
    traced.clear()
    assert program(x, [1, 1, 2]).tolist() == [4, 5, 6, 7]
    jax.make_jaxpr(partial(program, numbers=[2, 1]))(x)  # another program
    assert traced == [1, 2]
