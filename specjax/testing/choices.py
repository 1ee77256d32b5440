"""The verdict on a rule that chooses how many drafts of each sequence a step verifies.

Two rows take two steps, with three tokens and two drafts, and everything is enumerated: the drafts, the outcomes of the
verifier, and the noise of the target at a position, which a later step meets again where drafts after a rejection have
been compared with it. The joint distribution of the first tokens of both rows must be the product of the targets'.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array

from specjax import verifiers
from specjax.testing.enumeration import enumerate_outcomes, probabilities, total_variation
from specjax.types import Array, Categorical, Draft

V, K, LENGTH = 3, 2, 3  # LENGTH: first tokens of each row that are compared
START = 0  # token that both rows begin with
PATHS = np.array(list(product(range(V), repeat=K)), np.int32)  # the drafts of a row
PLAIN = K + 1  # index of a step without drafts in any row, after the numbers 0 to K of drafts
NUMBERS = range(K + 2)
ROWS = range(2)

SAMPLED, DETERMINISTIC, ONE_HOT = "sampled", "deterministic", "one-hot"  # ONE_HOT: in a batch with sampled rows
KINDS = {  # of the drafts of both rows in both steps
    "sampled drafts": ((SAMPLED, SAMPLED), (SAMPLED, SAMPLED)),
    "deterministic drafts": ((DETERMINISTIC, DETERMINISTIC), (DETERMINISTIC, DETERMINISTIC)),
    "sampled beside deterministic drafts": ((SAMPLED, ONE_HOT), (ONE_HOT, SAMPLED)),
    "deterministic, then sampled drafts": ((DETERMINISTIC, SAMPLED), (DETERMINISTIC, SAMPLED)),
}
VERIFIERS = {name: getattr(verifiers, name) for name in ("rejection", "block", "match")}
CONFIDENCES = np.array([[0.5, 0.9, 0.5], [0.5, 1.0, 0.25]], np.float32)  # in the draft after each token, with ties
_rng = np.random.default_rng(7)
TARGETS, DRAFTS = (1.5 * _rng.normal(size=(2, V, V)).astype(np.float32) for _ in range(2))  # logits after each token


class Drafted(NamedTuple):
    """The facts that a rule may look at before a step is verified. Counts are 0 and False before the first step."""

    tokens: Array  # [B, K] int32, the drafts
    probs: Array  # [B, K, V] float32, the distribution that each was drawn from
    confidences: Array  # [B, K] float32 in [0, 1], of each draft, by the token before it
    last: Array  # [B] int32, the last committed token
    num_drafts: Array  # [B] int32, of the step before
    num_accepted: Array  # [B] int32, of the step before
    is_accepted: Array  # [B, K] bool, the outcome of the test of each draft of the step before, also after a rejection


class Outcomes(NamedTuple):
    """The outcomes [..., O] of a row's part of a step."""

    weight: np.ndarray  # [..., O] float64
    tokens: np.ndarray  # [..., O, K+1], then -1
    is_accepted: np.ndarray  # [..., O, K]
    sampled: (
        np.ndarray | None
    )  # [O, T], the target's tokens by the noise of each position; None where other noise is used


def assert_choice_lossless(rule: Callable[[Drafted], Array], *, tolerance: float = 1e-6) -> None:
    """Raise AssertionError unless sequences keep their distributions where a rule chooses how many drafts count.

    The check is exact, with `rejection`, `block` and `match`, and with sampled and deterministic drafts, in one batch
    and in turn. A step in which no row has a draft is a step of plain decoding.

    Args:
        rule: a function of `Drafted` that returns how many drafts of each row are verified, [B] int32 in [0, K]; JAX
            must be able to trace it.
        tolerance: the largest total variation that passes.

    Raises:
        AssertionError: the tokens do not follow the targets. The message names the verifier, the drafts and the
            distance.

    Example:
        >>> from specjax.decoding.admission import admitted
        >>> assert_choice_lossless(lambda drafted: admitted(drafted.confidences, budget=2))
    """
    expected = np.outer(*[_continuation(row, START, LENGTH).reshape(-1) for row in ROWS])
    evaluate = jax.jit(jax.vmap(rule))
    for (drafts, kinds), verifier in product(KINDS.items(), VERIFIERS):
        found = _joint(evaluate, kinds, verifier)
        distance = total_variation(found, expected)
        if not distance <= tolerance:
            raise AssertionError(
                f"not lossless under {verifier} with {drafts}: total variation {distance:.3g} from the product of the "
                f"targets' distributions, expected at most {tolerance:g}"
            )


