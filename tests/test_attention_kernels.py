"""The kernels of attention to a cache, against float32 attention over a dense cache updated by a scatter."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import prefill
from lowering import compile_for_sm90, triton_kernels

from pallas_kernels.attention import Chunks, HeadNorms, layout_of, scores_of
from pallas_kernels.decode_attention import MAX_TOKENS, _plan, decode_attention, unsupported
from pallas_kernels.prompt_attention import _program_size, prompt_attention
from specjax import SamplingParams, decode, proposers, sampling
from specjax.models.attention import attend, attend_to_cache, memories, placed
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.models.rope import rotation
from specjax.operations.pieces import in_tiles
from specjax.types import ModelInput

CASES = {  # B, T, H, kv heads, D, S, start of each row
    "empty and full": (2, 3, 4, 2, 16, 48, [0, 45]),
    "past the end": (3, 6, 8, 2, 64, 192, [189, 191, 192]),
    "one token": (1, 1, 4, 1, 32, 304, [257]),
    "one split": (20, 2, 8, 8, 16, 80, [4 * i for i in range(20)]),
    "blocks of several splits": (1, 2, 4, 2, 16, 3008, [2900]),
    "a few long ones": (28, 2, 5, 5, 16, 3008, [40, 2900, 0, 2048, 1025, 3006, 1024, *range(3, 23), 3008]),
    "several blocks of queries": (2, 35, 8, 2, 32, 304, [150, 0]),
    "odd sizes": (1, 11, 7, 1, 80, 304, [150]),
    "wide heads": (1, 5, 8, 2, 256, 304, [150]),
}
PROMPTS = {
    "from the start": (1, 150, 4, 1, 32, 160, [0]),
    "in the middle": (3, 70, 8, 2, 16, 304, [3, 150, 234]),
    "past the end": (2, 70, 4, 2, 16, 208, [150, 137]),
    "large programs": (8, 270, 16, 8, 16, 304, [0, 1, 2, 3, 31, 32, 33, 34]),
    "odd sizes": (2, 66, 14, 2, 96, 304, [100, 0]),
    "large heads": (1, 80, 2, 1, 256, 304, [150]),
}


def operands(batch, num_tokens, heads, kv_heads, size, slots, start, dtype=jnp.bfloat16, cache_dtype=None):
    def normal(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)

    new, cached = (batch, num_tokens, kv_heads, size), (batch, slots, kv_heads, size)
    query = normal(0, batch, num_tokens, heads, size)
    caches = (normal(seed, *cached).astype(cache_dtype or dtype) for seed in (3, 4))
    return query, normal(1, *new), normal(2, *new), *caches, jnp.array(start, jnp.int32)


@partial(jax.jit, static_argnames=("window", "scale", "softcap", "num_hidden"))
def expected(
    query,
    key,
    value,
    key_cache,
    value_cache,
    start,
    turns=None,
    tree=None,
    *,
    window=None,
    scale=None,
    softcap=None,
    num_hidden=0,
    cache_scales=None,
    sinks=None,
    norms=None,
):
    query, key = placed(query, key, turns, norms)
    num_tokens, num_slots = query.shape[1], key_cache.shape[1]
    slot = start[:, None] + jnp.arange(num_tokens)[None]
    row = jnp.arange(len(start))[:, None]
    scales = [scale[None, None, :, None] for scale in cache_scales or [jnp.ones(key.shape[2])] * 2]
    caches, new = (
        (key_cache, value_cache),
        [(x / scale).astype(jnp.float32) for x, scale in zip((key, value), scales, strict=True)],
    )
    if key_cache.dtype == jnp.float8_e4m3fn:
        new = [jnp.clip(x, -448, 448) for x in new]
    caches = [cache.at[row, slot].set(x.astype(cache.dtype), mode="drop") for cache, x in zip(caches, new, strict=True)]
    position = jnp.broadcast_to(jnp.arange(num_slots)[None], (len(start), num_slots))
    mask = slot[..., None] >= position[:, None]
    mask &= (position[:, None] >= num_hidden) | (slot[..., None] == position[:, None])
    if tree is not None:
        sees, slot = tree  # the positions of the tokens take the place of their slots
        index = jnp.arange(num_slots)[None] - start[:, None]
        is_new = (index >= 0) & (index < num_tokens)
        index = jnp.clip(index, 0, num_tokens - 1)
        position = jnp.where(is_new, jnp.take_along_axis(slot, index, axis=1), position)
        mask = jnp.where(is_new[:, None], jnp.take_along_axis(sees, index[:, None], axis=2), mask)
    if isinstance(window, Chunks):
        mask &= slot[..., None] // window.size == position[:, None] // window.size
    elif window is not None:
        mask &= slot[..., None] - position[:, None] < window
    wide = (cache.astype(jnp.float32) * scale for cache, scale in zip(caches, scales, strict=True))
    with jax.default_matmul_precision("highest"):
        return attend(query.astype(jnp.float32), *wide, mask[:, None], scale, softcap, sinks), *caches


def in_pages(cache, table, num_pages):
    """A pool with the rows of a dense cache [B, S, ...] in the pages of a table, and NaN in the others."""
    batch, slots, *rest = cache.shape
    pages = cache.reshape(table.size, batch * slots // table.size, *rest)
    return jnp.full((num_pages, *pages.shape[1:]), jnp.nan, cache.dtype).at[table.ravel()].set(pages)


def random_tree(batch, num_tokens, start):
    """Ancestors [B, T, T] and positions [B, T] of trees in which the parent of each node is an earlier one."""
    random, sees = np.random.default_rng(0), np.zeros((batch, num_tokens, num_tokens), bool)
    for row in sees:
        for i in range(num_tokens):
            if i:
                row[i] = row[random.integers(i)]
            row[i, i] = True
    return jnp.array(sees), jnp.array(start)[:, None] + jnp.array(sees.sum(axis=2) - 1)


def check(case, interpret, page_size=None, turned=False, tree=False, cache_dtype=None, share=1, **options):
    arrays = operands(*case, cache_dtype=cache_dtype)
    if "sinks" in options:
        options["sinks"] = options["sinks"][: case[2]]
    batch, num_tokens, _, _, size, slots, start = case
    if "norms" in options:
        options["norms"] = jax.tree.map(lambda scale: scale[:size], options["norms"])
    positions = jnp.arange(batch)[:, None] * 7 + jnp.arange(num_tokens)[None]
    turns = rotation(positions, size, 100.0, turned=size // share) if turned else None
    trees = [random_tree(batch, num_tokens, start)] if tree else []
    reference, *caches = expected(*arrays, turns, *trees, **options)
    table, given = None, arrays
    if page_size is not None:
        num_pages = batch * slots // page_size + 3
        table = jax.random.permutation(jax.random.key(5), num_pages)[: batch * slots // page_size]
        table = table.reshape(batch, -1).astype(jnp.int32)
        caches = [in_pages(cache, table, num_pages) for cache in caches]
        given = *arrays[:3], *(in_pages(cache, table, num_pages) for cache in arrays[3:5]), arrays[5]
    kernel = decode_attention if num_tokens <= MAX_TOKENS else prompt_attention
    attended, *updated = jax.jit(partial(kernel, interpret=interpret, **options))(*given, turns, table, *trees)
    fits = (np.array(start)[:, None] + np.arange(num_tokens) < slots)[..., None, None]
    difference = np.where(fits, np.asarray(attended, np.float32) - reference, 0)
    assert np.linalg.norm(difference) < 5e-3 * np.linalg.norm(np.where(fits, reference, 0))
    for cache, reference_cache in zip(updated, caches, strict=True):
        cache, reference_cache = (np.asarray(x, np.float32) for x in (cache, reference_cache))
        # Keys are turned elsewhere, where a product and a sum may be rounded once or twice, and then to 8 bits.
        rtol = 0 if not turned else 2**-7 if cache_dtype is None else 2**-3
        atol = 0 if cache_dtype is None else 2**-9
        # Where a norm is rounded to the other side, a sum that nearly cancels changes by as much.
        if "norms" in options:
            atol = max(atol, 2**-6)
        np.testing.assert_allclose(cache, reference_cache, rtol=rtol, atol=atol)


TURNED, WINDOW = {"turned": True, "window": 2}, {"window": 70, "scale": 0.3, "softcap": 2.0}
HIDDEN = {"num_hidden": 20, "turned": True}
CHUNKS = {"window": Chunks(50), "turned": True}
TREE = {"tree": True, "window": 6, "turned": True}
SINKS = {"sinks": np.array([-20, 20, 0, 1, -1, 3, 0.5, 2, 4] * 2, np.float32)}  # one takes nearly all mass of its head
_SCALES = np.random.default_rng(7).uniform(-1.5, 1.5, (2, 256)).astype(np.float32)
NORMS = {"norms": HeadNorms(*_SCALES, 1e-6)}
IN_PART = {"turned": True, "share": 4}  # the first quarter of each head turns
OF_QUERIES = {"norms": replace(HeadNorms(*_SCALES, 0.1, 1.0), key=None)}
FLOAT8 = {"cache_dtype": jnp.float8_e4m3fn}


def scales(num_heads):
    """Scales of each kv head, no powers of two; some values divided by theirs are past the largest float8."""
    return {
        "cache_scales": tuple(
            np.linspace(low, high, num_heads, dtype=np.float32) for low, high in ((0.3, 1.7), (0.004, 0.6))
        )
    }


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case, options",
    [
        ("empty and full", TURNED),
        slow("past the end", WINDOW),
        slow("one token", TURNED | {"page_size": 16}),
        slow("one split", WINDOW | {"page_size": 80}),
        slow("blocks of several splits", TURNED | {"page_size": 64}),
        slow("a few long ones", TURNED | {"page_size": 64, "window": None} | SINKS),
        slow("a few long ones", TREE | {"page_size": 64, "window": 2500} | FLOAT8 | scales(5)),
        slow("several blocks of queries", {"page_size": 16, "turned": True}),
        slow("several blocks of queries", TREE),
        slow("odd sizes", TREE | {"page_size": 152}),
        ("empty and full", HIDDEN),
        ("past the end", CHUNKS),
        slow("blocks of several splits", CHUNKS | {"page_size": 64}),
        slow("several blocks of queries", CHUNKS | TREE | {"window": Chunks(153)}),
        slow("odd sizes", TURNED | SINKS),
        slow("one split", {"page_size": 16} | SINKS),
        slow("blocks of several splits", WINDOW | SINKS),
        slow("one token", {"page_size": 16} | HIDDEN),
        slow("blocks of several splits", HIDDEN),
        slow("empty and full", TURNED | NORMS),
        ("empty and full", IN_PART | NORMS),
        slow("odd sizes", TREE | {"page_size": 152, "share": 2}),
        slow("odd sizes", TREE | {"page_size": 152} | NORMS),
        slow("one token", {"page_size": 16} | OF_QUERIES),
        slow("one split", TURNED | NORMS | FLOAT8 | scales(8)),
        slow("wide heads", IN_PART | {"page_size": 16} | NORMS),
    ],
)
def test_few_tokens(case, options):
    check(CASES[case], True, **options)


@pytest.mark.parametrize("options", [TURNED | {"page_size": 16, "window": 130} | SINKS, slow(TREE | {"window": 200})])
def test_long_sequences_beside_short_ones(options, monkeypatch):
    """A device of two multiprocessors is full of four sequences, of which two have several splits."""
    monkeypatch.setattr("pallas_kernels.decode_attention.NUM_MULTIPROCESSORS", 2)
    monkeypatch.setattr("pallas_kernels.decode_attention._LEAST", 64)
    check((4, 2, 5, 1, 16, 304, [3, 250, 0, 129]), True, **options)


@pytest.mark.parametrize(
    "case, options",
    [
        ("from the start", {"turned": True}),
        slow("in the middle", TURNED | {"page_size": 16}),
        slow("in the middle", WINDOW | {"page_size": 152}),
        slow("past the end", {"page_size": 208}),
        slow("odd sizes", TURNED | {"page_size": 76}),
        slow("large heads", {"softcap": 3.0}),
        slow("from the start", HIDDEN),
        slow("from the start", CHUNKS),
        slow("in the middle", CHUNKS | {"page_size": 16}),
        slow("in the middle", TURNED | SINKS),
        slow("odd sizes", {"page_size": 76} | SINKS),
        slow("odd sizes", TURNED | {"page_size": 76} | NORMS),
        slow("from the start", OF_QUERIES),
        slow("in the middle", IN_PART | {"page_size": 16} | NORMS),
    ],
)
def test_many_tokens(case, options):
    check(PROMPTS[case], True, **options)


@pytest.mark.parametrize(
    "case, options",
    [
        slow("empty and full", TURNED | FLOAT8),
        ("past the end", WINDOW | FLOAT8 | scales(2)),
        slow("one split", {"page_size": 16} | FLOAT8 | scales(8)),
        slow("blocks of several splits", {"page_size": 64} | FLOAT8 | scales(2)),
        slow("odd sizes", TREE | {"page_size": 152} | FLOAT8 | scales(1)),
        slow("one split", {"page_size": 16} | FLOAT8 | scales(8) | SINKS),
        slow("one token", {"page_size": 16} | HIDDEN | FLOAT8),
        slow("several blocks of queries", {"page_size": 16, "turned": True, "softcap": 2.0} | FLOAT8 | scales(2)),
    ],
)
def test_few_tokens_and_a_cache_in_float8(case, options):
    check(CASES[case], True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, options",
    [
        ("in the middle", TURNED | {"page_size": 16} | FLOAT8 | scales(2)),
        ("past the end", {"page_size": 208} | FLOAT8 | scales(2)),
        ("odd sizes", WINDOW | {"page_size": 76} | FLOAT8),
    ],
)
def test_many_tokens_and_a_cache_in_float8(case, options):
    check(PROMPTS[case], True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [WINDOW, HIDDEN | FLOAT8 | scales(1)])
def test_large_programs(options, monkeypatch):
    """Programs of 128 queries, where one kv head fills a small device; on a GPU the case above has eight."""
    monkeypatch.setattr("pallas_kernels.prompt_attention.NUM_MULTIPROCESSORS", 20)
    batch, num_tokens, _, _, size, slots, start = PROMPTS["large programs"]
    assert _program_size(batch, 2 * num_tokens, size)[0] == 128
    check((batch, num_tokens, 2, 1, size, slots, start), True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2, 4, 8, 17, 32, 33, 64, 65])
def test_no_token_sees_a_later_one(num_tokens):
    """In the middle of a long cache, whatever the number of tokens."""
    check((1, num_tokens, 2, 1, 16, 240, [150]), True, turned=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, TURNED, WINDOW, CHUNKS, TREE, SINKS, TURNED | NORMS, IN_PART | NORMS],
    ids=["plain", "turned", "window", "chunks", "tree", "sinks", "norms", "part"],
)
@pytest.mark.parametrize("page_size", [None, 16, "all"])
@pytest.mark.parametrize("case", [*CASES.values(), *PROMPTS.values()], ids=[*CASES, *PROMPTS])
def test_on_a_gpu(case, page_size, options):
    if "tree" in options and case[1] > MAX_TOKENS:
        pytest.skip("the kernel of many tokens takes chains")
    check(case, False, case[5] if page_size == "all" else page_size, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("case", [*CASES.values(), *PROMPTS.values()], ids=[*CASES, *PROMPTS])
def test_a_cache_in_float8_on_a_gpu(case, page_size):
    check(case, False, page_size, **TURNED, **FLOAT8, **scales(case[3]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", range(1, 67))
def test_no_token_sees_a_later_one_on_a_gpu(num_tokens):
    check((2, num_tokens, 8, 2, 64, 640, [400, 64]), False, 64, turned=True)


@pytest.mark.slow
def test_padding_is_not_read():
    """NaN in a slot past a row's length reaches no output."""
    query, key, value, key_cache, value_cache, start = operands(*CASES["empty and full"])
    unseen = jnp.arange(48)[None, :, None, None] >= start[:, None, None, None]
    poisoned = (jnp.where(unseen, jnp.nan, cache) for cache in (key_cache, value_cache))
    attended = decode_attention(query, key, value, *poisoned, start, interpret=True)[0]
    np.testing.assert_array_equal(
        attended, decode_attention(query, key, value, key_cache, value_cache, start, interpret=True)[0]
    )


