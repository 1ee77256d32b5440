"""Vocabularies that several devices share: the tokens of one device, by small exchanges that every device agrees on."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import Categorical, Context, Draft, distributions, guided, sampling, trees, verifiers
from specjax.keys import positions
from specjax.parallel import shards
from specjax.sampling import SamplingParams, cut
from specjax.testing.statistics import chi_square
from specjax.trees import growing

BATCH, DRAFTS, VOCAB = 48, 3, 2048  # four blocks of 512 ids
VERIFIERS = {
    "rejection": verifiers.rejection,
    "block": verifiers.block,
    "match": verifiers.match,
    "typical": verifiers.typical,
    "synthetic": partial(verifiers.synthetic, acceptance_length=2.5),
}
MORE = [name for name in VERIFIERS if name != "typical"]
ONE_DEVICE = {
    name: jax.jit(partial(verify, log_probs=True), static_argnames="implementation")
    for name, verify in VERIFIERS.items()
}


def on_shards(number, function, *operands, per_device=False):
    """Run a function on operands whose logits are split over devices; `per_device` stacks what each returns."""
    return jax.jit(split(number, function, operands, per_device))(*operands)


def split(number, function, operands, per_device=False):
    """A function of operands whose logits are split over devices."""
    run = function if not per_device else lambda *args: jax.tree.map(lambda x: x[None], function(*args))
    out = P("vocab") if per_device else P()
    mesh = Mesh(np.array(jax.devices("cpu")[:number]), ("vocab",))
    specs = tuple(jax.tree_util.tree_map_with_path(_spec, operand) for operand in operands)
    is_interpreted = "interpret" in getattr(function, "keywords", {}).values()  # which JAX cannot check
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=not is_interpreted)


def _spec(path, leaf):
    is_logits = getattr(path[-1], "name", "") == "logits" if path else jnp.issubdtype(leaf.dtype, jnp.floating)
    return P(*[None] * (leaf.ndim - 1), "vocab") if is_logits else P()


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    """A machine with one GPU has several CPU devices, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def case(on_cpus):
    """Rows of every kind: greedy, cut, short, without drafts, almost equal to the draft, without mass, with NaN."""
    rng = np.random.default_rng(0)
    target = rng.normal(0, 3, (BATCH, DRAFTS + 1, VOCAB)).astype(np.float32)
    target[3, 1], target[4, 0, :600] = -np.inf, -np.inf
    drafted = target[:, :DRAFTS] + rng.normal(0, 0.5, (BATCH, DRAFTS, VOCAB)).astype(np.float32)
    drafted[3, 1] = 0
    target[3, 1, :600], target[5:9, :, 100:1900], drafted[7:11, :, ::2] = np.nan, np.nan, np.nan
    temperature = rng.choice([0, 0.6, 1, 1.7], BATCH).astype(np.float32)
    distribution = Categorical(jnp.asarray(drafted), jnp.where(temperature == 0, 1, temperature))
    tokens = distributions.sample(jax.random.split(jax.random.key(1), (BATCH, DRAFTS)), distribution)
    num_tokens = jnp.asarray(rng.integers(0, DRAFTS + 1, BATCH), jnp.int32)
    least = cut.min_logit(jnp.asarray(target), top_k=jnp.asarray(rng.choice([-1, 5, 300], (BATCH, 1)), jnp.int32))
    keys = positions(jax.random.split(jax.random.key(2), BATCH), jnp.full(BATCH, 7), DRAFTS)
    return (
        keys,
        Draft(tokens, distribution, num_tokens),
        Categorical(jnp.asarray(target), jnp.asarray(temperature), least),
    )


@pytest.mark.parametrize(
    "name, number",
    [
        ("rejection", 4),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("block", 2), ("match", 4), ("typical", 2), ("synthetic", 4))
        ),
    ],
)
def test_tokens_of_one_device(name, number, case):
    expected = ONE_DEVICE[name](*case)
    verify = partial(VERIFIERS[name], log_probs=True)
    got = on_shards(number, partial(verify, axis_name="vocab"), *case)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(got.is_empty, expected.is_empty)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert len(np.unique(expected.num_accepted)) > 1


@pytest.mark.parametrize(
    "name, number",
    [
        ("rejection", 4),
        ("match", 4),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("block", 2), ("typical", 4), ("synthetic", 2), ("rejection", 1))
        ),
    ],
)
def test_kernels_of_parts_emit_the_tokens_of_one_device(name, number, case):
    expected = ONE_DEVICE[name](*case)
    verify = partial(VERIFIERS[name], log_probs=True)
    got = on_shards(number, partial(verify, axis_name="vocab", implementation="interpret"), *case)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(got.is_empty, expected.is_empty)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["traversal", pytest.param("match", marks=pytest.mark.slow)])
