"""Export with `jax.export`: symbolic batches, other platforms, and the records as inputs and outputs."""

import dataclasses
import pkgutil
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import make_target, prefill
from jax import export
from jax.sharding import use_abstract_mesh
from lowering import ONE_DEVICE
from test_hybrid_steps import hybrid

import specjax
from specjax import Categorical, Draft, Pages, decode, distributions, sampling, serialization, testing, verifiers
from specjax.models.decoder import DecoderConfig, init_params
from specjax.models.experts import Experts, SigmoidTopK, SoftmaxTopK
from specjax.models.layer import LayerConfig
from specjax.models.linear import linear
from specjax.models.quantized import FORMATS, quantize
from specjax.proposers.self_draft import quantized_copy
from specjax.sampling import Sampling
from specjax.sampling.cut import min_logit

pytestmark = pytest.mark.slow  # the exported functions are tested elsewhere

VOCAB = 4096  # kernels are worthwhile
NUM_DRAFTS = 2
TRITON = "__gpu$xla.gpu.triton"
KEEPS_KERNELS = {"platforms": ["cuda"], "disabled_checks": [export.DisabledSafetyCheck.custom_call(TRITON)]}


def arguments(batch_size: int):
    keys = jax.random.split(jax.random.key(0), 3)
    target = 2 * jax.random.normal(keys[0], (batch_size, NUM_DRAFTS + 1, VOCAB))
    drawn_from = Categorical(target[:, :NUM_DRAFTS], jnp.full(batch_size, 1.5))
    tokens = jax.random.categorical(keys[1], drawn_from.logits / 1.5).astype(jnp.int32)
    return keys[2], Draft(tokens, drawn_from), target


def shapes(arguments, batch_size: int | None = None):
    """Shapes of arguments for a batch of 1, of another size, or of any size."""
    size = export.symbolic_shape("b")[0] if batch_size is None else batch_size
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]) if x.ndim else (), x.dtype), arguments)


def exported(function, *arguments, **options) -> export.Exported:
    """The export, for an H200 if for GPUs: JAX 0.11 makes kernels for a GPU that is there or is named."""
    with use_abstract_mesh(ONE_DEVICE) if "cuda" in options.get("platforms", ()) else nullcontext():
        return export.export(jax.jit(function), **options)(*arguments)


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_batch_of_any_size():
    function = exported(verifiers.rejection, *shapes(arguments(1)))
    assert_equal(function.call(*arguments(3)), jax.jit(verifiers.rejection)(*arguments(3)))


@pytest.mark.parametrize("verifier", ["block", "match", "synthetic", "typical"])
def test_verifiers_export_for_any_batch(verifier):
    options = {"acceptance_length": 2.0} if verifier == "synthetic" else {}
    function = exported(partial(getattr(verifiers, verifier), **options), *shapes(arguments(1)))
    assert function.out_avals[0].shape[1] == NUM_DRAFTS + 1


def test_other_operations_take_any_batch():
    rows = jax.random.normal(jax.random.key(3), (5, 2, 10_000))  # enough tokens that few of them are searched first
    keys = jax.random.split(jax.random.key(4), (5, 2))
    flat = rows.at[3].mul(0.01)  # kept: a tenth of the tokens, so the row is searched whole

    def operations(keys, rows, weight):
        x = rows[:, :1, :64]
        cut = min_logit(rows, top_p=jnp.float32(0.1), top_k=jnp.full(rows.shape[:2], 9000))
        return distributions.sample(keys, Categorical(rows)), cut, linear(x, weight, transposed=True)

    weight = jax.random.normal(jax.random.key(5), (8, 64))
    function = exported(operations, *shapes((keys, rows)), jax.ShapeDtypeStruct(weight.shape, weight.dtype))
    assert_equal(function.call(keys, flat, weight), jax.jit(operations)(keys, flat, weight))


def test_kernels_are_exported_for_a_gpu_from_anywhere():
    static = shapes(arguments(1), 2)
    assert TRITON in exported(verifiers.rejection, *static, **KEEPS_KERNELS).mlir_module()
    assert TRITON not in exported(verifiers.rejection, *shapes(arguments(1)), platforms=["cuda"]).mlir_module()
    by_xla = exported(partial(verifiers.rejection, implementation="xla"), *static, platforms=["cuda", "cpu"])
    assert TRITON not in by_xla.mlir_module()


def test_serialisation_of_kernels_is_asked_for():
    pytest.importorskip("flatbuffers")
    static = shapes(arguments(1), 2)
    with pytest.raises(ValueError, match="custom calls"):
        exported(verifiers.match, *static, platforms=["cuda"]).serialize()
    assert export.deserialize(exported(verifiers.match, *static, **KEEPS_KERNELS).serialize()).platforms == ("cuda",)


def test_records_are_serialised():
    pytest.importorskip("flatbuffers")
    records = [record(*[jnp.arange(2) + i for i in range(len(record._fields))]) for record in serialization.RECORDS]
    data = exported(lambda *records: records, *records).serialize()
    restored = export.deserialize(data).call(*records)
    assert [type(record) for record in restored] == list(serialization.RECORDS)
    assert_equal(list(restored), records)


