"""Mixtures of experts: routers, products of experts against the sum over all experts, and their files."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import ALL, CONFIGS, make_tensor, shapes, write
from jax.sharding import Mesh
from quantized_files import bits4, fp8_stack, fp8_stack_of_outputs, int8, nvfp4_stack
from safetensors.numpy import load_file, save_file
from test_families import GOLDENS, TOLERANCE, difference, whole_logits

from specjax import generate, prefill, proposers
from specjax.models import Checkpoint, load, tensor_parallel
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.experts import (
    ClippedGated,
    Experts,
    Gated,
    Shared,
    SigmoidTopK,
    SoftmaxTopK,
    SparseMixer,
    TopKSigmoid,
    TopKSoftmax,
    Ungated,
    normed_and_logits,
    tiles_of,
)
from specjax.models.layer import LayerConfig
from specjax.models.quantized import NF4, Quantized, dequantize, is_quantized, quantize
from specjax.sampling import Sampling
from specjax.testing import assert_model, chi_square
from specjax.types import ModelInput

pytestmark = pytest.mark.usefixtures("float32_products")
HIDDEN = 24


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_sorting(scores: np.ndarray, number: int) -> np.ndarray:
    """The places of the largest scores of each row, the lower place first where scores are equal."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :number]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def expected_choice(router, params, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(router, TopKSoftmax):
        logits = logits + params["router_bias"]
        chosen = by_sorting(logits, router.num_chosen)
        return chosen, softmax(np.take_along_axis(logits, chosen, 1))
    if isinstance(router, TopKSigmoid):
        chosen = by_sorting(logits, router.num_chosen)
        weights = 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, 1)))
        return chosen, weights / weights.sum(axis=-1, keepdims=True)
    if isinstance(router, SparseMixer):
        chosen, left, weights = by_sorting(logits, router.num_chosen), logits.astype(np.float64), []
        for expert in chosen.T:
            best = np.take_along_axis(left, expert[:, None], 1)
            is_near = best - left <= router.nearness * np.maximum(np.abs(logits), best)
            weights.append(1 / np.where(is_near, np.exp(left - best), 0).sum(axis=1))
            np.put_along_axis(left, expert[:, None], -np.inf, 1)
        return chosen, np.stack(weights, axis=1)
    if isinstance(router, SoftmaxTopK):
        scores, corrected, scale = softmax(logits), logits, 1.0
        if router.has_corrections:
            corrected = scores + params["router_correction"]
    else:
        scores, scale = 1 / (1 + np.exp(-logits)), router.scale
        corrected = scores + params["router_correction"]
        grouped = corrected.reshape(len(logits), router.num_groups, -1)
        of_group = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        kept = by_sorting(of_group, router.num_chosen_groups)
        is_kept = (kept[:, :, None] == np.arange(router.num_groups)).any(axis=1)
        corrected = np.where(is_kept[:, :, None], grouped, -np.inf).reshape(corrected.shape)
    chosen = by_sorting(corrected, router.num_chosen)
    weights = np.take_along_axis(scores, chosen, 1)
    if router.is_renormalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen, weights * scale


