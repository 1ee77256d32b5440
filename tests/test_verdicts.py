"""The verdict on a verifier: right ones pass, each wrong one is found, and keys act as the enumeration says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong_verifiers import WRONG, Changed

from specjax import Categorical, Draft, testing, validation, verifiers
from specjax.testing import toys
from specjax.verifiers import core
from specjax.verifiers.rejection import rejection

ROOT = Path(__file__).parent.parent


# The others show with one draft already. A verdict with two goes through those cases too, and takes longer to compile.
RIGHT_WITH_ONE_DRAFT = {
    "one_coin_for_all_positions",
    "one_coin_for_all_iterations",
    "looks_past_num_tokens",
    "counts_minus_one_as_token_0",
    "accepts_any_of_the_tied",
    "counts_the_accepted_behind_a_rejection",
    "block_with_the_first_failure",
    "block_with_the_token_residual",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_verifier_is_found(name):
    verifier, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        testing.assert_lossless(verifier, num_draft_tokens=2 if name in RIGHT_WITH_ONE_DRAFT else 1)


def test_the_docs_have_a_line_on_each():
    text = (ROOT / "docs" / "verdicts.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == set(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in verifiers.__all__ if name not in verifiers.LOSSY])
def test_a_lossless_verifier_passes(name):
    """With three drafts for `block`, whose verdicts on drafts depend on each other."""
    testing.assert_lossless(getattr(verifiers, name), num_draft_tokens=3 if name == "block" else 2)


@core.from_core
def two_flips(draw, draft, target, **options):
    """Accepts with the right probability as the product of two."""

    def flip(probabilities):
        half = jnp.sqrt(probabilities)
        return draw.flip(half) & draw.flip(half)

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@core.from_core
def flips_in_a_loop(draw, draft, target, **options):
    def flip(probabilities):
        def body(i, accepted):
            return accepted & draw.flip(probabilities ** (1 / 3), index=i)

        return jax.lax.fori_loop(0, 3, body, jnp.ones(probabilities.shape, bool))

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@core.from_core
def two_picks(draw, draft, target, **options):
    """Draws the next token as one of two draws, by a coin."""

    def pick(residual):
        first, second = draw.pick(residual), draw.pick(residual)
        return jnp.where(draw.flip(jnp.full((draft.tokens.shape[0], 1), 0.5))[:, 0], first, second)

    return rejection.core(Changed(draw, pick=pick), draft, target, **options)


@core.from_core
def two_samples(draw, draft, target, **options):
    """Accepts drafts that equal the first sample and emits the second where they do not: not lossless."""

    def sample(target):
        first, second = draw.sample(target), draw.sample(target)
        return jnp.where(first == jnp.pad(draft.tokens, ((0, 0), (0, 1)), constant_values=-1), first, second)

    return rejection.core(Changed(draw, sample=sample), draft, target, **options)


def batch(num_rows: int, is_sampled: bool) -> tuple[Draft, Categorical, np.ndarray]:
    """The same three tokens' worth of target and draft in every row, and the probabilities of the target."""
    target, reported = np.array([0.6, 0.3, 0.1], np.float32), np.array([0.2, 0.3, 0.5], np.float32)
    tokens = np.random.default_rng(0).choice(3, size=(num_rows, 1), p=reported / reported.sum()).astype(np.int32)
    distribution = Categorical(jnp.broadcast_to(jnp.log(reported), (num_rows, 1, 3))) if is_sampled else None
    return Draft(tokens, distribution), Categorical(jnp.broadcast_to(jnp.log(target), (num_rows, 2, 3))), target


@pytest.mark.parametrize(
    "verifier, is_sampled",
    [
        pytest.param(two_flips, True, id="two flips"),
        pytest.param(flips_in_a_loop, True, id="flips in a loop", marks=pytest.mark.slow),
        pytest.param(two_picks, True, id="two picks"),
        pytest.param(two_samples, False, id="two samples", marks=pytest.mark.slow),
    ],
)
def test_keys_agree_with_the_enumeration(verifier, is_sampled):
    """The joint distribution of the draft and the two next tokens, from keys and by enumeration."""
    num_rows = 200_000
    draft, target, _ = batch(num_rows, is_sampled)
    verified = jax.jit(verifier)(jax.random.key(1), draft, target)
    counts = np.zeros((3, 4, 4))
    np.add.at(counts, (draft.tokens[:, 0], *(np.asarray(verified.tokens) + 1).T), 1)

    few = Draft(np.arange(3, dtype=np.int32)[:, None], jax.tree.map(lambda x: x[:3], draft.distribution))
    outcomes, weight = testing.enumerate_outcomes(verifier, few, target._replace(logits=target.logits[:3]))
    exact = np.zeros((3, 4, 4))
    index = np.repeat(np.arange(3), weight.shape[1])
    share = np.bincount(draft.tokens[:, 0]) / num_rows
    np.add.at(exact, (index, *(np.asarray(outcomes.tokens) + 1).T), share[index] * weight.reshape(-1))
    test = testing.chi_square(counts, exact)
    assert test.statistic < test.bound


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [two_flips, two_picks], ids=lambda v: v.__name__)
def test_several_calls_are_lossless(verifier):
    testing.assert_lossless(verifier, num_draft_tokens=1)


