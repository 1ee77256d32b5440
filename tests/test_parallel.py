"""Models that several devices share: the text of one device, dense and in pages, and one exchange for each sum."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from test_eagle import write_eagle3
from test_engine import Tokenizer

from specjax import Capacities, Engine, Pages, SamplingParams, decode, models, proposers, sampling, verifiers
from specjax.decoding import tree_steps
from specjax.decoding.compiling import Compiled
from specjax.engine import slots as engine_slots
from specjax.engine.slots import Slots, chunk_at
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.experts import Experts, SoftmaxTopK
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.sharding import tensor_parallel
from specjax.parallel import data_parallel, put
from specjax.sampling.guided import Grammar
from specjax.types import ModelInput

CONFIG = DecoderConfig(
    vocab_size=2048,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_size=32,
    max_length=64,
)
EVERYTHING = LayerConfig(
    Attention(has_out_bias=True, has_head_norms=True), GatedMLP(has_bias=True), has_post_norms=True
)


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    """A machine with one GPU has several CPU devices, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def mesh_of(number):
    return Mesh(np.array(jax.devices("cpu")[:number]), ("tensor",))


def mesh_of_rows(rows, parts=1):
    return Mesh(np.array(jax.devices("cpu")[: rows * parts]).reshape(rows, parts), ("batch", "tensor"))


def with_shared_rows(model, rows, parts=1):
    """The model on a mesh whose devices share rows and, if there are several parts, weights."""
    mesh = mesh_of_rows(rows, parts)
    return data_parallel(tensor_parallel(model, mesh) if parts > 1 else model, mesh)


def decoder(seed=0, scale=8.0, **changes):
    config = replace(CONFIG, **changes)
    params = init_params(config, seed)
    return decoder_model(config, params | {"embedding": params["embedding"] * scale})


@pytest.mark.parametrize(
    "number, changes",
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        (
            4,
            {
                "transposed": True,
                "layers": (LayerConfig(Attention(has_bias=True)),),
                "vocab_size": 2047,
                "tie_embeddings": False,
            },
        ),
        pytest.param(
            4,
            {"num_kv_heads": 1, "layers": (EVERYTHING,)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            {
                "vocab_size": 37,
                "logit_softcap": 5.0,
                "embedding_factor": 4.0,
                "layers": (LayerConfig(Attention(window=4)), LayerConfig()),
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logits_of_one_device(number, changes):
    model = decoder(**changes)
    shared = tensor_parallel(model, mesh_of(number))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    inputs = ModelInput(tokens, jnp.broadcast_to(jnp.arange(6), (2, 6)))
    expected, _ = model.apply(model.params, inputs, model.init_cache(2, 16))
    apply, cache = jax.jit(shared.apply), shared.init_cache(2, 16)
    for part in (slice(0, 5), slice(5, 6)):
        got, cache = apply(shared.params, ModelInput(tokens[:, part], inputs.positions[:, part]), cache)
        np.testing.assert_allclose(got.logits, expected.logits[:, part], atol=2e-5)
        np.testing.assert_allclose(got.features.hidden, expected.features.hidden[:, part], atol=2e-5)


PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=1.2, top_k=300, max_tokens=14, presence_penalty=0.5),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9, logit_bias={2000: 2.0}),
]


def add_to_id(amount, logits, context):
    return logits.at[7].add(amount)


prefill = jax.jit(decode.prefill, static_argnames=("max_length", "num_logprobs", "prompt_logprobs"))


def generated(model, proposer, verifier, params=PARAMS, rows=None, **options):
    num_prompts = len(params) if rows is None else int(max(rows)) + 1
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 2000, (num_prompts, 7)), jnp.int32)
    keys = jax.random.split(jax.random.key(5), len(params))
    given = prompts, jnp.array([7, 3, 5, 2][:num_prompts]), sampling.batch(params), keys
    state = prefill(model, proposer, *given, max_length=32, rows=rows, **options)
    return decode.generate(model, proposer, state, verifier=verifier)


def check_same(got, expected):
    np.testing.assert_array_equal(got.context.tokens, expected.context.tokens)
    np.testing.assert_array_equal(got.totals.accepted, expected.totals.accepted)
    np.testing.assert_array_equal(got.log_probs.top_ids, expected.log_probs.top_ids)
    np.testing.assert_allclose(got.log_probs.chosen, expected.log_probs.chosen, atol=1e-4)


GRAMMAR = Grammar(np.arange(2048) % 2, np.array([[1, -1], [-1, 0]]))  # even and odd ids in turn