ROUTERS = {
    "softmax": SoftmaxTopK(12, 3, is_renormalized=False),
    "renormalized": SoftmaxTopK(12, 4),
    "corrected": SoftmaxTopK(12, 4, has_corrections=True),
    "of the chosen": TopKSoftmax(12, 4),
    "sigmoid": SigmoidTopK(12, 3, scale=2.5),
    "by sigmoids": TopKSigmoid(12, 3, is_renormalized=True),
    "near": SparseMixer(12, 2, nearness=0.6),
    "nearest": SparseMixer(12, 3, nearness=0.0),
    "groups": SigmoidTopK(12, 4, is_renormalized=False, scale=1.5, num_groups=4, num_chosen_groups=2),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_and_weights(name):
    """For random rows, rows of few values, where many experts are equal, and rows whose probabilities underflow."""
    router = ROUTERS[name]
    params = {key: np.round(numbers(*shape, seed=1)) / 2 for key, shape in router.shapes().items()}
    random, ties = numbers(1000, 12), np.random.default_rng(2).integers(0, 3, (200, 12)).astype(np.float32)
    without = jax.tree.map(np.zeros_like, params)
    cases = [(random, params), (random[:50], params), (ties, without), (ties[:50], without)]
    if isinstance(router, SoftmaxTopK) and not router.has_corrections:
        cases.append((200 * random[:50], params))
    for logits, own in cases:
        experts, weights = jax.jit(router.__call__)(own, logits)
        chosen, of_chosen = expected_choice(router, own, logits)
        np.testing.assert_array_equal(experts, chosen)
        np.testing.assert_allclose(weights, of_chosen, rtol=1e-5, atol=1e-37)  # XLA has no subnormal numbers


def test_weights_of_corrected_experts_without_probability():
    """transformers divides by no less than 1e-12."""
    router = SoftmaxTopK(4, 2, has_corrections=True)
    corrections = {"router_correction": jnp.array([5.0, 5, 0, 0])}
    experts, weights = router(corrections, jnp.array([[-150.0, -150, 0, 1]]))
    assert experts.tolist() == [[0, 1]] and weights.tolist() == [[0, 0]]


def test_logits_of_a_router_stay_in_memory():
    """Nothing that compares them computes them again: XLA would sum them in several orders."""
    made = jax.make_jaxpr(lambda router, x: normed_and_logits(router, x)[1])(
        jnp.zeros((256, HIDDEN), jnp.bfloat16), jnp.zeros((9, HIDDEN), jnp.bfloat16)
    )
    last = made.eqns[-1]
    assert last.primitive.name == "optimization_barrier" and last.outvars == made.jaxpr.outvars
    assert last.invars[0] in made.eqns[-2].outvars and made.eqns[-2].primitive.name == "dot_general"


def test_routers_of_codes():
    """A checkpoint may have a router, and the matrix of a factor, in few bits."""
    x, matrices = jnp.asarray(numbers(3, HIDDEN)), [quantize(jnp.asarray(numbers(n, HIDDEN)), "int8") for n in (6, 1)]
    _, *products = normed_and_logits(matrices[0], x, more=matrices[1])
    for got, matrix in zip(products, matrices, strict=True):
        np.testing.assert_allclose(got, x @ dequantize(matrix).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SoftmaxTopK(4, 5), r"num_chosen must be in \[1, num_experts = 4\], got 5"),
        (lambda: SigmoidTopK(12, 2, num_groups=5), "num_groups must divide num_experts = 12, got 5"),
        (lambda: SigmoidTopK(12, 2, num_groups=4, num_chosen_groups=5), r"num_chosen_groups must be in \[1, num_gr"),
        (lambda: SigmoidTopK(12, 2, num_groups=12, num_chosen_groups=2), "num_groups must leave 2 experts or more"),
        (lambda: SigmoidTopK(12, 4, num_groups=4), "num_chosen must be at most 3, the experts of num_chosen_groups"),
        (lambda: Experts(TopKSigmoid(4, 2), weighs_inputs=True), "num_chosen must be 1 where weights multiply inputs"),
    ],
)
def test_routers_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def make_experts(number: int, size: int, **options) -> tuple[Experts, dict]:
    ffn = Experts(SoftmaxTopK(number, 2), **options)
    params = {
        "experts_gate_up": numbers(number, ffn.gate.num_parts * size, HIDDEN),
        "experts_out": numbers(number, HIDDEN, size, seed=1),
    }
    if ffn.has_bias:
        params["experts_gate_up_bias"] = numbers(number, ffn.gate.num_parts * size, seed=2)
    return ffn, params


