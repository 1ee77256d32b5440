"""Matrices in every layout of quantised checkpoints, read and compared bit by bit with the written formulas."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_files as files

from specjax.models.config_file import ConfigFile
from specjax.models.quantization import scheme_of
from specjax.models.quantization.linear_files import in_memory
from specjax.models.quantized import NF4, dequantize


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def scheme(**fields):
    return scheme_of(ConfigFile(Path("config.json"), fields, "quantization_config."))


def read(config, arrays, shape, name="m", inputs_first=False):
    named = {name + (key if key[:1] in ("", "_", ".") else f".{key}"): value for key, value in arrays.items()}
    linear, how = in_memory(name, shape, named, np.dtype(np.float32), inputs_first), scheme(**config)
    assert how.is_quantized(linear)
    weight = how.read(linear)
    assert how.shape(replace(linear, shape=())) == shape  # from the headers alone
    return weight


def check(config, arrays, expected, inputs_first=False, matrix="m", **attributes):
    weight = read(config, arrays, expected.shape, matrix, inputs_first)
    found = np.asarray(dequantize(weight, jnp.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    for name, value in attributes.items():
        assert getattr(weight, name) == value, name
    return weight


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, 32), (8, 200, 32), (24, 40, -1)])
def test_gptq_with_zeros_of_both_versions(rng, version, n, k, group):
    arrays, w = files.gptq(rng, n, k, group, version=version)
    config = GPTQ | {"group_size": group, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    assert check(config, arrays, w, bits=4, code="int").order is None


def test_gptq_of_8_bits(rng):
    arrays, w = files.gptq(rng, 12, 72, 32, bits=8)
    check(GPTQ | {"bits": 8}, arrays, w, bits=8)
    arrays, w = files.gptq(rng, 12, 72, 32, bits=8, symmetric=True)
    assert check(GPTQ | {"bits": 8, "sym": True}, arrays, w).zero is None


def test_gptq_with_inputs_in_the_order_of_activations(rng):
    arrays, w = files.gptq(rng, 16, 128, 32, order=True)
    weight = check(GPTQ | {"desc_act": True}, arrays, w)
    assert weight.order is not None and not np.array_equal(weight.order, np.arange(128))
    check(GPTQ, arrays, w)  # a stored order counts, whatever desc_act says


@pytest.mark.parametrize(("label", "stored"), [("gptq", 7), ("gptq", 8), ("gptq_v2", 8), ("gptq_v2", 7)])
def test_symmetric_gptq_has_the_middle_as_zero_whatever_is_stored(rng, label, stored):
    arrays, w = files.gptq(rng, 16, 64, 32, symmetric=True, stored_zero=stored)
    assert check(GPTQ | {"sym": True, "checkpoint_format": label}, arrays, w).zero is None


def test_gptq_that_is_not_symmetric_keeps_a_stored_eight(rng):
    arrays, _ = files.gptq(rng, 16, 64, 32, symmetric=True, stored_zero=8)
    assert (read(GPTQ, arrays, (16, 64)).zero == 9).all()


@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, 32), (8, 100, 32), (32, 48, -1)])
def test_awq(rng, n, k, group):
    arrays, w = files.awq(rng, n, k, group)
    check(AWQ | {"group_size": group}, arrays, w, bits=4)
    short = {"quant_method": "awq", "w_bit": 4, "q_group_size": group}
    check(short, arrays, w)
    arrays, w = files.awq(rng, n, k, group, symmetric=True)
    check(AWQ | {"group_size": group, "zero_point": False, "sym": True}, arrays, w, bits=4)  # as AutoRound writes it


@pytest.mark.parametrize(("n", "k"), [(256, 128), (130, 200), (7, 5)])
def test_fp8_with_scales_of_blocks(rng, n, k):
    arrays, w = files.fp8(rng, n, k, (128, 128))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    powers = rng.integers(-9, 0, arrays["weight_scale_inv"].shape)
    rounded = arrays | {"weight_scale_inv": np.exp2(powers).astype(ml_dtypes.float8_e8m0fnu)}
    wide = np.exp2(powers)[np.arange(n)[:, None] // 128, np.arange(k)[None] // 128]
    check(config | {"fmt": "float8_e4m3fn"}, arrays, w)
    check(config | {"scale_fmt": "ue8m0"}, rounded, arrays["weight"].astype(np.float32) * wide.astype(np.float32))
    check(config, arrays, w, code="e4m3", group=(128, 128 if k > 128 else 0))


@pytest.mark.parametrize("shape", [(), (1,), (12,), (12, 1)])
def test_fp8_with_scales_of_the_whole_or_of_outputs(rng, shape):
    arrays, w = files.fp8(rng, 12, 20, name="weight_scale", shape=shape)
    check({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, arrays | {"input_scale": np.float32(1)}, w)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (3, 2, 1)])
def test_fp8_of_a_stack(rng, shape):
    """Mistral Small 4 has a scale for each expert, and transformers 5 writes one for gate and one for up."""
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    arrays, w = files.fp8_stack(rng, 3, 12, 20, shape)
    check(config, arrays | {"_activation_scale": np.ones(3, np.float32)}, w)
    with pytest.raises(ValueError, match=r"m_scale_inv must have shape \(3, 1, 1\) .* got \(2, 1, 1\)"):
        read(config, arrays | {"_scale_inv": np.ones((2, 1, 1), np.float32)}, w.shape)


def test_fp8_of_a_stack_in_blocks(rng):
    arrays, w = files.fp8_stack(rng, 3, 40, 70, (3, 2, 3), (32, 32))
    check({"quant_method": "fp8", "weight_block_size": [32, 32]}, arrays, w, code="e4m3", group=(32, 32))


def test_mxfp4_of_a_matrix_and_of_a_stack(rng):
    arrays, w = files.mxfp4(rng, 6, 96)
    check({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, arrays, w, code="e2m1", group=(1, 32))
    arrays, w = files.mxfp4(rng, 6, 64, experts=3)
    check({"quant_method": "mxfp4"}, arrays, w)


@pytest.mark.parametrize("is_nested", [False, True])
def test_modelopt(rng, is_nested):
    def named(algorithm):
        fields = {"quant_algo": algorithm}
        return {"quantization": fields} if is_nested else {"quant_method": "modelopt"} | fields

    arrays, w = files.fp8(rng, 12, 20, name="weight_scale")
    check(named("FP8"), arrays | {"input_scale": np.float32(1)}, w)
    arrays, w = files.nvfp4(rng, 12, 50, "modelopt")
    for algorithm in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"):
        check(named(algorithm), arrays, w, code="e2m1", group=(1, 16))
    with pytest.raises(ValueError, match="pre_quant_scale"):
        read(named("NVFP4"), arrays | {"pre_quant_scale": np.ones(50, np.float32)}, (12, 50))


@pytest.mark.parametrize("inputs_first", [True, False])
def test_stacks_of_modelopt_in_nvfp4(rng, inputs_first):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    arrays, w = files.nvfp4_stack(rng, 3, 12, 50, inputs_first)
    check(config, arrays | {"_input_scale": np.float32(1)}, w, inputs_first, code="e2m1", group=(1, 16))
    with pytest.raises(ValueError, match="m_pre_quant_scale must be absent"):
        read(config, arrays | {"_pre_quant_scale": np.ones(50, np.float32)}, w.shape, inputs_first=inputs_first)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1, 1), (3, 12), (3, 1, 12), (3, 12, 1)])
def test_stacks_in_fp8_with_inputs_first(rng, shape):
    """ModelOpt has one scale or more for a stack, and FBGEMM has one for each output."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    arrays, w = files.fp8_stack_of_outputs(rng, 3, 12, 20, shape)
    check(config, arrays, w, inputs_first=True, code="e4m3")
    with pytest.raises(ValueError, match=r"m_weight_scale must have shape \(3, 12, 1\) .* got \(2,\)"):
        read(config, arrays | {"_weight_scale": np.ones(2, np.float32)}, w.shape, inputs_first=True)
    arrays, w = files.fp8_stack_of_outputs(rng, 3, 12, 20, shape, "_scale")
    check({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, arrays, w, inputs_first=True)


def test_fbgemm_fp8(rng):
    arrays, w = files.fp8(rng, 12, 20, name="weight_scale", shape=(12, 1))
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    check(config, arrays, w, code="e4m3")


def named_by_lines(arrays):
    """Arrays whose names begin with a line and stand after a point, unlike arrays of a stack."""
    return {f".{name}": x for name, x in arrays.items()}


def quark(**weight):
    usual = {"weight": weight, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}
    return {
        "quant_method": "quark",
        "global_quant_config": usual,
        "layer_quant_config": {"*k_proj": usual | {"output_tensors": {"dtype": "fp8_e4m3"}}},
        "layer_type_quant_config": {},
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder", "kv_cache_group": ["*k_proj"]},
    }


PER_MATRIX = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None}
OF_MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}