@pytest.mark.slow
def test_two_samples_are_not_lossless():
    with pytest.raises(AssertionError, match="deterministic drafts"):
        testing.assert_lossless(two_samples, num_draft_tokens=1)


@pytest.mark.slow
def test_the_first_call_has_the_noise_it_always_had():
    """`two_flips` with one of its coins always true is `rejection`, token for token."""

    @core.from_core
    def one_certain(draw, draft, target, **options):
        def flip(probabilities):
            return draw.flip(probabilities) & draw.flip(jnp.ones_like(probabilities))

        return rejection.core(Changed(draw, flip=flip), draft, target, **options)

    draft, target, _ = batch(500, True)
    expected, got = (jax.jit(verifier)(jax.random.key(3), draft, target) for verifier in (rejection, one_certain))
    np.testing.assert_array_equal(got.tokens, expected.tokens)


@pytest.mark.parametrize("loop", ["fori_loop", "scan", "vmap", "jit"])
def test_a_call_in_a_traced_function_needs_an_index(loop):
    @core.from_core
    def counted(draw, draft, target, **options):
        def body(i, accepted):
            return accepted & draw.flip(jnp.ones(draft.tokens.shape))

        start = jnp.ones(draft.tokens.shape, bool)
        if loop == "fori_loop":
            jax.lax.fori_loop(0, 3, body, start)
        elif loop == "scan":
            jax.lax.scan(lambda carry, i: (body(i, carry), None), start, jnp.arange(3))
        elif loop == "vmap":
            jax.vmap(lambda i: body(i, start))(jnp.arange(3))
        else:
            jax.jit(body)(0, start)
        return rejection.core(draw, draft, target, **options)

    draft, target, _ = batch(2, True)
    with pytest.raises(ValueError, match=r"draw.flip must have index= inside a loop"):
        counted(jax.random.key(0), draft, target)
    with pytest.raises(ValueError, match=r"draw.flip must have index= inside a loop"):
        testing.assert_lossless(counted, num_draft_tokens=1)


@pytest.mark.parametrize("number", [-1, 1.0, True])
def test_number_of_draft_tokens(number):
    with pytest.raises(ValueError, match=f"num_draft_tokens must be an integer >= 0, got {number}"):
        testing.assert_lossless(verifiers.rejection, num_draft_tokens=number)


def test_calls_may_depend_on_more_than_the_form_of_drafts():
    """All outcomes are enumerated, whichever of the cases comes first."""

    @core.from_core
    def flips_for_plain_rows(draw, draft, target, **options):
        if target.temperature is None:
            draw.flip(jnp.full(draft.tokens.shape, 0.5))
        return rejection.core(draw, draft, target, **options)

    draft, plain, _ = batch(2, True)
    tempered = plain._replace(temperature=jnp.ones(2))
    for target, number in ((plain, 12), (tempered, 6), (plain, 12)):
        _, weight = testing.enumerate_outcomes(flips_for_plain_rows, draft, target)
        assert weight.shape == (2, number)
        np.testing.assert_allclose(weight.sum(axis=1), 1, atol=1e-6)


def test_too_many_outcomes_are_refused():
    draft, target, _ = batch(200_000, True)
    with pytest.raises(ValueError, match="the core must have at most 4000000 outcomes"):
        testing.enumerate_outcomes(two_picks, draft, target)


def test_a_verifier_without_a_core_cannot_be_enumerated():
    draft, target, _ = batch(2, True)
    with pytest.raises(ValueError, match="verifier must be one that from_core made, got <function"):
        testing.enumerate_outcomes(lambda keys, draft, target: None, draft, target)


def test_writers_of_verifiers_find_the_checks_in_core():
    for name in ("check_array", "check_bonus_tokens", "check_categorical", "check_number", "check_shapes"):
        assert getattr(core, name) is getattr(validation, name)


def test_the_drafts_of_the_sampled_verdict_are_not_folded(capfd):
    """As a constant they would be, which takes XLA seconds, about which it writes alarms."""

    def first_rejected(keys):
        tokens = jnp.concatenate([toys.first_token(keys, None)[0]] * 3, axis=1)
        return jnp.sum(jnp.cumprod((tokens >= 0).astype(jnp.int32), axis=1), axis=1)

    keys = jax.ShapeDtypeStruct((600_000, 1), jax.random.key(0).dtype)
    program = jax.jit(first_rejected).lower(keys).compile().as_text()
    assert "600000,3]" in program and not re.search(r"= s32\[600000(,\d)?\]\S* constant", program)
    assert "Constant folding" not in capfd.readouterr().err
