"""Theory against hand-worked values, brute force and enumeration of the textbook rules."""

import itertools

import numpy as np
import pytest

from specjax import theory

TARGET, DRAFT = np.array([1, 2]) / 3, np.array([2, 1]) / 3


def random_distributions(rng, shape, concentration=1.0):
    return rng.dirichlet(np.full(shape[-1], concentration), size=shape[:-1])


def context_free(distribution, num_draft_tokens):
    return [np.broadcast_to(distribution, distribution.shape * (i + 1)) for i in range(num_draft_tokens)]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.0, [1, 1, 1, 1, 1]),
        (0.5, [1.5, 1.75, 1.875, 1.9375, 1.96875]),
        (0.7, [1.7, 2.19, 2.533, 2.7731, 2.94117]),
        (0.8, [1.8, 2.44, 2.952, 3.3616, 3.68928]),
        (0.9, [1.9, 2.71, 3.439, 4.0951, 4.68559]),
        (1.0, [2, 3, 4, 5, 6]),
    ],
)
def test_expected_tokens(rate, expected):
    np.testing.assert_allclose(theory.expected_tokens(rate, np.arange(1, 6)), expected, rtol=1e-14)
    assert theory.expected_tokens(rate, 0) == 1
    num_accepted = theory.num_accepted_probabilities(rate, 5)
    assert num_accepted.sum() == pytest.approx(1)
    assert num_accepted @ np.arange(1, 7) == pytest.approx(expected[-1])


def test_expected_tokens_broadcasts_and_keeps_precision_near_one():
    rates = np.array([[0.2], [1 - 1e-14], [1.0]])
    tokens = theory.expected_tokens(rates, [0, 2, 7])
    assert tokens.shape == (3, 3)
    np.testing.assert_allclose(tokens[0], [1, 1.24, (1 - 0.2**8) / 0.8])
    np.testing.assert_allclose(tokens[1], tokens[2], rtol=1e-12)


