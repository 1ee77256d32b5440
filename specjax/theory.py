"""What speculative decoding should give: expected tokens, speed-up, the best number of drafts, acceptance from laws.

Host-side NumPy in float64. Shapes: V vocabulary, K draft tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "acceptance_rate",
    "best_draft_length",
    "best_num_draft_tokens",
    "coupled_acceptance_rate",
    "expected_accepted",
    "expected_tokens",
    "num_accepted_probabilities",
    "speed_up",
    "typical_acceptance_rate",
]

Floats = np.ndarray | np.float64  # float64; a scalar where every argument is one

# A verification rule as a recursion over the mass of the draft paths that it accepts, from that of the paths one token
# shorter. `accepted` and `drafted` [V, ..., V, 1] are the accepted and the whole mass of the prefix, `target` and
# `draft` [V, ..., V, V] the laws of the next token.
_RULES = {
    "rejection": lambda accepted, drafted, target, draft: accepted * np.minimum(target, draft),
    "block": lambda accepted, drafted, target, draft: np.minimum(accepted * target, drafted * draft),
    "match": lambda accepted, drafted, target, draft: accepted * target * draft,
}


def expected_tokens(acceptance_rate: ArrayLike, num_draft_tokens: ArrayLike) -> Floats:
    """Compute the tokens emitted per step when each draft is accepted independently at the same rate.

    Args:
        acceptance_rate: in [0, 1], float, any shape.
        num_draft_tokens: K >= 0, int, of a shape that broadcasts with it.

    Returns:
        (1 - rate^(K+1)) / (1 - rate), float64 of the broadcast shape; K + 1 at rate 1.

    Raises:
        ValueError: a rate outside [0, 1], or a number of drafts that is negative or not an integer.

    Example:
        >>> expected_tokens(0.5, [1, 2, 3])
        array([1.5  , 1.75 , 1.875])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, equation 1.
    """
    rate, num_drafts = _rate(acceptance_rate)[..., None], _count("num_draft_tokens", num_draft_tokens)[..., None]
    powers = np.arange(num_drafts.max(initial=0) + 1)
    return np.where(powers <= num_drafts, rate**powers, 0.0).sum(axis=-1)


def num_accepted_probabilities(acceptance_rate: ArrayLike, num_draft_tokens: int) -> np.ndarray:
    """Compute the law of the number of accepted drafts when each is accepted independently at the same rate.

    Args:
        acceptance_rate: in [0, 1], float, any shape.
        num_draft_tokens: K >= 0.

    Returns:
        [..., K+1] float64, the probability of 0, 1, ..., K accepted drafts.

    Raises:
        ValueError: a rate outside [0, 1], or a number of drafts that is not one integer >= 0.

    Example:
        >>> num_accepted_probabilities(0.5, 2)
        array([0.5 , 0.25, 0.25])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, section 3.1.
    """
    rate, num_drafts = _rate(acceptance_rate)[..., None], _count("num_draft_tokens", num_draft_tokens, is_scalar=True)
    num_accepted = np.arange(num_drafts + 1)
    return rate**num_accepted * np.where(num_accepted < num_drafts, 1 - rate, 1.0)


def speed_up(
    acceptance_rate: ArrayLike, num_draft_tokens: ArrayLike, cost_ratio: ArrayLike, verify_ratio: ArrayLike = 1.0
) -> Floats:
    """Compute how many times faster than plain decoding speculative decoding is.

    Args:
        acceptance_rate: in [0, 1], float; each draft is accepted independently at this rate.
        num_draft_tokens: K >= 0, int.
        cost_ratio: time of one draft call / time of a 1-token target call, float >= 0.
        verify_ratio: time of a (K+1)-token target call / time of a 1-token target call, float > 0.

    Returns:
        expected_tokens / (K * cost_ratio + verify_ratio), float64 of the broadcast shape of the arguments.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> round(float(speed_up(0.8, 4, cost_ratio=0.2)), 4)
        1.8676

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, theorem 3.8.
    """
    cost, verify = np.asarray(cost_ratio, np.float64), np.asarray(verify_ratio, np.float64)
    _require(cost >= 0, "cost_ratio", ">= 0", cost_ratio)
    _require(verify > 0, "verify_ratio", "> 0", verify_ratio)
    return expected_tokens(acceptance_rate, num_draft_tokens) / (np.asarray(num_draft_tokens) * cost + verify)


def best_num_draft_tokens(
    acceptance_rate: ArrayLike, cost_ratio: ArrayLike, max_draft_tokens: int = 32
) -> np.ndarray | np.int64:
    """Find the number of draft tokens of the greatest speed-up; the smallest one where several tie.

    Verifying K+1 tokens is taken to cost as much as one plain step (`verify_ratio` 1).

    Args:
        acceptance_rate: in [0, 1], float; each draft is accepted independently at this rate.
        cost_ratio: time of one draft call / time of a target call, float >= 0, of a shape that broadcasts with it.
        max_draft_tokens: the largest number to consider.

    Returns:
        int64 of the broadcast shape, in [0, max_draft_tokens]; 0, plain decoding, where the rate is at most cost_ratio.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> best_num_draft_tokens([0.1, 0.5, 0.8], cost_ratio=0.1)
        array([0, 2, 6])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, section 3.5.
    """
    choices = np.arange(_count("max_draft_tokens", max_draft_tokens, is_scalar=True) + 1)
    speed_ups = speed_up(np.asarray(acceptance_rate)[..., None], choices, np.asarray(cost_ratio)[..., None])
    is_best = speed_ups >= speed_ups.max(axis=-1, keepdims=True) * (1 - 1e-12)  # ties differ by rounding
    return is_best.argmax(axis=-1)


def best_draft_length(acceptance_rate: float, step_seconds: Mapping[int, float]) -> int:
    """Find the number of draft tokens of the most tokens a second, among those whose step was timed.

    Args:
        acceptance_rate: in [0, 1]; each draft is accepted independently at this rate.
        step_seconds: the time of a whole step for each number K of draft tokens; K = 0 is plain decoding.

    Returns:
        K; the smallest one where several tie.

    Raises:
        ValueError: no times, a time that is not positive, a number of drafts that is not an integer >= 0, or a rate
            that is not one number in [0, 1].

    Example:
        >>> best_draft_length(0.7, {0: 4.0e-3, 3: 6.6e-3, 5: 8.3e-3})
        3
    """
    if not step_seconds:
        raise ValueError("step_seconds must have the time of at least one number of draft tokens, got none")
    _require(np.ndim(acceptance_rate) == 0, "acceptance_rate", "one number", acceptance_rate)
    choices = sorted(step_seconds)
    seconds = np.array([step_seconds[k] for k in choices], np.float64)
    _require(seconds > 0, "step_seconds", "> 0", step_seconds)
    return choices[int(np.argmax(expected_tokens(acceptance_rate, choices) / seconds))]


def acceptance_rate(target: ArrayLike, draft: ArrayLike) -> Floats:
    """Compute the probability that rejection sampling accepts a token drawn from the draft law.

    Args:
        target: [..., V] float, probabilities of the target model.
        draft: [..., V] float, probabilities of the draft model.

    Returns:
        [...] float64: the sum of min(target, draft), which is 1 - total variation.

    Raises:
        ValueError: shapes that differ, a negative entry, or a law that does not sum to 1 within 1e-6.

    Example:
        >>> print(acceptance_rate([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
        0.75

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, corollary 3.6.
    """
    target, draft = _laws(target, draft)
    return np.minimum(target, draft).sum(axis=-1)


def coupled_acceptance_rate(target: ArrayLike, draft: ArrayLike) -> Floats:
    """Compute the acceptance probability of `match` when the drafter draws with the target's own Gumbel noise.

    It lies between (1 - TV) / (1 + TV) and 1 - TV, where TV is the total variation of the two laws.

    Args:
        target: [..., V] float, probabilities of the target model.
        draft: [..., V] float, probabilities of the draft model.

    Returns:
        [...] float64: the sum over i of 1 / sum over j of max(target_j / target_i, draft_j / draft_i).

    Raises:
        ValueError: shapes that differ, a negative entry, or a law that does not sum to 1 within 1e-6.

    Example:
        >>> round(float(coupled_acceptance_rate([0.25, 0.75], [0.75, 0.25])), 4)
        0.5

    References:
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv:2408.07978.
    """
    target, draft = _laws(target, draft)
    # In the order of target / draft, target_j / target_i is the larger one for the tokens j at and above i.
    order = np.arctan2(target, draft).argsort(axis=-1)
    target, draft = np.take_along_axis(target, order, axis=-1), np.take_along_axis(draft, order, axis=-1)
    above = target[..., ::-1].cumsum(axis=-1)[..., ::-1]
    below = draft.cumsum(axis=-1) - draft
    both = target * draft
    return np.divide(both, above * draft + below * target, out=np.zeros_like(both), where=both > 0).sum(axis=-1)


def typical_acceptance_rate(
    target: ArrayLike, draft: ArrayLike, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3
) -> Floats:
    """Compute the probability that typical acceptance accepts a token drawn from the draft law.

    Args:
        target: [..., V] float, probabilities of the target model.
        draft: [..., V] float, probabilities of the draft model.
        posterior_threshold: the probability in [0, 1] above which a token is always accepted.
        posterior_alpha: >= 0, factor of exp(-entropy) in the threshold of a spread-out target.

    Returns:
        [...] float64: the draft mass of the tokens whose target probability is greater than
        min(posterior_threshold, posterior_alpha * exp(-entropy of the target)).

    Raises:
        ValueError: shapes that differ, a negative entry, a law that does not sum to 1 within 1e-6, or a threshold or
            factor out of its range.

    Example:
        >>> print(typical_acceptance_rate([0.9, 0.05, 0.05], [0.5, 0.25, 0.25]))
        0.5

    References:
        Cai et al., Medusa, arXiv:2401.10774, section 3.3.1.
    """
    _require(0 <= posterior_threshold <= 1, "posterior_threshold", "in [0, 1]", posterior_threshold)
    _require(posterior_alpha >= 0, "posterior_alpha", ">= 0", posterior_alpha)
    target, draft = _laws(target, draft)
    entropy = -np.sum(target * np.log(np.where(target > 0, target, 1.0)), axis=-1, keepdims=True)
    threshold = np.minimum(posterior_threshold, posterior_alpha * np.exp(-entropy))
    return np.sum(draft, axis=-1, where=target > threshold)


def expected_accepted(target: Sequence[ArrayLike], draft: Sequence[ArrayLike], rule: str = "rejection") -> float:
    """Compute the expected number of accepted drafts of a step from the exact laws of both models.

    It enumerates all V^K draft paths, so it is meant for small vocabularies.

    Args:
        target: K arrays of float; `target[i]` of shape [V] * (i+1) holds the law of the token i given those before.
        draft: K arrays of the same shapes, the laws that the drafts are drawn from.
        rule: "rejection", "block", or "match" (drafts drawn independently of the target's noise).

    Returns:
        The expected number, in [0, K].

    Raises:
        ValueError: an unknown rule, a different number of arrays, a wrong shape, or an array that is not a law.

    Example:
        >>> target = [[0.5, 0.5], [[1.0, 0.0], [0.5, 0.5]]]
        >>> draft = [[0.75, 0.25], [[0.5, 0.5], [0.5, 0.5]]]
        >>> expected_accepted(target, draft, "rejection"), expected_accepted(target, draft, "block")
        (1.25, 1.375)

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192 (rejection);
        Sun et al., Block Verification Accelerates Speculative Decoding, arXiv:2403.10444 (block);
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv:2408.07978
        (match).
    """
    _require(rule in _RULES, "rule", f"one of {list(_RULES)}", repr(rule))
    _require(len(draft) == len(target), "draft", f"as many arrays as target, {len(target)}", len(draft))
    total = 0.0
    accepted = drafted = np.ones(())
    for i, laws in enumerate(zip(target, draft, strict=True)):
        target_law, draft_law = _laws(*laws, suffix=f"[{i}]")
        shape = np.shape(target[0])[-1:] * (i + 1)
        _require(target_law.shape == shape, f"target[{i}]", f"of shape [V] * {i + 1} = {shape}", target_law.shape)
        accepted, drafted = accepted[..., None], drafted[..., None]
        accepted = _RULES[rule](accepted, drafted, target_law, draft_law)
        drafted = drafted * draft_law
        total += float(accepted.sum())
    return total


def _require(is_valid, name, expected, got):
    if not np.all(is_valid):
        raise ValueError(f"{name} must be {expected}, got {got}")


def _rate(acceptance_rate):
    rate = np.asarray(acceptance_rate, np.float64)
    _require((rate >= 0) & (rate <= 1), "acceptance_rate", "in [0, 1]", acceptance_rate)
    return rate


def _count(name, value, is_scalar=False):
    count = np.asarray(value)
    is_valid = np.issubdtype(count.dtype, np.integer) and np.all(count >= 0) and (count.ndim == 0 or not is_scalar)
    _require(is_valid, name, "an integer >= 0", value)
    return count


def _laws(target, draft, suffix=""):
    laws = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    for name, law in zip((f"target{suffix}", f"draft{suffix}"), laws, strict=True):
        _require(law.ndim > 0 and law.size > 0, name, "of shape [..., V]", law.shape)
        _require(law >= 0, name, "nonnegative", law.min())
        sums = law.sum(axis=-1)
        _require(np.abs(sums - 1) <= 1e-6, name, "of sum 1 within 1e-6", f"{sums.min()} to {sums.max()}")
    _require(laws[0].shape == laws[1].shape, f"draft{suffix}", f"of shape {laws[0].shape}, target's", laws[1].shape)
    return laws