@pytest.mark.slow
def test_rows_that_devices_share():
    """Each device has its rows of the caches, and they get the tokens of one device."""
    model, proposer = decoder(num_layers=1), proposers.ngram(2)
    params = [SamplingParams(temperature=t, max_tokens=8) for t in (0, 0.8, 1.2, 0.6)]
    expected = generated(model, proposer, verifiers.rejection, params)
    got = generated(with_shared_rows(model, 2), proposer, verifiers.rejection, params)
    np.testing.assert_array_equal(got.context.tokens, expected.context.tokens)
    assert got.cache.rows[0]["key"].addressable_shards[0].data.shape[0] == 2


LISTED = {"num_logprobs": 2, "prompt_logprobs": True, "rows": np.array([0, 1, 1, 0])}  # prompts of four requests


def models_and_requests(**last):
    """A target, a drafter, and requests with parameters of every kind; among them grammars, which all rows share."""
    params = [*PARAMS, SamplingParams(max_tokens=8, guided_decoding=GRAMMAR, **last)]
    return decoder(num_layers=1), proposers.draft_model(decoder(1, num_layers=1), 3), verifiers.block, params


@pytest.fixture(scope="module")
def one_device():
    return generated(*models_and_requests(logit_bias={7: 9.0}), **LISTED)


