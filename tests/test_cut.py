"""The cut against a float64 sort that keeps ties."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from lowering import H200, decisions_of_the_host, triton_kernels

from specjax.sampling.cut import min_logit

OFF = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
VALUES = {
    "temperature": [0.0, 0.01, 0.3, 0.8, 1.0, 5.0],
    "top_k": [-1, 0, 1, 2, 7, 50, 128, 1000, 10**6],
    "top_p": [1e-6, 0.1, 0.5, 0.9, 0.9999, 1.0],
    "min_p": [0.0, 1e-3, 0.05, 0.5, 1.0],
}
ROUNDING = 1e-6  # of top_p and min_p


def oracle(row, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """The cut of one row, from a sorted float64 copy."""
    kept = np.sort(row[row > -np.inf].astype(np.float64))[::-1]
    on = [min_p > 0, 0 < top_k < len(row), top_p < 1]
    if temperature == 0 or not any(on) or len(kept) == 0 or (on == [False, True, False] and top_k > len(kept)):
        return -np.inf
    if on[0]:
        kept = kept[np.exp((kept - kept[0]) / temperature) >= min(min_p, 1)]
    if on[1]:
        kept = kept[kept >= kept[min(top_k, len(kept)) - 1]]
    if on[2]:
        mass = np.cumsum(np.exp((kept - kept[0]) / temperature))
        kept = kept[kept >= kept[np.searchsorted(mass, top_p * mass[-1])]]
    return kept[-1]


def rows_of(vocab_size, seed):
    """Rows of every kind, [22, vocab_size] float32."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(4, vocab_size))
    zipf = -np.log(1 + np.arange(vocab_size))
    some = rng.random((6, vocab_size)) < 0.5
    single = np.full(vocab_size, -np.inf)
    single[vocab_size // 2] = -3
    rows = [
        *(3 * normal),
        normal[0],
        normal[1] + 1000,
        rng.standard_cauchy(vocab_size),
        rng.exponential(size=vocab_size) ** 3,
        zipf,
        1.3 * rng.permutation(zipf),
        np.round(2 * normal[2]),
        np.round(normal[3]) / 4,
        np.zeros(vocab_size),
        np.ldexp(np.where(some[0], 1, -1), -(np.arange(vocab_size) % 120)),
        np.where(some[1], 3 * normal[0], -np.inf),
        np.where(some[2], 3 * normal[1], np.finfo(np.float32).min),
        np.where(np.arange(vocab_size) < 20, normal[2], -np.inf),
        single,
        np.full(vocab_size, -np.inf),
        np.full(vocab_size, np.nan),
        np.where(some[3], 3 * normal[2], np.nan),
        np.where(np.arange(vocab_size) == 1, np.nan, 3 * normal[3]),
    ]
    return np.stack(rows).astype(np.float32)


def check(logits, cut, fields, rounding=ROUNDING):
    """The cut lies between the cuts of slightly other top_p and min_p; returns whether these two are equal, per row."""
    sharp = []
    for i, (row, found) in enumerate(zip(logits, cut, strict=True)):
        given = {name: float(values[i]) for name, values in fields.items()}
        given["top_k"] = int(given.get("top_k", -1))
        bounds = []
        for sign in (1, -1):
            moved = dict(given)
            if 0 < moved.get("top_p", 1) < 1:
                moved["top_p"] = min(moved["top_p"] * (1 + sign * rounding), 1 - 1e-16)
            if moved.get("min_p", 0) > 0:
                moved["min_p"] *= 1 - sign * rounding
            bounds.append(oracle(row, **moved))
        assert bounds[0] <= found <= bounds[1], (i, given, bounds, found)
        assert found == -np.inf or found in row.astype(cut.dtype), (i, given, found)
        sharp.append(bounds[0] == bounds[1])
    return np.array(sharp)


def as_arrays(fields, dtype=np.float32):
    return {name: np.asarray(v, np.int32 if name == "top_k" else dtype) for name, v in fields.items()}


jitted = jax.jit(min_logit, static_argnames="implementation")
few = pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.slow)])


@few
def test_by_hand(implementation):
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))

    def kept(**fields):
        return (logits >= jitted(logits, **as_arrays(OFF | fields), implementation=implementation)).tolist()

    assert kept() == kept(top_k=-1) == kept(top_k=4) == kept(top_p=1.0, min_p=0.0) == [True] * 4
    assert kept(temperature=0.0, top_k=1, top_p=0.1) == [True] * 4
    assert kept(top_k=3) == kept(top_p=0.85) == kept(min_p=0.45) == [False, True, True, True]
    assert kept(top_k=1) == kept(top_p=0.0) == kept(min_p=1.0) == kept(min_p=2.0) == [False, True, False, False]
    assert kept(min_p=0.45, temperature=2.0) == [True] * 4
    assert kept(top_p=0.5) == kept(top_k=2) == [False, True, False, True]
    # 0.4 of 0.7 reaches 0.5, 0.4 of 1 does not: top_k and min_p come before top_p.
    assert kept(top_p=0.5, top_k=2) == kept(top_p=0.5, min_p=0.7) == [False, True, False, False]