def dense_sum(ffn: Experts, params: dict, x, experts, weights, dtype=np.float64) -> np.ndarray:
    """The weighted sum over all experts in float64, with weights of 0 for those that were not chosen.

    The values between the two products are rounded to `dtype`.
    """
    params = {name: np.asarray(x, np.float64) for name, x in params.items()}
    weight = np.zeros((len(x), ffn.router.num_experts))
    np.put_along_axis(weight, experts, weights, axis=1)
    gate_up = np.einsum("th,enh->ten", x, params["experts_gate_up"]) + params.get("experts_gate_up_bias", 0)
    half = gate_up.shape[-1] // 2
    both = (gate_up[..., ::2], gate_up[..., 1::2]) if ffn.is_interleaved else (gate_up[..., :half], gate_up[..., half:])
    if isinstance(ffn.gate, ClippedGated):
        gate, up = np.minimum(both[0], ffn.gate.limit), np.clip(both[1], -ffn.gate.limit, ffn.gate.limit)
        inner = gate / (1 + np.exp(-ffn.gate.slope * gate)) * (up + 1)
    elif isinstance(ffn.gate, Ungated):
        inner = np.square(np.maximum(gate_up, 0))
    else:
        inner = both[0] / (1 + np.exp(-both[0])) * both[1]
    inner = inner.astype(dtype).astype(np.float64)
    return np.einsum("te,tei,ehi->th", weight, inner, params["experts_out"])