@pytest.mark.parametrize("shape", [(), (12,), (12, 1)])
def test_quark_in_fp8(rng, shape):
    arrays, w = files.fp8(rng, 12, 20, name="weight_scale", shape=shape)
    fields = quark(**PER_MATRIX | ({"qscheme": "per_channel", "ch_axis": 0} if shape else {}))
    check(fields, arrays | {"input_scale": np.float32(1), "output_scale": np.float32(1)}, w, code="e4m3")


def test_quark_in_mxfp4(rng):
    arrays, w = files.mxfp4_packed(rng, 12, 64, "weight")
    check(quark(**OF_MX), arrays, w, code="e2m1", group=(1, 32))


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}}


@pytest.mark.parametrize("shape", [(), (1, 1), (12,), (12, 1), (3, 2)])
def test_torchao_in_fp8(rng, shape):
    """With a scale of the matrix, of each output, or of a block."""
    arrays, w = files.torchao(rng, 12, 40, shape)
    check(TORCHAO, named_by_lines(arrays), w, code="e4m3")


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 4)])
def test_torchao_in_int8(rng, shape, has_zeros):
    arrays, w = files.torchao(rng, 12, 128, shape, is_int=True, has_zeros=has_zeros)
    check(TORCHAO, named_by_lines(arrays), w, code="int", bits=8)