def test_static_fields_are_serialised():
    """A page table and quantised weights have some, and the groups and dtypes of the weights are no JSON."""
    pytest.importorskip("flatbuffers")
    weights = [quantize(jnp.ones((64, 64), dtype), name) for name in FORMATS for dtype in ("float32", "bfloat16")]
    records = Pages(jnp.zeros((2, 3), jnp.int32), 6, 4), weights
    restored = export.deserialize(exported(lambda *records: records, *records).serialize())
    assert jax.tree.structure(restored.call(*records)) == jax.tree.structure(records)


def test_every_record_of_arrays_is_named():
    rooms = "cli", "engine", "models.quantize_files", "ragged", "server", "testing", "training"
    on_the_host = {f"specjax.{room}" for room in rooms}
    names = [m.name for m in pkgutil.walk_packages(specjax.__path__, "specjax.") if not m.name.endswith("__main__")]
    modules = [import_module(name) for name in names if not any(name.startswith(host) for host in on_the_host)]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and hasattr(value, "_fields")
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")  # it stays in its module
    }
    assert found - {specjax.verifiers.kernels.Rule} == set(serialization.RECORDS)


def test_prompts_of_any_batch():
    """In several chunks, with features, through pages."""
    bigram = testing.bigram_model(jnp.log(jnp.arange(1.0, 50).reshape(7, 7)))

    def apply(params, inputs, cache):
        output, cache = bigram.apply(params, inputs, cache)
        return output._replace(features=output.logits), cache

    model = dataclasses.replace(bigram, apply=apply, takes_pages=True)

    def fed(prompts, lengths, table, max_tokens):
        options = {"max_length": 12, "chunk_size": 2, "num_logprobs": 1, "prompt_logprobs": True}
        params, pages = Sampling(max_tokens=max_tokens), Pages(table, 20, 3)
        state = decode.prefill(model, None, prompts, lengths, params, jax.random.key(0), pages=pages, **options)
        return state.context.tokens, state.log_probs.chosen

    prompts, table = np.arange(15).reshape(3, 5) % 7, np.arange(12).reshape(3, 4)
    given = [x.astype(np.int32) for x in (prompts, np.array([5, 1, 4]), table, np.ones(3))]
    tokens, chosen = exported(fed, *shapes(given)).call(*given)
    assert tokens[:, :5].tolist() == prompts.tolist()
    expected = jax.nn.log_softmax(bigram.params)[prompts[:, :-1], prompts[:, 1:]]
    is_fed = np.arange(1, 5) < given[1][:, None]
    np.testing.assert_allclose(chosen[:, 1:5], np.where(is_fed, expected, 0), rtol=1e-5)


@pytest.mark.parametrize("router", [SoftmaxTopK(6, 2), SigmoidTopK(6, 2, num_groups=3, num_chosen_groups=2)])
def test_a_mixture_of_experts_for_any_batch(router):
    """One row, few pairs that are compared, and many that are sorted."""
    experts = Experts(router)
    config = DecoderConfig(7, 8, 1, 2, 2, 4, 12, 16, expert_size=4, layers=(LayerConfig(ffn=experts),))
    params = init_params(config, 0)["layers"][0]

    def mixed(rows):
        return experts.route(params, rows, 20 * rows[:, :6])[:2]

    function = exported(mixed, *shapes((np.zeros((1, 8), np.float32),)))
    for number in (1, 9, 600):
        rows = np.random.default_rng(number).normal(size=(number, 8)).astype(np.float32)
        (got, chosen), (expected, of_jit) = function.call(rows), jax.jit(mixed)(rows)
        assert_equal(chosen, of_jit)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)


def test_steps_of_a_quantised_target():
    """The step takes the arrays of a built-in model as the page on exports does."""
    pytest.importorskip("flatbuffers")
    target = quantized_copy(make_target(num_layers=1), "int8")
    leaves, structure = jax.tree.flatten(target)
    rows = sampling.batch([sampling.SamplingParams(temperature=0.7)] * 2)
    state = prefill(target, None, np.array([[1, 2], [3, 4]]), np.array([2, 1]), rows, jax.random.key(0), max_length=8)

    @jax.jit
    def step(leaves, state):
        return decode.step(jax.tree.unflatten(structure, leaves), None, state)[0]

    restored = export.deserialize(exported(step, leaves, state).serialize())
    assert_equal(restored.call(leaves, state).context.tokens, step(leaves, state).context.tokens)


def test_steps_of_a_hybrid():
    """Its state has the rows of recurrent layers."""
    pytest.importorskip("flatbuffers")
    target = hybrid(7)
    rows = sampling.batch([sampling.SamplingParams(temperature=0)] * 2)
    state = prefill(target, None, np.array([[1, 2], [3, 4]]), np.array([2, 1]), rows, jax.random.key(0), max_length=8)
    step = partial(decode.step, target, None)
    restored = export.deserialize(exported(step, state).serialize())
    (state, _), (expected, _) = restored.call(state), jax.jit(step)(state)
    (state, _), (expected, _) = restored.call(state), jax.jit(step)(expected)
    assert_equal(state.context.tokens, expected.context.tokens)
