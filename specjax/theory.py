"""Predictions of speculative decoding: acceptance rates of distributions, expected tokens, speed-up, the best K.

The functions compute on the host, in NumPy and float64. Shapes: V vocabulary, K draft tokens.
"""

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from specjax.validation import check_number

__all__ = [
    "StepTimes",
    "acceptance_rate",
    "best_draft_length",
    "best_num_draft_tokens",
    "call_seconds",
    "coupled_acceptance_rate",
    "expected_accepted",
    "expected_tokens",
    "num_accepted_probabilities",
    "speed_up",
    "typical_acceptance_rate",
]

Floats = np.ndarray | np.float64  # float64, a scalar where every argument is a scalar

# Each rule gives the probability that a draft path is drawn and accepted, from the same probability `accepted` of the
# path without its last token. `drafted` is the probability that this shorter path is drawn; both have shape
# [V, ..., V, 1]. `target` and `draft` [V, ..., V, V] are the distributions of the last token.
_RULES = {
    "rejection": lambda accepted, drafted, target, draft: accepted * np.minimum(target, draft),
    "block": lambda accepted, drafted, target, draft: np.minimum(accepted * target, drafted * draft),
    "match": lambda accepted, drafted, target, draft: accepted * target * draft,
}


def expected_tokens(acceptance_rate: ArrayLike, num_draft_tokens: ArrayLike) -> Floats:
    """Compute the expected number of tokens per step if each draft is accepted independently at the same rate.

    Args:
        acceptance_rate: float in [0, 1], of any shape.
        num_draft_tokens: K, int >= 0, of a shape that broadcasts with `acceptance_rate`.

    Returns:
        (1 - rate^(K+1)) / (1 - rate), which is K + 1 at rate 1; float64 of the broadcast shape.

    Raises:
        ValueError: a rate is outside [0, 1], or a number of drafts is negative or not an integer.

    Example:
        >>> expected_tokens(0.5, [1, 2, 3])
        array([1.5  , 1.75 , 1.875])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, equation 1.
    """
    rate, num_drafts = _rate(acceptance_rate), _count("num_draft_tokens", num_draft_tokens)
    _require_broadcast(acceptance_rate=rate, num_draft_tokens=num_drafts)
    rate, num_drafts = rate[..., None], num_drafts[..., None]
    powers = np.arange(num_drafts.max(initial=0) + 1)
    return np.where(powers <= num_drafts, rate**powers, 0.0).sum(axis=-1)


