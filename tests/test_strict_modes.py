"""JAX's strict modes, gradients, and arrays of the wrong kind, which a stranger's program may bring along."""

import gc
import itertools
from functools import partial

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_block_draft
import test_eagle
import test_medusa
import test_mlp_speculator
from jax.experimental import checkify
from jax.tree_util import Partial

from specjax import decode, distributions, models, proposers, ragged, sampling, scorers, testing, verifiers
from specjax.decoding import log_probs
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.sampling import SamplingParams
from specjax.sampling.guided.tables import Grammar
from specjax.types import Categorical, Context, Draft

pytestmark = pytest.mark.slow  # modes of JAX that change no token

NAMES = verifiers.__all__
OPTIONS = {"synthetic": {"acceptance_length": 2.0}}
B, K, V = 6, 2, 7
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)  # of a bigram model
FLOAT8 = jnp.float8_e4m3fn


def bound(name):
    return Partial(getattr(verifiers, name), **OPTIONS.get(name, {}))


def batch(dtype=jnp.float32):
    """Greedy and sampled rows of 0 to K drafts, with tokens of -inf, cuts, and a row where everything is forbidden."""
    rng = np.random.default_rng(1)
    drawn_from, scored = rng.normal(size=(B, K, V)), rng.normal(size=(B, K + 1, V))
    scored[..., ::3] = -np.inf
    scored[5, 1] = -np.inf
    cut = np.sort(scored, axis=-1)[..., 4]
    temperature = np.arange(B, dtype=np.float32) % 3 * np.float32(0.7)
    draft = Draft(
        np.argmax(drawn_from + rng.gumbel(size=drawn_from.shape), axis=-1).astype(np.int32),
        Categorical(drawn_from.astype(np.float64 if dtype == jnp.float64 else np.float32), np.roll(temperature, 1)),
        (K - np.arange(B) % (K + 1)).astype(np.int32),
    )
    target = Categorical(jnp.asarray(scored, dtype), temperature, jnp.asarray(cut, dtype).astype(jnp.float32))
    return jax.tree.map(jnp.asarray, (draft, target))


def last_lower(logits, context):
    return logits.at[context.tokens[context.length - 1]].add(-1)


EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        max_tokens=6,
        min_tokens=2,
        stop_token_ids=[3],
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={1: 2.0},
        allowed_token_ids=range(6),
        bad_words=[[1, 2], [4]],
    ),
    SamplingParams(
        max_tokens=4,
        logits_processors=[last_lower, sampling.ExactTopK(5)],
        guided_decoding=Grammar(np.arange(V), np.where(np.arange(V) == 5, -1, 0)[None]),
    ),
]


def start(model, proposer):
    """Prompts with every feature of sampling and of log-probabilities."""
    prompts, lengths = jnp.array([[1, 2, 3], [4, 5, 0], [6, 0, 0]], jnp.int32), jnp.array([3, 2, 1], jnp.int32)
    params, keys = sampling.batch(EVERYTHING, vocab_size=V), jax.random.key(1)
    options = {"max_length": 10, "num_logprobs": 2, "prompt_logprobs": True}
    return decode.prefill(model, proposer, prompts, lengths, params, keys, **options)


def generate(model, proposer, verifier=verifiers.rejection, **options):
    return decode.generate(model, proposer, start(model, proposer), verifier=verifier, **options)


def bigram():
    return testing.bigram_model(jnp.asarray(TABLE))


PROPOSERS = ("none", "ngram", "draft_model", "greedy draft_model", "fallback", "toy")


DRAFTERS = {  # functions that write a checkpoint to a directory
    "eagle": test_eagle.write_eagle,
    "eagle3": partial(test_eagle.write_eagle3, layout="authors"),
    "p_eagle": partial(test_eagle.write_eagle3, layout="parallel"),
    "medusa": lambda directory, target: test_medusa.authors(directory),
    "mlp_speculator": lambda directory, target: test_mlp_speculator.write(directory),
    "dflash": lambda directory, target: test_block_draft.write(directory, "authors"),
    "dspark": lambda directory, target: test_block_draft.write(directory, "dspark"),
}


def every_proposer():
    model, ngram = bigram(), proposers.ngram(K)
    draft = proposers.draft_model(model, 3, max_length=8, temperature=0.5)
    return {
        "none": None,
        "ngram": ngram,
        "draft_model": proposers.draft_model(model, K, speculate_below=3),
        "greedy draft_model": proposers.draft_model(model, K, temperature=0),
        "fallback": proposers.fallback(ngram, draft),
        "toy": testing.BigramProposer(model.params, K),
    }


