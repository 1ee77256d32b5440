"""Verifiers that are wrong in ways in which a contributor would be wrong. `testing.assert_lossless` must find each.

docs/verdicts.md has a line on each of them.
"""

import jax
import jax.numpy as jnp

from specjax import distributions, verifiers
from specjax.verifiers import core
from specjax.verifiers.rejection import rejection

WRONG = {}  # name: the verifier, and the message of the verdict


def wrong(message):
    def add(function):
        WRONG[function.__name__] = core.from_core(function), message
        return function

    return add


class Changed:
    """A draw with some calls of another one replaced."""

    def __init__(self, draw, **calls):
        self.flip, self.pick, self.sample = draw.flip, draw.pick, draw.sample
        self.__dict__.update(calls)


def finish(draw, draft, target, accepted, **options):
    """`rejection` with the outcome of its coins given."""
    return rejection.core(Changed(draw, flip=lambda probabilities: accepted), draft, target, **options)


@wrong("not lossless on .*sampled drafts")
def one_coin_for_all_positions(draw, draft, target, **options):
    def flip(probabilities):
        return jnp.broadcast_to(draw.flip(probabilities[:, :1]), probabilities.shape)

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("two calls of draw.flip in one step have index=0")
def one_coin_for_all_iterations(draw, draft, target, **options):
    if draft.distribution is None:
        return rejection.core(draw, draft, target, **options)

    def flip(probabilities):
        def body(i, accepted):
            return accepted.at[:, i].set(draw.flip(probabilities[:, i][:, None], index=0)[:, 0])

        return jax.lax.fori_loop(0, probabilities.shape[1], body, jnp.zeros(probabilities.shape, bool))

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("row with 1 of 2 drafts'")
def looks_past_num_tokens(draw, draft, target, **options):
    """Multiplies the numbers after the row's own drafts by 0, which gives NaN where they are NaN."""
    if draft.distribution is None:
        return rejection.core(draw, draft, target, **options)
    behind = 0 * jnp.sum(draft.distribution.logits, axis=(1, 2), where=jnp.isnan(draft.distribution.logits))[:, None]
    flip = lambda probabilities: draw.flip(probabilities + behind)  # noqa: E731
    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("not lossless|must not depend on the rest of the batch")
def waits_for_the_slowest_row(draw, draft, target, **options):
    """Accepts as many drafts as the row of the batch that accepts fewest."""

    def flip(probabilities):
        return draw.flip(probabilities) & (jnp.min(draft.num_tokens) > 0)

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("not lossless on")
def recovers_from_the_next_row(draw, draft, target, **options):
    def pick(residual):
        normalized = distributions.normalize(target)
        rows = jnp.minimum(residual.target.distribution.rows[:, 0] % draft.tokens.shape[1] + 1, draft.tokens.shape[1])
        return draw.pick(residual._replace(target=distributions.take_row(normalized, rows)))

    return rejection.core(Changed(draw, pick=pick) if draft.tokens.shape[1] else draw, draft, target, **options)


@wrong("row with 0 of 2 drafts'")
def counts_minus_one_as_token_0(draw, draft, target, **options):
    width = draft.tokens.shape[1]
    draft = draft._replace(tokens=jnp.maximum(draft.tokens, 0), num_tokens=jnp.full_like(draft.num_tokens, width))
    return rejection.core(draw, draft, target, **options)


@wrong("greedy row'")
def samples_greedy_rows(draw, draft, target, **options):
    if target.temperature is not None:
        target = target._replace(temperature=jnp.where(target.temperature > 0, target.temperature, 1))
    return rejection.core(draw, draft, target, **options)


@wrong("greedy row with ties'")
def accepts_any_of_the_tied(draw, draft, target, **options):
    if draft.distribution is None or target.temperature is None:
        return rejection.core(draw, draft, target, **options)
    logits = distributions.kept_logits(target)[:, :-1]
    drafted = jnp.take_along_axis(logits, jnp.maximum(draft.tokens, 0)[..., None], axis=-1)[..., 0]
    is_best = drafted == jnp.max(logits, axis=-1)

    def flip(probabilities):
        return draw.flip(jnp.where(target.temperature[:, None] == 0, is_best.astype(jnp.float32), probabilities))

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("draft row 0 without mass'")
def accepts_what_the_draft_calls_impossible(draw, draft, target, **options):
    if draft.distribution is None:
        return rejection.core(draw, draft, target, **options)
    of_draft = distributions.token_log_prob(distributions.normalize_drafts(draft.distribution), draft.tokens)
    impossible = of_draft == -jnp.inf
    greedy = jnp.zeros((1, 1), bool) if target.temperature is None else target.temperature[:, None] == 0
    one_hot = core.is_deterministic(draft)[:, None]

    def flip(probabilities):
        return draw.flip(jnp.where(impossible & ~greedy & ~one_hot, 1.0, probabilities))

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("tokens must be in")
def emits_the_vocabulary_size_where_nothing_has_mass(draw, draft, target, **options):
    def pick(residual):
        mass = jnp.sum(distributions.residual_weights(residual), axis=-1)
        return jnp.where(mass > 0, draw.pick(residual), distributions.shape_of(target)[2])

    def sample(target):
        token, has_mass = draw.sample(target), jnp.isfinite(distributions.normalize(target).log_mass)
        return jnp.where(has_mass, token, distributions.shape_of(target)[2])

    return rejection.core(Changed(draw, pick=pick, sample=sample), draft, target, **options)