def _joint(evaluate: Callable, kinds: Sequence, verifier: str) -> np.ndarray:
    """Return the joint distribution of the first tokens of both rows, [V**LENGTH, V**LENGTH]."""
    laws = [_row_laws(verifier, row, *kinds[row]) for row in ROWS]
    first, second = (_Paths(kinds[0][step], kinds[1][step]) for step in range(2))
    nothing = np.zeros((1, 2, 3 + K), np.int32)
    nothing[..., 0] = START
    numbers = _numbers(evaluate, first, nothing)[0]  # [P, 2]
    weight = first.weight(START, START)

    terms = []
    for pair, paths in enumerate(first.pairs):
        if weight[pair] == 0:
            continue
        reached = [np.flatnonzero(laws[row].is_reached[paths[row], numbers[pair, row]]) for row in ROWS]
        each = np.stack(np.meshgrid(*reached, indexing="ij"), axis=-1).reshape(-1, 2)  # [C, 2] classes
        terms.append((weight[pair], paths, numbers[pair], each))
    # The rule sees of the first step the class of each row alone.
    seen, where = np.unique(np.concatenate([each for *_, each in terms]), axis=0, return_inverse=True)
    history = np.stack([laws[row].classes[seen[:, row]] for row in ROWS], axis=1)  # [C, 2, 3 + K]
    later = _numbers(evaluate, second, history)  # [C, P, 2]
    later_weight = np.stack([second.weight(*last) for last in history[:, :, 0]])  # [C, P]

    index, values, start = ([], []), [], 0
    for mass, paths, number, each in terms:
        rows = where.reshape(-1)[start : start + len(each)]
        start += len(each)
        values.append((mass * later_weight[rows]).reshape(-1))
        for row in ROWS:
            place = (paths[row], number[row], each[:, row, None], second.pairs[None, :, row], later[rows][..., row])
            index[row].append(np.ravel_multi_index(np.broadcast_arrays(*place), laws[row].shape).reshape(-1))
    coordinates = tuple(np.concatenate(part) for part in index)
    sizes = tuple(math.prod(law.shape) for law in laws)
    both = csr_array((np.concatenate(values), coordinates), shape=sizes)
    tables = [law.table.reshape(size, -1) for law, size in zip(laws, sizes, strict=True)]
    return tables[0].T @ (both @ tables[1])


class _Paths:
    """The drafts of both rows in a step: all pairs [P, 2] of rows of `PATHS`."""

    def __init__(self, *kinds: str):
        self.kinds = kinds
        self.pairs = np.array(list(product(range(len(PATHS)), repeat=2)))

    def weight(self, *last: int) -> np.ndarray:
        """Return the probability [P] of each pair after the last tokens of the rows."""
        of_rows = [
            _path_weights(row, kind, token) for row, (kind, token) in enumerate(zip(self.kinds, last, strict=True))
        ]
        return of_rows[0][self.pairs[:, 0]] * of_rows[1][self.pairs[:, 1]]


def _numbers(evaluate: Callable, paths: _Paths, history: np.ndarray) -> np.ndarray:
    """Return the numbers [C, P, 2] that a rule chooses, for histories [C, 2, 3 + K]; PLAIN where all are 0."""
    tokens = PATHS[paths.pairs]  # [P, 2, K]
    shape = len(history), len(tokens), 2
    last = np.broadcast_to(history[:, None, :, 0], shape)
    drafts = np.broadcast_to(tokens, (*shape, K))
    before = np.concatenate([last[..., None], drafts[..., :-1]], axis=-1)
    row = np.arange(2)[:, None]
    probs = probabilities(DRAFTS)[row, before]
    is_sampled = np.array([kind == SAMPLED for kind in paths.kinds])[:, None, None]
    probs = np.where(is_sampled, probs, np.eye(V)[drafts])
    counts = np.broadcast_to(history[:, None], (*shape, history.shape[-1]))
    fields: list[Any] = [drafts, probs.astype(np.float32), CONFIDENCES[row, before], last]
    fields += [counts[..., 1], counts[..., 2], counts[..., 3 : 3 + K] > 0]
    flat = Drafted(*[x.reshape(-1, *x.shape[2:]) for x in fields])
    numbers = np.asarray(evaluate(flat)).reshape(shape)
    if numbers.min() < 0 or numbers.max() > K:
        raise AssertionError(f"the rule must return numbers in [0, K = {K}], got {numbers.min()} to {numbers.max()}")
    return np.where(np.all(numbers == 0, axis=-1, keepdims=True), PLAIN, numbers)