def nan_made_by(function, *arguments):
    """The error of checkify for the first NaN in the program, also of one that is masked later; None without any.

    It looks at every operation, as `jax_debug_nans` does outside jit, and into loops, where that does not.
    """
    return jax.jit(checkify.checkify(function, errors=checkify.nan_checks))(*arguments)[0].get()


class TestNoNaN:
    def test_verifiers(self):
        def verify(draft, target):
            verified = [bound(name)(jax.random.key(0), draft, target, log_probs=True) for name in NAMES]
            deterministic, packed = Draft(draft.tokens, None, draft.num_tokens), distributions.pack(target)
            verified.append(verifiers.typical(jax.random.key(0), deterministic, packed, log_probs=True))
            return verified, log_probs.logprobs(target, verified[0].tokens, n=2)

        assert nan_made_by(verify, *batch()) is None

    def test_a_step_with_every_sampling_parameter(self):
        step = partial(decode.step, verifier=verifiers.match)
        assert nan_made_by(step, bigram(), None, start(bigram(), None)) is None

    def test_entropy_outside_jit(self):
        with jax.debug_nans(True):
            entropy = distributions.entropy(distributions.normalize(Categorical(jnp.log(jnp.array([[[0.0, 1.0]]])))))
        assert entropy.tolist() == [[0.0]]

    def test_rows_without_mass(self):
        """Every token has probability 0 there, and token 0 is drawn, marked as a draw from nothing."""
        target = Categorical(jnp.full((1, 1, 3), -jnp.inf))
        residual = distributions.Residual(distributions.normalize(target))
        with jax.debug_nans(True):
            assert log_probs.logprobs(target, jnp.zeros((1, 1), jnp.int32), n=1).top.tolist() == [[[-np.inf]]]
            assert distributions.residual_probs(residual).tolist() == [[1.0, 0.0, 0.0]]
        assert distributions.pick(residual, jnp.full((1, 2), 0.5)).tolist() == [-2]


def log_probs_of(target, tokens):
    """Log-softmax of the kept logits over temperature at the tokens, by hand.

    0 where that is a constant: for -1, in greedy rows, and for tokens of probability 0.
    """
    is_kept = target.logits >= target.min_logit[..., None]
    temperature = jnp.where(target.temperature > 0, target.temperature, 1)[:, None, None]
    scaled = jnp.where(is_kept, jnp.where(is_kept & (target.logits > -jnp.inf), target.logits, 0) / temperature, -1e9)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scaled), jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where((tokens >= 0) & (target.temperature > 0)[:, None] & (chosen > -1e8), chosen, 0)


@jax.jit
def gradients(draft, target):
    """For every verifier, the gradients of its log-probabilities in logits and temperature, and its output."""

    normalized = distributions.normalize(target)
    log_normalizer = (
        normalized.log_mass + normalized.shift / jnp.where(target.temperature > 0, target.temperature, 1)[:, None]
    )

    def of(name, change=lambda target: target):
        def total(logits, temperature):
            changed = change(target._replace(logits=logits, temperature=temperature))
            verified = bound(name)(jax.random.key(3), draft, changed, log_probs=True)
            return verified.log_probs.sum(), verified

        return jax.grad(total, (0, 1), has_aux=True)(target.logits, target.temperature)

    return {
        **{name: of(name) for name in NAMES},
        "packed": of("rejection", distributions.pack),
        "a normaliser that is stored": of("match", lambda x: x._replace(log_normalizer=log_normalizer)),
    }