def choices(number: int, num_rows: int) -> dict[str, np.ndarray]:
    """Experts of rows: spread, all the same, and with experts that no row chose."""
    rng = np.random.default_rng(3)
    spread = np.stack([rng.permutation(number)[:2] for _ in range(num_rows)])
    return {
        "spread": spread,
        "skewed": np.tile(np.array([[number - 1, 0]]), (num_rows, 1)),
        "empty": np.stack([2 * (spread[:, 0] // 2), np.full(num_rows, 1)], axis=1),
    }


@pytest.mark.parametrize("num_rows", [1, 3, 40, 300])
def test_products_equal_the_dense_sum(num_rows):
    """With an odd width, biases, both layouts of gate and up, and without a gate."""
    x, weights = numbers(num_rows, HIDDEN), np.abs(numbers(num_rows, 2, seed=5))
    for options in ({}, {"gate": ClippedGated(), "has_bias": True, "is_interleaved": True}, {"gate": Ungated()}):
        ffn, params = make_experts(6, 7, **options)
        mix = jax.jit(ffn.mix)
        for experts in choices(6, num_rows).values():
            got = mix(params, x, experts.astype(np.int32), weights)
            expected = dense_sum(ffn, params, x, experts, weights)
            np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_a_clip_is_reached():
    gate, up = np.array([-9.0, 9.0], np.float32), np.array([9.0, -9.0], np.float32)
    sigmoid = 1 / (1 + np.exp(-1.702 * np.array([-9.0, 7.0])))
    np.testing.assert_allclose(ClippedGated()(gate, up), np.array([-9.0 * 8, 7.0 * -6]) * sigmoid, rtol=1e-5)
    np.testing.assert_allclose(Gated("silu")(gate, up), gate / (1 + np.exp(-gate)) * up, rtol=1e-5)


@pytest.mark.parametrize("num_rows, num_experts", [(1, 128), (4, 128), (64, 128), (600, 8), (5, 2)])
def test_tiles(num_rows, num_experts):
    """Every pair has a place in one tile of its expert, and no tile has an expert that nobody chose."""
    rng = np.random.default_rng(num_rows)
    experts = np.stack([rng.permutation(num_experts)[:2] for _ in range(num_rows)])
    for chosen in (experts, np.tile(experts[:1], (num_rows, 1))):
        tiles = jax.tree.map(np.asarray, jax.jit(tiles_of, static_argnums=(1, 2, 3))(chosen, num_experts, 8, 128))
        assert set(tiles.expert) == set(chosen.reshape(-1)) and tiles.count.max() <= tiles.num_rows
        found = {}
        for start, count, expert in zip(tiles.start, tiles.count, tiles.expert, strict=True):
            assert not set(found) & set(range(start, start + count))
            found |= dict.fromkeys(range(start, start + count), expert)
        pairs = np.arange(chosen.size)
        np.testing.assert_array_equal([found[place] for place in tiles.place], chosen.reshape(-1))
        np.testing.assert_array_equal(tiles.row[tiles.place], pairs // 2)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_products_with_codes(format):
    ffn, params = make_experts(5, 40)
    codes = {name: quantize(jnp.asarray(x), format) for name, x in params.items()}
    floats = {name: dequantize(x) for name, x in codes.items()}
    x, weights = numbers(9, HIDDEN), np.abs(numbers(9, 2, seed=5))
    experts = choices(5, 9)["spread"].astype(np.int32)
    got, expected = (jax.jit(ffn.mix)(one, x, experts, weights) for one in (codes, floats))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


LAYER = LayerConfig(ffn=Experts(SigmoidTopK(6, 2, scale=2.0), shared=Shared(is_gated=True)))
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}


def two_devices() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))


def mixture_model(expert_size: int = 64):
    sizes = {"mlp_size": 32, "expert_size": expert_size, "shared_size": 32}
    config = DecoderConfig(**SIZES, **sizes, max_length=64, layers=(LAYER,))
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, init_params(config, 0))
    for layer in params["layers"].values():
        layer["router_correction"] = jnp.asarray(numbers(6, seed=4)) / 8
    return decoder_model(config, params)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    """In float32 a row has the same experts and outputs alone and in a batch."""
    model = mixture_model()
    tokens = jnp.arange(30, dtype=jnp.int32).reshape(5, 6)
    positions = jnp.tile(jnp.arange(6, dtype=jnp.int32), (5, 1))
    apply = jax.jit(model.apply)
    together = apply(model.params, ModelInput(tokens, positions), None)[0].logits
    alone = apply(model.params, ModelInput(tokens[3:4], positions[3:4]), None)[0].logits
    np.testing.assert_allclose(together[3:4], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_logits_of_a_mixture_do_not_depend_on_the_calls():
    assert_model(mixture_model())


@pytest.mark.slow
def test_tokens_of_several_steps_follow_the_mixture():
    """With drafts of another mixture, two tokens have the product of the probabilities that whole sequences give."""
    target, rows, size = mixture_model(), 30_000, SIZES["vocab_size"]
    other = replace(target, params=jax.tree.map(lambda x: 0.8 * x, target.params))
    proposer = proposers.draft_model(other, 2)
    requests = Sampling(max_tokens=jnp.full(rows, 3), temperature=jnp.ones(rows))
    prompts, lengths = jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32)
    start = jax.jit(prefill, static_argnames="max_length")
    state = start(target, proposer, prompts, lengths, requests, jax.random.key(0), max_length=4)
    tokens = np.asarray(generate(target, proposer, state).context.tokens)

    pairs = jnp.stack([jnp.zeros(size, jnp.int32), jnp.arange(size, dtype=jnp.int32)], axis=1)
    positions = jnp.tile(jnp.arange(2, dtype=jnp.int32), (size, 1))
    logits = jax.jit(target.apply)(target.params, ModelInput(pairs, positions), None)[0].logits
    law = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    expected = law[0, 0][:, None] * law[:, 1]
    counts = np.bincount(size * tokens[:, 1] + tokens[:, 2], minlength=size**2)
    test = chi_square(counts, expected.ravel() / expected.sum())
    assert test.statistic < test.bound


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4", None])
def test_devices_share_the_width_of_experts(format):
    model = mixture_model()
    if format is not None:
        with_codes = {
            i: {name: quantize(x, format) if "experts" in name else x for name, x in layer.items()}
            for i, layer in model.params["layers"].items()
        }
        model = replace(model, params=dict(model.params) | {"layers": with_codes})
    with jax.default_device(jax.devices("cpu")[0]):
        shared = tensor_parallel(model, two_devices())
    for name in ("experts_gate_up", "experts_out"):
        leaf = shared.params["layers"][0][name]
        leaf = leaf.values if is_quantized(leaf) else leaf
        assert leaf.addressable_shards[0].data.size * 2 == leaf.size
    inputs = ModelInput(jnp.arange(10).reshape(2, 5), jnp.tile(jnp.arange(5), (2, 1)))
    got, expected = (jax.jit(one.apply)(one.params, inputs, None)[0].logits for one in (shared, model))
    np.testing.assert_allclose(got[..., :40], expected, rtol=1e-4, atol=1e-5)


