"""Files of torch.save are read without running what they hold."""

import json
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest
import torch_files
from families import write
from safetensors.numpy import load_file

from specjax.models import load
from specjax.models.tensors import Tensors
from specjax.models.torch_file import open_torch_file

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.arange(4, dtype=np.float16),
    "b": np.arange(4).astype(ml_dtypes.bfloat16).reshape(4, 1),
    "map": np.array([3, 1, 2]),
    "kept": np.array([True, False]),
}


def read(path):
    with open_torch_file(path) as file:
        return {name: file.get_slice(name)[:] for name in file.keys()}  # noqa: SIM118, the file is not a dict


def test_reads_what_was_written(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch_files.write(path, ARRAYS)
    for name, array in read(path).items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype == ARRAYS[name].dtype


@pytest.mark.slow
def test_reads_what_torch_writes(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"part": whole[1:, 1:3], "turned": whole.t(), "own": torch.nn.Parameter(whole.bfloat16())}
    for content in (tensors, torch.nn.Linear(2, 3).state_dict()):
        torch.save(content, tmp_path / "x.pt")
        for name, array in read(tmp_path / "x.pt").items():
            np.testing.assert_array_equal(array.astype(np.float32), content[name].detach().float().numpy())


def test_tensors_of_a_torch_file(tmp_path):
    path = tmp_path / "medusa_lm_head.pt"
    torch_files.write(path, ARRAYS)
    tensors = Tensors(tmp_path, np.dtype(np.float32), files=[path])
    assert tensors.names() == list(ARRAYS) and tensors.shape("b") == (4, 1)
    np.testing.assert_array_equal(tensors.matrices(3, {"a.weight": 2}), ARRAYS["a.weight"].T)
    assert tensors.integers("map", 3).tolist() == [3, 1, 2] and tensors.integers("kept", 2).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"tensor half in .* must be of integers of shape \(4,\), got float16"):
        tensors.integers("half", 4)
    with pytest.raises(ValueError, match=r"tensor map in .* must be of integers of shape \(2,\), got int64 \(3,\)"):
        tensors.integers("map", 2)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_model_in_files_of_torch(num_shards, tmp_path):
    """As old releases have them."""
    expected, directory = load(write(tmp_path / "plain", "llama3")), write(tmp_path / "torch", "llama3")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied, and in the file nevertheless
    files = [f"pytorch_model-{i}.bin" for i in range(num_shards)] if num_shards > 1 else ["pytorch_model.bin"]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(tensors)}
    for file in files:
        torch_files.write(directory / file, {name: x for name, x in tensors.items() if weight_map[name] == file})
    if num_shards > 1:
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for one, other in zip(*map(jax.tree.leaves, (load(directory).params, expected.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def program(body: bytes) -> bytes:
    return pickle.PROTO + b"\x02" + body + pickle.STOP


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return torch_files.symbol(module, name) + torch_files.tuple_of(*arguments) + pickle.REDUCE


@pytest.mark.parametrize(
    "body, message",
    [
        (call("posix", "system", torch_files.text("touch RAN")), "a reference to posix.system"),
        (call("builtins", "eval", torch_files.text("open('RAN', 'w')")), "a reference to builtins.eval"),
        (torch_files.symbol("torch", "FloatStorage") + pickle.EMPTY_TUPLE + pickle.REDUCE, "a call of _Global"),
        (torch_files.text("os") + torch_files.text("system") + pickle.STACK_GLOBAL, "a reference to os.system"),
        (b"ios\nsystem\n", "the operation INST"),
        (pickle.EMPTY_TUPLE + pickle.EMPTY_TUPLE + pickle.NEWOBJ, "the operation NEWOBJ"),
        (pickle.POP, "the operation POP"),
        (pickle.BINPERSID, "an operation without its operands"),
        (torch_files.text("x"), "must hold a dictionary of tensors by name"),
        (pickle.EMPTY_DICT + torch_files.text("a") + pickle.NONE + pickle.SETITEM, "must hold a dictionary of tensors"),
    ],
)
def test_refuses_other_programs(tmp_path, monkeypatch, body, message):
    monkeypatch.chdir(tmp_path)
    torch_files.write("x.bin", {}, program(body))
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x.bin")
    assert [file.name for file in tmp_path.iterdir()] == ["x.bin"]


def test_refuses_damaged_files(tmp_path):
    path, array = tmp_path / "x.bin", ARRAYS["a.weight"]
    torch_files.write(path, {"a": array}, torch_files.dictionary({"a": torch_files.tensor("0", array, size=7)}))
    with pytest.raises(ValueError, match=r"tensor a in .* must have 28 bytes, not compressed, got 24 bytes"):
        read(path)
    torch_files.write(path, {"a": array}, torch_files.dictionary({"a": torch_files.tensor("0", array, size=5)}))
    with pytest.raises(ValueError, match=r"tensor a in .* must lie in its storage"):
        read(path)
    torch_files.write(path, {}, torch_files.dictionary({"a": torch_files.tensor("0", array)}))
    with pytest.raises(ValueError, match="got no such entry"):
        read(path)
    torch_files.write(path, {"a": array})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="must be a whole zip archive"):
        read(path)