class TestGradients:
    def test_are_those_of_a_log_softmax(self):
        draft, target = batch()
        target = jax.tree.map(lambda x: x.at[5].set(x[2]), target)  # no row where everything is forbidden
        for name, (found, verified) in gradients(draft, target).items():

            def total(logits, temperature, tokens=verified.tokens):
                return log_probs_of(target._replace(logits=logits, temperature=temperature), tokens).sum()

            expected = jax.grad(total, (0, 1))(target.logits, target.temperature)
            assert np.count_nonzero(expected[0]) > 10 and np.count_nonzero(expected[1]) > 1
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)

    def test_are_finite_where_everything_is_forbidden(self):
        for name, (found, _) in gradients(*batch()).items():
            assert all(np.isfinite(gradient).all() for gradient in found), name

    def test_where_a_kernel_would_run(self):
        """The vocabulary takes kernels on a GPU; the branches of every platform are traced."""

        def total(logits):
            draft = Draft(jnp.array([[1, 2]]), Categorical(jnp.zeros((1, K, 2048))))
            return verifiers.rejection(jax.random.key(0), draft, logits, log_probs=True).log_probs.sum()

        gradient = jax.jit(jax.grad(total))(jnp.zeros((1, K + 1, 2048)))
        np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-5)
        assert np.count_nonzero(gradient) > 0

    def test_through_sampling_parameters(self):
        """Tokens that are cut away have no gradient, nor has the cut itself."""
        params = sampling.batch([SamplingParams(top_k=3, top_p=0.9, min_p=0.01, temperature=0.8)])
        context = Context(jnp.zeros((1, 2), jnp.int32), jnp.array([1]), jnp.array([True]))

        def total(logits):
            target = sampling.process(params, logits, context, jnp.array([[1, 2]]))
            verified = verifiers.match(jax.random.key(0), Draft(jnp.array([[1, 2]])), target, log_probs=True)
            return verified.log_probs.sum(), (target, verified.tokens)

        logits = jnp.asarray(TABLE)[None, : K + 1]
        gradient, (target, tokens) = jax.jit(jax.grad(total, has_aux=True))(logits)
        expected = jax.grad(lambda x: log_probs_of(target._replace(logits=x), tokens).sum())(logits)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
        assert not gradient[target.logits < target.min_logit[..., None]].any()

    def test_of_logprobs(self):
        _, target = batch()
        tokens = jnp.argmax(target.logits, axis=-1).astype(jnp.int32)

        @jax.jit
        @jax.grad
        def gradient(logits):
            return log_probs.logprobs(target._replace(logits=logits), tokens).chosen.sum()

        gradient = gradient(target.logits)
        expected = jax.grad(lambda x: log_probs_of(target._replace(logits=x), tokens)[:5].sum())(target.logits)
        np.testing.assert_allclose(gradient[:5], expected[:5], rtol=1e-5, atol=1e-6)
        assert np.isfinite(gradient).all()


def assert_dtypes(verified):
    assert verified.tokens.dtype == verified.num_accepted.dtype == jnp.int32 and verified.log_probs.dtype == jnp.float32


class TestStrictPromotion:
    """Promotion happens at trace time, so that most of it is checked by tracing alone; also with `jax_enable_x64`."""

    @staticmethod
    def assert_same_dtypes(function, *arguments):
        with jax.numpy_dtype_promotion("strict"):
            expected = jax.eval_shape(function, *arguments)
            with jax.enable_x64(True):
                found = jax.eval_shape(function, *arguments)
        assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]

    @pytest.mark.parametrize("verifier, proposer", [*zip(itertools.cycle(NAMES), PROPOSERS, strict=False)])
    def test_the_loop(self, verifier, proposer):
        """Each verifier and each proposer once: neither knows the other."""
        self.assert_same_dtypes(partial(generate, bigram(), every_proposer()[proposer], bound(verifier)))

    @pytest.mark.parametrize("name", DRAFTERS)
    def test_drafters_on_features(self, tmp_path, name):
        target = heads.make_target()
        DRAFTERS[name](tmp_path, target)
        target = models.with_feature_layers(target, proposers.feature_layers(tmp_path, target))
        proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
        self.assert_same_dtypes(lambda: decode.generate(target, proposer, heads.start(target, proposer)))

    def test_batch_expansion(self):
        self.assert_same_dtypes(partial(generate, bigram(), proposers.ngram(K), scorer=scorers.batch_expansion))

    def test_a_decoder(self):
        config = DecoderConfig(
            vocab_size=V,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_size=8,
            mlp_size=16,
            max_length=16,
        )
        params = jax.eval_shape(partial(init_params, config, 0))

        def loop(params):
            model = decoder_model(config, params)
            return generate(model, proposers.draft_model(model, K))

        self.assert_same_dtypes(loop, params)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        "dtype, x64",
        [
            (jnp.float32, False),
            (jnp.float16, False),
            (jnp.bfloat16, True),
            (jnp.float64, True),
        ],
    )
    def test_verifiers(self, name, dtype, x64):
        """Also with fields of other dtypes than the logits, packed, and their gradients."""

        def total(logits, target):
            target = distributions.pack(target._replace(logits=logits))
            return bound(name)(jax.random.key(0), draft, target, log_probs=True).log_probs.sum()

        with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
            draft, target = batch(dtype)
            assert_dtypes(jax.eval_shape(partial(bound(name), log_probs=True), jax.random.key(0), draft, target))
            target = target._replace(
                temperature=target.temperature.astype(jnp.bfloat16), log_normalizer=jnp.zeros((B, K + 1), jnp.float16)
            )
            draft = Draft(draft.tokens.astype(jnp.uint8), draft.distribution, draft.num_tokens.astype(jnp.int16))
            assert jax.eval_shape(jax.grad(total), target.logits, target).dtype == dtype

    @pytest.mark.parametrize("x64", [False, True])
    def test_ragged_and_log_probs(self, x64):
        verify = partial(ragged.verify, verifiers.block, max_draft_tokens=K, log_probs=True)
        with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
            logits = Categorical(jnp.asarray(TABLE)[:6].astype(jnp.bfloat16), jnp.ones(3))
            counts, tokens = jnp.array([2, 2, 3], jnp.int16), jnp.array([1, 2, 3], jnp.uint8)
            drafted = logits._replace(logits=logits.logits[:3])
            assert_dtypes(jax.eval_shape(verify, jax.random.key(0), tokens, counts, drafted, logits))
            jax.eval_shape(partial(ragged.expand_to_tokens, num_tokens=3), jnp.ones(3), counts)
            found = jax.eval_shape(log_probs.logprobs, batch(jnp.bfloat16)[1], jnp.zeros((B, K + 1), jnp.uint8))
        assert found.chosen.dtype == jnp.float32 and found.rank.dtype == found.top_ids.dtype == jnp.int32

    def test_bfloat16_logits_of_all_sampling_parameters(self):
        model = testing.bigram_model(jnp.asarray(TABLE, jnp.bfloat16))
        self.assert_same_dtypes(partial(generate, model, proposers.draft_model(model, K)))

    def test_enumeration(self):
        with jax.numpy_dtype_promotion("strict"):
            distribution = testing.enumerate_law(verifiers.match, [np.zeros(2), np.zeros((2, 2))], [np.zeros(2)])
        np.testing.assert_allclose(distribution, 0.25, rtol=1e-6)