def write_apart(directory, case: str, names: tuple[str, str, str], block: str = "mlp"):
    """The checkpoint of a case with a tensor for each matrix of each expert, as released files have them."""
    write(directory, case)
    tensors = {}
    for name, shape in shapes(case).items():
        values = make_tensor(name, shape)
        if ".experts." not in name:
            tensors[name.replace(".mlp.gate.", f".{block}.gate.")] = values
            continue
        layer = name.split(".mlp.experts.")[0]
        for i, one in enumerate(values):
            parts = zip(names[:2], np.split(one, 2), strict=True) if "gate_up" in name else ((names[2], one),)
            tensors |= {f"{layer}.{block}.experts.{i}.{part}.weight": x.copy() for part, x in parts}
    save_file(tensors, directory / "model.safetensors")
    return directory


QWEN = "gate_proj", "up_proj", "down_proj"


def test_files_with_a_tensor_for_each_expert(tmp_path):
    for case, names, block in (("qwen3_moe", QWEN, "mlp"), ("mixtral", ("w1", "w3", "w2"), "block_sparse_moe")):
        whole, apart = load(write(tmp_path / case, case)), load(write_apart(tmp_path / f"{case}2", case, names, block))
        assert apart.apply.config == whole.apply.config
        jax.tree.map(np.testing.assert_array_equal, apart.params, whole.params)


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [True, False])
def test_experts_are_rounded_when_they_are_read(is_apart, tmp_path):
    directory = write_apart(tmp_path / "a", "qwen3_moe", QWEN) if is_apart else write(tmp_path / "a", "qwen3_moe")
    model = load(directory, quantization="int8")
    layer, floats = model.params["layers"][1], load(directory).params["layers"][1]
    for name in ("experts_gate_up", "experts_out"):
        assert isinstance(layer[name], Quantized)
        expected = quantize(floats[name], "int8")
        jax.tree.map(np.testing.assert_array_equal, layer[name], expected)
    np.testing.assert_array_equal(layer["router"], floats["router"])
    assert difference(whole_logits(model), np.load(GOLDENS / "logits.npz")["qwen3_moe"]) < 0.05
    kept = load(Checkpoint(directory, "int8"), mesh=two_devices())
    assert difference(whole_logits(kept), np.asarray(whole_logits(model))) <= TOLERANCE