@few
def test_ties_are_kept(implementation):
    jitted = jax.jit(partial(min_logit, implementation=implementation))
    logits = jnp.log(jnp.array([0.2, 0.3, 0.2, 0.1, 0.2]))
    for fields in ({"top_k": 2}, {"top_p": 0.45}, {"min_p": 0.6}, {"top_k": 3, "top_p": 0.6}):
        cut = jitted(logits, **as_arrays(OFF | fields))
        assert (logits >= cut).tolist() == [True, True, True, False, True], fields
    # The mass that top_p works on includes all ties of the k-th token: 0.3 of 0.9 is less than 0.35, of 0.5 it is more.
    assert jitted(logits, **as_arrays(OFF | {"top_k": 2, "top_p": 0.35})) == logits[0]
    many = jnp.zeros(20000).at[7].set(5.0)  # exp(5) is 0.0074 of the mass
    assert jitted(many, top_k=jnp.array(2), top_p=jnp.array(0.01)) == 0
    assert jitted(many, top_k=jnp.array(2), top_p=jnp.array(0.007)) == 5


@pytest.mark.parametrize("vocab_size", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_every_combination(vocab_size):
    rows = rows_of(vocab_size, seed=vocab_size)
    combinations = list(itertools.product(*VALUES.values()))
    fields = dict(zip(VALUES, map(np.array, zip(*combinations, strict=True)), strict=True))
    fields = {name: np.repeat(v, 2) for name, v in as_arrays(fields).items()}
    logits = rows[np.arange(2 * len(combinations)) * 7 % len(rows)]
    assert check(logits, np.asarray(jitted(logits, **fields)), fields).mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "implementation"),
    [
        (8193, np.float32, "xla"),
        (128256, ml_dtypes.bfloat16, "xla"),
        (100, np.float32, "interpret"),
        (50272, np.float16, "interpret"),
        (151936, np.float32, "interpret"),
    ],
)
def test_mixed_batch(vocab_size, dtype, implementation):
    with np.errstate(over="ignore"):  # float16
        logits = np.tile(rows_of(vocab_size, seed=vocab_size), (3, 1)).astype(dtype)
    rng = np.random.default_rng(vocab_size)
    fields = as_arrays({name: rng.choice(values, len(logits)) for name, values in VALUES.items()})
    for name in ("top_k", "min_p"):  # a third of the rows on top_p alone
        fields[name] = np.where(np.arange(len(logits)) % 3 == 0, OFF[name], fields[name]).astype(fields[name].dtype)
    cut = jitted(logits, **fields, implementation=implementation)
    assert cut.dtype == jnp.float32
    assert check(logits, np.asarray(cut), fields).mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("names", [("top_p",), ("temperature", "top_k", "top_p"), ("top_k",), ("min_p",)])
def test_fields_left_out(names):
    logits = np.tile(rows_of(8193, seed=1), (3, 1))
    rng = np.random.default_rng(1)
    fields = as_arrays({name: rng.choice(VALUES[name], len(logits)) for name in names})
    cut = np.asarray(jitted(logits, **fields))
    check(logits, cut, fields)
    absent = as_arrays({name: np.full(len(logits), off) for name, off in OFF.items()})
    np.testing.assert_array_equal(cut, jitted(logits, **absent | fields))


def test_float64(x64):
    logits = rows_of(8193, seed=2).astype(np.float64) * (1 + 1e-9)
    fields = as_arrays({name: np.resize(values, len(logits)) for name, values in VALUES.items()}, np.float64)
    cut = jitted(logits, **fields)
    assert cut.dtype == jnp.float64
    assert check(logits, np.asarray(cut), fields, rounding=1e-13).all()


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    logits = np.tile(rows_of(8193, seed=3), (3, 1))
    rng = np.random.default_rng(3)
    fields = as_arrays({name: rng.choice(values, len(logits)) for name, values in VALUES.items()})
    cut = np.asarray(jitted(logits, **fields))
    order = rng.permutation(len(logits))
    permuted = jitted(logits[order], **{name: values[order] for name, values in fields.items()})
    np.testing.assert_array_equal(cut[order], permuted)


