"""Every verifier, and the cut, lowers to Triton kernels that compile for an H200 without spilling registers."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from lowering import H200, compile_for_sm90, decisions_of_the_host, triton_kernels

from pallas_kernels import all_reduce
from specjax import (
    Categorical,
    Draft,
    DraftTree,
    ModelInput,
    SamplingParams,
    decode,
    distributions,
    models,
    proposers,
    sampling,
    trees,
    verifiers,
)
from specjax.models.decoder import DecoderConfig, decoder_model, init_params, param_shapes
from specjax.sampling.cut import min_logit

pytestmark = pytest.mark.slow  # compiles kernels for a GPU, and runs none

NUM_DRAFTS = 5
BY_RESIDUAL = ["_statistics_kernel", "_accept_kernel", "_recover_kernel"]
KERNELS = dict.fromkeys(("rejection", "block", "typical", "synthetic"), BY_RESIDUAL)
KERNELS |= {"match": ["_block_mass_kernel", "_draw_kernel"]}
CUT = ["_block_kernel", "_candidate_kernel", "_row_kernel"]
OPTIONS = {"synthetic": {"acceptance_length": 3.0}}


def inputs(batch_size: int, vocab_size: int, dtype, *, shaped: bool, drafts: str = "sampled"):
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    temperature = array() if shaped else None
    cut = array(NUM_DRAFTS + 1) if shaped else None
    target = Categorical(array(NUM_DRAFTS + 1, vocab_size, dtype=dtype), temperature, cut)
    logits = array(NUM_DRAFTS, vocab_size, dtype=dtype)
    known = array(NUM_DRAFTS) if not shaped else None
    distribution = Categorical(logits, temperature, None, known) if drafts == "sampled" else None
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
    return keys, Draft(array(NUM_DRAFTS, dtype=jnp.int32), distribution, array(dtype=jnp.int32)), target


# Every value with every verifier, and every two values together with one.
CASES = [
    (verifier, *case)
    for number, verifier in enumerate(KERNELS)
    for case in [
        ((1, jnp.bfloat16, False), (256, jnp.float32, True)),
        ((1, jnp.float32, True), (256, jnp.bfloat16, False)),
        ((1, jnp.bfloat16, True), (256, jnp.float32, False)),
        ((1, jnp.float32, False), (256, jnp.bfloat16, True)),
    ][number % 4]
]


@pytest.mark.parametrize("verifier, batch_size, dtype, shaped", CASES)
def test_verifiers_lower_to_triton(verifier, batch_size, dtype, shaped):
    vocab_size = 32000 if batch_size == 1 else 151936
    kernels = triton_kernels(
        lambda *args: getattr(verifiers, verifier)(*args, **OPTIONS.get(verifier, {})),
        *inputs(min(batch_size, 16), vocab_size, dtype, shaped=shaped),  # a large batch takes kernels of two forms
    )
    assert [kernel.name for kernel in kernels] == KERNELS[verifier]


# One case of each verifier, and below the other one for a shared vocabulary.
COMPILED = [CASES[2 * number + number % 2] for number in range(len(KERNELS))]


@pytest.mark.parametrize("verifier, batch_size, dtype, shaped", COMPILED)
def test_kernels_compile_without_spilling(verifier, batch_size, dtype, shaped, tmp_path):
    pytest.importorskip("triton")
    kernels = triton_kernels(
        lambda *args: getattr(verifiers, verifier)(*args, log_probs=True, **OPTIONS.get(verifier, {})),
        *inputs(batch_size, 128256, dtype, shaped=shaped),
    )
    assert {kernel.name for kernel in kernels} >= set(KERNELS[verifier])
    for kernel in kernels:
        resources = compile_for_sm90(kernel, tmp_path)
        assert resources.spilled_bytes == 0 and resources.stack_bytes == 0, (kernel.name, kernel.grid, resources)


def test_verifiers_of_trees_lower_to_triton(tmp_path):
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((8, *shape), dtype)

    nodes, rows = array(64, dtype=jnp.int32), Categorical(array(64, 128256, dtype=jnp.bfloat16), array())
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    tree = DraftTree(nodes, nodes, nodes, distribution=rows)
    kernels = triton_kernels(partial(trees.match, max_depth=7), keys, tree, rows)
    assert [kernel.name for kernel in kernels] == KERNELS["match"]
    (kernel,) = triton_kernels(partial(trees.traversal, max_depth=7), keys, tree, rows)
    assert kernel.name == "_traverse_kernel"
    pytest.importorskip("triton")
    resources = compile_for_sm90(kernel, tmp_path)
    assert resources.spilled_bytes == 0 and resources.stack_bytes == 0, resources


OF_PARTS = dict.fromkeys(KERNELS, ("_statistics_kernel", "_accept_kernel", "_candidate_kernel", "_choice_kernel"))
OF_PARTS |= {"match": ("_block_mass_kernel", "_part_draw_kernel", "_choice_kernel")}
PARTS = AbstractMesh((2,), ("vocab",), (AxisType.Auto,), abstract_device=H200)


def of_parts(verifier: str, operands: tuple, check_vma: bool = True, **options):
    """The kernels of a verification by two devices that share the vocabulary."""

    def is_logits(leaf):
        return len(leaf.shape) == 3

    specs = jax.tree.map(lambda x: PartitionSpec(None, None, "vocab") if is_logits(x) else PartitionSpec(), operands)
    options |= OPTIONS.get(verifier, {}) | {"axis_name": "vocab"}
    verify = jax.shard_map(
        lambda *args: getattr(verifiers, verifier)(*args, **options),
        mesh=PARTS,
        in_specs=specs,
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    return triton_kernels(verify, *operands, mesh=PARTS)


@pytest.mark.parametrize("verifier, batch_size, dtype, shaped", [case for case in CASES if case not in COMPILED])
def test_kernels_of_a_shared_vocabulary(verifier, batch_size, dtype, shaped, tmp_path):
    """They lower where JAX checks that all devices get the same and where it does not, and compile."""
    operands = inputs(batch_size, 129024, dtype, shaped=shaped)
    kernels = of_parts(verifier, operands, check_vma=shaped, log_probs=not shaped)
    assert tuple(kernel.name for kernel in kernels) == OF_PARTS[verifier]
    pytest.importorskip("triton")
    for kernel in kernels:
        resources = compile_for_sm90(kernel, tmp_path)
        assert resources.spilled_bytes == 0 and resources.stack_bytes == 0, (kernel.name, kernel.grid, resources)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_shared_model_is_verified_by_kernels(top_p):
    """The host waits for no condition inside a step, so that it starts the next one before this one has ended."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
    gpus = AbstractMesh((2,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    config = DecoderConfig(4096, 64, 2, 4, 2, 16, 128, 256)
    target = models.tensor_parallel(decoder_model(config, init_params(config, 0)), mesh)
    proposer = proposers.ngram(2)
    target = replace(target, apply=replace(target.apply, mesh=gpus))
    prompts = jnp.ones((1, 3), jnp.int32), jnp.array([3]), sampling.batch([SamplingParams(max_tokens=4, top_p=top_p)])

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    target = jax.tree.map(shape, target)
    prefill = partial(decode.prefill, max_length=9)
    state = jax.tree.map(shape, jax.eval_shape(prefill, target, proposer, *prompts, jax.random.key(0)))
    names = [kernel.name for kernel in triton_kernels(decode.step, target, proposer, state, mesh=gpus)]
    assert names == [*(CUT if top_p < 1 else ()), *OF_PARTS["match"]]
    assert decisions_of_the_host(decode.step, target, proposer, state, mesh=gpus) == []


@pytest.mark.parametrize("size, dtype, number", [(4096, jnp.bfloat16, 2), (100, jnp.float32, 8)])
def test_sums_over_devices_compile(size, dtype, number, tmp_path):
    """The instructions that write to another device stand once each, in the order of the code."""
    pytest.importorskip("triton")
    x, links = (jax.ShapeDtypeStruct((1, 1, size), dtype), jax.ShapeDtypeStruct((2 * number + 1,), jnp.int32))
    (kernel,) = triton_kernels(lambda x, links: all_reduce.all_reduce(x, links, residual=x), x, links)
    resources = compile_for_sm90(kernel, tmp_path)
    assert resources.spilled_bytes == 0 and resources.stack_bytes == 0 and resources.shared_bytes == 0, resources
    text = (tmp_path / "kernel.ptx").read_text()
    accesses = re.findall(r"(?:ld|st)\.volatile\.global[.\w]*", text)
    next_number = ["ld.volatile.global.u32", "st.volatile.global.u32"]
    expected = next_number + ["st.volatile.global.v2.u32"] * (number - 1) + ["ld.volatile.global.v2.u32"] * (number - 1)
    assert accesses == expected


def test_draws_of_a_draft_model_lower_to_triton():
    keys, _, target = inputs(4, 128256, jnp.bfloat16, shaped=True)
    kernels = triton_kernels(distributions.sample, jax.ShapeDtypeStruct((4, 6), keys.dtype), target)
    assert [kernel.name for kernel in kernels] == KERNELS["match"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(128256, jnp.float32), (2**19, jnp.bfloat16)])
def test_cut_compiles_without_spilling(vocab_size, dtype, tmp_path):
    pytest.importorskip("triton")
    fields = {name: jax.ShapeDtypeStruct((4, 6), jnp.float32) for name in ("temperature", "top_p", "min_p")}
    fields["top_k"] = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    logits = jax.ShapeDtypeStruct((4, 6, vocab_size), dtype)
    kernels = triton_kernels(lambda logits, fields: min_logit(logits, **fields), logits, fields)
    assert [kernel.name for kernel in kernels] == CUT
    for kernel in kernels:
        resources = compile_for_sm90(kernel, tmp_path)
        assert resources.spilled_bytes == 0 and resources.stack_bytes == 0, (kernel.name, resources)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_cut_lowers_with_one_field(name):
    field = {name: jax.ShapeDtypeStruct((6,), jnp.int32 if name == "top_k" else jnp.float32)}
    logits = jax.ShapeDtypeStruct((6, 32000), jnp.bfloat16)
    assert len(triton_kernels(lambda logits, field: min_logit(logits, **field), logits, field)) == 3


def small_decoder():
    config = DecoderConfig(512, 64, 2, 4, 2, 16, 128, 256, transposed=True)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(config))
    return decoder_model(config, params)