class _RowLaws(NamedTuple):
    """The first tokens of one row, by its drafts and their numbers in both steps, and the classes of first steps."""

    table: np.ndarray  # [P, NUMBERS, C, P, NUMBERS, V**LENGTH] float64, of outcomes of class c of the first step
    classes: np.ndarray  # [C, 3 + K] int32: last token, numbers of drafts and accepted ones, outcomes of the tests
    is_reached: np.ndarray  # [P, NUMBERS, C]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape[:-1]


@cache
def _row_laws(verifier: str, row: int, kind: str, later_kind: str) -> _RowLaws:
    first = {number: _outcomes(verifier, row, kind, number) for number in NUMBERS}
    later = {number: _outcomes(verifier, row, later_kind, number) for number in NUMBERS}
    later_laws = {number: _completed(outcomes, row) for number, outcomes in later.items()}
    classes: dict[tuple, int] = {}
    parts = []
    for path, number in product(range(len(PATHS)), NUMBERS):
        outcomes = first[number]
        for o in np.flatnonzero(outcomes.weight[START, path] > 0):
            tokens = outcomes.tokens[START, path, o]
            emitted = tokens[tokens >= 0]
            tests = outcomes.is_accepted[START, path, o].tolist()
            drafted = 0 if number == PLAIN else number
            name = (int(emitted[-1]), drafted, len(emitted) - 1, *map(int, tests))
            place = path, number, classes.setdefault(name, len(classes))
            law = _after(outcomes, (path, int(o)), len(emitted), int(emitted[-1]), row, later, later_laws)
            parts.append((place, outcomes.weight[START, path, o], emitted, law))
    table = np.zeros((len(PATHS), len(NUMBERS), len(classes), len(PATHS), len(NUMBERS), *[V] * LENGTH))
    is_reached = np.zeros(table.shape[:3], bool)
    for place, weight, emitted, law in parts:
        left = LENGTH - len(emitted)
        is_reached[place] = True
        table[(*place, slice(None), slice(None), *emitted)] += weight * law.reshape(*law.shape[:2], V**left, -1).sum(
            axis=-1
        ).reshape(*law.shape[:2], *[V] * left)
    return _RowLaws(table.reshape(*table.shape[:5], -1), np.array(list(classes), np.int32), is_reached)


def _after(
    outcomes: Outcomes,
    place: tuple[int, int],
    num_emitted: int,
    last: int,
    row: int,
    later: dict[int, Outcomes],
    laws: dict[int, np.ndarray],
) -> np.ndarray:
    """Return the distribution of the next K+1 tokens after an outcome of the first step, [P, NUMBERS, V**(K+1)].

    Where both steps use the noise of positions, the outcome says something about the noise of positions that it has not
    committed.
    """
    path, o = place
    ratios, result = _ratios(row), []
    for number in NUMBERS:
        weight, sampled = later[number].weight[last], later[number].sampled  # [P, O]
        if outcomes.sampled is not None and sampled is not None:
            slots = range(num_emitted, outcomes.sampled.shape[1])  # of the first step
            for i, slot in zip(range(sampled.shape[1]), slots, strict=False):  # i: of the second, at the same position
                before = PATHS[path, slot - 1], np.full(len(PATHS), last) if i == 0 else PATHS[:, i - 1]
                weight = weight * ratios[before][:, outcomes.sampled[o, slot], sampled[:, i]]
        result.append(np.einsum("po,pov->pv", weight, laws[number][last]))
    return np.stack(result, axis=1)


@cache
def _ratios(row: int) -> np.ndarray:
    """Return the joint probability of two tokens by the same noise over their product, [V, V, V, V].

    The first two axes are the tokens before them, the other two the tokens.
    """
    target = probabilities(TARGETS[row])
    pairs = [[_coupling(old, new) / np.outer(old, new) for new in target] for old in target]
    return np.array(pairs)