def test_torchao_that_is_refused(rng):
    arrays, _ = files.torchao(rng, 12, 128, (12, 4), is_int=True, has_zeros=True)
    for name, value, message in (
        (
            "scale",
            np.ones((12, 5), np.float32),
            "m._weight_scale must have a scale for each .* got \\(12, 5\\)",
        ),
        ("qdata", np.ones((12, 64), np.int8), "m._weight_qdata must have shape \\(12, 128\\)"),
        ("qdata", np.ones((12, 128), np.uint8), "m._weight_qdata must be of dtype float8_e4m3fn or int8"),
        ("zero_point", np.ones(12, np.int8), "m._weight_zero_point must have as many numbers .* 48, got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            read(TORCHAO, named_by_lines(arrays | {f"_weight_{name}": value}), (12, 128))


FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("n", "k"), [(6, 128), (10, 96), (3, 40)])
def test_bitsandbytes_of_4_bits(rng, nested, n, k):
    for kind, table in (("nf4", NF4), ("fp4", FP4)):
        arrays, w = files.bits4(rng, n, k, table, nested, kind)
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        check(config, arrays, w, code=kind)


def test_bitsandbytes_of_8_bits(rng):
    arrays, w = files.llm_int8(rng, 6, 40)
    check({"quant_method": "bitsandbytes", "load_in_8bit": True}, arrays, w, bits=8)


AUTO_ROUND = GPTQ | {"quant_method": "auto-round"}


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel"])
def test_auto_round_with_zeros_of_both_versions(rng, packing):
    arrays, w = files.gptq(rng, 16, 64, 32, version=1 if packing == "auto_round:auto_gptq" else 2)
    check(AUTO_ROUND | {"packing_format": packing}, arrays, w)


@pytest.mark.parametrize(
    ("fields", "fabricate"),
    [
        ({"data_type": "mx_fp", "bits": 4}, files.mxfp4_packed),
        ({"data_type": "mx_fp_rceil", "bits": 8}, files.mxfp8),
        ({"data_type": "nv_fp", "bits": 4}, lambda rng, n, k: files.nvfp4(rng, n, k, "compressed-tensors")),
        ({"data_type": "fp", "bits": 8}, lambda rng, n, k: files.fp8(rng, n, k, name="weight_scale", shape=(n, 1))),
    ],
)
def test_auto_round_of_floats(rng, fields, fabricate):
    arrays, w = fabricate(rng, 12, 64)
    check(AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"} | fields, arrays, w)


def test_names_of_auto_round_go_before_patterns(rng):
    """A matrix may have other bits, by its name or by a pattern, and 16 bits are floats."""
    tables = {".*": {"bits": 8}, "m": {"bits": 4}, "other": {"bits": 16, "data_type": "float"}}
    fields = AUTO_ROUND | {"data_type": "mx_fp", "extra_config": tables}
    arrays, w = files.mxfp4_packed(rng, 12, 64)
    check(fields, arrays, w, bits=4)
    arrays, w = files.mxfp8(rng, 12, 64)
    check(fields | {"extra_config": {".*": {"bits": 8}}}, arrays, w, bits=8)


@pytest.mark.parametrize(
    ("pattern", "bits"),
    [
        (r"layers\.[01]\.mlp", 8),
        ("^model.*up_proj$", 8),
        ("^mlp", 4),
        ("layers.1.mlp", 4),
        ("model.layers.1.mlp.up_proj", 8),
    ],
)
def test_patterns_of_auto_round_match_parts_of_names(rng, pattern, bits):
    """A name without the characters of a pattern is a whole name."""
    arrays, w = (files.mxfp8 if bits == 8 else files.mxfp4_packed)(rng, 12, 64)
    fields = AUTO_ROUND | {"data_type": "mx_fp", "extra_config": {pattern: {"bits": 8}}}
    check(fields, arrays, w, matrix="model.layers.1.mlp.up_proj", bits=bits)


def groups(layout, targets=("Linear",), **weights):
    return {"targets": list(targets), "format": layout, "weights": weights}


def compressed(*tables, ignore=("lm_head",), layout="mixed-precision"):
    named = {f"group_{i}": table for i, table in enumerate(tables)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, "ignore": list(ignore)}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 128, 32), (13, 100, 32), (9, 21, None)])