def test_bad_files(tmp_path):
    directory = write_apart(tmp_path / "apart", "qwen3_moe", QWEN)
    tensors = load_file(directory / "model.safetensors")
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({name: x for name, x in tensors.items() if name != missing}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {missing} is missing"):
        load(directory)
    save_file(
        tensors | {"model.layers.1.mlp.experts.6.up_proj.weight": tensors[missing]}, directory / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"experts.6.up_proj.weight in .* does not belong to a model of this config"):
        load(directory)


def test_an_expert_that_is_not_in_codes(tmp_path):
    """The expert of floats makes the stack floats; an expert that is missing is named."""
    directory = write_apart(tmp_path / "apart", "qwen3_moe", QWEN)
    floats, codes, rng = load_file(directory / "model.safetensors"), {}, np.random.default_rng(0)
    for name in [name for name in floats if ".experts." in name]:
        if ".experts.3." in name:
            continue
        arrays, floats[name] = int8(rng, *floats[name].shape)
        codes |= {name.removesuffix("weight") + key: x for key, x in arrays.items()}
    save_file(floats, directory / "model.safetensors")
    expected = load(directory).params["layers"][1]["experts_gate_up"]
    group = {"targets": ["Linear"], "format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = CONFIGS["qwen3_moe"] | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    one = {name: x for name, x in floats.items() if ".experts.3." in name}
    others = {name: x for name, x in floats.items() if ".experts." not in name}
    save_file(others | codes | one, directory / "model.safetensors")
    np.testing.assert_array_equal(load(directory).params["layers"][1]["experts_gate_up"], expected)
    save_file(others | codes, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.experts.3.gate_proj.weight is missing"):
        load(directory)


@pytest.mark.parametrize(
    "case, fields, message",
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok in .* must be in \[1, 6\], got 7"),
        ("qwen3_moe", {"num_local_experts": 5}, r"num_local_experts in .* must be 6, the only value"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, r"scoring_func in .* must be absent"),
        ("qwen3_moe", {"router_scale": 2.0}, r"router_scale in .* must be absent"),
        ("qwen3_moe", {"n_group": 2}, r"n_group in .* must be absent or 1"),
        ("mixtral", {"num_local_experts": None}, r"must have the field num_local_experts"),
        ("llama", {"num_local_experts": 4}, r"num_local_experts in .* must be absent"),
    ],
)
def test_fields_that_are_refused(case, fields, message, tmp_path):
    directory = write(tmp_path / case, case)
    (directory / "config.json").write_text(json.dumps(CONFIGS[case] | fields))
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_devices_that_cannot_share_experts():
    with pytest.raises(ValueError, match="expert_size must be a multiple of the 2 devices that share it, got 21"):
        tensor_parallel(mixture_model(expert_size=21), two_devices())


@pytest.mark.parametrize(("case", "block"), [("mistral4", None), ("qwen3_moe", (8, 8))])
def test_stacks_of_experts_in_fp8(tmp_path, case, block):
    """As Mistral Small 4 has them, with scales of activations that nothing reads."""
    directory, rng = write(tmp_path / "codes", case), np.random.default_rng(0)
    tensors = dict(load_file(directory / "model.safetensors"))
    floats = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, n, k = tensors[name].shape
        shape = (number, 1, 1) if block is None else (number, -(-n // block[0]), -(-k // block[1]))
        arrays, floats[name] = fp8_stack(rng, number, n, k, shape, block)
        tensors |= {f"{name}{ending}": x for ending, x in arrays.items()}
        tensors |= {f"{name}_activation_scale": np.ones(number, np.float32)}
    save_file(tensors, directory / "model.safetensors")
    fields = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    (directory / "config.json").write_text(json.dumps(ALL[case] | {"quantization_config": fields}))
    plain = write(tmp_path / "floats", case)
    save_file(floats, plain / "model.safetensors")
    model, expected = load(directory), np.asarray(whole_logits(load(plain)))
    assert isinstance(model.params["layers"][1]["experts_gate_up"], Quantized)
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(whole_logits(load(Checkpoint(directory, keep_codes=False))), expected) <= TOLERANCE
    if block is None:
        assert difference(whole_logits(load(directory, mesh=two_devices())), expected) <= TOLERANCE


def test_stacks_of_experts_in_fp8_with_inputs_first_are_refused(tmp_path):
    directory = write(tmp_path / "model", "llama4")
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    tensors = dict(load_file(directory / "model.safetensors"))
    tensors |= {name: tensors[name].astype(jnp.float8_e4m3fn), f"{name}_scale_inv": np.ones((6, 1, 1), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    fields = ALL["llama4"] | {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"gate_up_proj must be floats, because codes .* this order of its axes"):
        load(directory)


OF_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("case", "fields", "fabricate"),
    [
        ("llama4", OF_MODELOPT | {"quant_algo": "NVFP4"}, nvfp4_stack),
        ("llama4", OF_MODELOPT, lambda rng, *sizes: fp8_stack_of_outputs(rng, *sizes, ())),
        (
            "llama4",
            {"quant_method": "fbgemm_fp8"},
            lambda rng, number, n, k: fp8_stack_of_outputs(rng, number, n, k, (number, 1, n), "_scale"),
        ),
        ("gpt_oss", OF_MODELOPT | {"quant_algo": "NVFP4"}, nvfp4_stack),
    ],
)
def test_stacks_of_experts_with_inputs_first(tmp_path, case, fields, fabricate):
    """As ModelOpt and FBGEMM write the experts of Llama 4, with scales of activations that nothing reads."""
    directory, plain = (write(tmp_path / folder, case) for folder in ("codes", "floats"))
    rng, floats = np.random.default_rng(0), dict(load_file(plain / "model.safetensors"))
    tensors = dict(floats)
    for name in [name for name in floats if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, k, n = floats[name].shape
        arrays, w = fabricate(rng, number, n, k)
        floats[name] = np.ascontiguousarray(w.swapaxes(1, 2))
        tensors |= {f"{name}{ending}": np.array(x) for ending, x in arrays.items()}
        tensors[f"{name}_input_scale"] = np.ones((), np.float32)
    save_file(tensors, directory / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(ALL[case] | {"quantization_config": fields}))
    model, expected = load(directory), np.asarray(whole_logits(load(plain)))
    assert isinstance(model.params["layers"][1]["experts_gate_up"], Quantized)
    assert difference(whole_logits(model), expected) <= TOLERANCE


def test_experts_of_gpt_oss_with_a_layer_for_each_matrix(tmp_path):
    """As Unsloth has them, in NF4."""
    directory, plain = (write(tmp_path / folder, "gpt_oss") for folder in ("codes", "floats"))
    rng, tensors = np.random.default_rng(0), dict(load_file(plain / "model.safetensors"))
    others = {name: x for name, x in tensors.items() if "experts" not in name}
    stored = {name.replace("router.", "router.linear."): x for name, x in others.items()}
    for name, x in [(name, x) for name, x in tensors.items() if name.endswith("_proj") and "experts" in name]:
        number, inputs, outputs = x.shape
        made = [bits4(rng, outputs, inputs, NF4, nested=True) for _ in range(number)]
        for i, (arrays, _) in enumerate(made):
            stored |= {f"{name}s.{i}.{key}": np.ascontiguousarray(value) for key, value in arrays.items()}
            stored[f"{name}s.{i}.bias"] = np.ascontiguousarray(tensors[f"{name}_bias"][i])
        tensors[name] = np.ascontiguousarray(np.stack([w.T for _, w in made]))
    save_file(stored, directory / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    fields = CONFIGS["gpt_oss"] | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (directory / "config.json").write_text(json.dumps(fields))
    model, expected = load(directory), np.asarray(whole_logits(load(plain)))
    assert model.params["layers"][0]["experts_gate_up"].code == "nf4"
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(whole_logits(load(directory, mesh=two_devices())), expected) <= TOLERANCE


def write_mxfp4(directory):
    """The checkpoint of gpt-oss with experts in MXFP4, and the floats for which the codes stand, by name."""
    write(directory, "gpt_oss")
    tensors, floats, rng = load_file(directory / "model.safetensors"), {}, np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        number, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (number, outputs, -(-inputs // 32), 16), dtype=np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:-1], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes > 7, -1, 1)
        values = (values * 2.0 ** (scales[..., None] - 127.0)).astype(np.float32)
        floats[name] = values.reshape(number, outputs, -1)[..., :inputs]
    save_file(tensors, directory / "model.safetensors")
    fields = CONFIGS["gpt_oss"] | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory, floats


@pytest.mark.slow
def test_experts_in_mxfp4_stay_so(tmp_path):
    """The codes stand for exactly the floats of the format, and one device and two compute with them."""
    directory, floats = write_mxfp4(tmp_path / "codes")
    model = load(directory)
    for i, layer in model.params["layers"].items():
        for name, stored in (("experts_gate_up", "gate_up_proj"), ("experts_out", "down_proj")):
            assert isinstance(layer[name], Quantized) and layer[name].code == "e2m1"
            np.testing.assert_array_equal(dequantize(layer[name]), floats[f"model.layers.{i}.mlp.experts.{stored}"])
    tensors = load_file(write(tmp_path / "floats", "gpt_oss") / "model.safetensors")
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in floats.items()}
    save_file(tensors | turned, tmp_path / "floats" / "model.safetensors")
    expected = np.asarray(whole_logits(load(tmp_path / "floats")))
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(whole_logits(load(directory, mesh=two_devices())), expected) <= TOLERANCE
    unpacked = load(Checkpoint(directory, keep_codes=False))
    assert not any(is_quantized(x) for x in jax.tree.leaves(unpacked.params, is_leaf=is_quantized))
    assert difference(whole_logits(unpacked), expected) <= TOLERANCE
