"""Medusa heads: layouts, parity with the formulas, and what they do in decoding."""

from dataclasses import dataclass, replace
from functools import partial

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import HIDDEN, VOCAB
from paged import random_table
from safetensors.numpy import load_file

from specjax import decode, metrics, proposers, sampling, testing
from specjax.pages import Pages, read_slots, write_slots
from specjax.proposers.medusa import load_medusa as load
from specjax.sampling import SamplingParams
from specjax.types import Draft, Features, Memory, Model, ModelOutput

NUM_HEADS = 3
TOKEN_MAP = np.random.default_rng(3).permutation(VOCAB)[:40]


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


def silu(x):
    return x / (1 + np.exp(-x))


def reference(blocks, head, token_map=None):
    """The logits of the drafts; blocks[i] are (weight, bias) of head i."""

    def logits(tokens, features, drafts):
        rows = []
        for i in range(len(drafts)):
            x = features.hidden[-1]
            for weight, bias in blocks[i]:
                x = x + silu(weight @ x + bias)
            row = np.full(VOCAB, -np.inf)
            row[slice(None) if token_map is None else token_map] = head[i] @ x
            rows.append(row)
        return np.stack(rows)

    return logits


def authors(directory, file="medusa_lm_head.pt", prefix="", num_blocks=1, num_heads=NUM_HEADS):
    shapes = {}
    for i in range(num_heads):
        for j in range(num_blocks):
            shapes |= {f"{prefix}{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{prefix}{i}.{j}.linear.bias": (HIDDEN,)}
        shapes[f"{prefix}{i}.{num_blocks}.weight"] = (VOCAB, HIDDEN)
    tensors = heads.random_tensors(shapes)
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_blocks, "base_model_name_or_path": "x"}
    extra = {"model.norm.weight": np.ones(HIDDEN, np.float32)} if prefix else {}
    heads.write(directory, config, tensors | extra, file)
    blocks = [
        [tuple(tensors[f"{prefix}{i}.{j}.linear.{name}"] for name in ("weight", "bias")) for j in range(num_blocks)]
        for i in range(num_heads)
    ]
    return reference(blocks, [tensors[f"{prefix}{i}.{num_blocks}.weight"] for i in range(num_heads)])


VLLM = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": NUM_HEADS}


def vllm(directory, is_reduced=True, **config):
    size = len(TOKEN_MAP) if is_reduced else VOCAB
    config = VLLM | {"num_hidden_layers": 1, "truncated_vocab_size": size} | config
    is_shared, has_bias = config.get("original_lm_head"), config.get("medusa_fc_bias")
    shapes = {f"blocks.{i}.layers.0.weight": (HIDDEN, HIDDEN) for i in range(NUM_HEADS)}
    shapes |= {f"lm_heads.{i}.weight": (size, HIDDEN) for i in range(1 if is_shared else NUM_HEADS)}
    shapes |= {f"blocks.{i}.layers.0.bias": (HIDDEN,) for i in range(NUM_HEADS if has_bias else 0)}
    tensors = heads.random_tensors(shapes)
    extra = {"token_map": TOKEN_MAP} if is_reduced else {}
    heads.write(directory, config, tensors | extra)
    blocks = [
        [(tensors[f"blocks.{i}.layers.0.weight"], tensors.get(f"blocks.{i}.layers.0.bias", 0))]
        for i in range(NUM_HEADS)
    ]
    own = [tensors[f"lm_heads.{0 if is_shared else i}.weight"] for i in range(NUM_HEADS)]
    return reference(blocks, own, TOKEN_MAP if is_reduced else None)


LAYOUTS = {
    "authors": authors,
    "two blocks": lambda directory: authors(directory, "medusa_lm_head.safetensors", num_blocks=2),
    "whole model": lambda directory: authors(directory, "model.safetensors", "medusa_head."),
    "vllm": vllm,
    "vllm shared": lambda directory: vllm(directory, False, original_lm_head=True, medusa_fc_bias=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity(tmp_path, target, layout):
    expected = LAYOUTS[layout](tmp_path)
    assert proposers.kind_of(tmp_path) == "medusa"
    proposer = proposers.load(tmp_path, target, num_draft_tokens=NUM_HEADS)
    lengths = (NUM_HEADS, 0, NUM_HEADS, 1) if layout == "two blocks" else None
    heads.follow(target, proposer, expected, in_pages=layout in ("vllm", "two blocks"), draft_lengths=lengths)


def bigram_heads(size=8, num_heads=2, **options):
    """Heads for the 8 tokens of the public verdict, whose target's hidden states are its logits."""
    keys = jax.random.split(jax.random.key(5), num_heads)
    made = [
        {"blocks": [{"weight": jax.random.normal(key, (8, 8)) / 3, "bias": None}], "head": jnp.eye(8)[:size]}
        for key in keys
    ]
    return proposers.medusa(made, vocab_size=8, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"size": 5, "token_ids": np.array([6, 1, 3, 0, 4]), "temperature": 0},
        {"temperature": 0.6},
    ],
)
def test_the_distribution_is_the_targets(options):
    testing.assert_proposer_lossless(bigram_heads(**options), num_samples=20_000)