def test_packed_integers(rng, bits, symmetric, n, k, group):
    arrays, w = files.packed(rng, n, k, group, bits=bits, symmetric=symmetric)
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    check(compressed(groups("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy)), arrays, w, bits=bits)


def test_packed_integers_in_the_order_of_activations(rng):
    arrays, w = files.packed(rng, 16, 128, 32, symmetric=False, order=True)
    weights = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32, "actorder": "group"}
    assert check(compressed(groups("pack-quantized", **weights)), arrays, w).order is not None
    check(compressed(groups("pack-quantized", **weights | {"actorder": None})), arrays, w)  # a stored order counts
    arrays, w = files.packed(rng, 16, 128, 32, symmetric=False)
    with pytest.raises(ValueError, match="weight_zero_point must be of zeros where `symmetric` is true"):
        read(compressed(groups("pack-quantized", **weights | {"symmetric": True})), arrays, w.shape)
    del arrays["weight_shape"]  # as files for other tools may lack it
    weight = check(compressed(groups("pack-quantized", **weights | {"actorder": "weight"})), arrays, w)
    assert weight.order is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "symmetric"), [(None, True), (None, False), (32, True)])
def test_integers_in_bytes(rng, group, symmetric, bits):
    arrays, w = files.int8(rng, 9, 70, group, symmetric, bits)
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    config = compressed(groups("int-quantized", num_bits=bits, symmetric=symmetric, **strategy))
    check(config, arrays, w, bits=bits)
    with pytest.raises(ValueError, match=r"m.weight_scale must have shape \(9, \d\) .* got \(1,\)"):
        read(config, arrays | {"weight_scale": arrays["weight_scale"][0, :1]}, w.shape)


def test_floats_of_8_bits(rng):
    weights = {"num_bits": 8, "type": "float", "symmetric": True}
    for shape, strategy in (((1,), "tensor"), ((12, 1), "channel")):
        arrays, w = files.fp8(rng, 12, 20, name="weight_scale", shape=shape)
        check(compressed(groups("float-quantized", strategy=strategy, **weights)), arrays, w, code="e4m3")
    arrays, w = files.fp8(rng, 130, 200, (128, 128), name="weight_scale")
    blocks = groups("float-quantized", strategy="block", block_structure=[128, 128], **weights)
    check(compressed(blocks), arrays, w, group=(128, 128))
    check(compressed(blocks | {"format": "naive-quantized"}), arrays, w)


