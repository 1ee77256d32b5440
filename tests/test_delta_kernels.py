"""The kernels of gated delta nets: interpreted and on a GPU against XLA, and compiled for an H100."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import compile_for_sm90, triton_kernels

from pallas_kernels import delta_net as kernels
from specjax.models import delta_net
from specjax.models.decoder import DecoderConfig
from specjax.models.delta_net import DeltaNet, delta_rule
from specjax.models.layer import Sublayer
from specjax.models.linear import Norm, linear_of_two
from specjax.models.recurrent import MAX_STEP, NUM_SLOTS, RowMemory

INTERPRET = [True, pytest.param(False, marks=pytest.mark.gpu)]
NET = DeltaNet(num_key_heads=2, num_value_heads=4, key_size=16, value_size=32)
LARGE = kernels.Heads(16, 32, 128, 128)  # of released models
CHANNELS = 2 * 16 * 128 + 32 * 128


def implementation(interpret: bool) -> str:
    return "interpret" if interpret else "pallas"


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rates(*shape, seed=0):
    return jax.nn.sigmoid(numbers(*shape, seed=seed) + 2), -jnp.exp(numbers(*shape, seed=seed + 1) - 2)


def error(got, expected) -> float:
    return float(np.abs(np.asarray(got) - expected).max() / np.abs(expected).max())


def step_operands(dtype, num_tokens):
    """Return the operands of a step: rows that replay none, some and all tokens, and where slots are used again."""
    num_rows = 6
    inputs, kept = (numbers(num_rows, n, NET.channels, seed=n).astype(dtype) for n in (num_tokens, NET.num_input_slots))
    new_rates = numbers(num_rows, num_tokens, 2, 4, seed=5).astype(dtype)
    keys = numbers(num_rows, NUM_SLOTS, 2, 16, seed=6)
    memory = RowMemory(
        {
            "state": numbers(num_rows, 4, 16, 32),
            "inputs": kept,
            "keys": keys / jnp.linalg.norm(keys, axis=-1, keepdims=True),
            "changes": numbers(num_rows, NUM_SLOTS, 4, 32, seed=7),
            "decays": rates(num_rows, NUM_SLOTS, 4)[1],
        },
        start=jnp.asarray([0, 1, 0, 60, 33, 34], jnp.int32),
        count=jnp.asarray([0, 1, 3, MAX_STEP, 2, 0], jnp.int32),
        num_tokens=jnp.full(num_rows, num_tokens, jnp.int32),
        is_step=True,
    )
    params = {"delta_conv": 0.3 * numbers(NET.channels, 1, NET.conv_size)}
    params |= {name: numbers(4, seed=i) for i, name in enumerate(("delta_decay", "delta_decay_bias"))}
    return params, memory, inputs, new_rates


@pytest.mark.slow
@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "factor"), [(jnp.bfloat16, 3, 1), (jnp.float32, 7, 2), (jnp.float32, 1, 1)]
)
def test_step(dtype, num_tokens, factor, interpret):
    """Rows that replay none, some and all inputs, near the begin of a sequence and where slots are used again."""
    net, (params, memory, inputs, new_rates) = replace(NET, beta_factor=factor), step_operands(dtype, num_tokens)
    wide = jnp.pad(inputs, ((0, 0), (0, 0), (0, 5)), constant_values=jnp.nan)  # the numbers after the inputs

    @partial(jax.jit, static_argnums=0)
    def step(implementation):
        return net.step(params, memory, wide, new_rates, implementation=implementation)

    with jax.default_device(jax.devices("cpu")[0]):
        expected, after = step("xla")
    got, kernel_after = step(implementation(interpret))
    assert error(got, expected) < 1e-5
    for name in ("state", "keys", "changes", "decays"):
        assert error(kernel_after[name], after[name]) < 1e-5
    np.testing.assert_array_equal(kernel_after["inputs"].astype(jnp.float32), after["inputs"].astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("interpret", INTERPRET)
def test_step_by_parts(interpret):
    """A program that takes some rows of the states after the others gives as much as one that holds all of them."""
    params, memory, inputs, new_rates = step_operands(jnp.float32, 3)
    tokens = kernels.Tokens(inputs, new_rates, *params.values(), memory.start, memory.count)
    run = partial(kernels.step, kernels.Held(**memory.held), tokens, NET.heads, interpret=interpret)
    whole, parts = (run(tiling=kernels.StepTiling(32, 1, entries)) for entries in (16, 4))
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert error(y.astype(jnp.float32), x.astype(jnp.float32)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("interpret", INTERPRET)
def test_chunks(interpret):
    """Several chunks, of which the last is not full; keys that repeat, and tokens that leave the state."""
    num_tokens = 150
    query, key = (numbers(2, num_tokens, 2, 16, seed=i) for i in range(2))
    key = key.at[0].set(key[0, :1])
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    stays = jnp.arange(num_tokens)[None, :, None] < jnp.asarray([150, 90])[:, None, None]
    beta, g = (jnp.where(stays, x, 0) for x in rates(2, num_tokens, 4))
    operands = numbers(2, 4, 16, 32, seed=2), query, key, numbers(2, num_tokens, 4, 32, seed=3), beta, g
    run = jax.jit(delta_rule, static_argnames="implementation")
    expected, state = run(*operands, implementation="xla")
    got, after = run(*operands, implementation=implementation(interpret))
    tolerance = 1e-5 if interpret else 5e-3  # TF32
    assert error(got, expected) < tolerance
    assert error(after, state) < tolerance
    assert error(after[1], delta_rule(operands[0], *(x[:, :90] for x in operands[1:]))[1][1]) < tolerance


@pytest.mark.parametrize("interpret", INTERPRET)
@pytest.mark.parametrize("by_heads", [False, True])
def test_projections(by_heads, interpret, monkeypatch):
    """The kernel that norms a few tokens for both matrices, with an offset of the scale as Qwen has it."""
    config = DecoderConfig(512, 64, 2, 4, 2, 16, 128, 256, transposed=True, norm_offset=1.0)
    net = replace(NET, by_heads=by_heads)
    params = {name: numbers(*net.shapes(config, 64)[name]).astype(jnp.bfloat16) for name in ("delta_in", "delta_rates")}
    x = numbers(2, 3, 64, seed=3).astype(jnp.bfloat16)
    call = Sublayer(x, Norm(numbers(64, seed=4).astype(jnp.bfloat16), 1e-6, config.norm_offset), x)

    def project(implementation):
        monkeypatch.setattr(delta_net, "linear_of_two", partial(linear_of_two, implementation=implementation))
        return jax.jit(lambda: net._project(config, params, call))()

    for got, expected in zip(project(implementation(interpret)), project("xla"), strict=True):
        assert got.shape == expected.shape
        assert error(got.astype(jnp.float32), np.asarray(expected, np.float32)) < 1e-2


def test_unsupported():
    params, memory, inputs, new_rates = step_operands(jnp.float32, 5)
    tokens = kernels.Tokens(inputs, new_rates, *params.values(), memory.start, memory.count)
    with pytest.raises(ValueError, match=r"tiling.entries must be 16 for more than 4 tokens, got .*entries=4"):
        kernels.step(kernels.Held(**memory.held), tokens, NET.heads, tiling=kernels.StepTiling(32, 1, 4))
    heads = kernels.Heads(2, 4, 24, 32)
    with pytest.raises(
        NotImplementedError, match=r"sizes of keys and values that are powers of two .*, got \(24, 32\)"
    ):
        x = numbers(1, 2, 2, 24)
        delta_rule(numbers(1, 4, 24, 32), x, x, numbers(1, 2, 4, 32), *rates(1, 2, 4), implementation="interpret")
    assert kernels.unsupported(heads._replace(key_size=32)) is None


@pytest.mark.slow
def test_compile_for_an_h100(tmp_path):
    """The kernels at the sizes of released models, for an H100."""
    pytest.importorskip("triton")

    def like(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    number, half = like(4, dtype=jnp.int32), partial(like, dtype=jnp.bfloat16)
    slots = (like(4, NUM_SLOTS, *sizes) for sizes in ((16, 128), (32, 128), (32,)))
    held = kernels.Held(like(4, 32, 128, 128), half(4, 19, CHANNELS), *slots)
    for num_tokens, tiling in ((8, None), (4, kernels.step_tiling(LARGE, 64, 4))):
        new = half(4, num_tokens, CHANNELS + 4096), half(4, num_tokens, 2, 32), half(CHANNELS, 1, 4), half(32), half(32)
        tokens = kernels.Tokens(*new, number, number)
        for kernel in triton_kernels(partial(kernels.step, heads=LARGE, tiling=tiling), held, tokens):
            assert compile_for_sm90(kernel, tmp_path).spilled_bytes == 0
    heads = like(1, 512, 16, 128)
    tokens = kernels.Prompt(heads, heads, like(1, 512, 32, 128), like(1, 512, 32), like(1, 512, 32))
    solve, walk = triton_kernels(partial(kernels.chunks, heads=LARGE), like(1, 32, 128, 128), tokens)
    assert compile_for_sm90(solve, tmp_path).spilled_bytes == 0
    assert compile_for_sm90(walk, tmp_path).spilled_bytes <= 256
