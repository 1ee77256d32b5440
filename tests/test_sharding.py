"""Checkpoints that are read to the devices of a mesh part by part: the bytes read, the models, and refused meshes."""

import json
import math
import weakref

import heads
import jax
import numpy as np
import pytest
import test_eagle
from families import CONFIGS, write
from jax.sharding import Mesh, SingleDeviceSharding
from test_families import GOLDENS, TOLERANCE, difference, incremental_logits, whole_logits

from specjax import proposers
from specjax.models import data_parallel, load, tensor_parallel, tensors, with_feature_layers

# Families whose devices share the numbers of a norm, with heads of several sizes and numbers, with another network,
# with activations that have parameters, with a bias of logits, and with queries, keys and values of heads together.
OTHERS = "olmo3", "gemma4", "gemma4_small", "gemma4_moe", "laguna", "afmoe", "hunyuan_moe", "llama4"
OTHERS += "gpt2_untied", "apertus", "phi_default", "gpt_neox_serial", "olmo", "falcon_one_norm"
FAST = "llama_bias", "gemma2", "opt_post_norm", "falcon_multi_query"  # of the families


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    """A machine with one GPU has several CPU devices, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def mesh_of(*sizes, names=("tensor",)):
    return Mesh(np.array(jax.devices("cpu")[: math.prod(sizes)]).reshape(sizes), names)


@pytest.fixture
def reads(monkeypatch):
    """Record the bytes that are read from files, and the sizes of the host's arrays."""
    found = {"bytes": 0, "arrays": []}
    read_slice, empty = tensors.Tensors._read_slice, tensors._aligned_empty

    def recorded_slice(self, name, index):
        values = read_slice(self, name, index)
        found["bytes"] += values.nbytes
        found["arrays"].append(values.nbytes)
        return values

    def recorded_empty(shape, dtype):
        found["arrays"].append(math.prod(shape) * dtype.itemsize)
        return empty(shape, dtype)

    monkeypatch.setattr(tensors.Tensors, "_read_slice", recorded_slice)
    monkeypatch.setattr(tensors, "_aligned_empty", recorded_empty)
    return found


def parts_of(params):
    """The parts of all parameters, each once where devices have the same."""
    return [
        part
        for leaf in jax.tree.leaves(params)
        for part in {str(shard.index): np.asarray(shard.data) for shard in leaf.addressable_shards}.values()
    ]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CONFIGS])
def test_devices_read_their_parts(case, tmp_path, reads):
    directory, mesh = write(tmp_path / case, case), mesh_of(4)
    expected = tensor_parallel(load(directory), mesh)
    reads.update(bytes=0, arrays=[])
    model = load(directory, mesh=mesh)
    parts = parts_of(model.params)
    held = sum(part.nbytes for part in parts)
    assert reads["bytes"] == held  # the vocabulary of 64 has no padding
    assert max(reads["arrays"]) == max(part.nbytes for part in parts)
    assert held < 1.5 * sum(leaf.nbytes for leaf in jax.tree.leaves(load(directory).params))  # with copies of heads

    assert jax.tree.structure(model) == jax.tree.structure(expected)
    for got, wanted in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        assert got.sharding == wanted.sharding
        np.testing.assert_array_equal(got, wanted)


def test_the_host_holds_one_part_at_a_time(tmp_path, monkeypatch):
    """It holds one parameter for one device; arrays on a device are copies here, as on a GPU."""
    alive, most = set(), 0
    empty, device_put = tensors._aligned_empty, jax.device_put

    def counted(shape, dtype):
        nonlocal most
        array = empty(shape, dtype)
        alive.add(id(array))
        weakref.finalize(array, alive.remove, id(array))
        most = max(most, len(alive))
        return array

    monkeypatch.setattr(tensors, "_aligned_empty", counted)
    monkeypatch.setattr(jax, "device_put", lambda x, device: device_put(x.copy(), device))
    load(write(tmp_path / "opt", "opt"), mesh=mesh_of(2, 2, names=("batch", "tensor")))
    assert most == 1


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in (*FAST[2:], *OTHERS[:2]) else pytest.mark.slow) for c in (*CONFIGS, *OTHERS)],
)
def test_logits_are_the_recorded_ones(case, tmp_path):
    """For every family, on two devices, for whole rows and from a cache."""
    model = load(write(tmp_path / case, case), mesh=mesh_of(2))
    expected = np.load(GOLDENS / "logits.npz")[case]
    assert difference(whole_logits(model), expected) <= TOLERANCE
    assert difference(incremental_logits(model), expected) <= TOLERANCE


