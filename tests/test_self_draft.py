"""A target that drafts for itself: whose cache is written in a step, the tokens, and the copies that are not made."""

import json
import re
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parallel
import test_slots
from choice import one_of
from heads import prefill
from test_llm import random_tensors, write_checkpoint
from test_steps import LENGTHS, MAX_LENGTH, VOCAB, decoder, prompts, random_pages, recurrent, start, step

from specjax import LLM, decode, metrics, models, proposers, sampling, testing, verifiers
from specjax.cli import main
from specjax.engine.draft_length import with_draft_lengths
from specjax.engine.slot_rows import empty
from specjax.engine.slots import Slots
from specjax.models.quantized import Quantized
from specjax.pages import read_slots
from specjax.sampling import SamplingParams
from specjax.sampling.capacities import Capacities
from specjax.theory import StepTimes
from specjax.types import Context, Draft, Memory, ModelInput


@pytest.fixture(scope="module")
def target():
    return decoder(0)


@pytest.fixture(scope="module")
def proposer(target):
    """The group of 4 bits spans all inputs of these matrices, so many drafts are rejected."""
    return proposers.self_draft(target, 3)


def decode_all(target, proposer, verifier="match", pages=None, some_rows=False):
    """The last state, after steps of all rows or of some in turn."""
    state = start(target, proposer, pages)
    rng = np.random.default_rng(0)
    while state.context.active.any():
        rows = jnp.asarray(rng.permutation(len(LENGTHS) + 1)[:3]) if some_rows else None
        state, _ = step(target, proposer, state, rows=rows, verifier=getattr(verifiers, verifier))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("form, some_rows", [("dense", True), ("pages", False), ("pages", True), ("no pages", True)])
def test_tokens_are_those_of_plain_decoding(target, proposer, form, some_rows):
    """Greedy rows and, verified by matches, sampled ones; and the cache holds what plain decoding leaves in it."""
    if form == "no pages":
        target = replace(target, takes_pages=False)
        proposer = replace(proposer, model=replace(proposer.model, takes_pages=False))
    pages = random_pages() if form == "pages" else None
    plain = decode_all(target, None, pages=pages)
    state = decode_all(target, proposer, pages=pages, some_rows=some_rows)
    np.testing.assert_array_equal(state.context.tokens, plain.context.tokens)
    assert 0 < metrics.acceptance_rate(state.totals) < 0.9  # so that there are rejections
    assert_same_slots(state, plain)


def assert_same_slots(state, plain):
    """The slots of fed tokens, up to the one before the last committed, and all pages that no row has."""

    def held(state, leaf):
        pool = np.asarray(leaf)
        return pool if state.context.pages is None else np.asarray(read_slots(leaf, state.context.pages))

    for own, other in zip(*(jax.tree.leaves((s.cache.pools, s.cache.rows)) for s in (state, plain)), strict=True):
        for b, length in enumerate(np.asarray(plain.context.length)):
            got, expected = (held(s, leaf)[b, : length - 1] for s, leaf in ((state, own), (plain, other)))
            np.testing.assert_allclose(got, expected, atol=2e-5)
        if plain.context.pages is not None:
            free = np.setdiff1d(np.arange(own.shape[0]), plain.context.pages)
            assert not np.asarray(own)[free].any()


@pytest.mark.slow
def test_beside_drafts_of_n_grams(target, proposer):
    """Rows with drafts of the first proposer, rows with drafts of the second, and steps without the second."""
    both = proposers.fallback(proposers.ngram(2, min_n=1), proposer)
    assert both.reads_memory and both.writes_memory
    plain, state = (decode_all(target, each, pages=random_pages()) for each in (None, both))
    np.testing.assert_array_equal(state.context.tokens, plain.context.tokens)
    assert_same_slots(state, plain)
    alone = proposers.fallback(proposers.ngram(2), proposers.ngram(3))
    assert not alone.reads_memory and not alone.writes_memory