def test_integers_that_have_more_bits_than_the_config_says(rng):
    arrays, w = files.int8(rng, 9, 70)
    with pytest.raises(ValueError, match=r"m.weight must be of codes in \[-8, 7\]"):
        read(compressed(groups("int-quantized", num_bits=4, strategy="channel")), arrays, w.shape)


def test_floats_of_8_bits_with_exponents(rng):
    arrays, w = files.mxfp8(rng, 12, 80)
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    check(compressed(groups("mxfp8-quantized", **weights)), arrays, w, code="e4m3", group=(1, 32))
    check({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}}, arrays, w, code="e4m3", group=(1, 32))


def test_codes_of_e2m1(rng):
    arrays, w = files.nvfp4(rng, 12, 50, "compressed-tensors")
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    check(compressed(groups("nvfp4-pack-quantized", **weights)), arrays, w, code="e2m1", group=(1, 16))
    arrays, w = files.mxfp4_packed(rng, 12, 80)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    check(compressed(groups("mxfp4-pack-quantized", **weights)), arrays, w, code="e2m1", group=(1, 32))


def test_a_matrix_belongs_to_the_group_that_names_it_closest(rng):
    by_class = groups("int-quantized", num_bits=8, strategy="channel")
    by_pattern = groups("pack-quantized", ["re:.*down_proj"], num_bits=4, strategy="channel")
    by_name = groups("pack-quantized", ["a.down_proj"], num_bits=8, strategy="channel")
    how = scheme(**compressed(by_class, by_pattern, by_name, ignore=["lm_head", "re:.*gate$"]))

    def bits(name):
        linear = in_memory(name, (8, 64), {}, np.dtype(np.float32))
        if not how.is_quantized(linear):
            return None
        group = how._group_of(linear)
        return group.format, group.bits

    assert bits("a.up_proj") == ("int-quantized", 8)
    assert bits("b.down_proj") == ("pack-quantized", 4)
    assert bits("a.down_proj") == ("pack-quantized", 8)
    assert bits("lm_head") is None and bits("mlp.gate") is None
    assert bits("mlp.gate_proj") == ("int-quantized", 8)


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method.*aqlm"),
        (GPTQ | {"bits": 3}, "bits.*4 or 8.*got 3"),
        (GPTQ | {"dynamic": {"+:a": {"bits": 3}}}, r"dynamic\.\+:a\.bits.*4 or 8.*got 3"),
        (GPTQ | {"dynamic": {"+:a": 8}}, "dynamic.*object.*got 8 for .:a"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic.*patterns of names"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq:2"}, "packing_format.*auto_gptq:2"),
        (quark(dtype="int4", qscheme="per_group"), "global_quant_config.weight.dtype .* 'fp8_e4m3' or 'fp4', .*int4"),
        (quark(**OF_MX | {"group_size": 16}), "global_quant_config.weight.group_size .* must be 32, .* got 16"),
        (quark(**PER_MATRIX | {"qscheme": "per_group"}), "weight.qscheme .* must be 'per_tensor' or 'per_channel'"),
        (quark(**PER_MATRIX | {"is_dynamic": True}), "weight.is_dynamic .* must be False"),
        (quark(**OF_MX) | {"layer_quant_config": {"*up": {"weight": [OF_MX, OF_MX]}}}, "layer_quant_config.*weight"),
        (quark(**OF_MX) | {"algo_config": [{"name": "rotation"}]}, "algo_config .* must be absent"),
        (AUTO_ROUND | {"data_type": "mx_int"}, "data_type .* must be 'int' or 'mx_fp' .* got 'mx_int'"),
        (AUTO_ROUND | {"data_type": "nv_fp", "bits": 8}, "bits .* must be 4 for 'nv_fp', got 8"),
        (AUTO_ROUND | {"spinquant_config": {"r4": True}}, "spinquant_config.*absent"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 2}}}, r"extra_config\.a\.bits.*4 or 8.*got 2"),
        (AUTO_ROUND | {"extra_config": {"a[": {"bits": 8}}}, "extra_config.*patterns of names"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        (GPTQ | {"group_size": 0}, "group_size"),
        (AWQ | {"version": "gemv"}, "version.*gemv"),
        (AWQ | {"bits": 8}, "bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt.*e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo.*W4A8_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size.*must be 16.*got 32"),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quantized_layers.*W4A8_AWQ.*for a"),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 8}}}, "group_size.*got 8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type"),
        (compressed(groups("marlin-24", num_bits=4)), "format.*marlin-24"),
        (compressed(groups("pack-quantized", num_bits=3)), "num_bits"),
        (compressed(groups("pack-quantized", num_bits=4, strategy="group")), "group_size"),
        (compressed(groups("pack-quantized", num_bits=4, strategy="token")), "strategy.*token"),
        (compressed(groups("pack-quantized", num_bits=4, strategy="channel", dynamic=True)), "weights.dynamic"),
        (compressed(groups("pack-quantized", num_bits=4) | {"input_activations": {"actorder": "group"}}), "actorder"),
        (compressed(groups("pack-quantized", num_bits=4) | {"output_activations": {"num_bits": 8}}), "output_act"),
        (compressed(groups("pack-quantized", num_bits=4)) | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (compressed(groups("pack-quantized", num_bits=4)) | {"transform_config": {"a": 1}}, "transform_config"),
        (compressed(groups("pack-quantized", ["re:("], num_bits=4)), "targets.*re:"),
        (compressed(groups("pack-quantized", [], num_bits=4)), "targets.*got none"),
        (compressed(), "config_groups"),
    ],
)
def test_a_field_that_is_not_supported_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        scheme(**config)