@pytest.mark.slow
def test_tokens_of_one_device(one_device):
    """Four devices, two for each head of keys and values, which lie in pages; caches without pages share rows below."""
    model, *given = models_and_requests(logit_bias={7: 9.0})
    table = np.random.default_rng(1).permutation(32).reshape(4, 8).astype(np.int32)
    pages = Pages(jnp.asarray(table), 32, 4)
    check_same(generated(tensor_parallel(model, mesh_of(4)), *given, pages=pages, **LISTED), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("rows, parts", [(2, 2), (4, 1)])
def test_tokens_where_devices_share_the_rows(one_device, rows, parts):
    """Whole rows take a logits processor, which here does the same as a bias."""
    processor = {"logits_processors": [Partial(add_to_id, jnp.float32(9))]}
    model, *given = models_and_requests(**(processor if parts == 1 else {"logit_bias": {7: 9.0}}))
    got = generated(with_shared_rows(model, rows, parts), *given, **LISTED)
    check_same(got, one_device)
    for leaf in jax.tree.leaves((got.cache, got.proposer)):
        assert leaf.addressable_shards[0].data.shape[0] == 4 // rows
    ids = got.context.tokens[3, got.context.prompt_length[3] : got.context.length[3]]
    np.testing.assert_array_equal(ids % 2, np.arange(8) % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier, changes",
    [
        (verifiers.match, {"num_draft_tokens": 2, "tree": 5, "coupled": True}),
        (verifiers.block, {"num_draft_tokens": 2, "tree": 5}),
    ],
)
def test_trees_of_one_device(verifier, changes):
    """Noise by depth, coins by node and residuals of failed siblings belong to the whole vocabulary."""
    model, draft = (decoder(num_layers=1, tie_embeddings=False, scale=scale) for scale in (8.0, 0.2))
    proposer = proposers.draft_model(draft, **changes)
    params = [SamplingParams(temperature=t, max_tokens=20) for t in (0.01, 0.02, 0.03)]
    expected = generated(model, proposer, verifier, params)
    got = generated(tensor_parallel(model, mesh_of(2)), proposer, verifier, params)
    np.testing.assert_array_equal(got.context.tokens, expected.context.tokens)
    np.testing.assert_array_equal(got.totals.accepted_at, expected.totals.accepted_at)
    accepted, drafted = (np.sum(x) for x in (expected.totals.accepted, expected.totals.drafted))
    assert 0.1 * drafted < accepted < 0.9 * drafted, (accepted, drafted)


@pytest.mark.parametrize("options", [{"acceptance_rates": [1.0, 0.0]}, {"acceptance_length": 2.0}], ids=list)
def test_a_step_takes_acceptance_rates(options):
    """Which are checked against the drafts of its proposer."""
    model = tensor_parallel(decoder(num_layers=1), mesh_of(2))
    proposer, rows = proposers.ngram(2, min_n=1), sampling.batch([SamplingParams(max_tokens=9)])
    state = prefill(model, proposer, np.ones((1, 4), int), jnp.array([4]), rows, jax.random.key(0), max_length=12)
    verifier = Partial(verifiers.synthetic, **options)
    _, info = jax.jit(partial(decode.step, verifier=verifier))(model, proposer, state)
    assert info.num_accepted.tolist() == [1]


@pytest.mark.parametrize("parts", [1, 2])
def test_targets_whose_rows_are_shared_take_trees(parts):
    """A model that takes pages has caches with slots, which stay slots where devices share the rows."""
    model = decoder(num_layers=1)
    tree_steps.check_target(with_shared_rows(model, 2, parts))
    with pytest.raises(ValueError, match="a target must take pages to score trees"):
        tree_steps.check_target(with_shared_rows(replace(model, takes_pages=False), 2, parts))


@pytest.mark.slow
def test_trees_of_a_head_where_devices_share_rows_and_weights(tmp_path):
    """They give the tokens of plain decoding: each device has the features of the paths of its rows."""
    target = heads.make_target((2, 0, 1))
    write_eagle3(tmp_path, target, "authors")
    head = proposers.load(tmp_path, target, num_draft_tokens=2).with_tree(12, coupled=True)
    shared = with_shared_rows(target, rows=2, parts=2)
    plain, trees = (
        decode.generate(shared, each, heads.start(shared, each, temperature=0.7), verifier=verifiers.match)
        for each in (None, put(head, shared.apply.whole))
    )
    np.testing.assert_array_equal(trees.context.tokens, plain.context.tokens)
    assert np.all(trees.totals.accepted > 0)


@pytest.mark.slow
def test_a_step_beside_prompts_draws_on_the_parts_of_the_vocabulary():
    """Parts of fewer than 512 ids have other noise than the whole, so the tokens show from which they are drawn."""
    shared = tensor_parallel(decoder(vocab_size=60, num_layers=1), mesh_of(2))
    rows = sampling.batch([SamplingParams(temperature=1, max_tokens=4)] * 8)
    pages = Pages(np.arange(8, dtype=np.int32)[:, None], 9, 8)
    prompts = np.arange(24, dtype=np.int32).reshape(8, 3)
    given = shared, None, prompts, np.full(8, 3), rows, jax.random.key(0)
    state = jax.jit(partial(decode.prefill, max_length=8, pages=pages))(*given)
    tokens = jnp.arange(4, dtype=jnp.int32)[None]
    beside = ModelInput(tokens, tokens, pages=jnp.array([[8]]), pieces=jnp.array([[8, 0, 4]], jnp.int32))
    (_, alone), (_, mixed) = (jax.jit(decode.step)(shared, None, state, prompts=each) for each in (None, beside))
    np.testing.assert_array_equal(mixed.tokens, alone.tokens)
    assert alone.features is None and mixed.features.hidden.shape == (1, 4, 16)


def test_slots_where_devices_share_the_rows():
    """A prompt goes to its slot, and the others keep what they have."""
    model, proposer = decoder(num_layers=1), proposers.ngram(2)
    shared = with_shared_rows(model, 2)
    sizes = {"num_slots": 4, "max_length": 8, "capacities": Capacities()}
    found = []
    for target in (model, shared):
        slots = Slots(target, proposer, **sizes)
        chunks = [chunk_at(np.arange(start, start + 4, dtype=np.int32), 0, 4, slots.no_features) for start in (5, 50)]
        outputs = slots.prefill([2, 1], chunks, 3)
        found.append((jax.tree.leaves(slots.state.cache), outputs))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *found)


def in_an_engine(model, proposer):
    """The tokens that an engine gives some requests, by programs that are compiled once, as they are of one use."""
    capacities = Capacities(stop_tokens=2, biases=2, allowed_tokens=0, bad_words=0, logprobs=2)
    sizes = {"num_slots": 4, "max_length": 48, "page_size": 4, "chunk_size": 8, "prompt_sizes": [], "step_sizes": []}
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 2000, size).tolist() for size in (3, 17, 9, 24, 11)]
    requests = [
        SamplingParams(temperature=t, seed=i, max_tokens=12, top_k=k, logprobs=2, logit_bias={5: float(i)})
        for i, (t, k) in enumerate([(0, -1), (0.9, 40), (1.2, -1), (0.7, 9), (0, -1)], 1)
    ]
    sizes |= {"capacities": capacities, "warm_up": requests}
    with Engine(model, proposer, tokenizer=Tokenizer(), **sizes) as engine, Compilations() as later:
        submitted = [engine.submit(*each) for each in zip(prompts, requests, strict=True)]
        found = [request.result(timeout=120).token_ids for request in submitted]
    assert later.number == 0
    pages = engine.stats().pages  # none where devices share the rows
    assert pages is None or pages.num_used == 0
    return found