DTYPES = "must be of one of the dtypes float32, bfloat16, float16, float64, got "


class TestWrongArrays:
    """A float8 is of floating dtype for JAX, but it is no dtype to compute in."""

    @pytest.mark.parametrize("dtype", [FLOAT8, jnp.complex64, jnp.int32])
    @pytest.mark.parametrize("field", ["logits", "temperature", "min_logit", "log_normalizer"])
    @pytest.mark.parametrize("name", ["target", "draft.distribution"])
    def test_of_a_verifier(self, name, field, dtype):
        draft, target = batch()
        draft = draft._replace(distribution=Categorical(*(x[:, :K] if x.ndim > 1 else x for x in target[:3])))
        wrong = target if name == "target" else draft.distribution
        like = wrong.min_logit if field == "log_normalizer" else getattr(wrong, field)
        wrong = wrong._replace(**{field: like.astype(dtype)})
        draft, target = (draft, wrong) if name == "target" else (draft._replace(distribution=wrong), target)
        path = name if field == "logits" else f"{name}.{field}"
        with pytest.raises(ValueError, match=f"{path} {DTYPES}{dtype.__name__}"):
            verifiers.rejection(jax.random.key(0), draft, target)

    def test_of_ragged(self):
        verify = partial(ragged.verify, verifiers.rejection, jax.random.key(0), max_draft_tokens=1)
        tokens, counts, logits = jnp.array([1]), jnp.array([1]), jnp.zeros((2, V))
        for name, arguments in {
            "target.logits": (None, logits.astype(FLOAT8)),
            "draft_distribution.logits": (logits[:1].astype(FLOAT8), logits),
            "draft_distribution.temperature": (Categorical(logits[:1], jnp.ones(1, FLOAT8)), logits),
            "target.temperature": (None, Categorical(logits, jnp.ones(1, FLOAT8))),
        }.items():
            with pytest.raises(ValueError, match=f"{name} {DTYPES}float8_e4m3fn"):
                verify(tokens, counts, *arguments)

    def test_of_log_probs(self):
        logits, tokens = jnp.zeros((1, 1, V)), jnp.zeros((1, 1), jnp.int32)
        with pytest.raises(ValueError, match=f"logits {DTYPES}float8_e4m3fn"):
            log_probs.logprobs(logits.astype(FLOAT8), tokens)
        with pytest.raises(ValueError, match=f"logits.temperature {DTYPES}float8_e4m3fn"):
            log_probs.logprobs(Categorical(logits, jnp.ones(1, FLOAT8)), tokens)
        with pytest.raises(ValueError, match=r"logits.temperature must have shape \[B\] = \(1,\), got \(\)"):
            log_probs.logprobs(Categorical(logits, 0.7), tokens)

    @pytest.mark.parametrize(
        "shape, dtype, message",
        [
            ((1, 1, V), FLOAT8, f"logits {DTYPES}float8_e4m3fn"),
            ((1, 1, V), jnp.int32, f"logits {DTYPES}int32"),
            ((1, V), jnp.float32, r"logits must have shape \[B, T, V\] = \(1, any, any\), got \(1, 7\)"),
            ((2, 1, V), jnp.float32, r"logits must have shape \[B, T, V\] = \(1, any, any\), got \(2, 1, 7\)"),
        ],
    )
    def test_of_sampling(self, shape, dtype, message):
        logits = jnp.zeros(shape, dtype)
        context = Context(jnp.zeros((1, 2), jnp.int32), jnp.array([1]), jnp.array([True]))
        with pytest.raises(ValueError, match=message):
            sampling.process(sampling.batch([SamplingParams()]), logits, context, jnp.zeros((1, 0), jnp.int32))

    @pytest.mark.parametrize("dtype", [FLOAT8, jnp.complex64, jnp.int32, jnp.bool])
    def test_of_probabilities(self, dtype):
        with pytest.raises(ValueError, match=f"probs {DTYPES}{dtype.__name__}"):
            Categorical.from_probs(jnp.ones((1, 1, 2), dtype))

    def test_lists(self):
        with pytest.raises(ValueError, match=r"draft.tokens must be an array, got list"):
            verifiers.match(jax.random.key(0), Draft([[1]]), jnp.zeros((1, 2, V)))
        with pytest.raises(ValueError, match=r"target.logits must be an array, got list"):
            ragged.verify(verifiers.match, jax.random.key(0), [1], [1], None, [[0.0] * V] * 2, max_draft_tokens=1)

    def test_scalar_temperature(self):
        with pytest.raises(ValueError, match=r"target.temperature must have shape \[B\] = \(1,\), got \(\)"):
            verifiers.match(jax.random.key(0), Draft(jnp.array([[1]])), Categorical(jnp.zeros((1, 2, V)), 0.7))

    @pytest.mark.parametrize("number", [2.0, -1, True])
    def test_max_draft_tokens(self, number):
        with pytest.raises(ValueError, match=f"max_draft_tokens must be an integer >= 0, got {number}"):
            ragged.verify(
                verifiers.match,
                jax.random.key(0),
                jnp.array([1]),
                jnp.array([1]),
                None,
                jnp.zeros((2, V)),
                max_draft_tokens=number,
            )