def test_trees_of_one_device(name):
    """Two children of node 0, each with one, in rows that are greedy, cut or without mass."""
    rng, shape = np.random.default_rng(0), growing.of_widths((2, 1))
    target = rng.normal(0, 3, (BATCH, 5, VOCAB)).astype(np.float32)
    drafted = jnp.asarray(target + rng.normal(0, 0.7, target.shape).astype(np.float32))
    target[3, 1], target[4, 0, :600], target[5:9, :, 100:1900] = -np.inf, -np.inf, np.nan
    temperature = jnp.asarray(rng.choice([0, 0.6, 1, 1.7], BATCH), jnp.float32)
    least = cut.min_logit(jnp.asarray(target), top_k=jnp.asarray(rng.choice([-1, 5, 300], (BATCH, 1)), jnp.int32))
    keys = positions(jax.random.split(jax.random.key(2), BATCH), jnp.full(BATCH, 7), shape.max_depth)
    of_draft = partial(Categorical, temperature=jnp.where(temperature == 0, 1, temperature))

    choose = growing.by_drawing if name == "traversal" else growing.by_coupling

    @jax.jit
    def grown(keys, drafted):
        def after(tokens, nodes, carry):
            return of_draft(drafted[:, np.array(nodes)]), carry

        given = jnp.zeros(BATCH, jnp.int32), of_draft(drafted[:, :1]), after, None, choose
        return growing.grow(shape, keys, *given)[0]

    tree = grown(keys, drafted)
    operands = keys, tree, Categorical(jnp.asarray(target), temperature, least)
    verify = partial(getattr(trees, name), log_probs=True)
    expected = jax.jit(verify)(*operands)
    got = on_shards(2, partial(verify, axis_name="vocab"), *operands)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.path, expected.path)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
    assert {1, 2} <= set(expected.path[:, 1].tolist()), expected.path[:, 1]


def packed_in_bfloat16(case):
    keys, draft, target = case
    drafted, target = (x._replace(logits=x.logits.astype(jnp.bfloat16)) for x in (draft.distribution, target))
    rows = jnp.arange(BATCH * DRAFTS).reshape(BATCH, DRAFTS)[::-1]
    drafted = distributions.pack(drafted)._replace(rows=rows, temperature=drafted.temperature[::-1])
    return (keys, draft._replace(tokens=draft.tokens[::-1], distribution=drafted), target), {}


def with_bonus_tokens(case):
    """And with known normalizers of the drafts."""
    keys, draft, target = case
    drafted = draft.distribution
    scaled = drafted.logits / drafted.temperature[:, None, None]
    drafted = drafted._replace(log_normalizer=jax.scipy.special.logsumexp(scaled, -1))
    return (keys, draft._replace(distribution=drafted), target), {"bonus_tokens": jnp.arange(BATCH) * 40 % VOCAB}


def with_equal_logits(case):
    """The argmax is the lowest id of the largest logit, of one part or of several. Some rows have logits of NaN."""
    keys, draft, target = case
    logits = jnp.zeros_like(target.logits).at[..., jnp.array([700, 900, 1500, 2000])].set(9)
    logits = logits.at[::7, 1, 701].set(jnp.nan).at[1::7, 0].set(jnp.nan)
    target = target._replace(logits=logits, temperature=target.temperature * (jnp.arange(BATCH) % 2))
    tokens = jnp.asarray(np.resize([700, 900, 700, 1500, 3], (BATCH, DRAFTS)))
    drafted = draft.distribution._replace(logits=logits[:, 1:])
    return (keys, draft._replace(tokens=tokens, distribution=drafted), target), {}


FAST = with_bonus_tokens, with_equal_logits


@pytest.mark.parametrize(
    "name, change",
    [
        *(("rejection", change) for change in FAST),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("block", packed_in_bfloat16),
                ("block", with_bonus_tokens),
                ("match", with_equal_logits),
                ("typical", packed_in_bfloat16),
                ("synthetic", with_bonus_tokens),
            )
        ),
    ],
)
def test_kernels_of_parts_and_of_one_device(name, change, case):
    operands, options = change(case)
    if options and name == "match":  # which takes no bonus tokens, but `rejection` does as much with them
        name, operands = "rejection", (operands[0], operands[1]._replace(distribution=None), operands[2])
    of_kernels = {"implementation": "interpret"}
    # The kernels of one device give the tokens of XLA, unless two tokens are as likely but for rounding.
    expected = ONE_DEVICE[name](*operands, **options, **(of_kernels if change is with_equal_logits else {}))
    options |= {"log_probs": True} | of_kernels
    got = on_shards(2, partial(VERIFIERS[name], axis_name="vocab", **options), *operands)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("has_bonus", [False, True])