@wrong("not lossless on 'sampled drafts'")
def accepts_a_single_draft(draw, draft, target, **options):
    """Right for every K but 1."""
    if draft.tokens.shape[1] != 1 or draft.distribution is None:
        return rejection.core(draw, draft, target, **options)
    return finish(draw, draft, target, draw.flip(jnp.ones(draft.tokens.shape)), **options)


@wrong("with bonus tokens'")
def emits_the_bonus_after_a_rejection(draw, draft, target, *, bonus_tokens=None, log_probs=False):
    verified = rejection.core(draw, draft, target, log_probs=log_probs)
    if bonus_tokens is None:
        return verified
    last = jnp.arange(draft.tokens.shape[1] + 1)[None] == verified.num_accepted[:, None]
    return verified._replace(tokens=jnp.where(last, bonus_tokens[:, None], verified.tokens))


@wrong("must end with their bonus token")
def ignores_bonus_tokens(draw, draft, target, *, bonus_tokens=None, log_probs=False):
    return rejection.core(draw, draft, target, log_probs=log_probs)


@wrong("not lossless on")
def brings_its_own_chance(draw, draft, target, **options):
    def flip(probabilities):
        return jax.random.uniform(jax.random.key(7), probabilities.shape) < probabilities

    return rejection.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("tokens must be num_accepted of")
def counts_the_accepted_behind_a_rejection(draw, draft, target, **options):
    kept = []

    def flip(probabilities):
        kept.append(draw.flip(probabilities))
        return kept[0]

    verified = rejection.core(Changed(draw, flip=flip), draft, target, **options)
    if not kept:
        return verified
    is_draft = jnp.arange(draft.tokens.shape[1])[None] < draft.num_tokens[:, None]
    return verified._replace(num_accepted=jnp.sum(kept[0] & is_draft, axis=1, dtype=jnp.int32))


@wrong("log_probs must be those of the target")
def reports_the_probability_of_the_draft(draw, draft, target, *, bonus_tokens=None, log_probs=False):
    verified = rejection.core(draw, draft, target, bonus_tokens=bonus_tokens, log_probs=log_probs)
    if not log_probs or draft.distribution is None:
        return verified
    of_draft = distributions.token_log_prob(distributions.normalize(draft.distribution), verified.tokens[:, :-1])
    is_accepted = jnp.arange(draft.tokens.shape[1])[None] < verified.num_accepted[:, None]
    merged = jnp.where(is_accepted, of_draft, verified.log_probs[:, :-1])
    return verified._replace(log_probs=jnp.concatenate([merged, verified.log_probs[:, -1:]], axis=1))


@wrong("depends on the order of the batch|not lossless on")
def takes_the_temperature_of_row_0(draw, draft, target, **options):
    if target.temperature is not None:
        target = target._replace(temperature=jnp.full_like(target.temperature, target.temperature[0]))
    return rejection.core(draw, draft, target, **options)


@wrong("draft of temperature 0'")
def ignores_one_hot_drafts(draw, draft, target, **options):
    """Scores the argmax draft of a row of draft temperature 0 with the softmax."""
    softmax = draft.distribution
    if softmax is not None and softmax.temperature is not None:
        softmax = softmax._replace(temperature=jnp.where(softmax.temperature == 0, 1, softmax.temperature))
    return rejection.core(draw, draft._replace(distribution=softmax), target, **options)


@wrong("cut'")
def ignores_the_cut(draw, draft, target, **options):
    uncut = draft.distribution and draft.distribution._replace(min_logit=None)
    return rejection.core(draw, draft._replace(distribution=uncut), target._replace(min_logit=None), **options)


@wrong("not lossless on")
def block_with_the_first_failure(draw, draft, target, **options):
    def flip(probabilities):
        return jnp.cumprod(draw.flip(probabilities).astype(jnp.int32), axis=1).astype(bool)

    return verifiers.block.core(Changed(draw, flip=flip), draft, target, **options)


@wrong("not lossless on")
def block_with_the_token_residual(draw, draft, target, **options):
    def pick(residual):
        return draw.pick(residual._replace(scale=None))

    return verifiers.block.core(Changed(draw, pick=pick), draft, target, **options)


@wrong("not lossless on 'sampled drafts'")
def resamples_from_the_target(draw, draft, target, **options):
    def pick(residual):
        return draw.pick(residual._replace(draft=None))

    return rejection.core(Changed(draw, pick=pick), draft, target, **options)
