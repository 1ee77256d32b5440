"""Attention of any number of new tokens in the middle of a long cache, against loops over queries in float64."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import poisoned, random_table

from pallas_kernels.attention import Chunks
from specjax.models import attention, dense_attention
from specjax.models.attention import BLOCK, attend, attend_to_cache, attention_mask, num_slots, update_cache
from specjax.models.block_attention import num_blocks
from specjax.models.rope import rotation
from specjax.types import ModelInput

pytestmark = pytest.mark.usefixtures("float32_products")
IMPLEMENTATIONS = {"xla": (jnp.float32, 1e-5)}  # name: dtype, and the error of a result relative to its norm
BATCH, HEADS, KV_HEADS, SIZE, SLOTS, PAGE_SIZE = 3, 4, 2, 16, 192, 32
STARTS = np.array([97, 64, 120], np.int32)
OPTIONS = {
    "plain": {},
    "window": {"window": 21, "scale": 0.4, "softcap": 2.0},
    "sinks": {"sinks": np.array([-20, 20, 0.5, 3], np.float32)},
    "hidden": {"num_hidden": 3},
    "chunks": {"window": Chunks(21), "scale": 0.4},
}
LAYOUTS = "dense", "pages"
COMBINATIONS = [(layout, options) for layout in LAYOUTS for options in list(OPTIONS)[:3]]
CASES = [*((5, *combination) for combination in COMBINATIONS), (5, "dense", "hidden"), (5, "pages", "chunks")]
SLOW = [(n, *COMBINATIONS[i % 6]) for i, n in enumerate((1, 2, 3, 4, 7, 8, 15, 16, 17, 18, 31, 32, 33, 63))]
SLOW += [*((64, *combination) for combination in COMBINATIONS), (64, "dense", "chunks")]


def arrays(num_tokens, dtype):
    def normal(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)

    new, cached = (BATCH, num_tokens, KV_HEADS, SIZE), (BATCH, SLOTS, KV_HEADS, SIZE)
    query = normal(0, BATCH, num_tokens, HEADS, SIZE)
    return query, normal(1, *new), normal(2, *new), {"key": normal(3, *cached), "value": normal(4, *cached)}


def turn(x, positions):
    cos, sin = (np.asarray(part, np.float64)[:, :, None] for part in rotation(jnp.asarray(positions), SIZE, 100.0))
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def reference(
    query, key, value, cache, positions, dtype, window=None, scale=SIZE**-0.5, softcap=None, num_hidden=0, sinks=None
):
    """Attention of each query to the slots up to its own, of which the last hold the new tokens."""
    query, key = (np.asarray(jnp.asarray(turn(x, positions)).astype(dtype), np.float64) for x in (query, key))
    keys, values = (np.array(cache[name], np.float64) for name in ("key", "value"))
    for b, slots in enumerate(positions):
        keys[b, slots], values[b, slots] = key[b], np.asarray(value[b], np.float64)
    attended = np.zeros(query.shape)
    for b, t, h in np.ndindex(query.shape[:3]):
        end = positions[b, t] + 1
        if isinstance(window, Chunks):
            begin = (end - 1) // window.size * window.size
        else:
            begin = num_hidden if window is None else max(0, end - window)
        kv_head = h // (HEADS // KV_HEADS)
        scores = scale * keys[b, begin:end, kv_head] @ query[b, t, h]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sink = -np.inf if sinks is None else sinks[h]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        attended[b, t, h] = weights @ values[b, begin:end, kv_head] / (weights.sum() + np.exp(sink - top))
    return attended


@jax.jit
def in_pages(pool, table, cache, starts):
    """The pool with the slots of a dense cache that were fed, in the pages of a table; NaN in the others."""
    is_held = (jnp.arange(cache["key"].shape[1])[None] < starts[:, None])[..., None, None]
    held = jax.tree.map(lambda leaf: jnp.where(is_held, leaf, jnp.nan), cache)
    return jax.tree.map(lambda leaf, rows: leaf.at[table].set(rows.reshape(BATCH, -1, *leaf.shape[1:])), pool, held)


def attend_to_slots(query, key, value, cache, inputs, window=None, num_hidden=0, **options):
    mask = attention_mask(inputs, num_slots(cache, inputs), window, num_hidden)
    turns = rotation(inputs.positions, SIZE, 100.0)
    options["num_hidden"] = num_hidden
    return attend_to_cache(query, key, value, cache, inputs, mask, turns, window, **options)[0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "num_tokens, layout, options", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_each_token_sees_those_up_to_itself(num_tokens, implementation, layout, options):
    dtype, tolerance = IMPLEMENTATIONS[implementation]
    query, key, value, cache = arrays(num_tokens, dtype)
    positions = STARTS[:, None] + np.arange(num_tokens, dtype=np.int32)
    expected = reference(query, key, value, cache, positions, dtype, **OPTIONS[options])
    table = None
    if layout == "pages":
        table = jnp.asarray(random_table((BATCH, SLOTS // PAGE_SIZE), 40))
        pool = poisoned({name: jnp.zeros((40, PAGE_SIZE, KV_HEADS, SIZE), dtype) for name in cache})
        cache = in_pages(pool, table, cache, STARTS)
    inputs = ModelInput(jnp.zeros(positions.shape, jnp.int32), jnp.asarray(positions), pages=table)
    run = jax.jit(partial(attend_to_slots, implementation=implementation, **OPTIONS[options]))
    attended = np.asarray(run(query, key, value, cache, inputs), np.float64)
    error = np.linalg.norm(attended - expected) / np.linalg.norm(expected)
    assert error < tolerance


LONG = [(70, *combination) for combination in (*COMBINATIONS, ("dense", "hidden"), ("dense", "chunks"))]
FAST = (70, "dense", "plain"), (5, "pages", "plain")
BLOCKS = [*LONG, *((5, "pages", name) for name in OPTIONS)]


@pytest.mark.parametrize(
    "num_tokens, layout, options",
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in BLOCKS],
)
@pytest.mark.parametrize("few", [attention.FEW_QUERIES, 0])
def test_blocks_of_slots(num_tokens, layout, options, few, monkeypatch):
    """A long cache is attended to in blocks, of which only those that a row fills are read."""
    monkeypatch.setattr(attention, "FEW_QUERIES", few)
    slots, starts = 3 * BLOCK + 64, np.array([3, BLOCK - 20, 2 * BLOCK + 5], np.int32)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    query, key, value = (normal(BATCH, num_tokens, heads, SIZE) for heads in (4, 2, 2))
    cache = {name: normal(BATCH, slots, KV_HEADS, SIZE) for name in ("key", "value")}
    positions = jnp.asarray(starts[:, None] + np.arange(num_tokens, dtype=np.int32))
    inputs = ModelInput(jnp.zeros(positions.shape, jnp.int32), positions)
    options = OPTIONS[options]
    scores = {name: options.get(name) for name in ("scale", "softcap", "sinks")}

    @jax.jit
    def both(query, key, value, cache, inputs, table):
        """Attention to all slots at once, and in blocks, whose cache has NaN where nothing was fed."""
        written = update_cache(cache, key, value, inputs)
        mask = attention_mask(inputs, slots, options.get("window"), options.get("num_hidden", 0))
        expected = attend(query, written["key"], written["value"], mask, **scores)
        if table is None:
            is_seen = (jnp.arange(slots)[None] < starts[:, None])[..., None, None]
            cache = jax.tree.map(lambda leaf: jnp.where(is_seen, leaf, jnp.nan), cache)
        else:
            pool = dict.fromkeys(cache, jnp.full((160, PAGE_SIZE, KV_HEADS, SIZE), jnp.nan))
            cache, inputs = in_pages(pool, table, cache, starts), inputs._replace(pages=table)
        return expected, attend_to_cache(query, key, value, cache, inputs, mask, implementation="xla", **options)[0]

    table = jnp.asarray(random_table((BATCH, slots // PAGE_SIZE), 160)) if layout == "pages" else None
    expected, attended = both(query, key, value, cache, inputs, table)
    np.testing.assert_allclose(attended, expected, rtol=1e-4, atol=1e-5)


def test_a_row_without_pages_reads_nothing():
    """A vacant slot of an engine stands at the end of the buffer, and has no page."""
    slots, num_pages = 16 * attention.SMALL_BLOCK, 4
    query, key, value = (jnp.ones((2, 3, n, SIZE)) for n in (HEADS, KV_HEADS, KV_HEADS))
    pool = {name: jnp.full((num_pages, PAGE_SIZE, KV_HEADS, SIZE), jnp.nan) for name in ("key", "value")}
    table = np.full((2, slots // PAGE_SIZE), num_pages, np.int32)
    table[0, 0] = 2
    positions = jnp.asarray(np.array([[0], [slots - 1]], np.int32) + np.arange(3, dtype=np.int32))
    inputs = ModelInput(jnp.zeros((2, 3), jnp.int32), positions, pages=jnp.asarray(table))
    assert num_blocks(pool, inputs, attention.SMALL_BLOCK) == 1
    attended = attend_to_slots(query, key, value, pool, inputs)
    np.testing.assert_allclose(attended, [np.ones((3, HEADS, SIZE)), np.zeros((3, HEADS, SIZE))], rtol=1e-5)


@pytest.mark.slow
def test_windows_hide_pages_that_were_freed():
    slots, window = 4 * attention.SMALL_BLOCK, 40
    query, key, value, _ = arrays(5, jnp.float32)
    positions = jnp.asarray(np.array([[200], [330], [480]], np.int32) + np.arange(5, dtype=np.int32))
    cache = {
        name: jax.random.normal(jax.random.key(i), (48, PAGE_SIZE, KV_HEADS, SIZE))
        for i, name in enumerate(("key", "value"))
    }
    table = random_table((BATCH, slots // PAGE_SIZE), 48)
    ends = PAGE_SIZE * (1 + np.arange(slots // PAGE_SIZE))
    freed = np.where(ends[None] <= np.asarray(positions)[:, :1] - window, 48, table)
    inputs = ModelInput(jnp.zeros((BATCH, 5), jnp.int32), positions, pages=jnp.asarray(table))
    expected = attend_to_slots(query, key, value, cache, inputs, window)
    attended = attend_to_slots(query, key, value, cache, inputs._replace(pages=jnp.asarray(freed)), window)
    np.testing.assert_array_equal(attended, expected)


def test_blocks_hold_no_more_scores_than_one():
    """No array of the program is as large as the scores of all slots."""
    slots, num_tokens = 32 * BLOCK, 128
    like = jax.ShapeDtypeStruct
    query, new = (like((1, num_tokens, n, SIZE), jnp.float32) for n in (HEADS, KV_HEADS))
    cache = dict.fromkeys(("key", "value"), like((1, slots, KV_HEADS, SIZE), jnp.float32))
    inputs = ModelInput(*[like((1, num_tokens), jnp.int32)] * 2)
    program = jax.jit(attend_to_slots).lower(query, new, new, cache, inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * HEADS * num_tokens * slots


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_float16(softcap):
    """Many queries work too, for which `jax.nn.dot_product_attention` asks CPUs for a product that they lack."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 33, heads, 8)).astype(np.float16) for heads in (4, 2, 2))
    found = jax.jit(partial(attend, mask=None, softcap=softcap))(query, key, value)
    expected = attend(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), None, softcap=softcap)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, expected, atol=4e-3)


