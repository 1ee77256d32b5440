"""Hybrids over many steps: their exact distribution, their tokens in an engine, and long sequences."""

import math
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_steps import prefill, serve

from specjax import decode, proposers, sampling, testing
from specjax.decoding.calls import run
from specjax.engine import memory
from specjax.engine.slots import Slots
from specjax.models import tensor_parallel
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.delta_net import DeltaNet
from specjax.models.layer import Attention, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.parallel import put
from specjax.proposers import trunk
from specjax.sampling import SamplingParams
from specjax.types import ModelInput, Verified

SIZES = {"num_key_heads": 1, "num_value_heads": 2, "key_size": 4, "value_size": 4}
NET, MAMBA = LayerConfig(DeltaNet(**SIZES)), LayerConfig(Mamba2(**SIZES))
BESIDE = LayerConfig(Attention(), beside=MAMBA.mixer, beside_factor=0.5)
ATTENTION = LayerConfig(Attention(has_head_norms=True, has_gate=True))
CONFIG = DecoderConfig(29, 16, 2, 2, 1, 8, 16, 4096, layers=(NET, ATTENTION))


def hybrid(vocab_size, net=NET):
    config = replace(CONFIG, vocab_size=vocab_size, layers=(net, ATTENTION))
    params = jax.tree.map(lambda x: 12 * x if x.ndim > 1 else x, init_params(config, 0))
    return decoder_model(config, params)


@jax.jit
def whole(model, tokens):
    """The logits of whole sequences [B, N], in one call."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    count = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    memory = model.init_memory(tokens.shape[0], *tokens.shape)
    return run(model, ModelInput(tokens, positions, num_tokens=count), memory)[0].logits


def follow(keys, draft, target, *, tokens):
    """Accept the drafts that agree with given tokens [B, K+1], and report the probabilities of these."""
    agrees = jnp.cumprod(draft.tokens == tokens[:, :-1], axis=1)
    count = jnp.sum(agrees, axis=1).astype(jnp.int32)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(target.logits), tokens[..., None], axis=2)[..., 0]
    return Verified(jnp.where(index <= count[:, None], tokens, -1), count, chosen)


@jax.jit
def step(model, proposer, state, paths):
    """A step along the paths [B, N], and the sum of the log-probabilities of its tokens [B]."""
    index = state.context.length[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(paths, jnp.minimum(index, paths.shape[1] - 1), axis=1)
    found = []

    def verify(keys, draft, target):
        found.append(follow(keys, draft, target, tokens=tokens))
        return found[-1]

    state, info = decode.step(model, proposer, state, verifier=verify)
    return state, jnp.sum(jnp.where(info.tokens >= 0, found[0].log_probs, 0), axis=1), info.num_accepted


def assert_exact(target):
    """All sequences of 6 tokens are decoded, with drafts that are right and wrong in every place of a step."""
    num_tokens = 6
    paths = np.array([(1, 2, *path) for path in product(range(3), repeat=num_tokens)], np.int32)
    proposer = testing.BigramProposer(jax.random.normal(jax.random.key(1), (3, 3)), 2)
    rows = sampling.batch([SamplingParams(temperature=1, max_tokens=num_tokens)] * len(paths))
    given = target, proposer, paths[:, :2], np.full(len(paths), 2), rows, jax.random.key(0)
    state, total, counts = prefill(*given, max_length=10), np.zeros(len(paths)), np.zeros(3, int)
    while state.context.active.any():
        active = np.asarray(state.context.active)
        state, log_probs, accepted = step(target, proposer, state, paths)
        total += np.where(active, log_probs, 0)
        np.add.at(counts, np.asarray(accepted)[active], 1)
    np.testing.assert_array_equal(np.asarray(state.context.tokens)[:, : paths.shape[1]], paths)
    logits = np.asarray(jax.nn.log_softmax(whole(target, paths)))
    expected = np.take_along_axis(logits[:, 1:-1], paths[:, 2:, None], axis=2).sum(axis=(1, 2))
    np.testing.assert_allclose(np.exp(total), np.exp(expected), atol=1e-6)
    assert abs(np.exp(total).sum() - 1) < 1e-5 and (counts > 100).all()


@pytest.mark.slow
@pytest.mark.parametrize("net", [NET, MAMBA, BESIDE], ids=["delta_net", "mamba", "beside"])
def test_the_distribution_is_exact(net):
    assert_exact(hybrid(3, net))


@pytest.mark.slow
@pytest.mark.parametrize("net, number", [(NET, 1), (MAMBA, 2), (BESIDE, 2)], ids=["delta_net", "mamba", "beside"])
def test_an_engine_gives_the_tokens_of_plain_decoding(net, number):
    """With n-grams and a module for multi-token prediction, shared states, and jobs that lose their slots.

    In all cases but the first two devices share the target.
    """
    target = hybrid(29, net)
    head = proposers.MTPHead(replace(CONFIG, num_layers=1, layers=(ATTENTION,)), is_token_first=True)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, trunk.random_params(head.shapes(), jax.random.key(1)))
    params |= dict.fromkeys(("embedding", "lm_head"), target.params["embedding"])
    proposer = proposers.fallback(proposers.ngram(2), proposers.mtp(head, params, 2))
    sizes = {"num_slots": 3, "max_length": 32, "pool": (24, 4), "chunk_size": 8}
    if number == 1:
        slots = Slots(target, proposer, **sizes)
    else:
        shared = tensor_parallel(target, Mesh(np.array(jax.devices("cpu")[:number]), ("tensor",)))
        slots = Slots(shared, put(proposer, shared.apply.whole), **sizes)
    common = [*range(9), *range(8)]
    prompts = [[*common, i] for i in (1, 2, 1)] + [[3], [4, 5]] + [[*common[:9], i, 4, 5] for i in (1, 2)]
    jobs, tables = serve(slots, [*prompts, [7, *common, 3, 4]], 3)
    assert tables.stats().num_hit_tokens > 30 and sum(job.num_preempted for job in jobs) > 3
    tokens = np.array([job.tokens + [0] * (32 - len(job.tokens)) for job in jobs], np.int32)
    likely = np.asarray(whole(target, tokens).argmax(axis=2))
    for job, row in zip(jobs, likely.tolist(), strict=True):
        assert len(job.tokens) == len(job.prompt) + 9
        assert job.tokens[len(job.prompt) :] == row[len(job.prompt) - 1 : len(job.tokens) - 1]
    kinds = [kind for job in jobs for kind in job.kinds]
    assert min(kinds.count(kind) for kind in ("accepted", "recovered")) > 5


def test_kept_states_count_as_memory(monkeypatch):
    """The device has room for the states of four slots, for as many copies of them, and for ten pages."""
    target, num_slots = hybrid(29), 4
    shapes = jax.eval_shape(lambda: (target.init_rows(2 * num_slots), target.init_cache(10, 8)))
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    calls = memory.COPIES * 4 * 16 * target.vocab_size
    monkeypatch.setattr(memory, "free_bytes", lambda: needed + calls)
    sizes = {"num_slots": num_slots, "max_length": 64, "page_size": 8, "chunk_size": 16}
    given = target, proposers.none()
    assert memory.num_pages_that_fit(*given, **sizes, num_kept=num_slots) == 10
    assert memory.num_pages_that_fit(*given, **sizes) > 10