@pytest.mark.slow
def test_jit_eager_and_vmap_agree():
    logits = jnp.asarray(rows_of(8193, seed=4)[:20].reshape(4, 5, -1))
    fields = {"temperature": jnp.full((4, 5), 0.7), "top_k": jnp.arange(20).reshape(4, 5) * 9, "top_p": jnp.array(0.9)}
    cut = jitted(logits, **fields)
    assert cut.shape == (4, 5)
    np.testing.assert_array_equal(cut, min_logit(logits, **fields))
    mapped = jax.vmap(lambda x, t, k: min_logit(x, temperature=t, top_k=k, top_p=fields["top_p"]))
    np.testing.assert_array_equal(cut, jax.jit(mapped)(logits, fields["temperature"], fields["top_k"]))


def test_shapes():
    logits = jnp.zeros((2, 3, 7))
    assert min_logit(logits, top_k=jnp.array([[1], [2]])).shape == (2, 3)
    assert min_logit(logits, temperature=jnp.array(2.0)).tolist() == [[-np.inf] * 3] * 2
    assert min_logit(logits[:0], top_p=jnp.array(0.5)).shape == (0, 3)
    with pytest.raises(ValueError, match="broadcast"):
        min_logit(logits, top_k=jnp.array([1, 2]))


@pytest.mark.slow
def test_in_shard_map():
    logits = jnp.asarray(rows_of(8193, seed=4)[:20].reshape(4, 5, -1))
    fields = {"top_k": jnp.array(40), "top_p": jnp.array(0.9)}
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    by_row = PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(lambda x: min_logit(x, **fields), mesh=mesh, in_specs=by_row, out_specs=by_row))
    np.testing.assert_array_equal(sharded(logits), jitted(logits, **fields))


ROW = np.zeros(7, np.float32)


def test_the_host_waits_for_no_part_of_a_shared_vocabulary():
    """Kernels search some rows on each device: a GPU would tell the host each condition of the loops of XLA."""
    mesh = AbstractMesh((2,), ("vocab",), (AxisType.Auto,), abstract_device=H200)
    cut = jax.shard_map(
        lambda logits: min_logit(logits, top_p=jnp.float32(0.9), axis_name="vocab"),
        mesh=mesh,
        in_specs=PartitionSpec(None, "vocab"),
        out_specs=PartitionSpec(),
    )
    logits = jax.ShapeDtypeStruct((2, 4096), jnp.float32)
    names = [kernel.name for kernel in triton_kernels(cut, logits, mesh=mesh)]
    assert names == ["_block_kernel", "_candidate_kernel", "_row_kernel"]
    assert decisions_of_the_host(cut, logits, mesh=mesh) == []


@pytest.mark.parametrize(
    ("logits", "fields", "message"),
    [
        (ROW.astype(np.int32), {"top_k": 2}, "logits must be of floating dtype, got int32"),
        (ROW, {"top_k": 1.5}, "top_k must be of integer dtype, got float32"),
        (ROW, {"top_p": True}, "top_p must be of number dtype, got bool"),
        (np.stack([ROW, ROW]), {"min_p": ROW[:3]}, r"min_p must be broadcastable to \(2,\), got shape \(3,\)"),
        (ROW, {"top_k": 1, "temperature": ROW[:1]}, r"temperature must be broadcastable to \(\), got"),
    ],
)
def test_bad_input(logits, fields, message):
    with pytest.raises(ValueError, match=message):
        min_logit(logits, **fields)


def test_unsupported_cases():
    with pytest.raises(ValueError, match="'xla', 'pallas' or 'interpret', got 'triton'"):
        min_logit(jnp.zeros(7), top_k=jnp.array(2), implementation="triton")
    with pytest.raises(NotImplementedError, match="at most 524288 tokens, got 524289"):
        min_logit(jnp.zeros(2**19 + 1), top_k=jnp.array(2), implementation="interpret")


def test_unsupported_dtype(x64):
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, got float64"):
        min_logit(jnp.zeros(7, jnp.float64), top_k=jnp.array(2), implementation="pallas")


def test_one_trace_for_all_values():
    traces = []

    @jax.jit
    def cut(logits, fields):
        traces.append(logits.shape)
        return min_logit(logits, **fields)

    logits = jnp.asarray(rows_of(100, seed=5))
    for values in itertools.islice(itertools.product(*VALUES.values()), 0, None, 100):
        cut(logits, as_arrays({k: np.full(len(logits), v) for k, v in zip(VALUES, values, strict=True)}))
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_memory(dtype):
    logits = jax.ShapeDtypeStruct((64, 128256), dtype)
    fields = {name: jax.ShapeDtypeStruct((64,), jnp.float32) for name in ("temperature", "top_p", "min_p")}
    fields["top_k"] = jax.ShapeDtypeStruct((64,), jnp.int32)
    used = jitted.lower(logits, **fields).compile().memory_analysis().temp_size_in_bytes
    assert used < 0.3 * 4 * logits.size