def test_num_accepted_probabilities():
    np.testing.assert_allclose(theory.num_accepted_probabilities(0.8, 3), [0.2, 0.16, 0.128, 0.512])
    np.testing.assert_allclose(theory.num_accepted_probabilities([0.0, 1.0], 2), [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(theory.num_accepted_probabilities(0.8, 0), [1])


@pytest.mark.parametrize(
    ("cost_ratio", "num_drafts", "speed_ups"),
    [
        (0.05, [3, 6, 8, 13], [1.63, 2.35, 3.09, 4.67]),
        (0.1, [2, 4, 6, 10], [1.46, 1.98, 2.47, 3.43]),
        (0.2, [1, 3, 4, 7], [1.25, 1.58, 1.87, 2.37]),  # 1 and 2 tie at rate .5
    ],
)
def test_best_num_draft_tokens_and_its_speed_up(cost_ratio, num_drafts, speed_ups):
    rates = np.array([0.5, 0.7, 0.8, 0.9])
    best = theory.best_num_draft_tokens(rates, cost_ratio)
    assert best.tolist() == num_drafts
    np.testing.assert_allclose(theory.speed_up(rates, best, cost_ratio), speed_ups, atol=0.005)


def test_best_num_draft_tokens_is_zero_iff_the_rate_is_at_most_the_cost():
    rates = np.arange(21) / 20
    best = theory.best_num_draft_tokens(rates[:, None], rates)
    np.testing.assert_array_equal(best == 0, rates[:, None] <= rates)
    np.testing.assert_array_equal(theory.speed_up(rates, 0, 0.3), 1)


def test_best_num_draft_tokens_is_the_smallest_of_a_tie_whatever_the_rounding():
    rates = np.linspace(0.1, 0.9, 81)
    cost_ratios = rates**2 / (1 + rates - rates**2)  # 1 and 2 drafts tie
    np.testing.assert_array_equal(theory.best_num_draft_tokens(rates, cost_ratios), 1)


def test_best_num_draft_tokens_is_limited():
    assert theory.best_num_draft_tokens(0.9, 0.05, max_draft_tokens=5) == 5
    assert theory.best_num_draft_tokens(1.0, 0.0, max_draft_tokens=7) == 7
    assert theory.best_num_draft_tokens(0.9, 0.05, max_draft_tokens=0) == 0


def test_speed_up_counts_the_time_of_verification():
    assert theory.speed_up(0.5, 2, cost_ratio=0.1, verify_ratio=1.3) == pytest.approx(1.75 / 1.5)
    assert theory.speed_up(0.5, 2, cost_ratio=[0.0, 0.1]).tolist() == pytest.approx([1.75, 1.75 / 1.2])


def test_call_seconds_of_shared_models():
    """Reading is shared, sums are not, and one device has none."""
    seconds = theory.call_seconds([[8.0], [16.0]], 2.0, [1, 4], num_sums=5, sum_seconds=[100.0, 0.5])
    np.testing.assert_allclose(seconds, [[4.0, 3.5], [8.0, 4.5]])
    assert theory.call_seconds(8.0, 2.0) == 4.0


def test_acceptance_rate_is_one_less_total_variation():
    rng = np.random.default_rng(0)
    target, draft = random_distributions(rng, (4, 7)), random_distributions(rng, (4, 7))
    rates = theory.acceptance_rate(target, draft)
    np.testing.assert_allclose(rates, 1 - np.abs(target - draft).sum(axis=-1) / 2)
    assert theory.acceptance_rate([0.5, 0.5, 0], [0, 0.25, 0.75]) == 0.25


def test_coupled_acceptance_rate_is_the_double_sum():
    rng = np.random.default_rng(1)
    target, draft = random_distributions(rng, (50, 6), 0.5), random_distributions(rng, (50, 6), 0.5)
    ratios = [distribution[:, None, :] / distribution[:, :, None] for distribution in (target, draft)]
    rates = theory.coupled_acceptance_rate(target, draft)
    np.testing.assert_allclose(rates, (1 / np.maximum(*ratios).sum(axis=-1)).sum(axis=-1), rtol=1e-12)
    overlap = theory.acceptance_rate(target, draft)  # 1 - TV
    assert np.all(rates <= overlap) and np.all(rates >= overlap / (2 - overlap))


def test_coupled_acceptance_rate_of_zeros_and_of_equal_distributions():
    # Only token 1 can be both: 1 / (1 + max(.5/.5, 0) + max(0, .75/.25)) = 1 / 5.
    assert theory.coupled_acceptance_rate([0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0]) == pytest.approx(0.2)
    assert theory.coupled_acceptance_rate([1.0, 0.0], [0.0, 1.0]) == 0
    assert theory.coupled_acceptance_rate([0.5, 0.0, 0.5], [0.5, 0.0, 0.5]) == pytest.approx(1)


def test_coupled_acceptance_rate_is_the_agreement_of_draws_with_the_same_gumbel_noise():
    rng = np.random.default_rng(2)
    target, draft = random_distributions(rng, (2, 5))
    noise = rng.gumbel(size=(100_000, 5))
    agree = (np.log(target) + noise).argmax(axis=-1) == (np.log(draft) + noise).argmax(axis=-1)
    rate = theory.coupled_acceptance_rate(target, draft)
    assert 0.1 < rate < 0.9
    assert abs(agree.mean() - rate) < 6 * np.sqrt(rate * (1 - rate) / len(agree))


def test_typical_acceptance_rate():
    # Peaked: entropy .3944, threshold min(.09, .3 * .674) = .09. Flat over 10: threshold .03.
    assert theory.typical_acceptance_rate([0.9, 0.1, 0.0], [0.3, 0.6, 0.1]) == pytest.approx(0.9)
    assert theory.typical_acceptance_rate([0.92, 0.08, 0.0], [0.3, 0.6, 0.1]) == pytest.approx(0.3)
    assert theory.typical_acceptance_rate(np.full(10, 0.1), np.full(10, 0.1)) == pytest.approx(1)
    peaked, flat = [0.92, 0.08, 0, 0], [0.25] * 4
    rates = theory.typical_acceptance_rate([peaked, flat], [flat, flat], posterior_threshold=0.5, posterior_alpha=0.3)
    assert rates.tolist() == [0.25, 1]  # thresholds .227 and .075
    # A threshold equal to the probability rejects.
    assert theory.typical_acceptance_rate([0.5, 0.5], [0.5, 0.5], posterior_threshold=0.5, posterior_alpha=1.01) == 0


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("rejection", [2 / 3, 10 / 9, 38 / 27, 130 / 81]),
        ("block", [2 / 3, 11 / 9, 5 / 3, 166 / 81]),
        ("match", [4 / 9, 52 / 81]),
    ],
)
def test_expected_accepted_context_free(rule, expected):
    lengths = range(1, len(expected) + 1)
    found = [theory.expected_accepted(context_free(TARGET, k), context_free(DRAFT, k), rule) for k in lengths]
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("rule", "expected"), [("rejection", 1.15), ("block", 1.2)])
def test_expected_accepted_where_the_residuals_of_block_and_token_differ(rule, expected):
    target = [[0.25, 0.5, 0.25], [[0.6, 0.4, 0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]]
    draft = [[0.5, 0.25, 0.25], [[0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3]]]
    assert theory.expected_accepted(target, draft, rule) == pytest.approx(expected, rel=1e-14)


def rejection_rule(target_rows, draft_rows, path):
    """The distribution of the number of accepted drafts, each tested until the first failure."""
    tests = [min(1, t[x] / d[x]) for t, d, x in zip(target_rows, draft_rows, path, strict=True)]
    reach = np.cumprod([1, *tests])
    return reach * (1 - np.array([*tests, 0]))


def match_rule(target_rows, draft_rows, path):
    tests = [t[x] for t, x in zip(target_rows, path, strict=True)]
    return np.cumprod([1, *tests]) * (1 - np.array([*tests, 0]))


def block_rule(target_rows, draft_rows, path):
    """The distribution of the last index whose test passes, with the thresholds of Sun et al., algorithm 2."""
    weight, tests = 1.0, [1.0]  # index 0 always passes
    for i, token in enumerate(path, start=1):
        weight = min(1, weight * target_rows[i - 1][token] / draft_rows[i - 1][token])
        if i < len(path):
            residual = np.maximum(weight * target_rows[i] - draft_rows[i], 0).sum()
            tests.append(residual / (residual + 1 - weight) if residual + 1 - weight > 0 else 1)
        else:
            tests.append(weight)
    failures = 1 - np.array([*tests[1:], 0])
    return np.array(tests) * np.cumprod(failures[::-1])[::-1]


@pytest.mark.parametrize(
    ("name", "rule"), [("rejection", rejection_rule), ("block", block_rule), ("match", match_rule)]
)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_expected_accepted_is_that_of_the_enumerated_rule(name, rule, num_draft_tokens):
    rng = np.random.default_rng(num_draft_tokens)
    shapes = [(3,) * (i + 1) for i in range(num_draft_tokens)]
    target, draft = (
        [random_distributions(rng, shape) for shape in shapes],
        [random_distributions(rng, shape) for shape in shapes],
    )
    expected = 0.0
    for path in itertools.product(range(3), repeat=num_draft_tokens):
        target_rows, draft_rows = (
            [distribution[path[:i]] for i, distribution in enumerate(tables)] for tables in (target, draft)
        )
        num_accepted = rule(target_rows, draft_rows, path)
        assert num_accepted.sum() == pytest.approx(1)
        mass = np.prod([distribution[token] for distribution, token in zip(draft_rows, path, strict=True)])
        expected += mass * num_accepted @ np.arange(num_draft_tokens + 1)
    assert theory.expected_accepted(target, draft, name) == pytest.approx(expected, rel=1e-12)


def test_rules_agree_where_they_must():
    rng = np.random.default_rng(3)
    target, draft = random_distributions(rng, (2, 5))
    one = [theory.expected_accepted([target], [draft], rule) for rule in ("rejection", "block")]
    assert one == pytest.approx([theory.acceptance_rate(target, draft)] * 2)
    assert theory.expected_accepted(context_free(target, 3), context_free(target, 3), "block") == pytest.approx(3)
    assert theory.expected_accepted([], []) == 0


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (theory.expected_tokens, (1.5, 2), r"acceptance_rate must be in \[0, 1\], got 1.5"),
        (theory.expected_tokens, (float("nan"), 2), "acceptance_rate must be in"),
        (theory.expected_tokens, (0.5, -1), "num_draft_tokens must be an integer >= 0, got -1"),
        (theory.expected_tokens, (0.5, 2.0), "num_draft_tokens must be an integer >= 0, got 2.0"),
        (theory.num_accepted_probabilities, (0.5, [1, 2]), "num_draft_tokens must be an integer >= 0, got"),
        (theory.speed_up, (0.5, 2, -0.1), "cost_ratio must be >= 0, got -0.1"),
        (theory.speed_up, (0.5, 2, 0.1, 0.0), "verify_ratio must be > 0, got 0.0"),
        (theory.best_num_draft_tokens, (0.5, 0.1, -1), "max_draft_tokens must be an integer >= 0, got -1"),
        (theory.acceptance_rate, ([0.5, 0.6], TARGET), "target must be of sum 1"),
        (theory.acceptance_rate, (TARGET, [1.5, -0.5]), "draft must be nonnegative, got -0.5"),
        (theory.acceptance_rate, (TARGET, [0.5, 0.25, 0.25]), r"draft must be of shape \(2,\), as target, got \(3,\)"),
        (theory.coupled_acceptance_rate, (TARGET, [TARGET]), "draft must be of shape"),
        (theory.typical_acceptance_rate, (1.0, 1.0), r"target must be of shape \[..., V\], got \(\)"),
        (theory.typical_acceptance_rate, (TARGET, DRAFT, -0.1), r"posterior_threshold must be in \[0, 1\], got -0.1"),
        (theory.typical_acceptance_rate, (TARGET, DRAFT, 0.1, -3), "posterior_alpha must be >= 0, got -3"),
        (theory.best_draft_length, ([0.5, 0.7], {0: 1, 2: 1.1}), r"acceptance_rate must be one number, got \[0.5, 0.7"),
        (theory.best_draft_length, (0.5, {2.5: 1}), r"a key of step_seconds must be an integer >= 0, got \[2.5\]"),
        (theory.best_draft_length, (0.5, [1, 2]), r"step_seconds must be a mapping from .* to seconds, got \[1, 2\]"),
        (theory.call_seconds, (0, 1.0), "weight_bytes must be > 0, got 0"),
        (theory.call_seconds, (1.0, 1.0, 0), "num_devices must be > 0, got 0"),
        (theory.call_seconds, (1.0, 1.0, 2, 3, -1.0), "sum_seconds must be >= 0, got -1.0"),
        (theory.expected_accepted, ([TARGET], [DRAFT], "typical"), "rule must be one of .*, got 'typical'"),
        (theory.expected_accepted, ([TARGET], [DRAFT] * 2), "draft must be as many arrays as target, 1, got 2"),
        (
            theory.expected_accepted,
            ([TARGET] * 2, [DRAFT] * 2),
            r"target\[1\] must be of shape .* \(2, 2\), got \(2,\)",
        ),
        (theory.expected_accepted, ([TARGET], [[0.5, 0.1]]), r"draft\[0\] must be of sum 1"),
        (theory.expected_tokens, ("0.5", 2), "acceptance_rate must be a number, or an array of numbers, got '0.5'"),
        (theory.expected_tokens, (True, 2), "acceptance_rate must be a number, or an array of numbers, got True"),
        (theory.expected_tokens, (None, 2), "acceptance_rate must be a number, or an array of numbers, got None"),
        (theory.expected_tokens, ([[0.5], [0.5, 0.6]], 2), r"acceptance_rate must be a number, .*, got \[\[0.5\], \["),
        (theory.expected_tokens, (0.5, "2"), "num_draft_tokens must be an integer >= 0, got '2'"),
        (theory.expected_tokens, (0.5, [[1], [1, 2]]), "num_draft_tokens must be an integer >= 0, got"),
        (
            theory.expected_tokens,
            ([0.5, 0.6], [1, 2, 3]),
            r"acceptance_rate, num_draft_tokens must have shapes that broadcast, got \(2,\), \(3,\)",
        ),
        (theory.speed_up, (0.5, 2, "a"), "cost_ratio must be a number, or an array of numbers, got 'a'"),
        (theory.speed_up, (0.5, 0, float("inf")), "cost_ratio must be >= 0, got inf"),
        (theory.speed_up, (0.5, 2, [0.1, 0.2], [1.0] * 3), "cost_ratio, verify_ratio must have shapes that broadcast"),
        (theory.best_num_draft_tokens, ([0.5] * 2, [0.1] * 3), "acceptance_rate, cost_ratio must have shapes that"),
        (theory.best_draft_length, ("a", {0: 1.0}), "acceptance_rate must be a number, .*, got 'a'"),
        (theory.best_draft_length, (0.5, {0: "a"}), r"a time of step_seconds must be a number, .*, got \['a'\]"),
        (theory.best_draft_length, (0.5, {0: [1.0]}), "a time of step_seconds must be one number, got"),
        (theory.best_draft_length, (0.5, {0: float("inf")}), "step_seconds must be > 0, got {0: inf}"),
        (theory.call_seconds, ("a", 1.0), "weight_bytes must be a number, or an array of numbers, got 'a'"),
        (theory.call_seconds, (1.0, float("inf")), "bandwidth must be > 0, got inf"),
        (theory.call_seconds, ([1.0] * 2, [1.0] * 3), "must have shapes that broadcast"),
        (theory.acceptance_rate, (["a"], [1.0]), r"target must be a number, or an array of numbers, got \['a'\]"),
        (theory.typical_acceptance_rate, (TARGET, DRAFT, "a"), r"posterior_threshold must be in \[0, 1\], got 'a'"),
        (theory.typical_acceptance_rate, (TARGET, DRAFT, 0.1, None), "posterior_alpha must be >= 0, got None"),
        (theory.expected_accepted, (3, 3), "target must be a list of arrays, got 3"),
        (theory.expected_accepted, ([TARGET], [DRAFT], ["block"]), r"rule must be one of .*, got \['block'\]"),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


TIMES = {1: {0: 4.0e-3, 3: 6.6e-3}, 64: {0: 6.0e-3, 3: 18.0e-3}}


class TestStepTimes:
    def test_the_smallest_batch_that_holds_the_sequences(self):
        times = theory.StepTimes(TIMES)
        assert [times.at(number)[0] for number in (1, 2, 64, 65)] == [4.0e-3, 6.0e-3, 6.0e-3, 6.0e-3]
        assert (times.best(1, 0.7), times.best(2, 0.7)) == (3, 0)

    def test_files(self, tmp_path):
        times = theory.StepTimes(TIMES)
        times.save(tmp_path / "times.json", device="one")
        assert theory.StepTimes.load(tmp_path / "times.json") == times
        assert '"device": "one"' in (tmp_path / "times.json").read_text()

    @pytest.mark.parametrize(
        "text, message",
        [
            ("{", "it is no JSON"),
            ("[]", "it has no field seconds"),
            ('{"times": {}}', "it has no field seconds"),
            ('{"seconds": {}}', "seconds must be an object with at least one entry, got {}"),
            ('{"seconds": {"a": {"0": 1}}}', "seconds must have integers >= 0 as names, got 'a'"),
            ('{"seconds": {"0": {"0": 1}}}', "seconds must have numbers of sequences >= 1 as names, got '0'"),
            ('{"seconds": {"1": [4]}}', r"seconds\.1 must be an object with at least one entry, got \[4\]"),
            ('{"seconds": {"1": {"-1": 1}}}', r"seconds\.1 must have integers >= 0 as names, got '-1'"),
            ('{"seconds": {"1": {"0": -1}}}', r"seconds\.1\.0 must be a number > 0, got -1"),
            ('{"seconds": {"1": {"0": "fast"}}}', r"seconds\.1\.0 must be a number > 0, got 'fast'"),
            ('{"seconds": {"1": {"0": NaN}}}', r"seconds\.1\.0 must be a number > 0, got nan"),
        ],
    )
    def test_wrong_files(self, tmp_path, text, message):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ValueError, match=rf"wrong\.json must be a file that specjax tune has written: {message}"):
            theory.StepTimes.load(tmp_path / "wrong.json")

    @pytest.mark.parametrize("seconds", [{}, {1: {}}, {0: {0: 1.0}}, {1: {0: 0.0}}, {1: {-1: 1.0}}, {1.5: {0: 1.0}}])
    def test_wrong_values(self, seconds):
        with pytest.raises(ValueError, match="seconds must"):
            theory.StepTimes(seconds)