@pytest.mark.slow
def test_greedy_is_plain(tmp_path, target):
    """In a dense cache; slots have pages."""
    authors(tmp_path)
    rows, state = heads.generate(target, load(tmp_path, target), temperature=0)
    heads.assert_greedy_rows(target, rows)
    assert int(state.totals.drafted.sum()) > 0


FACTOR, MODULUS, TOKENS = 24, 37, 13


def follows(params, inputs, cache):
    """A target whose hidden state is a one-hot of r[t] = (24 r[t-1] + token[t] + 1) mod 37, which decides all."""
    slots = inputs.positions
    before = jnp.pad(read_slots(cache, inputs.pages), ((0, 0), (1, 0)))
    state = jnp.take_along_axis(before, slots[:, :1], axis=1, mode="clip")[:, 0]

    def body(state, token):
        state = (FACTOR * state + token + 1) % MODULUS
        return state, state

    states = jnp.moveaxis(jax.lax.scan(body, state, jnp.moveaxis(inputs.tokens, 1, 0))[1], 0, 1)
    cache = write_slots(cache, slots, states, inputs.pages)
    hidden = jax.nn.one_hot(states, MODULUS)
    return ModelOutput(9 * jax.nn.one_hot(states % TOKENS, TOKENS), Features(hidden)), cache


def no_states(num_pages, page_size):
    return jnp.zeros((num_pages, page_size), jnp.int32)


COPIED = Model((), follows, no_states, TOKENS, takes_pages=True)


def copying_heads(num_heads=3):
    """Head i knows the target's token i + 1 tokens later."""
    state, made = np.arange(MODULUS), []
    for _ in range(num_heads):
        state = (FACTOR * state + state % TOKENS + 1) % MODULUS
        made.append({"blocks": [], "head": jnp.asarray(9 * np.eye(TOKENS)[:, state % TOKENS], jnp.float32)})
    return proposers.medusa(made, vocab_size=TOKENS)


def own_text(length):
    state, tokens = 4, [3]
    for _ in range(length - 1):
        tokens.append(state % TOKENS)
        state = (FACTOR * state + tokens[-1] + 1) % MODULUS
    return tokens


def start_copying(proposer, in_pages=False):
    """Prompts that the target itself would have written, of lengths on and beside the ends of chunks."""
    ids, lengths = np.tile(own_text(8), (4, 1)).astype(np.int32), np.array([4, 5, 2, 8])
    rows = sampling.batch([SamplingParams(temperature=0, max_tokens=30)] * 4)
    pages = Pages(jnp.asarray(random_table((4, 10), 64)), 64, 4) if in_pages else None
    given = COPIED, proposer, jnp.asarray(ids), jnp.asarray(lengths), rows, jax.random.key(0)
    return heads.prefill(*given, max_length=40, chunk_size=4, pages=pages)