class TestCudnn:
    """Causal attention without a cache from many queries of 16 bits, on NVIDIA GPUs."""

    @staticmethod
    def operands(num_tokens=256, size=64, dtype=jnp.bfloat16):
        def normal(seed, heads):
            return jax.random.normal(jax.random.key(seed), (2, num_tokens, heads, size)).astype(dtype)

        return normal(0, 4), normal(1, 2), normal(2, 2)

    @pytest.mark.parametrize(
        ("takes", "options"),
        [
            (True, {}),
            (True, {"num_tokens": 129, "dtype": jnp.float16}),
            (False, {"dtype": jnp.float32}),
            (False, {"num_tokens": 127}),
            (False, {"size": 68}),
            (False, {"size": 136}),
        ],
    )
    def test_what_it_takes(self, takes, options, monkeypatch):
        device = SimpleNamespace(compute_capability="9.0")
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
        assert dense_attention._suits_cudnn(*self.operands(**options)) == takes
        device.compute_capability = "7.5"
        assert not dense_attention._suits_cudnn(*self.operands(**options))

    def test_no_gpu(self, monkeypatch):
        def none(backend):
            raise RuntimeError(f"Unknown backend {backend}")

        monkeypatch.setattr(jax, "local_devices", none)
        assert not dense_attention._suits_cudnn(*self.operands())

    @pytest.mark.gpu
    def test_parity(self):
        """With XLA in float32, of results and gradients."""

        def run(attend, *operands):
            def loss(*heads):
                attended = attend(*heads, None, 0.1, None)
                return jnp.sum(jnp.sin(attended.astype(jnp.float32))), attended

            return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)

        operands = self.operands()
        assert "cudnn" in jax.jit(partial(attend, mask=None)).lower(*operands).as_text()
        found = run(attend, *operands)
        expected = run(attention._attend_in_xla, *(x.astype(jnp.float32) for x in operands))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other)
            assert np.linalg.norm(one - other) < 0.01 * np.linalg.norm(other)