@pytest.mark.parametrize("kernel, num_tokens", [(decode_attention, 20), slow(prompt_attention, 70)])
@pytest.mark.parametrize("nothing", [-1, slow(6), slow(2**31 - 1)])
def test_a_token_without_a_page_is_not_written(kernel, num_tokens, nothing):
    query, key, value, *_ = operands(1, num_tokens, 2, 1, 16, 16, [0])
    pool = jnp.zeros((6, 16, 1, 16), jnp.bfloat16)
    table = jnp.array([[4, nothing, 2, 0, nothing]], jnp.int32)
    start = jnp.array([12], jnp.int32)
    attended, keys, values = kernel(query, key, value, pool, pool, start, None, table, interpret=True)
    for cache, new in ((keys, key), (values, value)):
        written = np.zeros((80, 1, 16), np.float32)
        written[12 : 12 + num_tokens] = np.asarray(new[0], np.float32)[: 80 - 12]
        expected = np.zeros((6, 16, 1, 16), np.float32)
        for p, page in enumerate([4, None, 2, 0, None]):
            if page is not None:
                expected[page] = written[16 * p : 16 * p + 16]
        np.testing.assert_array_equal(np.asarray(cache, np.float32), expected)
    assert np.isfinite(np.asarray(attended, np.float32)).all()


