"""Checkpoints that `specjax quantize` writes, as specjax and compressed-tensors load them."""

import json

import families
import hybrids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_checkpoint import make_tensors, write
from test_experts import QWEN, write_apart
from test_experts import write as write_experts
from test_quantized_checkpoints import BASE, is_quantized, logits, quantized_leaves

from specjax import models
from specjax.cli import main
from specjax.models.quantize_files import write_quantized
from specjax.models.quantized import dequantize, quantize


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_written_checkpoint_is_the_one_that_is_rounded_when_it_is_read(tmp_path, format, num_shards, capsys):
    (tmp_path / "in").mkdir()
    path = write(
        tmp_path / "in", BASE | {"intermediate_size": 128}, make_tensors(BASE | {"intermediate_size": 128}), num_shards
    )
    assert main(["quantize", str(path), "--format", format, "--out", str(tmp_path / "out")]) == 0
    assert "MB of weights in place of" in capsys.readouterr().out
    written, rounded = models.load(tmp_path / "out"), models.load(path, quantization=format)
    assert len(quantized_leaves(written)) == 8
    for one, other in zip(*(jax.tree.leaves(m.params, is_leaf=is_quantized) for m in (written, rounded)), strict=True):
        floats = [np.asarray(dequantize(x) if is_quantized(x) else x) for x in (one, other)]
        np.testing.assert_array_equal(*floats)
    np.testing.assert_array_equal(logits(written), logits(rounded))
    if format == "int4":  # matrices of 64 inputs have groups of 64, of 128 have 128, queries have 8 bits
        config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        sizes = [group["weights"]["group_size"] for group in config["config_groups"].values()]
        assert set(sizes) == {64, 128, None}
        quantized = models.load(tmp_path / "out").params["layers"][0]
        assert [quantized[name].bits for name in ("qkv", "attention_out", "mlp_out")] == [8, 4, 4]