def test_kernels_of_parts_without_drafts(has_bonus, case):
    keys, draft, target = case
    options = {"bonus_tokens": jnp.full(BATCH, 1600)} if has_bonus else {}
    none = Draft(draft.tokens[:, :0])
    target = Categorical(target.logits[:, :1], target.temperature)
    verify = partial(verifiers.rejection, log_probs=True, **options)
    expected = jax.jit(verify)(keys[:, :1], none, target)
    got = on_shards(4, partial(verify, axis_name="vocab", implementation="interpret"), keys[:, :1], none, target)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_deterministic_drafts_and_bonus_tokens(case):
    keys, draft, target = case
    draft, bonus = draft._replace(distribution=None), jnp.arange(BATCH, dtype=jnp.int32)
    expected = ONE_DEVICE["rejection"](keys, draft, target, bonus_tokens=bonus)
    verify = partial(verifiers.rejection, axis_name="vocab", bonus_tokens=bonus)
    np.testing.assert_array_equal(on_shards(4, verify, keys, draft, target).tokens, expected.tokens)


@pytest.mark.slow
def test_packed_logits(case):
    keys, draft, target = case
    packed = distributions.pack(target)
    expected = ONE_DEVICE["rejection"](*case)
    got = on_shards(2, partial(verifiers.rejection, axis_name="vocab"), keys, draft, packed)
    np.testing.assert_array_equal(got.tokens, expected.tokens)


@pytest.mark.parametrize(
    "name", ["match", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rejection", "block"))]
)
def test_the_distribution_where_shards_are_not_whole_blocks(name):
    """Other draws than on one device, with the same distribution."""
    rows, vocab_size = 20_000, 12
    rng = np.random.default_rng(5)
    target, drafted = (jnp.asarray(rng.normal(0, 1.5, (1, n, vocab_size)), jnp.float32) for n in (2, 1))
    repeat = partial(jnp.repeat, repeats=rows, axis=0)
    distribution = Categorical(repeat(drafted))
    tokens = distributions.sample(jax.random.split(jax.random.key(3), (rows, 1)), distribution)
    operands = jax.random.key(4), Draft(tokens, distribution), Categorical(repeat(target))
    got = on_shards(4, partial(VERIFIERS[name], axis_name="vocab"), *operands).tokens
    counts = np.bincount(np.asarray(got)[:, 0], minlength=vocab_size)
    result = chi_square(counts, np.asarray(jax.nn.softmax(target[0, 0])))
    assert result.statistic < result.bound


def rough_psum(values, axis_name, psum=jax.lax.psum):
    """A sum that rounds differently on every device, where more than one of them adds something."""
    result, adding = psum(values, axis_name), psum((values != 0).astype(jnp.float32), axis_name)
    error = 1 + 0.2 * jax.lax.axis_index(axis_name)
    return jnp.where(adding > 1, (result * error).astype(result.dtype), result)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["typical", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_devices_agree_however_they_round(name, implementation, case, monkeypatch):
    monkeypatch.setattr(jax.lax, "psum", rough_psum)
    verify = partial(VERIFIERS[name], axis_name="vocab", implementation=implementation)
    each = on_shards(4, verify, *case, per_device=True)
    for device in range(1, 4):
        np.testing.assert_array_equal(each.tokens[device], each.tokens[0])
        np.testing.assert_array_equal(each.num_accepted[device], each.num_accepted[0])


@pytest.mark.parametrize(
    "name, implementation, most",
    [
        ("match", "xla", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("rejection", "xla", 7),
                ("block", "xla", 9),
                ("match", "interpret", 1),
                ("rejection", "interpret", 2),
                ("block", "interpret", 2),
            )
        ),
    ],
)
def test_exchanges_are_few_and_small(name, implementation, most, case):
    verify = partial(VERIFIERS[name], axis_name="vocab", implementation=implementation)
    text = jax.jit(split(4, verify, case)).lower(*case).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)
    sizes = []
    for shapes in re.findall(r"= (.+?) all-reduce(?:-start)?\(", text):
        listed = re.findall(r"\w+\[([\d,]*)\]", shapes)
        sizes += [math.prod(int(n) for n in dims.split(",") if n) for dims in listed]
    assert 0 < len(sizes) <= most
    assert max(sizes) <= 4 * 6 * BATCH * (DRAFTS + 1)