def test_models_keep_their_kernels_in_shard_map():
    """A batch split over devices: each multiplies its one token, and attends, in kernels; layers share a function."""
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H200)
    model, by_row = small_decoder(), PartitionSpec("data")
    token = ModelInput(*[jax.ShapeDtypeStruct((2, 1), jnp.int32)] * 2)
    cache = jax.eval_shape(lambda: model.init_cache(2, 64))
    split = jax.shard_map(model.apply, mesh=mesh, in_specs=(PartitionSpec(), by_row, by_row), out_specs=by_row)
    names = [kernel.name for kernel in triton_kernels(split, model.params, token, cache, mesh=mesh)]
    assert (names.count("_linear_kernel"), names.count("decode_attention")) == (5, 1)


def test_what_is_sharded_is_left_to_xla():
    """It splits its own operations; a kernel would have all of the logits and weights gathered on every device."""
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=H200)

    def sharded(x):
        spec = PartitionSpec(*[None] * (x.ndim - 1), "x")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    keys, draft, target = inputs(4, 32000, jnp.bfloat16, shaped=True)
    target = target._replace(logits=sharded(target.logits))
    assert not triton_kernels(verifiers.rejection, keys, draft, target, mesh=mesh)
    assert not triton_kernels(lambda logits: min_logit(logits, top_k=jnp.array(5)), target.logits, mesh=mesh)

    model = small_decoder()
    cache = jax.eval_shape(lambda: model.init_cache(1, 64))
    token = ModelInput(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    assert {k.name for k in triton_kernels(model.apply, model.params, token, cache)} >= {
        "decode_attention",
        "_linear_kernel",
    }
    assert not triton_kernels(model.apply, jax.tree.map(sharded, model.params), token, cache, mesh=mesh)