@pytest.mark.usefixtures("all_programs")
@pytest.mark.slow
def test_in_the_engine():
    """Devices that share rows and weights; test_llm.py has some that share the weights alone, with pages."""
    model, proposer = decoder(num_layers=1), proposers.draft_model(decoder(1, num_layers=1), 3)
    shared = with_shared_rows(model, rows=2, parts=2)
    found = in_an_engine(shared, put(proposer, shared.apply.whole))
    assert found == in_an_engine(model, proposer)


def test_threads_take_turns_on_devices(monkeypatch):
    """Devices that got the programs of two threads in different orders would wait for each other for ever."""
    inside, most = [], []

    def slow_step(model, proposer, state, *args, **options):
        inside.append(state)
        most.append(len(inside))
        time.sleep(0.02)  # a thread without a turn comes in meanwhile
        inside.pop()
        return state, None

    monkeypatch.setattr(engine_slots, "_step", Compiled(slow_step, slow_step))
    model = decoder(num_layers=1)
    meshes = Mesh(np.array(jax.devices("cpu")[1::-1]), ("tensor",)), mesh_of(2)  # the same devices in two orders
    slots = [Slots(tensor_parallel(model, mesh), num_slots=1, max_length=8) for mesh in meshes]
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(each.step) for each in slots * 2]:
            future.result(timeout=60)
    assert most == [1] * 4


def test_arrays_without_entries_stay_outside():
    """Without drafts a state counts none by position: one compiler crashes where such an array goes in and out."""
    model, proposer = with_shared_rows(decoder(), 2, 2), proposers.none()

    def begin(keys):
        given = jnp.zeros((2, 3), jnp.int32), jnp.array([3, 2]), sampling.batch(PARAMS[:2])
        return decode.prefill(model, proposer, *given, keys, max_length=16)

    state = jax.eval_shape(begin, jax.random.split(jax.random.key(0), 2))
    assert state.totals.drafted_at.shape == (2, 0)
    step, after = jax.make_jaxpr(partial(decode.step, model, proposer), return_shape=True)(state)
    (call,) = [each for each in step.eqns if each.primitive.name == "shard_map"]
    assert all(each.aval.size for each in call.invars)
    assert after[0].totals.drafted_at.shape == (2, 0)


def test_padding_is_never_drawn():
    model = tensor_parallel(decoder(vocab_size=37, num_layers=1), mesh_of(2))

    def logits(params, cache, inputs):
        output, cache = model.apply.apply(params, inputs, cache)
        return cache, output.logits

    inputs = ModelInput(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    spread = P(None, None, "tensor")
    _, whole = jax.jit(model.apply.run, static_argnums=(0, 4))(
        logits, model.params, model.init_cache(1, 8), inputs, spread
    )
    assert whole.shape == (1, 1, 38)
    np.testing.assert_array_equal(np.isfinite(whole[0, 0]), np.arange(38) < 37)


def exchanges_in(jaxpr):
    """The sums over devices in a program, each as the name of what does it and the number of its operand's entries.

    Where platforms differ, the program of CUDA counts.
    """
    for equation in jaxpr.eqns:
        name, size = equation.primitive.name, sum(x.aval.size for x in equation.invars[:1])
        if "psum" in name or name in ("all_gather", "all_to_all", "ppermute", "pmax", "pmin"):
            yield name.partition("_")[0], size
        elif name == "pallas_call":
            if "all_reduce" in equation.params["jaxpr"].debug_info.func_name:
                yield "kernel", size
        else:
            inner = jaxprs_in_params(equation.params)
            for one in list(inner)[:1] if name == "cond" else inner:
                yield from exchanges_in(one)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["psum", "kernel"])
def test_two_sums_a_layer_and_two_exchanges(by, monkeypatch):
    """A step sums a small array for the embedding, two for each layer, and what verification exchanges."""
    links = jnp.zeros((2, 5), jnp.int32) if by == "kernel" else None
    monkeypatch.setattr("specjax.models.sharding.links_of", lambda mesh, axis_name: links)
    proposer = proposers.draft_model(decoder(1, num_layers=1, vocab_size=8192), 3)
    layers = LayerConfig(), LayerConfig(ffn=Experts(SoftmaxTopK(4, 2)))
    target = decoder(vocab_size=8192, transposed=True, layers=layers, expert_size=16)
    shared = tensor_parallel(target, mesh_of(2))
    given = jnp.zeros((2, 4), jnp.int32), jnp.array([4, 3]), sampling.batch([SamplingParams()] * 2)
    begin = partial(decode.prefill, max_length=16)
    state = jax.eval_shape(begin, shared, proposer, *given, jax.random.key(0))
    found = list(exchanges_in(jax.make_jaxpr(decode.step)(shared, proposer, state).jaxpr))
    of_model = 1 + 2 * CONFIG.num_layers
    assert found[:of_model] == [(by, 2 * 4 * CONFIG.hidden_size)] * of_model  # rows, tokens, numbers
    assert [name for name, _ in found[of_model:]] == [by] * 2
    assert max(size for _, size in found[of_model:]) <= 2 * 4 * 64  # of 8192 logits in each row