class TestNumPy:
    """NumPy's arrays do as well as JAX's, in float64 too."""

    def test_log_probs(self):
        _, target = batch()
        tokens = np.argmax(target.logits, axis=-1)
        expected = log_probs.logprobs(target, tokens, n=2)
        double = jax.tree.map(lambda x: np.asarray(x, np.float64), target)
        jax.tree.map(np.testing.assert_array_equal, log_probs.logprobs(double, tokens, n=2), expected)

    def test_sampling(self):
        params = sampling.batch(EVERYTHING, vocab_size=V)
        context = Context(np.ones((3, 4), np.int64), np.array([4, 3, 2]), np.ones(3, bool), None, params.guide.initial)
        arguments = params, np.zeros((3, K + 1, V)), context, np.ones((3, K), np.int64)
        distribution = jax.eval_shape(
            lambda: sampling.process(*jax.tree.map(np.asarray, arguments))
        )  # traced, not compiled
        assert distribution.logits.dtype == distribution.min_logit.dtype == jnp.float32

    def test_unsigned_tokens(self):
        """They have another form of -1."""
        draft = verifiers.canonical(Draft(jnp.array([[3, 4]], jnp.uint8), None, jnp.array([1])))
        assert draft.tokens.tolist() == [[3, -1]] and draft.tokens.dtype == jnp.int32


def test_inside_a_scan_of_a_checked_program():
    """Leaks of tracers, and JAX's own checks of every program."""
    gc.collect()
    gc.freeze()  # the search for leaks collects often, and need not look through what earlier tests left
    draft, target = batch()
    keys = jax.random.split(jax.random.key(0), 2)
    with jax.checking_leaks(), jax.enable_checks(True):
        verify = partial(verifiers.block, draft=draft, target=target, log_probs=True)
        scanned = jax.eval_shape(lambda: jax.lax.scan(lambda carry, key: (carry, verify(key)), 0, keys)[1])
    assert scanned.tokens.shape == (2, B, K + 1)