@pytest.mark.parametrize("number", [4])
def test_cuts(number):
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (40, 16384 * 4)).astype(np.float32)
    logits[1], logits[2, 100:] = 0, -np.inf
    logits[3, 9] = np.nan
    options = {
        "temperature": jnp.asarray(rng.choice([0, 0.7, 1.3], 40), jnp.float32),
        "top_k": jnp.asarray(rng.choice([-1, 1, 40, 5000], 40), jnp.int32),
        "top_p": jnp.asarray(rng.choice([1, 0.9, 0.3], 40), jnp.float32),
        "min_p": jnp.asarray(rng.choice([0, 0.05], 40), jnp.float32),
    }
    expected = jax.jit(cut.min_logit)(jnp.asarray(logits), **options)
    got = on_shards(number, lambda x: cut.min_logit(x, axis_name="vocab", **options), jnp.asarray(logits))
    np.testing.assert_array_equal(got, expected)
    assert np.isfinite(expected).sum() > 20


@pytest.mark.slow
def test_parameters_of_requests():
    """Every parameter that shapes logits, for tokens at both ends of each shard."""
    vocab_size = 64
    rng = np.random.default_rng(9)
    grammar = guided.from_regex("a+b?", [bytes([97 + i % 26]) for i in range(vocab_size)], [63])
    params = [
        SamplingParams(temperature=0.5, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, top_k=9),
        SamplingParams(logit_bias={15: 3.0, 16: -2.0, 63: 1.0}, bad_words=[[5], [3, 31]], top_p=0.7),
        SamplingParams(allowed_token_ids=[0, 15, 16, 47, 48, 63], min_tokens=5, stop_token_ids=[16, 63]),
        SamplingParams(guided_decoding=grammar, min_p=0.1),
    ]
    rows = sampling.batch(params, vocab_size=vocab_size)
    context = Context(
        jnp.asarray(rng.integers(0, vocab_size, (4, 12)), jnp.int32).at[1, 7].set(3),
        jnp.array([12, 8, 6, 5]),
        jnp.ones(4, bool),
        jnp.array([6, 4, 4, 5]),
        None if rows.guide is None else rows.guide.initial,
    )
    drafts = jnp.asarray(rng.integers(0, vocab_size, (4, 2)), jnp.int32)
    logits = jnp.asarray(rng.normal(0, 2, (4, 3, vocab_size)), jnp.float32)
    expected = jax.jit(sampling.process)(rows, logits, context, drafts)

    def part(logits):
        got = sampling.process(rows, logits, context, drafts, axis_name="vocab")
        return shards.table(got.logits, "vocab"), got.min_logit

    parts, least = on_shards(4, part, logits)
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), expected.logits)
    np.testing.assert_array_equal(least, expected.min_logit)


def test_own_part():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("vocab",))
    split = partial(shards.own_part, axis_name="vocab", padding=-1.0)
    split = jax.shard_map(split, mesh=mesh, in_specs=P(), out_specs=P(None, "vocab"))
    logits = jnp.arange(22.0).reshape(2, 11)
    np.testing.assert_array_equal(split(logits), np.pad(logits, ((0, 0), (0, 1)), constant_values=-1))
    sizes = {(11, 4): 3, (2048, 4): 512, (2049, 4): 1024, (128_256, 2): 64_512}
    assert {given: shards.part_size(*given) for given in sizes} == sizes


def test_own_draft():
    """The padding at the end of the last part has no probability: each draft keeps its probability."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("vocab",))
    logits = jnp.asarray(np.random.default_rng(6).normal(-3, 1, (2, 3, 11)), jnp.float32)
    tokens = jnp.array([[0, 4, 10], [3, 8, 2]])
    draft = Draft(tokens, Categorical(logits, jnp.array([1.0, 0.7])))

    def log_prob(draft, axis_name=None):
        own = shards.own_draft(draft, axis_name).distribution
        return distributions.token_log_prob(distributions.normalize_drafts(own, axis_name), tokens)

    split = jax.shard_map(partial(log_prob, axis_name="vocab"), mesh=mesh, in_specs=P(), out_specs=P())
    np.testing.assert_allclose(jax.jit(split)(draft), log_prob(draft), rtol=1e-6)


def test_errors(case):
    with pytest.raises(ValueError, match=r"axis_name must be None or an axis of the jax\.shard_map around the call"):
        verifiers.rejection(*case, axis_name="vocab")

    @verifiers.from_core
    def own(draw, draft, target, *, bonus_tokens=None, log_probs=False):
        raise AssertionError("not reached")

    with pytest.raises(ValueError, match="axis_name must be left out, as own does not support it, got 'vocab'"):
        on_shards(2, partial(own, axis_name="vocab"), *case)

    def kernel(keys, draft, target, *, bonus_tokens, log_probs, interpret):
        raise AssertionError("not reached")

    whole = verifiers.from_core(verifiers.match.core, kernel=kernel)
    with pytest.raises(NotImplementedError, match="the kernels of this verifier take whole vocabularies"):
        on_shards(2, partial(whole, axis_name="vocab", implementation="interpret"), *case)