@pytest.mark.parametrize("number", [2, 4])
def test_padded_vocabulary_and_repeated_heads(number, tmp_path):
    """From shards, in another dtype, with a vocabulary that the devices cannot share equally."""
    from test_checkpoint import UNTIED, make_tensors
    from test_checkpoint import write as write_tensors

    config = UNTIED | {"intermediate_size": 12, "mlp_bias": True, "num_key_value_heads": 1}
    biases = {
        f"model.layers.{i}.mlp.{name}_proj.bias": np.arange(size, dtype=np.float32)
        for i in range(config["num_hidden_layers"])
        for name, size in (("gate", 12), ("up", 12), ("down", config["hidden_size"]))
    }
    write_tensors(tmp_path, config, make_tensors(config) | biases, num_shards=3)
    model = load(tmp_path, "bfloat16", mesh=mesh_of(number))
    expected = tensor_parallel(load(tmp_path, "bfloat16"), mesh_of(number))
    for got, wanted in zip(*map(jax.tree.leaves, (model.params, expected.params)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    padded = model.params["head"].shape[0]
    assert padded == 12 and not np.any(model.params["head"][11:])


def test_mesh_of_rows_and_parts(tmp_path, reads):
    """Devices with the same part share one read of it; a mesh of rows alone has the model whole on each."""
    directory = write(tmp_path / "opt", "opt")
    names = "batch", "tensor"
    expected = data_parallel(tensor_parallel(load(directory), mesh_of(2, 2, names=names)), mesh_of(2, 2, names=names))
    reads.update(bytes=0, arrays=[])
    model = load(directory, mesh=mesh_of(2, 2, names=names), feature_layers=[1])
    assert reads["bytes"] == sum(part.nbytes for part in parts_of(model.params))
    assert jax.tree.structure(model) == jax.tree.structure(with_feature_layers(expected, [1]))
    reads.update(bytes=0, arrays=[])
    model = load(directory, mesh=mesh_of(4, names=("batch",)))
    assert reads["bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert all(leaf.is_fully_replicated and len(leaf.devices()) == 4 for leaf in jax.tree.leaves(model.params))


def test_a_drafter_of_a_shared_target(tmp_path):
    """Its taps and tables equal the whole target's, without padding."""
    target = heads.make_target()
    test_eagle.write_eagle3(tmp_path, target, "authors")
    shared = tensor_parallel(target, mesh_of(2))
    layers = proposers.feature_layers(tmp_path, shared)
    pair = [with_feature_layers(model, layers) for model in (target, shared)]
    expected, got = (proposers.load(tmp_path, model, num_draft_tokens=2) for model in pair)
    assert [model.feature_layers for model in pair] == [layers] * 2 and layers
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    jax.tree.map(np.testing.assert_array_equal, expected, got)


@pytest.mark.parametrize(
    "mesh, message",
    [
        ((2, "model"), r"mesh must have the axes 'tensor', 'batch' or both, got \['model'\]"),
        ((3, "tensor"), "num_heads must be a multiple of the 3 devices that share it, got 4"),
    ],
)
def test_meshes_that_are_refused(mesh, message, tmp_path, reads):
    """Before anything is read."""
    directory = write(tmp_path / "opt", "opt")
    with pytest.raises(ValueError, match=message):
        load(directory, mesh=mesh_of(mesh[0], names=mesh[1:]))
    with pytest.raises(ValueError, match="sharding must be None where mesh is given"):
        load(directory, mesh=mesh_of(2), sharding=SingleDeviceSharding(jax.devices("cpu")[0]))
    assert reads["bytes"] == 0


def test_files_that_are_missing(tmp_path):
    directory = write(tmp_path / "llama", "llama")
    whole = directory / "model.safetensors"
    whole.rename(directory / "a.safetensors")
    names = {name: "a.safetensors" for name in ("x", "y")} | {"z": "b.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FileNotFoundError, match=r"b.safetensors is missing, .*; copy the checkpoint"):
        load(directory, mesh=mesh_of(2))


def test_damaged_files(tmp_path):
    """A tensor of another shape, and a file that ends early, are named."""
    directory = write(tmp_path / "llama", "llama")
    (directory / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": 66}))
    with pytest.raises(ValueError, match=r"tensor model.embed_tokens.weight in .* must have shape \(66, 32\), got"):
        load(directory, mesh=mesh_of(2))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors must be a whole safetensors file"):
        load(directory, mesh=mesh_of(2))
