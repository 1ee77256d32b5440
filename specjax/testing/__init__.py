"""Checks of verifiers, proposers and models, which raise an AssertionError that names the fault."""

from specjax.testing.cases import BLOCK_INSTANCE
from specjax.testing.choices import Drafted, assert_choice_lossless
from specjax.testing.enumeration import (
    completed_law,
    enumerate_law,
    enumerate_outcomes,
    probabilities,
    product_law,
    total_variation,
)
from specjax.testing.models import assert_model
from specjax.testing.statistics import ChiSquare, chi_square, sampled_tokens
from specjax.testing.toys import BigramProposer, bigram_model, sample_draft
from specjax.testing.tree_verdict import assert_tree_lossless
from specjax.testing.verdicts import (
    assert_lossless,
    assert_permutation_equivariant,
    assert_proposer_lossless,
    assert_rows_independent,
)

__all__ = [
    "BLOCK_INSTANCE",
    "BigramProposer",
    "ChiSquare",
    "Drafted",
    "assert_choice_lossless",
    "assert_lossless",
    "assert_model",
    "assert_permutation_equivariant",
    "assert_proposer_lossless",
    "assert_rows_independent",
    "assert_tree_lossless",
    "bigram_model",
    "chi_square",
    "completed_law",
    "enumerate_law",
    "enumerate_outcomes",
    "probabilities",
    "product_law",
    "sample_draft",
    "sampled_tokens",
    "total_variation",
]
