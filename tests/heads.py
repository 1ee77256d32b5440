"""Helpers for tests of drafters on features: a target, checkpoints of heads, and a run followed step by step."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch_files
from paged import random_table
from safetensors.numpy import save_file

from specjax import decode, sampling, scorers, verifiers
from specjax.decoding.calls import run
from specjax.engine.draft_length import with_draft_lengths
from specjax.engine.slots import Slots, chunk_at, request
from specjax.keys import positions
from specjax.models import with_feature_layers
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.pages import Pages
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Capacities, Needs, of_request
from specjax.types import ModelInput

VOCAB, HIDDEN, LAYERS = 61, 32, 2
CONFIG = DecoderConfig(VOCAB, HIDDEN, LAYERS, 4, 2, 8, 48, 128, tie_embeddings=False)
SIZE = 40  # of the token buffer
LENGTHS = (11, 1, 2, 6)

prefill = jax.jit(decode.prefill, static_argnames=("max_length", "chunk_size"))
step = jax.jit(decode.step)


def make_target(feature_layers=(), **sizes):
    config = replace(CONFIG, **sizes)
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init_params(config, 0))
    return with_feature_layers(decoder_model(config, params), feature_layers)


def random_tensors(shapes: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of some shapes; scales of norms are around 1, matrices keep the size of their input."""
    rng = np.random.default_rng(seed)
    scale = {name: 0.2 if len(shape) == 1 else 1 / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {
        name: (scale[name] * rng.normal(size=shape) + ("norm" in name and len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(directory, config: dict, tensors: dict, file: str = "model.safetensors"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch_files.write(directory / file, tensors)
    return directory


@jax.jit
def features_of(target, tokens):
    """Features of whole sequences, from scratch."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    count = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    memory = target.init_memory(tokens.shape[0], *tokens.shape)
    return run(target, ModelInput(tokens, positions, num_tokens=count), memory)[0].features


@jax.jit
def propose_and_step(target, proposer, state, verifier):
    """The draft of a step, as it is scored, and the results of the step, in one program."""
    scored = []

    def score(model, context, draft, cache):
        scored.append(draft)
        return scorers.mqa(model, context, draft, cache)

    state, info = decode.step(target, proposer, state, verifier=verifier, scorer=score)
    return scored[0], state, info


@jax.jit
def propose(proposer, state):
    keys = positions(state.keys, state.context.length, proposer.num_draft_tokens)
    return proposer.propose(keys, state.context, state.sampling, state.proposer)[0]


def start(target, proposer, in_pages=False, temperature=1.0, max_tokens=SIZE, **options):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, VOCAB, (len(LENGTHS), max(LENGTHS))), jnp.int32)
    rows = sampling.batch([SamplingParams(temperature=temperature, max_tokens=max_tokens)] * len(LENGTHS))
    if in_pages:
        options["pages"] = Pages(jnp.asarray(random_table((len(LENGTHS), SIZE // 4), 64)), 64, 4)
    given = target, proposer, ids, jnp.array(LENGTHS), rows, jax.random.key(2)
    return prefill(*given, max_length=SIZE, chunk_size=4, **options)


def follow(target, proposer, reference, in_pages=False, rate=0.8, draft_lengths=None, tolerance=1e-4):
    """Decode, and compare the distribution of every draft with a transcription of the formulas.

    The reference gets the committed tokens of a row, the target's features of them from scratch, and the drafts. The
    proposer's state must give the same logits, whatever was accepted and rejected before. Steps make
    `draft_lengths` drafts in turn; None is always the proposer's own number.
    """
    turns = [proposer]
    if draft_lengths is not None:
        each = with_draft_lengths(proposer, draft_lengths)
        proposer, turns = next(iter(each.values())), [each[k] for k in draft_lengths]
    state, counts = start(target, proposer, in_pages), np.zeros(proposer.num_draft_tokens + 1, int)
    while bool(state.context.active.any()):
        proposer, turns = turns[0], turns[1:] + turns[:1]
        width = proposer.num_draft_tokens
        verifier = jax.tree_util.Partial(verifiers.synthetic, acceptance_rates=[rate ** (i + 1) for i in range(width)])
        context, features = jax.device_get((state.context, features_of(target, state.context.tokens)))
        draft, state, info = propose_and_step(target, proposer, state, verifier)
        draft = jax.device_get(draft)
        for b in np.flatnonzero(context.active):
            length = context.length[b]
            if not width:
                continue
            assert draft.num_tokens[b] == (width if length > 1 else 0)
            if length < 2 or length + width > SIZE:
                continue
            own = jax.tree.map(lambda x: None if x is None else x[b, : length - 1], features)  # noqa: B023
            expected = reference(context.tokens[b, :length], own, draft.tokens[b])
            np.testing.assert_allclose(draft.distribution.logits[b], expected, rtol=tolerance, atol=tolerance)
        np.add.at(counts, np.asarray(info.num_accepted)[context.active], 1)
    assert (counts > 0).all(), counts


def generate(target, proposer, **options):
    state = decode.generate(target, proposer, start(target, proposer, **options))
    context = jax.device_get(state.context)
    return [row[:n].tolist() for row, n in zip(context.tokens, context.length, strict=True)], state


def requests():
    """The prompts of some requests, whose keys are made of their numbers."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in (9, 1, 5, 12)]


def in_slots(target, proposer, temperature=0, turns=(None,), **options):
    """Tokens of `requests`, which come to two slots in pages and leave them for others; steps have these K in turn."""
    waiting, capacities = list(enumerate(requests())), Capacities()
    params = of_request(SamplingParams(temperature=temperature, max_tokens=14), capacities, (), VOCAB)
    slots = Slots(target, proposer, num_slots=2, max_length=SIZE, capacities=capacities, pool=(32, 4), **options)
    table = random_table((2, SIZE // 4), 32)
    running, done, turn = {}, {}, itertools.cycle(turns)
    while waiting or running:
        slots.set_pages(table)
        coming = {slot: waiting.pop(0) for slot in sorted({0, 1} - set(running)) if waiting}
        previous, begin = dict.fromkeys(coming, slots.no_features), dict.fromkeys(coming, 0)
        while fed := [slot for slot, (_, prompt) in coming.items() if begin[slot] < len(prompt)][::-1]:
            sizes = [8 if i == 0 and len(coming[slot][1]) - begin[slot] > 4 else 4 for i, slot in enumerate(fed)]
            each = zip(fed, sizes, strict=True)
            chunks = [chunk_at(coming[slot][1], begin[slot], size, previous[slot]) for slot, size in each]
            features, _ = slots.prefill(fed, chunks, 3, 4)  # a packed call of pieces of one tile and two
            previous |= dict(zip(fed, features, strict=False))
            begin |= {slot: begin[slot] + size for slot, size in zip(fed, sizes, strict=True)}
        for slot, (number, prompt) in coming.items():
            slots.insert(slot, request(slots.state, prompt, np.array([0, number], np.uint32), params))
            running[slot], done[number] = number, []
        output = jax.device_get(
            slots.step(Needs.EVERYTHING if temperature else Needs.GREEDY, num_draft_tokens=next(turn))
        )
        for slot, number in list(running.items()):
            done[number] += [token for token in output.tokens[slot].tolist() if token >= 0]
            if output.finished[slot] != decode.RUNNING:
                slots.evict([slot])
                del running[slot]
    return done


@jax.jit
def logits_of(target, tokens):
    """Logits of whole sequences, from scratch."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    count = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    memory = target.init_memory(tokens.shape[0], *tokens.shape)
    return run(target, ModelInput(tokens, positions, num_tokens=count), memory)[0].logits


def assert_greedy(target, prompts, outputs, num_tokens):
    """Compare outputs with the target's most likely tokens, which one call gives: plain decoding compiles more."""
    tokens = np.zeros((len(prompts), SIZE), np.int32)
    for row, prompt, output in zip(tokens, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = [*prompt, *output]
    likely = np.asarray(logits_of(target, tokens)).argmax(axis=2)
    for row, prompt, output, number in zip(likely, prompts, outputs, num_tokens, strict=True):
        assert len(output) == number
        assert row[len(prompt) - 1 :][:number].tolist() == output


def assert_greedy_rows(target, rows):
    """Compare the rows that `generate` gives at temperature 0 with the target's most likely tokens."""
    pairs = [(row[:length], row[length:]) for row, length in zip(rows, LENGTHS, strict=True)]
    assert_greedy(target, *zip(*pairs, strict=True), [SIZE - length for length in LENGTHS])


def assert_greedy_requests(target, found):
    """Compare the tokens that `in_slots` gives at temperature 0 with the target's most likely ones."""
    prompts = requests()
    assert_greedy(target, prompts, [found[i] for i in range(len(prompts))], [14] * len(prompts))


# A transcription of decoder layers in NumPy, one sequence at a time, with the names of tensors in checkpoints.
HEADS, KV_HEADS, HEAD_SIZE, THETA, EPSILON = 4, 2, 8, 500.0, 1e-5
FIELDS = {  # of config.json
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_theta": THETA,
    "rms_norm_eps": EPSILON,
}


def layer_shapes(name, has_bias=False, has_head_norms=False, inputs=HIDDEN, mlp=48):
    query, key = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    sizes = {"q": query, "k": key, "v": key}
    shapes = {f"{name}.self_attn.{part}_proj.weight": (size, inputs) for part, size in sizes.items()}
    if has_bias:
        shapes |= {f"{name}.self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if has_head_norms:
        shapes |= {f"{name}.self_attn.{part}_norm.weight": (HEAD_SIZE,) for part in "qk"}
    shapes |= {f"{name}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{name}.mlp.{part}_proj.weight": (mlp, HIDDEN) for part in ("gate", "up")}
    return shapes | {f"{name}.self_attn.o_proj.weight": (HIDDEN, query), f"{name}.mlp.down_proj.weight": (HIDDEN, mlp)}


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def turn(x, positions):
    """Rotate x [T, heads, head size]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def heads_of(tensors, name, part, x):
    """The queries, keys or values [T, heads, head size] of x [T, H], with their norm."""
    product = x @ tensors[f"{name}.self_attn.{part}_proj.weight"].T
    product = product + tensors.get(f"{name}.self_attn.{part}_proj.bias", 0)
    product = product.reshape(len(x), -1, HEAD_SIZE)
    norm = tensors.get(f"{name}.self_attn.{part}_norm.weight")
    return product if norm is None else rms(product, norm)


def attend(query, key, value, mask):
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (key, value))
    scores = np.einsum("thd,shd->hts", query, key) / HEAD_SIZE**0.5
    scores = np.where(mask[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, value).reshape(len(query), -1)


def silu(x):
    return x / (1 + np.exp(-x))


def after_attention(tensors, name, x, attended):
    """The stream after a layer, given that before it and what its heads attended to."""
    x = x + attended @ tensors[f"{name}.self_attn.o_proj.weight"].T
    normed = rms(x, tensors[f"{name}.post_attention_layernorm.weight"])
    gate, up = (normed @ tensors[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (silu(gate) * up) @ tensors[f"{name}.mlp.down_proj.weight"].T


def causal_layer(tensors, name, x):
    """A decoder layer on x [T, H] at positions 0, 1, ..."""
    normed, positions = rms(x, tensors[f"{name}.input_layernorm.weight"]), np.arange(len(x))
    query, key, value = (heads_of(tensors, name, part, normed) for part in "qkv")
    attended = attend(turn(query, positions), turn(key, positions), value, np.tri(len(x), dtype=bool))
    return after_attention(tensors, name, x, attended)
