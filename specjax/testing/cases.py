"""The cases of the exact check of a verifier: small targets and drafts that use every field of the records."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.enumeration import Table, draft_tables, path_probabilities, probabilities, rows_along
from specjax.types import Categorical, Draft

VOCAB_SIZE = 3


def _log(table: list) -> Table:
    with np.errstate(divide="ignore"):
        return np.log(table)


# Conditional logits of a target and a draft on which the usual mistakes in block verification change the distribution.
BLOCK_INSTANCE = (
    [
        _log([0.25, 0.5, 0.25]),
        _log([[0.6, 0.4, 0.0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]),
        np.broadcast_to(_log([0.2, 0.3, 0.5]), (3, 3, 3)),
    ],
    [_log([0.5, 0.25, 0.25]), _log([[0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3]])],
)


class Case(NamedTuple):
    """The arguments of a verifier, with one row for each possible draft, and the expected distribution."""

    name: str
    draft: Draft  # N rows
    target: Categorical  # N rows
    weight: np.ndarray  # [N] float64, the probability of each row's draft
    expected: list[Table]  # conditional probabilities of the next K+1 tokens


def make_case(
    name: str,
    target: Sequence[Table],
    draft: Sequence[Table] | Sequence[int],
    *,
    num_tokens: int | None = None,
    ends_by_id: bool = False,
    target_temperature: float = 1.0,
    draft_temperature: float = 1.0,
    min_logit: float = -np.inf,
) -> Case:
    """Build a case from conditional logits, in which every field of the records has a value.

    Everything that no verifier may read is garbage: the token ids and the NaN logits of the draft after a row's own
    drafts, and the NaN logits of the target after the row of its bonus token.

    Args:
        name: the name of the case, for messages.
        target: conditional logits of the target, levels 0 to K; level i has shape [V] * (i + 1).
        draft: conditional logits of the draft, levels 0 to K-1; or K token ids of deterministic drafts.
        num_tokens: the number of drafts that the row has; None is K.
        ends_by_id: whether the id -1 ends a row with fewer drafts, in place of `Draft.num_tokens`.
        target_temperature: the temperature of the target.
        draft_temperature: the temperature of the draft.
        min_logit: the cut of all rows.
    """
    num_drafts, drafted = len(target) - 1, draft_tables(draft)
    kept = num_drafts if num_tokens is None else num_tokens
    heads = [tuple(map(int, draft[:kept]))] if drafted is None else product(range(VOCAB_SIZE), repeat=kept)
    paths = [head + (0,) * (num_drafts - kept) for head in heads]
    size = len(paths)
    past = np.arange(num_drafts) >= kept
    tokens = np.where(past, VOCAB_SIZE + 5, np.array(paths, np.int32).reshape(size, num_drafts))
    if ends_by_id and kept < num_drafts:
        tokens[:, kept] = -1

    def rows(tables: Sequence[Table], is_unread: np.ndarray, temperature: float) -> Categorical:
        logits = np.where(is_unread[:, None], np.nan, rows_along(tables, paths))
        fields = logits, np.full(size, temperature), np.full((size, len(tables)), min_logit)
        return Categorical(*(jnp.asarray(x.astype(np.float32), jnp.float32) for x in fields))

    reported, weight = None, np.ones(1)
    if drafted is not None:
        reported = rows(drafted, past, draft_temperature)
        weight = path_probabilities([probabilities(t, draft_temperature, min_logit) for t in drafted[:kept]], paths)
    counts = jnp.asarray(np.full(size, num_drafts if ends_by_id else kept, np.int32), jnp.int32)
    return Case(
        name,
        Draft(jnp.asarray(tokens.astype(np.int32), jnp.int32), reported, counts),
        rows(target, np.arange(num_drafts + 1) > kept, target_temperature),
        weight,
        [probabilities(table, target_temperature, min_logit) for table in target],
    )


def _plain(case: Case) -> Case:
    """Return the case with records that have only the fields that they must have."""
    tokens, reported, _ = case.draft
    draft = Draft(tokens, None if reported is None else Categorical(reported.logits))
    return case._replace(draft=draft, target=Categorical(case.target.logits))


def _without_mass(case: Case, row: int) -> Case:
    """Return the case with a row of the reported draft distribution in which no token has mass."""
    reported = case.draft.distribution
    assert reported is not None, "the drafts are sampled"
    logits = np.array(reported.logits)
    logits[:, row] = -np.inf
    reported = reported._replace(logits=jnp.asarray(logits, jnp.float32))
    return case._replace(draft=case.draft._replace(distribution=reported))


def batches(num_drafts: int) -> Iterator[list[Case]]:
    """Yield the cases of K drafts, in batches whose records have the same fields."""
    rng = np.random.default_rng(num_drafts)

    def tables(levels: int, zeros: bool = False) -> list[Table]:
        result = [2 * rng.normal(size=(VOCAB_SIZE,) * (level + 1)) for level in range(levels)]
        for table in result if zeros else ():
            hidden = rng.random(table.shape) < 0.4
            hidden[..., 0] &= ~hidden.all(axis=-1)
            table[hidden] = -np.inf
        return result

    target, draft = tables(num_drafts + 1), tables(num_drafts)
    plain = [
        make_case("sampled drafts", target, draft),
        make_case("drafts of the target itself", target, target[:-1]),
    ]
    if num_drafts == 2:
        plain.append(make_case("the instance of block verification", *BLOCK_INSTANCE))
    if num_drafts:
        yield [_plain(case) for case in plain]

    tied = [np.round(table / 2) for table in target]  # many logits of a row are equal
    ids = [token % VOCAB_SIZE for token in range(num_drafts)]
    for sampled in [True, False] if num_drafts else [False]:
        drafts, kind = (draft, "") if sampled else (ids, "deterministic drafts, ")
        mixed = [
            make_case(f"{kind}no limits among rows that have some", target, drafts),
            make_case(f"{kind}temperatures", target, drafts, target_temperature=0.6, draft_temperature=1.4),
            make_case(f"{kind}greedy row", target, drafts, target_temperature=0.0),
            make_case(f"{kind}greedy row with ties", tied, drafts, target_temperature=0.0),
            make_case(f"{kind}cut", *_kept(target, drafts), min_logit=0.0),
            make_case(f"{kind}cut through ties", *_kept(tied, drafts), min_logit=0.0, target_temperature=0.7),
            make_case(f"{kind}impossible tokens", tables(num_drafts + 1, True), drafts),
        ]
        for count in range(num_drafts):
            name = f"{kind}row with {count} of {num_drafts} drafts"
            mixed.append(make_case(name, target, drafts, num_tokens=count))
            mixed.append(make_case(f"{name}, then -1", target, drafts, num_tokens=count, ends_by_id=True))
        if sampled:
            zeros = tables(num_drafts + 1, True), tables(num_drafts, True)
            mixed += [
                make_case("impossible tokens of both", *zeros),
                make_case("draft of temperature 0", target, draft, draft_temperature=0.0),
                make_case("greedy row, draft of temperature 0", tied, draft, target_temperature=0, draft_temperature=0),
            ]
            if num_drafts > 2:
                flat = [np.zeros((VOCAB_SIZE,) * (level + 1)) for level in range(num_drafts + 1)]
                instance = BLOCK_INSTANCE[0] + flat[3:], BLOCK_INSTANCE[1] + flat[2:-1]
                mixed.append(make_case("the instance of block verification", *instance, num_tokens=2))
            mixed += [
                _without_mass(make_case(f"draft row {i} without mass", target, draft), i) for i in range(num_drafts)
            ]
        yield mixed
    yield [_plain(make_case("deterministic drafts", target, ids))]


def _kept(target: list[Table], drafts: list) -> tuple[list[Table], list]:
    """Return the tables changed to have a logit above a cut at 0 in every row; token ids stay as they are."""

    def lift(table: Table) -> Table:
        return table if np.ndim(table) == 0 else np.where(np.arange(VOCAB_SIZE) == 0, np.maximum(table, 0.5), table)

    return [lift(table) for table in target], [lift(table) for table in drafts]


def stack(cases: Sequence[Case]) -> tuple[Draft, Categorical]:
    """Concatenate the rows of the cases of a batch, one case after another."""
    return jax.tree.map(lambda *fields: np.concatenate(fields), *((case.draft, case.target) for case in cases))