@pytest.mark.slow
def test_steps_of_other_lengths_and_pauses(target, proposer):
    """The number of drafts changes from step to step, and rows that pause have nothing to catch up with."""
    plain = decode_all(target, None)
    few = replace(proposer, speculate_below=3)
    choices = [few, *with_draft_lengths(proposer, (0, 1)).values()]
    state = start(target, proposer)
    for i in range(60):
        each = choices[i % 3]
        state, info = step(target, each, state, verifier=verifiers.match)
        if each is few and i == 0:
            assert not info.num_drafts.any()  # of four active rows
    assert not state.context.active.any()
    np.testing.assert_array_equal(state.context.tokens, plain.context.tokens)
    assert_same_slots(state, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_lossless_over_several_steps(name):
    """Pairs of tokens of a target that reads its cache, against all sequences of five tokens."""
    config = replace(test_slots.CONFIG, vocab_size=4)
    target = models.decoder.decoder_model(config, jax.tree.map(lambda x: 5 * x, models.decoder.init_params(config, 3)))
    proposer = proposers.self_draft(target, 2)
    batch_size, num_tokens = 20_000, 5
    sequences = np.stack(np.meshgrid(*[np.arange(4)] * num_tokens, indexing="ij"), -1).reshape(-1, num_tokens)
    tokens = np.pad(sequences, ((0, 0), (1, 0)))[:, :-1].astype(np.int32)
    logits = target.apply(target.params, ModelInput(tokens, np.arange(num_tokens)[None].repeat(len(tokens), 0)), None)
    rows = np.asarray(jax.nn.softmax(logits[0].logits / 0.8, axis=-1), np.float64)
    expected = np.take_along_axis(rows, sequences[..., None], axis=2).prod(axis=(1, 2))
    params = sampling.Sampling(
        max_tokens=jnp.full(batch_size, num_tokens), temperature=jnp.full(batch_size, 0.8, jnp.float32)
    )
    ones = jnp.ones(batch_size, jnp.int32)
    given = target, proposer, jnp.zeros((batch_size, 1), jnp.int32), ones, params, jax.random.key(0)
    state = decode.generate(target, proposer, prefill(*given, max_length=num_tokens + 1), verifier=one_of(name))
    found = np.asarray(state.context.tokens)[:, 1:]
    test = testing.chi_square(np.bincount(np.ravel_multi_index(tuple(found.T), (4,) * 5), minlength=4**5), expected)
    assert test.statistic < test.bound
    assert metrics.acceptance_rate(state.totals) < 0.98


@pytest.mark.slow
def test_the_public_suite():
    other = testing.bigram_model(2 * jax.random.normal(jax.random.key(1), (8, 8)))
    testing.assert_proposer_lossless(proposers.SelfDraft(other, 3), num_samples=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alone", "below a number of rows", "after n-grams"])
def test_no_pool_is_copied(target, proposer, kind):
    """A step that donates its state writes to the pools where they lie."""
    if kind == "below a number of rows":
        proposer = replace(proposer, speculate_below=2)
    if kind == "after n-grams":
        proposer = proposers.fallback(proposers.ngram(2), proposer)
    few = Capacities(biases=0, allowed_tokens=0, bad_words=0, logprobs=0)
    state = Slots(target, proposer, num_slots=2, max_length=16, pool=(50_000, 4), capacities=few).state
    pools = jax.tree.leaves(state.cache.pools)

    def compiled(own_step):
        return jax.jit(own_step, donate_argnums=2).lower(target, proposer, state).compile()

    def one_step(target, proposer, state):
        return decode.step(target, proposer, state)[0]

    program = compiled(one_step)
    copies = re.compile(rf"= f32\[{','.join(map(str, pools[0].shape))}\]\S* copy")
    assert not copies.search(program.as_text())
    assert program.memory_analysis().temp_size_in_bytes < pools[0].nbytes / 4
    if kind == "alone":  # a copy would be seen
        copying = compiled(lambda target, proposer, state: (state, state.cache))
        assert copies.search(copying.as_text())
        assert copying.memory_analysis().output_size_in_bytes > 2 * sum(pool.nbytes for pool in pools)


@pytest.mark.slow
def test_parameters_are_shared_where_they_are_not_quantised():
    config = replace(test_slots.CONFIG, tie_embeddings=False, hidden_size=64)
    target = models.decoder.decoder_model(config, models.decoder.init_params(config, 0))
    made = {name: proposers.self_draft(target, 1, quantization=name).model.params for name in ("int4", "int8", "fp8")}
    for params in made.values():
        for name in ("embedding", "norm"):
            assert params[name] is target.params[name]
        layer = params["layers"][0]
        assert layer["mlp_norm"] is target.params["layers"][0]["mlp_norm"]
        assert {name for name, leaf in layer.items() if isinstance(leaf, Quantized)} == {
            *("qkv", "attention_out", "gate_up", "mlp_out")
        }
        assert layer["qkv"].shape == target.params["layers"][0]["qkv"].shape[::-1]
    formats = {name: (p["layers"][0]["qkv"].bits, p["layers"][0]["qkv"].code) for name, p in made.items()}
    assert formats == {"int4": (4, "int"), "int8": (8, "int"), "fp8": (8, "e4m3")}
    assert [p["head"].bits for p in made.values()] == [8, 8, 8]
    again = proposers.self_draft(replace(target, params=made["int8"]), 1, quantization="int8").model.params
    assert again["layers"][0]["qkv"] is made["int8"]["layers"][0]["qkv"]  # it has as few bits
    fewer = proposers.self_draft(replace(target, params=made["int8"]), 1).model.params
    assert fewer["layers"][0]["qkv"].bits == 4 and fewer["head"] is made["int8"]["head"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "gemma4_moe", "deepseek_v3", "cohere"])
def test_the_copy_of_a_checkpoint(tmp_path, case):
    """Experts have their outputs first, and a router, biases, a matrix of latents and norms stay as they are."""
    path = families.write(tmp_path / "model", case)
    target, rounded = models.load(path), models.load(path, quantization="int8")
    copy = proposers.self_draft(target, 2, quantization="int8").model
    params = {**copy.params, "head": target.params["head"]} if "head" in target.params else copy.params
    tokens = jnp.asarray(families.tokens())
    inputs = ModelInput(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    found, expected = (m.apply(p, inputs, None)[0].logits for m, p in ((copy, params), (rounded, rounded.params)))
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_in_slots_beside_requests_of_every_use():
    target = test_slots.make(0)
    test_slots.run_and_compare(target, proposers.self_draft(target, 3), "rejection", True, seed=6, step_sizes=())


@pytest.mark.slow
def test_devices_that_share_the_target():
    """Each quantises its parts; the tokens equal plain decoding on one device."""
    with jax.default_device(jax.devices("cpu")[0]):
        model = test_parallel.decoder(vocab_size=2047, tie_embeddings=False, hidden_size=32, num_layers=1)
        params = test_parallel.PARAMS[:2]
        expected = test_parallel.generated(model, None, verifiers.match, params)
        shared = test_parallel.with_shared_rows(model, rows=2, parts=2)
        proposer = proposers.self_draft(shared, 3, quantization="int8")
        part = proposer.model.params["layers"][0]["mlp_out"].values.addressable_shards[0].data
        assert part.size == proposer.model.params["layers"][0]["mlp_out"].values.size // 2
        state = test_parallel.generated(shared, proposer, verifiers.match, params)
        np.testing.assert_array_equal(state.context.tokens, expected.context.tokens)
        greedy = jax.tree.map(lambda x: x[0], state.totals)  # a match and a draft have different noise
        assert greedy.accepted > greedy.drafted / 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("own") / "target", random_tensors(0, num_layers=1), num_layers=1)


@pytest.mark.slow
def test_text_of_an_llm(checkpoint):
    """Text and a stream equal plain decoding; the engine of an LLM draws prompts of several lengths."""
    llm = LLM(checkpoint, "self", 3, verifier=verifiers.match)
    assert isinstance(llm.proposer, proposers.SelfDraft) and llm.proposer.model.params["layers"][0]["qkv"].bits == 4
    options = {"max_tokens": 20, "ignore_eos": True, "presence_penalty": 0.1}  # all steps have one use
    params = [SamplingParams(temperature=t, seed=i, **options) for i, t in enumerate((0, 0.9, 0))]
    prompts = ["the cat sat", "a", "it was the best of times"]
    results, expected = (each.generate(prompts, params) for each in (llm, llm.plain()))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert sum(result.metrics.num_accepted for result in results) > 0
    assert [piece.token_id for piece in llm.stream(prompts[0], params[0])] == expected[0].token_ids


@pytest.mark.slow
def test_an_llm_of_other_options(checkpoint):
    """In pages, by steps of several lengths, on devices that share the target."""
    options = {"num_draft_tokens": "auto", "step_times": StepTimes({1: {0: 1.0, 2: 1.1, 4: 1.3}})}
    options |= {"tensor_parallel": 2, "draft_quantization": "int8"}
    llm = LLM(checkpoint, "self", verifier=verifiers.match, **options)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    results, expected = (each.generate(["the cat sat", "a"], params) for each in (llm, LLM(checkpoint)))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert results[0].metrics.num_accepted > 0


@pytest.mark.slow
def test_the_command(checkpoint, capsys):
    arguments = ["generate", "the cat", "--model", str(checkpoint), "--draft", "self", "--json", "--max-tokens", "8"]
    assert main([*arguments, "--draft-quantization", "int8"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_acceptance_of_the_embedded_target():
    """The share of drafts accepted where those before them are, at temperatures 0 and 0.8."""
    checkpoint = models.Checkpoint(models.EMBEDDED / "target")
    target, tokenizer = models.load(checkpoint), checkpoint.tokenizer()
    text = (Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py").read_text()
    ids = tokenizer.encode(text).ids
    places = [ids[start : start + 64] for start in range(0, 64 * 12, 64)]
    proposer, floors = proposers.self_draft(target, 4), {0.0: 0.9, 0.8: 0.8}
    rows = sampling.batch([SamplingParams(temperature=t, max_tokens=24) for t in floors for _ in places])
    given = target, proposer, np.array(places * 2, np.int32), np.full(24, 64, np.int32), rows, jax.random.key(0)
    state = decode.generate(target, proposer, prefill(*given, max_length=88))
    for i, floor in enumerate(floors.values()):
        found = metrics.acceptance_rate_per_position(jax.tree.map(lambda x, i=i: x[12 * i :][:12], state.totals))
        tests = 1 + found[:-1].sum()  # of a step: draft i is tested where all before it are accepted
        assert found.sum() / tests >= floor


@dataclass(frozen=True)
class Peeking:
    """Says in a draft which numbers stand in the target's memory, and writes given numbers."""

    result: str = "written"
    num_draft_tokens = 1
    takes_pages = True
    reads_memory = writes_memory = True

    def init_memory(self, batch_size, num_pages, page_size):
        return Memory()

    def prefill(self, inputs, following, previous, features, state):
        return state

    def propose(self, keys, context: Context, sampling, state, memory: Memory):
        draft = Draft(jnp.zeros((context.length.shape[0], 1), jnp.int32))
        if self.result == "written":
            return draft, state, memory
        return (draft, state) if self.result == "kept" else (draft, state, memory.pools)

    def update(self, context, verified, features, state):
        return state


jax.tree_util.register_static(Peeking)


def test_what_writes_must_return_the_memory(target):
    state = start(target, Peeking())
    step(target, Peeking(), state)
    for result in ("kept", "pools"):
        with pytest.raises(ValueError, match=r"Peeking must return \(Draft, state, memory\), with the memory"):
            decode.step(target, Peeking(result), state)


def test_what_writes_must_read(target):
    class Blind(Peeking):
        reads_memory = False

    jax.tree_util.register_static(Blind)
    with pytest.raises(ValueError, match="writes_memory must have reads_memory = True, got Blind"):
        start(target, Blind())


def test_recurrent_targets_are_refused():
    with pytest.raises(ValueError, match="target must keep nothing but slots to draft for itself: its commit must be"):
        proposers.self_draft(recurrent(False), 2)
    with pytest.raises(ValueError, match="its init_rows must be None"):
        proposers.self_draft(recurrent(True), 2)
    for make in (
        lambda *given: decode.prefill(*given, prompts(), np.array(LENGTHS), None, None, max_length=MAX_LENGTH),
        lambda *given: empty(*given, num_slots=1, max_length=MAX_LENGTH),
    ):
        with pytest.raises(ValueError, match="proposer must not write the memory of a target with commit, got Peeking"):
            make(recurrent(False), Peeking())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target": 3}, "target must be a Model, got int"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be >= 1"),
        ({"quantization": "int5"}, "quantization must be one of int8, int4, fp8, got 'int5'"),
        ({"temperature": -1}, "temperature must be None, or a number"),
        ({"speculate_below": 0}, "speculate_below must be None or >= 1, got 0"),
    ],
)
def test_bad_arguments(target, change, message):
    with pytest.raises(ValueError, match=message):
        proposers.self_draft(**({"target": target, "num_draft_tokens": 2} | change))


def test_targets_of_others_are_refused():
    with pytest.raises(ValueError, match="target must be one that specjax built"):
        proposers.self_draft(testing.bigram_model(jnp.zeros((VOCAB, VOCAB))), 2)


@pytest.mark.slow
def test_requests_of_all_parameters_end_as_they_do_plainly(target, proposer):
    """An end inside the drafts, and the end of the buffer."""
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=40)] * len(LENGTHS))
    given = prompts(), np.array(LENGTHS), params, jax.random.key(0)
    states = [
        decode.generate(target, each, prefill(target, each, *given, max_length=MAX_LENGTH)) for each in (None, proposer)
    ]
    np.testing.assert_array_equal(states[0].context.tokens, states[1].context.tokens)
    assert (np.asarray(states[1].finished) == decode.BUFFER_FULL).all()