def _coupling(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the joint distribution [V, V] of draws from two positive distributions by the same Gumbel noise.

    With exponential variables E the draws are argmin E / p and argmin E / q, and an integral over E_b / E_a
    remains where they differ.
    """
    joint = np.zeros((V, V))
    for a, b in product(range(V), repeat=2):
        if a == b:
            joint[a, b] = 1 / np.maximum(p / p[a], q / q[a]).sum()
            continue
        low, high = p[b] / p[a], q[b] / q[a]
        others = [j for j in range(V) if j not in (a, b)]
        ends = sorted({low, high, *(p[j] / p[a] * q[b] / q[j] for j in others)})
        for start, end in pairwise(ends):
            if low <= start and end <= high:
                middle = (start + end) / 2
                is_flat = [p[j] / p[a] > q[j] / q[b] * middle for j in others]
                base = 1 + sum(p[j] / p[a] for j, flat in zip(others, is_flat, strict=True) if flat)
                slope = 1 + sum(q[j] / q[b] for j, flat in zip(others, is_flat, strict=True) if not flat)
                joint[a, b] += (1 / (base + slope * start) - 1 / (base + slope * end)) / slope
    return joint


def _outcomes(verifier: str, row: int, kind: str, number: int) -> Outcomes:
    """Return the outcomes [V, P, O] of a row's part of a step, after each last token and with each path of drafts."""
    if number == PLAIN:
        every, place = _all_outcomes(verifier, 0, DETERMINISTIC), (row, 0, 0)
    else:
        is_one_hot = int(kind == ONE_HOT)
        every = _all_outcomes(verifier, K, DETERMINISTIC if kind == DETERMINISTIC else SAMPLED)
        place = row, is_one_hot, number
    weight, tokens, is_accepted = (x[place] for x in every[:3])
    return Outcomes(weight, tokens, is_accepted, every.sampled)


@cache
def _all_outcomes(verifier: str, width: int, kind: str) -> Outcomes:
    """Return the outcomes of all steps with a number of draft tokens, [row, one-hot or not, number, V, P, O]."""
    shape = 2, 1 + (kind == SAMPLED), width + 1, V, len(PATHS)
    row, is_one_hot, count, last, path = (x.reshape(-1) for x in np.indices(shape))
    drafts = PATHS[path][:, :width]
    before = np.concatenate([last[:, None], drafts], axis=1)
    reported = None
    if kind == SAMPLED:
        temperature = np.where(is_one_hot, 0, 1).astype(np.float32)
        reported = Categorical(jnp.asarray(DRAFTS[row[:, None], before[:, :-1]]), jnp.asarray(temperature))
    draft = Draft(jnp.asarray(drafts), reported, jnp.asarray(count, jnp.int32))
    target = jnp.asarray(TARGETS[row[:, None], before])
    options: dict[str, Any] = {} if verifier == "block" else {"outcomes": True}
    verified, weight = enumerate_outcomes(VERIFIERS[verifier], draft, target, **options)
    shape = *shape, weight.shape[1]
    tokens = np.full((*shape, K + 1), -1)
    tokens[..., : width + 1] = np.asarray(verified.tokens).reshape(*shape, -1)
    is_accepted = np.arange(K) < np.asarray(verified.num_accepted).reshape(*shape, 1)
    if verified.is_accepted is not None:
        is_accepted[..., :width] = np.asarray(verified.is_accepted).reshape(*shape, -1)
    is_by_position = verifier == "match" or reported is None
    sampled = np.array(list(product(range(V), repeat=width + 1))) if is_by_position else None
    return Outcomes(np.asarray(weight, np.float64).reshape(shape), tokens, is_accepted, sampled)


def _completed(outcomes: Outcomes, row: int) -> np.ndarray:
    """Return the distribution of the next K+1 tokens in each outcome, [V, P, O, V**(K+1)]."""
    shape = outcomes.weight.shape
    result = np.zeros((math.prod(shape), V ** (K + 1)))
    found, where = np.unique(outcomes.tokens.reshape(-1, K + 1), axis=0, return_inverse=True)
    for i, tokens in enumerate(found):
        emitted = tokens[tokens >= 0]
        law = np.zeros([V] * (K + 1))
        law[tuple(emitted)] = _continuation(row, int(emitted[-1]), K + 1 - len(emitted))
        result[where.reshape(-1) == i] = law.reshape(-1)
    return result.reshape(*shape, -1)


def _continuation(row: int, last: int, length: int) -> np.ndarray:
    """Return the target's distribution of the next tokens after a token, [V] * length."""
    target, law = probabilities(TARGETS[row]), np.ones(())
    for i in range(length):
        law = law[..., None] * (target[last] if i == 0 else target)
    return law


def _path_weights(row: int, kind: str, last: int) -> np.ndarray:
    """Return the probability [P] of the drafts of a row after a token. Deterministic drafts count on from it."""
    if kind != SAMPLED:
        return np.all((last + 1 + np.arange(K)) % V == PATHS, axis=1).astype(float)
    draft = probabilities(DRAFTS[row])
    return draft[last, PATHS[:, 0]] * draft[PATHS[:, 0], PATHS[:, 1]]