@pytest.mark.slow
def test_two_sums_a_layer_and_no_gathered_logits():
    model = tensor_parallel(decoder(), mesh_of(2))
    given = jnp.zeros((1, 4), jnp.int32), jnp.array([4]), sampling.batch([SamplingParams(temperature=0)])
    state = prefill(model, None, *given, jax.random.key(0), max_length=16)
    text = jax.jit(partial(decode.step, model, None)).lower(state).compile().as_text()
    sums = len(re.findall(r"all-reduce(?:-start)?\(", text))
    exchanges = 1  # of `match`, which plain decoding is verified by
    assert sums == 1 + 2 * CONFIG.num_layers + exchanges
    assert not re.search(r"all-gather(?:-start)?\(", text)


@pytest.mark.parametrize(
    "number, changes, message",
    [
        (4, {"num_heads": 6, "num_kv_heads": 2}, "num_heads must be a multiple of the 4 devices that share it, got 6"),
        (2, {"mlp_size": 33}, "mlp_size must be a multiple of the 2 devices"),
        (4, {"num_heads": 12, "num_kv_heads": 3}, "num_kv_heads must be a multiple or a divisor of the 4 devices"),
    ],
)
def test_meshes_that_do_not_fit(number, changes, message):
    with pytest.raises(ValueError, match=message):
        tensor_parallel(decoder(**changes), mesh_of(number))


def test_axis_that_is_not_there():
    for share in (tensor_parallel, data_parallel):
        with pytest.raises(ValueError, match=r"axis_name must be an axis of .*, one of \['tensor'\], got 'model'"):
            share(decoder(), mesh_of(2), "model")


def test_axes_of_another_type():
    """`jax.make_mesh` makes axes of the type Explicit by itself, which the code of models does not serve."""
    for axis, share in (("tensor", tensor_parallel), ("batch", data_parallel)):
        mesh = jax.make_mesh((2,), (axis,), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
        with pytest.raises(ValueError, match=r"mesh must have axes of the type Auto, .*, got Explicit"):
            share(decoder(), mesh)
        with pytest.raises(ValueError, match=r"mesh must have axes of the type Auto, .*, got Explicit"):
            models.load(models.EMBEDDED / "draft", mesh=mesh)


def test_rows_that_devices_cannot_share():
    model, mesh = decoder(num_layers=1), mesh_of_rows(2, 2)
    shared = data_parallel(tensor_parallel(model, mesh), mesh)
    with pytest.raises(ValueError, match=r"must be a multiple of the 2 devices along the axis 'batch' .*, got 3 rows"):
        generated(shared, None, verifiers.match)
    with pytest.raises(ValueError, match=r"must be a multiple of the 2 devices along the axis 'batch' .*, got 1 rows"):
        Slots(shared, num_slots=1, max_length=8)
    with pytest.raises(ValueError, match="pages must be None for a model whose takes_pages is False"):
        pages = Pages(jnp.arange(4)[:, None], 4, 32)
        generated(shared, None, verifiers.match, [SamplingParams()] * 4, pages=pages)
    for axis in ("tensor", "batch"):
        with pytest.raises(ValueError, match=rf"axis_name must be an axis that .* not take yet, as .*, got '{axis}'"):
            data_parallel(shared, mesh, axis)
    with pytest.raises(ValueError, match="mesh must be that of the model"):
        data_parallel(tensor_parallel(model, mesh_of(2)), mesh)


@pytest.mark.slow
def test_slots_are_where_the_parameters_are():
    device, model = jax.devices("cpu")[1], decoder(num_layers=1)
    for sharding in (jax.sharding.SingleDeviceSharding(device), jax.sharding.NamedSharding(mesh_of(2), P())):
        slots = Slots(replace(model, params=jax.device_put(model.params, sharding)), num_slots=2, max_length=16)
        slots.step()
        assert slots.state.context.tokens.sharding.device_set == sharding.device_set
