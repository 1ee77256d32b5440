"""Loops and branches inside a user's own `jax.shard_map`, which checks over which axes of the mesh arrays vary."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import SamplingParams, decode, proposers, sampling
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.parallel.loops import as_carry, varying
from specjax.types import ModelInput

CONFIG = DecoderConfig(31, 16, 1, 4, 2, 8, 16, 1024)
SHARED = P("rows")


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))


@pytest.fixture(scope="module")
def target():
    return decoder_model(CONFIG, init_params(CONFIG, 0))


@pytest.fixture(scope="module")
def draft():
    return decoder_model(CONFIG, init_params(CONFIG, 1))


def test_elsewhere_nothing_is_traced():
    def body(carry):
        raise AssertionError("it is traced")

    carry = jnp.zeros(2), 0
    assert as_carry(body, carry, jnp.ones(3)) is carry


def test_arrays_vary_as_the_loop_makes_them(mesh):
    """The first becomes as the third, which becomes as the operand; the second stays."""

    def run(x):
        def body(carry):
            return carry[2], carry[1] + 1, carry[2] + x

        carry = as_carry(body, (jnp.zeros(2), jnp.zeros(2), jnp.zeros(2)), x)
        first, second, third = jax.lax.fori_loop(0, 3, lambda _, carry: body(carry), carry)
        return first + varying(jnp.zeros(2), jax.typeof(x)) + third, second

    shared = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SHARED, out_specs=(SHARED, P())))
    sums, counts = shared(jnp.array([1.0, 2, 3, 4]))
    assert sums.tolist() == [5, 10, 15, 20]
    assert counts.tolist() == [3, 3]


def decoding(mesh):
    """A function that decodes four rows, the one by which devices share them, and its requests."""

    def run(target, proposer, *requests):
        state = decode.prefill(target, proposer, *requests, max_length=40, chunk_size=8)
        return decode.generate(target, proposer, state).context.tokens

    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 31, (4, 20)), jnp.int32)
    requests = sampling.batch([SamplingParams(temperature=0.8, top_k=10, top_p=0.9, max_tokens=12)] * 4)
    given = prompts, jnp.array([20, 17, 9, 2]), requests, jax.random.split(jax.random.key(0), 4)
    specs = P(), P(), *[SHARED] * 4
    return run, jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=SHARED)), given


def test_decoding_has_types_where_devices_share_rows(mesh, target, draft):
    _, shared, given = decoding(mesh)
    assert jax.eval_shape(shared, target, proposers.draft_model(draft, 3, max_length=28), *given).shape == (4, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft model with a limit", "ngram", "fallback"])
def test_decoding_of_rows_that_devices_share(mesh, target, draft, name):
    proposer = {
        "draft model with a limit": lambda: proposers.draft_model(draft, 3, max_length=28),
        "ngram": lambda: proposers.ngram(3),
        "fallback": lambda: proposers.fallback(proposers.ngram(3), proposers.draft_model(draft, 3)),
    }[name]()
    run, shared, given = decoding(mesh)
    np.testing.assert_array_equal(shared(target, proposer, *given), jax.jit(run)(target, proposer, *given))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 70])
@pytest.mark.parametrize("has_pages", [True, False])
def test_attention_in_blocks(mesh, target, num_tokens, has_pages):
    positions = 100 + jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (2, num_tokens))
    pages = jnp.arange(80, dtype=jnp.int32).reshape(2, 40) if has_pages else None
    cache = target.init_cache(80, 32) if has_pages else target.init_cache(2, 1280)

    def run(params, cache, positions, pages):
        return target.apply(params, ModelInput(jnp.ones_like(positions), positions, pages=pages), cache)[0].logits

    specs = P(), P() if has_pages else SHARED, SHARED, SHARED
    shared = jax.jit(partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=SHARED)(run))
    given = target.params, cache, positions, pages
    np.testing.assert_allclose(shared(*given), jax.jit(run)(*given), rtol=1e-5, atol=1e-6)
