"""Load Hugging Face checkpoints: config.json and safetensors files become a `Model`."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.types import Array, Model, PyTree

Read = Callable[..., np.ndarray]  # (name, *shape): the tensor of that name, checked to have that shape


def load(directory: str | Path, dtype: DTypeLike = jnp.float32) -> Model:
    """Load a Llama checkpoint from a directory in the Hugging Face layout.

    Args:
        directory: holds config.json, and model.safetensors or the shards that model.safetensors.index.json names.
        dtype: of the parameters, hence of the computation: float32, bfloat16 or float16.

    Returns:
        A `Model`; its logits are float32.

    Raises:
        FileNotFoundError: the directory, its config.json or a file of weights does not exist.
        NotImplementedError: the checkpoint asks for something that the decoder lacks; the message names the field.
        ValueError: a file is damaged, or a field or tensor is missing or not as it should be.

    Example:
        >>> from specjax import models
        >>> target = models.load(models.EMBEDDED / "target", dtype="bfloat16")
        >>> target.vocab_size, target.max_length
        (4096, 2048)
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"directory must hold a checkpoint, got {directory}, which is not a directory")
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")

    fields = _read_json(directory / "config.json")
    model_type = _field(fields, "model_type", str)
    if model_type != "llama":
        raise NotImplementedError(f"model_type must be 'llama', got {model_type!r}")
    config = _llama_config(fields)
    with ExitStack() as stack:
        return decoder_model(config, _llama_params(config, _tensor_reader(directory, dtype, stack)))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"directory must hold {path.name}, got {path.parent}, which does not")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _field(fields: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field of config.json: positive if it is a number; the default if it is absent or null."""
    value = default if fields.get(name) is None else fields[name]
    if value is None:
        raise ValueError(f"config.json must have the field {name}")
    is_kind = type(value) in ((int, float) if kind is float else (kind,))
    if not is_kind or (kind in (int, float) and not value > 0):
        positive = "a positive " if kind in (int, float) else ""
        raise ValueError(f"{name} in config.json must be {positive}{kind.__name__}, got {value!r}")
    return value


def _llama_config(fields: dict[str, Any]) -> DecoderConfig:
    for name, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = _field(fields, name, type(supported), supported)
        if value != supported:
            raise NotImplementedError(f"{name} in config.json must be {supported!r}, got {value!r}")
    hidden_size, num_heads = _field(fields, "hidden_size", int), _field(fields, "num_attention_heads", int)
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads = {num_heads}, got {hidden_size}")
    return DecoderConfig(
        vocab_size=_field(fields, "vocab_size", int),
        hidden_size=hidden_size,
        num_layers=_field(fields, "num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=_field(fields, "num_key_value_heads", int, num_heads),
        head_size=_field(fields, "head_dim", int, hidden_size // num_heads),
        mlp_size=_field(fields, "intermediate_size", int),
        max_length=_field(fields, "max_position_embeddings", int),
        rope_theta=_rope_theta(fields),
        norm_eps=_field(fields, "rms_norm_eps", float),
        tie_embeddings=_field(fields, "tie_word_embeddings", bool, False),
    )


def _rope_theta(fields: dict[str, Any]) -> float:
    """The base of the rotary frequencies: a field of its own, or one of `rope_parameters` (transformers 5)."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = _field(fields, name, dict, {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise NotImplementedError(f"rope_type of {name} in config.json must be 'default', got {rope_type!r}")
    return float(_field(fields | rope, "rope_theta", float, 10000.0))


def _tensor_reader(directory: Path, dtype: np.dtype, stack: ExitStack) -> Read:
    """A function that reads one tensor at a time in the given dtype; the files stay open as long as the stack."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        names = {"model.safetensors"}
    elif index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"weight_map in {index} must map names of tensors to names of files, got {weight_map!r}")
        names = set(weight_map.values())
    else:
        raise FileNotFoundError(f"directory must hold model.safetensors or {index.name}, got {directory}")

    files = {}  # name of a tensor: the open file that holds it
    for path in (directory / name for name in sorted(names)):
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {path.name}, which does not exist")
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} must be a whole safetensors file: {error}") from error
        files |= dict.fromkeys(file.keys(), file)

    def read(name: str, *shape: int) -> np.ndarray:
        if name not in files:
            raise ValueError(f"tensor {name} is missing from {directory}")
        entry = files[name].get_slice(name)
        if tuple(entry.get_shape()) != shape:
            raise ValueError(f"tensor {name} must have shape {shape}, got {tuple(entry.get_shape())}")
        if entry.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(f"tensor {name} must be of type F32, BF16 or F16, got {entry.get_dtype()}")
        return files[name].get_tensor(name).astype(dtype)

    return read


def _llama_params(config: DecoderConfig, read: Read) -> PyTree:
    """The parameters as the decoder holds them: each matrix [in, out], those of one input side by side."""
    hidden, mlp = config.hidden_size, config.mlp_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def matrices(inputs: int, outputs: dict[str, int]) -> Array:
        return jnp.asarray(
            np.concatenate([read(f"{name}.weight", size, inputs).T for name, size in outputs.items()], axis=1)
        )

    def vector(name: str) -> Array:
        return jnp.asarray(read(f"{name}.weight", hidden))

    def layer(name: str) -> dict[str, Array]:
        attention = f"{name}.self_attn"
        return {
            "attention_norm": vector(f"{name}.input_layernorm"),
            "qkv": matrices(
                hidden,
                {f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value},
            ),
            "attention_out": matrices(query, {f"{attention}.o_proj": hidden}),
            "mlp_norm": vector(f"{name}.post_attention_layernorm"),
            "gate_up": matrices(hidden, {f"{name}.mlp.gate_proj": mlp, f"{name}.mlp.up_proj": mlp}),
            "mlp_out": matrices(mlp, {f"{name}.mlp.down_proj": hidden}),
        }

    params = {
        "embedding": jnp.asarray(read("model.embed_tokens.weight", config.vocab_size, hidden)),
        "layers": {i: layer(f"model.layers.{i}") for i in range(config.num_layers)},
        "norm": vector("model.norm"),
    }
    if not config.tie_embeddings:
        params["head"] = jnp.asarray(read("lm_head.weight", config.vocab_size, hidden))
    return params