def num_accepted_probabilities(acceptance_rate: ArrayLike, num_draft_tokens: int) -> np.ndarray:
    """Compute the distribution of the number of accepted drafts if each is accepted independently at the same rate.

    Args:
        acceptance_rate: float in [0, 1], of any shape.
        num_draft_tokens: K, one int >= 0.

    Returns:
        [..., K+1] float64, the probabilities of 0, 1, ..., K accepted drafts.

    Raises:
        ValueError: a rate is outside [0, 1], or the number of drafts is not one integer >= 0.

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
    """Compute how many times faster speculative decoding is than plain decoding.

    Args:
        acceptance_rate: float in [0, 1]; each draft is accepted independently at this rate.
        num_draft_tokens: K, int >= 0.
        cost_ratio: float >= 0, the time of a draft call divided by the time of a 1-token target call.
        verify_ratio: float > 0, the time of a (K+1)-token target call divided by the time of a 1-token target call.

    Returns:
        expected_tokens / (K * cost_ratio + verify_ratio), float64 of the broadcast shape of the arguments.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> round(float(speed_up(0.8, 4, cost_ratio=0.2)), 4)
        1.8676

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, theorem 3.8.
    """
    rate, num_drafts = _rate(acceptance_rate), _count("num_draft_tokens", num_draft_tokens)
    cost, verify = _floats("cost_ratio", cost_ratio), _floats("verify_ratio", verify_ratio)
    _require((cost >= 0) & (cost < math.inf), "cost_ratio", ">= 0", cost_ratio)
    _require((verify > 0) & (verify < math.inf), "verify_ratio", "> 0", verify_ratio)
    _require_broadcast(acceptance_rate=rate, num_draft_tokens=num_drafts, cost_ratio=cost, verify_ratio=verify)
    return expected_tokens(rate, num_drafts) / (num_drafts * cost + verify)


def best_num_draft_tokens(
    acceptance_rate: ArrayLike, cost_ratio: ArrayLike, max_draft_tokens: int = 32
) -> np.ndarray | np.int64:
    """Find the number of draft tokens with the greatest speed-up.

    The function assumes that a target call over K+1 tokens takes as long as one over 1 token (`verify_ratio` 1).

    Args:
        acceptance_rate: float in [0, 1]; each draft is accepted independently at this rate.
        cost_ratio: float >= 0, the time of a draft call divided by the time of a target call, of a shape that
            broadcasts with `acceptance_rate`.
        max_draft_tokens: the largest number to consider.

    Returns:
        int64 of the broadcast shape, in [0, max_draft_tokens]: the smallest of the best numbers. It is 0, which is
        plain decoding, where the rate is at most `cost_ratio`.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> best_num_draft_tokens([0.1, 0.5, 0.8], cost_ratio=0.1)
        array([0, 2, 6])

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, section 3.5.
    """
    choices = np.arange(_count("max_draft_tokens", max_draft_tokens, is_scalar=True) + 1)
    rate, cost = _rate(acceptance_rate), _floats("cost_ratio", cost_ratio)
    _require_broadcast(acceptance_rate=rate, cost_ratio=cost)
    speed_ups = speed_up(rate[..., None], choices, cost[..., None])
    is_best = speed_ups >= speed_ups.max(axis=-1, keepdims=True) * (1 - 1e-12)  # ties differ by rounding
    return is_best.argmax(axis=-1)


def best_draft_length(acceptance_rate: float, step_seconds: Mapping[int, float]) -> int:
    """Find the number of draft tokens that gives the most tokens per second, given the time of a step for each.

    Args:
        acceptance_rate: one number in [0, 1]; each draft is accepted independently at this rate.
        step_seconds: the time of a whole step in seconds for each number K of draft tokens to choose from; K = 0 is
            plain decoding.

    Returns:
        K, the smallest of the best numbers.

    Raises:
        ValueError: there is no time, a time is not positive, a number of drafts is not an integer >= 0, or the rate is
            not one number in [0, 1].

    Example:
        >>> best_draft_length(0.7, {0: 4.0e-3, 3: 6.6e-3, 5: 8.3e-3})
        3
    """
    is_mapping = isinstance(step_seconds, Mapping)
    _require(is_mapping, "step_seconds", "a mapping from numbers of draft tokens to seconds", repr(step_seconds))
    if not step_seconds:
        raise ValueError("step_seconds must have the time of at least one number of draft tokens, got none")
    _require(_rate(acceptance_rate).ndim == 0, "acceptance_rate", "one number", acceptance_rate)
    choices = sorted(_count("a key of step_seconds", list(step_seconds)).tolist())
    seconds = _floats("a time of step_seconds", [step_seconds[k] for k in choices])
    _require(seconds.ndim == 1, "a time of step_seconds", "one number", step_seconds)
    _require((seconds > 0) & (seconds < math.inf), "step_seconds", "> 0", step_seconds)
    return choices[int(np.argmax(expected_tokens(acceptance_rate, choices) / seconds))]


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of a step by the number of sequences and of draft tokens; `specjax tune` writes them.

    Args:
        seconds: for each number of sequences B, the seconds of a step for each number K of draft tokens.

    Raises:
        ValueError: there is no number, or a number is not an integer of its range, or a time is not positive.

    Example:
        >>> times = StepTimes({1: {0: 4.0e-3, 3: 6.6e-3}, 64: {0: 6.0e-3, 3: 18.0e-3}})
        >>> times.best(1, 0.7), times.best(64, 0.7)
        (3, 0)
    """

    seconds: Mapping[int, Mapping[int, float]]

    def __post_init__(self):
        is_table = isinstance(self.seconds, Mapping) and all(isinstance(x, Mapping) for x in self.seconds.values())
        if not (is_table and self.seconds and all(self.seconds.values())):
            raise ValueError(f"seconds must have a time for a number of sequences and of drafts, got {self.seconds!r}")
        batches = _count("a key of seconds", list(self.seconds))
        _require(batches >= 1, "a key of seconds", ">= 1", batches)
        for batch, times in self.seconds.items():
            best_draft_length(0.5, times)  # checks the keys and the times
            object.__setattr__(self, "seconds", {**self.seconds, batch: dict(times)})

    def at(self, num_sequences: int) -> Mapping[int, float]:
        """Return the seconds of a step by K for the smallest B that holds the sequences, or for the largest B."""
        above = [batch for batch in self.seconds if batch >= num_sequences]
        return self.seconds[min(above) if above else max(self.seconds)]

    def best(self, num_sequences: int, acceptance_rate: float) -> int:
        """Return the K with the most tokens per second; `best_draft_length` describes the rate and the errors."""
        return best_draft_length(acceptance_rate, self.at(num_sequences))

    def save(self, path: str | Path, **about: Any) -> None:
        """Write the seconds to a JSON file.

        Args:
            path: the file.
            about: further fields, such as the device.
        """
        Path(path).write_text(json.dumps({**about, "seconds": self.seconds}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "StepTimes":
        """Read a file that `save` has written.

        Raises:
            ValueError: the file has no such times.
            OSError: it cannot be read.
        """

        def fail(reason: object) -> NoReturn:
            raise ValueError(f"{path} must be a file that specjax tune has written: {reason}")

        def number(field: str, value: Any) -> int:
            if not (isinstance(value, str) and value.isascii() and value.isdecimal()):
                fail(f"{field} must have integers >= 0 as names, got {value!r}")
            return int(value)

        def seconds(field: str, value: Any) -> float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf):
                fail(f"{field} must be a number > 0, got {value!r}")
            return float(value)

        def fields(field: str, value: Any) -> Mapping[str, Any]:
            if not (isinstance(value, dict) and value):
                fail(f"{field} must be an object with at least one entry, got {value!r}")
            return value

        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            fail(f"it is no JSON, {error}")
        if not isinstance(content, dict) or "seconds" not in content:
            fail("it has no field seconds")
        table = {
            number("seconds", b): {
                number(f"seconds.{b}", k): seconds(f"seconds.{b}.{k}", value)
                for k, value in fields(f"seconds.{b}", times).items()
            }
            for b, times in fields("seconds", content["seconds"]).items()
        }
        if 0 in table:
            fail("seconds must have numbers of sequences >= 1 as names, got '0'")
        return cls(table)


def call_seconds(
    weight_bytes: ArrayLike,
    bandwidth: ArrayLike,
    num_devices: ArrayLike = 1,
    num_sums: ArrayLike = 0,
    sum_seconds: ArrayLike = 0.0,
) -> Floats:
    """Compute the least time of a call of a model that several devices share, for a few tokens.

    Such a call reads all weights once, each device its part, and adds up over the devices between the parts of the
    network. The time that it takes besides, for the cache and all that is computed, is left out.

    Args:
        weight_bytes: float > 0, bytes of the weights of all devices together.
        bandwidth: float > 0, bytes per second that one device reads.
        num_devices: int >= 1.
        num_sums: int >= 0, sums over the devices in a call: `models.tensor_parallel` has two a layer, and one for the
            embedding. One device has none.
        sum_seconds: float >= 0, the time of a sum in seconds, which depends on the devices, their number and the bytes.

    Returns:
        weight_bytes / (num_devices * bandwidth) + num_sums * sum_seconds, in seconds; float64 of the broadcast shape.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> call_seconds(15e9, 4.3e12, num_devices=[1, 2], num_sums=65, sum_seconds=6e-6).round(5)
        array([0.00349, 0.00213])

    References:
        Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102, section 3.
    """
    given = {"weight_bytes": _floats("weight_bytes", weight_bytes), "bandwidth": _floats("bandwidth", bandwidth)}
    given |= {"num_devices": _count("num_devices", num_devices), "num_sums": _count("num_sums", num_sums)}
    given |= {"sum_seconds": _floats("sum_seconds", sum_seconds)}
    for name in ("weight_bytes", "bandwidth", "num_devices"):
        _require((given[name] > 0) & (given[name] < math.inf), name, "> 0", given[name])
    _require((given["sum_seconds"] >= 0) & (given["sum_seconds"] < math.inf), "sum_seconds", ">= 0", sum_seconds)
    _require_broadcast(**given)
    size, speed, number, sums, seconds = given.values()
    reading = size / (number * speed)
    return reading + np.where(number > 1, sums * seconds, 0.0)


def acceptance_rate(target: ArrayLike, draft: ArrayLike) -> Floats:
    """Compute the probability that rejection sampling accepts a token drawn from the draft distribution.

    Args:
        target: [..., V] float, the target's probabilities.
        draft: [..., V] float, the draft's probabilities.

    Returns:
        [...] float64, the sum of min(target, draft), which is 1 - total variation.

    Raises:
        ValueError: the shapes differ, an entry is negative, or the probabilities do not sum to 1 within 1e-6.

    Example:
        >>> print(acceptance_rate([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
        0.75

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, corollary 3.6.
    """
    target, draft = _distributions(target, draft)
    return np.minimum(target, draft).sum(axis=-1)


def coupled_acceptance_rate(target: ArrayLike, draft: ArrayLike) -> Floats:
    """Compute the acceptance probability of `match` if the drafter draws with the target's own Gumbel noise.

    It lies between (1 - TV) / (1 + TV) and 1 - TV, where TV is the total variation of the two distributions.

    Args:
        target: [..., V] float, the target's probabilities.
        draft: [..., V] float, the draft's probabilities.

    Returns:
        [...] float64, the sum over i of 1 / (sum over j of max(target_j / target_i, draft_j / draft_i)).

    Raises:
        ValueError: the shapes differ, an entry is negative, or the probabilities do not sum to 1 within 1e-6.

    Example:
        >>> round(float(coupled_acceptance_rate([0.25, 0.75], [0.75, 0.25])), 4)
        0.5

    References:
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, arXiv:2408.07978.
    """
    target, draft = _distributions(target, draft)
    # With the tokens sorted by target / draft, target_j / target_i is the larger ratio for every token j from i on.
    order = np.arctan2(target, draft).argsort(axis=-1)
    target, draft = np.take_along_axis(target, order, axis=-1), np.take_along_axis(draft, order, axis=-1)
    above = target[..., ::-1].cumsum(axis=-1)[..., ::-1]
    below = draft.cumsum(axis=-1) - draft
    both = target * draft
    return np.divide(both, above * draft + below * target, out=np.zeros_like(both), where=both > 0).sum(axis=-1)


def typical_acceptance_rate(
    target: ArrayLike, draft: ArrayLike, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3
) -> Floats:
    """Compute the probability that typical acceptance accepts a token drawn from the draft distribution.

    Args:
        target: [..., V] float, the target's probabilities.
        draft: [..., V] float, the draft's probabilities.
        posterior_threshold: the probability in [0, 1] above which a token is always accepted.
        posterior_alpha: the factor >= 0 of exp(-entropy), which lowers the threshold where the target is uncertain.

    Returns:
        [...] float64, the draft probability of all tokens whose target probability is greater than
        min(posterior_threshold, posterior_alpha * exp(-entropy of the target)).

    Raises:
        ValueError: the shapes differ, an entry is negative, the probabilities do not sum to 1 within 1e-6, or the
            threshold or factor is out of its range.

    Example:
        >>> print(typical_acceptance_rate([0.9, 0.05, 0.05], [0.5, 0.25, 0.25]))
        0.5

    References:
        Cai et al., Medusa, arXiv:2401.10774, section 3.3.1.
    """
    check_number("posterior_threshold", posterior_threshold, "in [0, 1]", 0, 1)
    check_number("posterior_alpha", posterior_alpha, ">= 0", 0, math.inf)
    target, draft = _distributions(target, draft)
    entropy = -np.sum(target * np.log(np.where(target > 0, target, 1.0)), axis=-1, keepdims=True)
    threshold = np.minimum(posterior_threshold, posterior_alpha * np.exp(-entropy))
    return np.sum(draft, axis=-1, where=target > threshold)


def expected_accepted(target: Sequence[ArrayLike], draft: Sequence[ArrayLike], rule: str = "rejection") -> float:
    """Compute the expected number of accepted drafts of a step from the exact distributions of both models.

    The function enumerates all V^K draft paths, so it is meant for small vocabularies.

    Args:
        target: K float arrays; `target[i]` of shape [V] * (i+1) holds the probabilities of token i given the tokens
            before it.
        draft: K float arrays of the same shapes, the probabilities that the drafts are drawn with.
        rule: "rejection", "block", or "match" with drafts that are drawn independently of the target's noise.

    Returns:
        The expected number, in [0, K].

    Raises:
        ValueError: the rule is unknown, the numbers of arrays differ, an array has a wrong shape, or probabilities are
            negative or do not sum to 1 within 1e-6.

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
    _require(isinstance(rule, str) and rule in _RULES, "rule", f"one of {list(_RULES)}", repr(rule))
    for name, arrays in (("target", target), ("draft", draft)):
        _require(hasattr(arrays, "__len__") and not isinstance(arrays, str), name, "a list of arrays", repr(arrays))
    _require(len(draft) == len(target), "draft", f"as many arrays as target, {len(target)}", len(draft))
    total = 0.0
    accepted = drafted = np.ones(())
    for i, level in enumerate(zip(target, draft, strict=True)):
        target_probs, draft_probs = _distributions(*level, suffix=f"[{i}]")
        shape = np.shape(target[0])[-1:] * (i + 1)
        _require(target_probs.shape == shape, f"target[{i}]", f"of shape [V] * {i + 1} = {shape}", target_probs.shape)
        accepted, drafted = accepted[..., None], drafted[..., None]
        accepted = _RULES[rule](accepted, drafted, target_probs, draft_probs)
        drafted = drafted * draft_probs
        total += float(accepted.sum())
    return total


def _require(is_valid, name, expected, got):
    if not np.all(is_valid):
        raise ValueError(f"{name} must be {expected}, got {got}")


def _require_broadcast(**arrays):
    try:
        np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(str(array.shape) for array in arrays.values())
        raise ValueError(f"{', '.join(arrays)} must have shapes that broadcast, got {shapes}") from None


def _floats(name, value):
    """Return numbers as float64; text, None and truth values are none, and neither are lists of several lengths."""
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.array(None)
    are_numbers = array.dtype.kind not in "bcmMOSTU"
    if array.dtype == object:  # as exact fractions and large integers of Python are
        are_numbers = all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in array.flat)
    _require(are_numbers, name, "a number, or an array of numbers", repr(value))
    return array.astype(np.float64)


def _rate(acceptance_rate):
    rate = _floats("acceptance_rate", acceptance_rate)
    _require((rate >= 0) & (rate <= 1), "acceptance_rate", "in [0, 1]", acceptance_rate)
    return rate


def _count(name, value, is_scalar=False) -> Any:
    try:
        count = np.asarray(value)
    except ValueError:  # lists of several lengths
        count = np.array(None)
    is_valid = np.issubdtype(count.dtype, np.integer) and np.all(count >= 0) and (count.ndim == 0 or not is_scalar)
    _require(is_valid, name, "an integer >= 0", repr(value))
    return count


def _distributions(target, draft, suffix=""):
    target, draft = _floats(f"target{suffix}", target), _floats(f"draft{suffix}", draft)
    for name, probs in ((f"target{suffix}", target), (f"draft{suffix}", draft)):
        _require(probs.ndim > 0 and probs.size > 0, name, "of shape [..., V]", probs.shape)
        _require(probs >= 0, name, "nonnegative", probs.min())
        sums = probs.sum(axis=-1)
        _require(np.abs(sums - 1) <= 1e-6, name, "of sum 1 within 1e-6", f"{sums.min()} to {sums.max()}")
    _require(target.shape == draft.shape, f"draft{suffix}", f"of shape {target.shape}, as target", draft.shape)
    return target, draft