def damaged(name, change):
    return lambda arrays: arrays | {name: change(arrays[name])}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda arrays: {k: v for k, v in arrays.items() if k != "scales"}, "m.scales is missing"),
        (damaged("qweight", lambda x: x[:-1]), "m.qweight must have shape"),
        (damaged("qzeros", lambda x: x[:, :1]), "m.qzeros must have shape"),
        (damaged("scales", lambda x: x.astype(np.float64)), "m.scales must be of dtype"),
        (damaged("scales", lambda x: np.where(x == x.max(), np.float16(np.nan), x)), "m.*finite"),
        (damaged("scales", lambda x: np.where(x == x.max(), np.float16(0), x)), "m.*0"),
        (damaged("g_idx", lambda x: np.zeros_like(x)), "m.g_idx must name groups of 32"),
    ],
)
def test_a_damaged_matrix_is_named(rng, damage, message):
    arrays, _ = files.gptq(rng, 16, 64, 32)
    with pytest.raises(ValueError, match=message):
        read(GPTQ, damage(arrays), (16, 64))


def test_a_block_that_is_larger_than_a_matrix(rng):
    """The number in the file, which may be huge, costs no memory."""
    arrays, expected = files.bits4(rng, 6, 128, NF4, True)
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.dumps(json.loads(arrays[name].tobytes()) | {"nested_blocksize": 10**30}).encode()
    found = read({"quant_method": "bitsandbytes"}, arrays | {name: np.frombuffer(state, np.uint8)}, (6, 128))
    np.testing.assert_array_equal(dequantize(found), expected)


def test_damaged_states_of_bitsandbytes(rng):
    arrays, _ = files.bits4(rng, 6, 128, NF4, True)
    state = "weight.quant_state.bitsandbytes__nf4"
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for content, message in ((b"{", "JSON"), (b'{"quant_type": "nf4"}', "shape"), (b"[]", "quant_type")):
        with pytest.raises(ValueError, match=message):
            read(config, arrays | {state: np.frombuffer(content, np.uint8)}, (6, 128))
    with pytest.raises(ValueError, match="absmax must be of dtype uint8, got float32"):  # the state says codes
        read(config, arrays | {"weight.absmax": np.ones(12, np.float32)}, (6, 128))
    with pytest.raises(ValueError, match="NF4"):
        read(config, arrays | {"weight.quant_map": NF4[::-1].copy()}, (6, 128))