@pytest.mark.parametrize("batch, slots", [(2, 640), slow(40, 640), slow(140, 2048)])
@pytest.mark.parametrize("nothing", [6, slow(-1)])
def test_a_row_without_pages_reads_nothing(batch, slots, nothing):
    """A vacant slot of an engine stands at the end of the buffer: its row does not take the time of the longest one."""
    query, key, value, *_, start = operands(batch, 3, 4, 1, 16, slots, [12, *[slots - 3] * (batch - 1)])
    pool = jnp.zeros((6, 16, 1, 16), jnp.bfloat16)  # slots of zeros, too, would count in a mean
    table = jnp.full((batch, slots // 16), nothing, jnp.int32).at[0, 0].set(2)
    attended, *_ = decode_attention(query, key, value, pool, pool, start, None, table, interpret=True)
    none = jnp.zeros((batch, 3, 1, 16), jnp.bfloat16)
    alone, *_ = decode_attention(query, key, value, none, none, jnp.zeros_like(start), interpret=True)
    attended, alone = (np.asarray(x, np.float32) for x in (attended, alone))
    np.testing.assert_allclose(attended[1:], alone[1:], atol=1e-2)
    assert np.abs(attended[0] - alone[0]).max() > 0.1  # its pages count


@pytest.mark.parametrize("nothing", [-1, slow(7)])
def test_windows_hide_pages_that_were_freed(nothing):
    """A page that no query sees any more is not read: what has its place in the pool may be NaN."""
    query, key, value, key_cache, value_cache, start = operands(1, 2, 2, 1, 16, 160, [140])
    whole = jnp.arange(1, 6, dtype=jnp.int32)[None]
    caches = [in_pages(cache, whole, 7) for cache in (key_cache, value_cache)]  # pages 0 and 6 are NaN
    freed = jnp.array([[0, 6, nothing, 4, 5]], jnp.int32)
    attended = [
        decode_attention(query, key, value, *caches, start, None, table, window=40, interpret=True)[0]
        for table in (whole, freed)
    ]
    np.testing.assert_array_equal(*attended)


@pytest.mark.parametrize(
    "num_slots, window, splits",
    [(2047, None, 1), (2048, None, 2), (131072, None, 8), (131072, 512, 1), (131072, Chunks(4096), 4)],
)
def test_long_sequences_have_splits_beside_many_others(num_slots, window, splits):
    """The one program of a long sequence would take longer than all others. Few sequences have splits in any case."""
    cache = jax.ShapeDtypeStruct((1, num_slots, 8, 128), jnp.bfloat16)
    layout = layout_of(cache, None)
    scores = scores_of(layout, None, None, window, 0)
    for num_tokens in (1, 4):
        plan = _plan((64, num_tokens, 32, 128), 8, layout, scores)
        assert (plan.splits, plan.least) == (splits, 1024 if splits > 1 else 0)
    assert _plan((4096, 8, 32, 128), 8, layout, scores).splits == 1  # the attention of splits would take much memory
    few = _plan((1, 1, 32, 128), 8, layout, scores)
    assert few.splits == 16 and few.least == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, has_join",
    [
        ((1, 6, 32, 8, 128, 640, [0]), True),
        ((64, 4, 32, 8, 64, 640, [0] * 64), False),
        ((64, 4, 32, 8, 64, 8192, [0] * 64), True),
    ],
)
def test_lowers_for_cuda(case, has_join):
    kernel = partial(decode_attention, num_hidden=1)
    sinks = jax.ShapeDtypeStruct((case[2],), jnp.bfloat16)
    names = [kernel.name for kernel in triton_kernels(kernel, *jax.eval_shape(lambda: operands(*case)), sinks=sinks)]
    assert names == ["decode_attention", "join_splits"][: 1 + has_join]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, page_size, cache_dtype",
    [
        ((1, 6, 32, 8, 128, 640, [0]), 64, jnp.bfloat16),
        ((1, 64, 16, 8, 256, 640, [0]), 16, jnp.bfloat16),
        ((1, 8, 24, 4, 256, 640, [0]), 16, jnp.bfloat16),
        ((8, 2048, 32, 8, 128, 2048, [0] * 8), 64, jnp.bfloat16),
        ((8, 2048, 16, 8, 256, 2048, [0] * 8), None, jnp.bfloat16),
        ((1, 512, 28, 4, 96, 640, [0]), 16, jnp.bfloat16),
        ((64, 1, 32, 8, 128, 640, [0] * 64), 64, jnp.float8_e4m3fn),
        ((64, 4, 32, 8, 128, 8192, [0] * 64), 64, jnp.bfloat16),
        ((8, 2048, 32, 8, 128, 2048, [0] * 8), 64, jnp.float8_e4m3fn),
    ],
)
def test_compiles_for_an_h200(case, page_size, cache_dtype, tmp_path):
    """Every kernel fits the shared memory of a multiprocessor, and its registers but for a few numbers."""
    pytest.importorskip("triton")
    kernel = decode_attention if case[1] <= MAX_TOKENS else prompt_attention
    arrays = list(jax.eval_shape(lambda: operands(*case, cache_dtype=cache_dtype)))
    turns = (jax.ShapeDtypeStruct((*case[:2], case[4] // 2), jnp.float32),) * 2
    table = None
    if page_size is not None:
        pages = case[0] * case[5] // page_size
        arrays[3] = arrays[4] = jax.ShapeDtypeStruct((pages, page_size, case[3], case[4]), cache_dtype)
        table = jax.ShapeDtypeStruct((case[0], pages // case[0]), jnp.int32)
    options = {"num_hidden": 1} if page_size is None else {"window": 300}
    factors = jax.eval_shape(lambda: scales(case[3])) if cache_dtype == jnp.float8_e4m3fn else {}
    if page_size is not None:
        factors["sinks"] = jax.ShapeDtypeStruct((case[2],), jnp.bfloat16)
        factors["norms"] = HeadNorms(*[jax.ShapeDtypeStruct((case[4],), jnp.bfloat16)] * 2, 1e-6)
    for lowered in triton_kernels(partial(kernel, **options), *arrays, turns, table, **factors):
        resources = compile_for_sm90(lowered, tmp_path)
        assert resources.shared_bytes <= 227 * 1024, (lowered.name, resources)
        assert resources.spilled_bytes <= 2048, (lowered.name, resources)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_lowers_for_cuda(num_drafts):
    """The whole loop: the kernel in the layers of target and draft, in place of XLA's attention."""
    config = DecoderConfig(512, 64, 2, 4, 2, 16, 128, 256)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), param_shapes(config))
    model = decoder_model(config, params)
    proposer = proposers.draft_model(model, num_drafts) if num_drafts else proposers.none()
    rows = sampling.batch([SamplingParams(max_tokens=9)])
    state = prefill(model, proposer, jnp.ones((1, 3), int), jnp.array([3]), rows, jax.random.key(0), max_length=64)

    def step(model, proposer, state):
        return decode.step(model, proposer, state)

    names = [kernel.name for kernel in triton_kernels(step, model, proposer, state)]
    assert names.count("decode_attention") == (3 if num_drafts else 1)  # a call of each width; layers share a function


def test_unsupported():
    arrays = operands(1, 2, 4, 2, 16, 40, [0], jnp.float32)
    assert "got float32 and float32" in unsupported(arrays[0], arrays[3])
    with pytest.raises(NotImplementedError, match="float32"):
        decode_attention(*arrays)


def packed_call(tile, pieces, table):
    """A packed call of (row, first position, count), and room for one piece more."""
    num_tiles = [-(-count // tile) for _, _, count in pieces]
    begin = tile * np.cumsum([0, *num_tiles])
    size, number = tile * (sum(num_tiles) + 1), sum(num_tiles) + 1
    positions, places = np.zeros((1, size), np.int32), np.tile(np.array([len(table), 0, 0], np.int32), (number, 1))
    pages = np.full((number, table.shape[1]), table.size, np.int32)
    for i, (row, first, count) in enumerate(pieces):
        positions[0, begin[i] : begin[i + 1]] = first + np.arange(begin[i + 1] - begin[i])
        places[i], pages[i] = (row, begin[i], count), table[row]
    call = ModelInput(np.zeros((1, size), np.int32), positions, pages=pages, pieces=places)
    return jax.tree.map(jnp.asarray, call)


def test_packed_pieces_see_their_own_sequence():
    """Pieces that end in, at and after a tile: by the kernel of prompts, which also lowers for CUDA, as by XLA."""
    table = np.random.default_rng(0).permutation(15).reshape(3, 5).astype(np.int32)
    call = packed_call(16, [(2, 5, 33), (0, 0, 16), (1, 40, 1)], table)
    query, key, value, *_ = operands(1, call.tokens.shape[1], 4, 2, 16, 1, [0])
    _, _, _, *caches, _ = operands(3, 1, 4, 2, 16, 80, [0])
    caches = {name: in_pages(each, table, 15) for name, each in zip(("key", "value"), caches, strict=True)}

    @partial(jax.jit, static_argnums=0)
    def attend_to(implementation, query, key, value, caches, call):
        (memory,) = memories(call, [caches], [20])
        shape = query.shape
        query, key, value = in_tiles(memory.inputs, (query, key, value))
        how = {"window": 20, "is_packed": True, "implementation": implementation}
        found, caches = attend_to_cache(query, key, value, caches, memory.inputs, memory.mask, **how)
        return found.reshape(shape), caches

    given = query, key, value, caches, call
    (found, written), (other, expected) = (attend_to(name, *given) for name in ("interpret", "xla"))
    for _, begin, count in np.asarray(call.pieces)[:3]:
        own = [np.asarray(x, np.float32)[0, begin : begin + count] for x in (found, other)]
        np.testing.assert_allclose(*own, atol=0.02)
    jax.tree.map(np.testing.assert_array_equal, written, expected)
    names = [kernel.name for kernel in triton_kernels(partial(attend_to, None), *jax.eval_shape(lambda: given))]
    assert names == ["_write_kernel", "_prompt_attention_kernel"]  # others do not write all tiles first