@pytest.mark.parametrize("in_pages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_heads_that_copy_the_target_are_always_right(in_pages):
    proposer = copying_heads()
    state = decode.generate(COPIED, proposer, start_copying(proposer, in_pages))
    assert metrics.acceptance_rate(state.totals) == 1 and int(state.totals.drafted.sum()) > 60
    assert state.context.tokens[3, :38].tolist() == own_text(38)


@partial(jax.tree_util.register_dataclass, data_fields=["known"], meta_fields=["num_draft_tokens"])
@dataclass(frozen=True)
class Sometimes:
    """Drafts a token of a known text and a wrong one, in rows whose length 3 divides."""

    known: jax.Array
    num_draft_tokens: int = 2
    takes_pages = True

    def init_memory(self, batch_size, num_pages, page_size):
        return Memory()

    def prefill(self, inputs, following, previous, features, state):
        return state

    def propose(self, keys, context, sampling, state):
        drafts = context.active & (context.length % 3 == 0)
        index = context.length[:, None] + jnp.arange(2)[None]
        tokens = (self.known[index] + jnp.arange(2)[None]) % TOKENS
        return Draft(jnp.where(drafts[:, None], tokens, -1)), state

    def update(self, context, verified, features, state):
        return state


@pytest.mark.slow
def test_after_drafts_of_another_proposer():
    """The heads go on from the last token that was accepted, whoever drafted it."""
    proposer = proposers.fallback(Sometimes(jnp.asarray(own_text(48), jnp.int32)), copying_heads())
    state, counts = start_copying(proposer), np.zeros((2, 4), int)
    while state.context.active.any():
        left = 30 - np.asarray(state.context.length - state.context.prompt_length)
        active = np.asarray(state.context.active) & (left > 3)
        state, info = heads.step(COPIED, proposer, state)
        np.add.at(counts, (np.asarray(state.proposer.rows[2])[active].astype(int), info.num_accepted[active]), 1)
    assert counts[0].tolist()[:3] == [0, 0, 0] and counts[0, 3] > 5, "the heads are always right"
    assert counts[1, 1] > 5, "the other's first draft is right, the second wrong"


@pytest.mark.slow
def test_slots(tmp_path, target):
    """Requests that enter and leave get what they would alone."""
    authors(tmp_path)
    heads.assert_greedy_requests(target, heads.in_slots(target, load(tmp_path, target)))


@pytest.mark.slow
def test_masks_may_leave_nothing_of_a_reduced_vocabulary():
    """The drafts of a row end where the request allows no token that the heads have."""
    proposer = bigram_heads(5, token_ids=np.array([6, 1, 3, 0, 4]))
    table = jax.random.normal(jax.random.key(0), (8, 8))
    target = testing.bigram_model(table)
    rows = sampling.batch(
        [SamplingParams(allowed_token_ids=ids, max_tokens=12) for ids in ([2, 5, 7], [2, 5, 6], None)]
    )
    prompts = jnp.array([[1, 2]] * 3)
    state = heads.prefill(target, proposer, prompts, jnp.array([2, 2, 2]), rows, jax.random.key(1), max_length=16)
    draft = heads.propose(proposer, state)
    assert draft.num_tokens.tolist() == [0, 2, 2] and draft.tokens[1].tolist() == [6, 6]
    assert draft.tokens[0].tolist() == [-1, -1]
    tokens = decode.generate(target, proposer, state).context.tokens
    assert set(tokens[0, 2:14].tolist()) <= {2, 5, 7} and set(tokens[1, 2:14].tolist()) <= {2, 5, 6}


class TestBadInput:
    def test_fields(self, tmp_path, target):
        for config, message in [
            ({"hidden_size": 16}, r"hidden_size in .* must be 32, the hidden size of the target, got 16"),
            ({"vocab_size": 60}, r"vocab_size in .* must be 61, the vocabulary of the target, got 60"),
            (
                {"truncated_vocab_size": 50},
                r"lm_heads.0.weight in .* must have shape \(50, 32\), got \(40, 32\)",
            ),
            ({"num_heads": 4}, "tensor blocks.3.layers.0.weight is missing"),
            ({"medusa_gate": True}, "medusa_gate in .* must be absent"),
            ({"logit_scale": 0.5}, "logit_scale in .* must be 1.0"),
        ]:
            vllm(tmp_path)
            whole = VLLM | {"truncated_vocab_size": 40} | config
            heads.write(tmp_path, whole, load_file(tmp_path / "model.safetensors"))
            with pytest.raises(ValueError, match=message):
                load(tmp_path, target)

    def test_files(self, tmp_path, target):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            load(tmp_path, target)
        authors(tmp_path)
        with pytest.raises(
            ValueError, match=r"rope_theta must be None for a drafter without rotary positions \(medusa\)"
        ):
            proposers.load(tmp_path, target, num_draft_tokens=3, rope_theta=1e4)
        with pytest.raises(ValueError, match=r"num_draft_tokens must be in \[1, 3\], the number of heads, got 4"):
            load(tmp_path, target, num_draft_tokens=4)
        file = tmp_path / "medusa_lm_head.pt"
        file.write_bytes(file.read_bytes()[:4000])
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt must be a whole zip archive"):
            load(tmp_path, target)

    def test_another_target(self, tmp_path, target):
        authors(tmp_path)
        proposer = load(tmp_path, target)
        with pytest.raises(ValueError, match=r"features\.hidden must be of H = 32 numbers a token, got 61"):
            heads.start(testing.bigram_model(jnp.zeros((VOCAB, VOCAB))), proposer)
        silent = testing.bigram_model(jnp.zeros((VOCAB, VOCAB)))
        silent = replace(silent, apply=without_features)
        with pytest.raises(ValueError, match=r"must give its hidden states, ModelOutput\.features, got None"):
            heads.start(silent, proposer)

    def test_arrays(self):
        head = {"blocks": [{"weight": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}], "head": jnp.zeros((7, 4))}
        for given, options, message in [
            ([], {}, "at least one head"),
            ([head], {"vocab_size": 8}, "token_ids must say which tokens of V = 8 the 7 logits are for"),
            ([head, head | {"head": jnp.zeros((7, 5))}], {}, r"heads\[1\]\['head'\] must have shape"),
            (
                [head],
                {"token_ids": np.array([0, 1, 2, 3, 4, 5, 7])},
                r"token_ids must be integers of shape",
            ),
            ([head], {"token_ids": np.zeros(7, int)}, "token_ids must have each id once"),
            ([head], {"temperature": -1}, "temperature must be None, or a number"),
        ]:
            with pytest.raises(ValueError, match=message):
                proposers.medusa(given, **({"vocab_size": 7} | options))


def without_features(params, inputs, cache):
    return ModelOutput(params[inputs.tokens]), cache