@pytest.mark.slow
def test_an_embedded_checkpoint_with_its_tokenizer(tmp_path):
    write_quantized(models.Checkpoint(models.EMBEDDED / "draft"), tmp_path / "out", "int8")
    checkpoint = models.Checkpoint(tmp_path / "out")
    assert checkpoint.tokenizer().encode("def").ids
    assert quantized_leaves(models.load(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_written_files_against_compressed_tensors(tmp_path, format):
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors import FloatQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file as load_torch

    (tmp_path / "in").mkdir()
    tensors = make_tensors(BASE)
    write_quantized(models.Checkpoint(write(tmp_path / "in", BASE, tensors)), tmp_path / "out", format)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(config).config_groups.values()
    scheme = next(group for group in groups if group.weights.num_bits == (4 if format == "int4" else 8))
    name = "model.layers.0.self_attn.o_proj."
    stored = load_torch(tmp_path / "out" / "model.safetensors")
    stored = {key.removeprefix(name): x for key, x in stored.items() if key.startswith(name)}
    compressor = FloatQuantizationCompressor if format == "fp8" else PackedQuantizationCompressor
    found = compressor.decompress(stored, scheme)["weight"].to(torch.float32).numpy()
    expected = np.asarray(dequantize(quantize(jnp.asarray(tensors[name + "weight"]), format)))
    tolerance = 2**-8 if format == "int4" else 0  # scales of int4 are bfloat16, in which the package multiplies
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_experts_get_matrices_of_their_own(tmp_path, case):
    """One tensor of all experts and a tensor for each matrix give the same files, with the names of other engines."""
    names = QWEN if case == "qwen3_moe" else ("w1", "w3", "w2")
    block = "mlp" if case == "qwen3_moe" else "block_sparse_moe"
    paths = write_experts(tmp_path / "whole", case), write_apart(tmp_path / "apart", case, names, block)
    found = []
    for path in paths:
        write_quantized(models.Checkpoint(path), tmp_path / f"{path.name} int8", "int8")
        found.append(load_file(tmp_path / f"{path.name} int8" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(f"model.layers.1.{block}.experts.1.{name}.weight_packed" in found[0] for name in names)
    for key, x in found[0].items():
        np.testing.assert_array_equal(x, found[1][key])
    config = json.loads((tmp_path / "whole int8" / "config.json").read_text())["quantization_config"]
    assert f"model.layers.1.{block}.gate" in config["ignore"]
    written, rounded = models.load(tmp_path / "whole int8"), models.load(paths[0], quantization="int8")
    assert is_quantized(written.params["layers"][1]["experts_out"])
    for one, other in zip(*(jax.tree.leaves(m.params) for m in (written, rounded)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "case"),
    [
        (families.write, "opt_post_norm"),
        (families.write, "gemma4_small"),
        (families.write, "gemma4_moe"),
        (families.write, "deepseek_v3"),
        (hybrids.write, "nemotron_h_latents"),
        (families.write, "minimax_m2"),
        (families.write, "granitemoe_swa"),
        (families.write, "laguna"),
        (families.write, "llama4_between"),
        (families.write, "phi"),
        (families.write, "starcoder2"),
        (families.write, "gpt_neox"),
        (families.write, "falcon"),
    ],
)
def test_all_matrices_of_a_family_are_rounded_as_when_it_is_read(tmp_path, write, case):
    path = write(tmp_path / "in", case)
    write_quantized(models.Checkpoint(path), tmp_path / "out", "int8")
    written, rounded = models.load(tmp_path / "out"), models.load(path, quantization="int8")
    leaves = [jax.tree.leaves(m.params, is_leaf=is_quantized) for m in (written, rounded)]
    for one, other in zip(*leaves, strict=True):
        assert is_quantized(one) == is_quantized(other)
        np.testing.assert_array_equal(*(np.asarray(dequantize(x) if is_quantized(x) else x) for x in (one, other)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_experts_whose_second_matrix_is_copied(tmp_path, case):
    """It has 20 or 48 inputs, which groups of 32 do not divide, and the first one has 32."""
    path = families.write(tmp_path / "in", case)
    write_quantized(models.Checkpoint(path), tmp_path / "out", "int4")
    written, floats = models.load(tmp_path / "out").params["layers"][1], models.load(path).params["layers"][1]
    assert is_quantized(written["experts_gate_up"])
    np.testing.assert_array_equal(written["experts_out"], floats["experts_out"])


@pytest.mark.slow
def test_stacks_of_floats_that_no_list_ignores(tmp_path):
    """They are no modules, so other tools do not name them. Their biases lie in another file."""
    path = families.write(tmp_path / "in", "gpt_oss")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    files = {name: f"{name.endswith('bias')}.safetensors" for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        save_file({name: x for name, x in tensors.items() if files[name] == file}, path / file)
    write_quantized(models.Checkpoint(path), tmp_path / "out", "int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [name for name in ignored if not name.endswith("_proj")]
    assert len(config["quantization_config"]["ignore"]) < len(ignored)
    expected = models.load(tmp_path / "out").params
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "out").params, expected)


def test_towers_for_images_are_copied(tmp_path):
    (tmp_path / "in").mkdir()
    names = [f"{place}vision_tower.encoder.layers.0.self_attn.q_proj.weight" for place in ("", "model.")]
    tower = {name: np.ones((64, 64), np.float32) for name in names}
    path = write(tmp_path / "in", BASE, make_tensors(BASE) | tower)
    write_quantized(models.Checkpoint(path), tmp_path / "out", "int8")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    for name in names:
        np.testing.assert_array_equal(stored[name], tower[name])
        assert name.removesuffix(".weight") in ignored


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    path = write(tmp_path / "in", BASE, make_tensors(BASE))
    write_quantized(models.Checkpoint(path), tmp_path / "out", "int8")
    with pytest.raises(ValueError, match="out must be a new or an empty directory"):
        write_quantized(models.Checkpoint(path), tmp_path / "out", "int8")
    with pytest.raises(ValueError, match="must be floats in safetensors files, to be rounded"):
        write_quantized(models.Checkpoint(tmp_path / "out"), tmp_path / "other", "int8")
    assert main(["quantize", str(tmp_path / "none"), "--format", "int8", "--out", str(tmp_path / "b")]) == 2
    assert "model must be a directory" in capsys.readouterr().err
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in names and "lm_head.weight" in names
    name = "model.layers.1.mlp.up_proj.weight"
    stored = load_file(path / "model.safetensors")
    save_file(stored | {name: stored[name] * np.nan}, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {name} in .*model.safetensors: weight must be finite"):
        write_quantized(models.Checkpoint(path), tmp_path / "nan", "int8")
    assert not (tmp_path / "nan").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="weight must be finite"):
        write_quantized(models.Checkpoint(path), tmp_path / "empty", "int8")
    assert not list((tmp_path / "empty").iterdir())
