"""The dtype of the cache of a built-in model, where it differs from the dtype of the parameters, and its scales."""

import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.directory import Checkpoint
from specjax.models.latent_attention import InitLatents
from specjax.models.network import Apply, InitCache
from specjax.parallel import InitOnMesh, OnMesh, put
from specjax.types import Model
from specjax.validation import suggestion

CACHE_DTYPES = {"fp8": "float8_e4m3fn"}
_SCALE = re.compile(  # of keys, values or both of a layer, as compressed-tensors, ModelOpt and older files name it
    r"(?:backbone\.|model\.|language_model\.model\.|model\.language_model\.)?layers\.(?P<layer>\d+)\.(?:self_attn|mixer)\."
    r"(?:(?P<kind>[kv]|kv)_scale|(?P<of>[kv])_proj\.(?:(?P=of)_scale|output_scale))"
)
_PARAMS = {"k": "key_scale", "v": "value_scale"}


def check_cache_dtype(cache_dtype: str | None) -> None:
    """Raise ValueError unless a cache may have this dtype."""
    if cache_dtype is not None and not (isinstance(cache_dtype, str) and cache_dtype in CACHE_DTYPES):
        hint = suggestion(cache_dtype, CACHE_DTYPES)
        raise ValueError(f"cache_dtype must be None or {', '.join(map(repr, CACHE_DTYPES))}, got {cache_dtype!r}{hint}")


def with_cache_dtype(model: Model, cache_dtype: str | None) -> Model:
    """Return a built-in model whose cache has another dtype than its parameters. The weights are shared.

    Args:
        model: a model of `models.load` or `decoder_model`.
        cache_dtype: "fp8" rounds keys and values to float8_e4m3fn, of half the size of bfloat16. None leaves the model
            as it is.

    Raises:
        ValueError: there is no such dtype, or the model is none of the built-in ones, or keeps latents.

    Example:
        >>> from specjax import models
        >>> model = models.with_cache_dtype(models.load(models.EMBEDDED / "draft"), "fp8")
        >>> layer = model.init_cache(1, 16)[0]
        >>> layer["key"].dtype
        dtype(float8_e4m3fn)
    """
    check_cache_dtype(cache_dtype)
    if cache_dtype is None:
        return model
    apply, init_cache, dtype = model.apply, model.init_cache, CACHE_DTYPES[cache_dtype]
    own = init_cache.init_cache if isinstance(init_cache, InitOnMesh) else init_cache
    if isinstance(own, InitLatents):
        raise ValueError(
            f"cache_dtype must be None for a model that keeps latents in place of keys and values, got {cache_dtype!r}"
        )
    if not isinstance(own, InitCache):
        raise ValueError(f"model must be one that specjax built, for a cache of another dtype, got {init_cache!r}")
    if not isinstance(apply, OnMesh):
        return replace(model, init_cache=replace(own, dtype=dtype))
    assert isinstance(init_cache, InitOnMesh), "a model on a mesh has it"
    assert isinstance(apply.init_cache, InitCache), "the devices have parts of the same cache"
    return replace(
        model,
        apply=replace(apply, init_cache=replace(apply.init_cache, dtype=dtype)),
        init_cache=replace(init_cache, init_cache=replace(own, dtype=dtype)),
    )


def with_cache_scales(model: Model, checkpoint: Checkpoint, sharding: jax.sharding.Sharding | None) -> Model:
    """Return a model of one device with the scales of its cache that the files of the checkpoint have.

    They become the parameters `key_scale` and `value_scale` [kv heads] float32 of the layers. A layer without scales,
    or with scales of 1, gets none.

    Args:
        model: the model as the files give it.
        checkpoint: the checkpoint.
        sharding: of the scales; None is the default device.

    Raises:
        ValueError: the config says that the scales belong to another dtype; a scale has a wrong shape or dtype, is not
            positive and finite, or stands for keys or values alone.
    """
    apply, layers = model.apply, dict(model.params["layers"])
    assert isinstance(apply, Apply), "scales are read before devices share the model"
    sizes = getattr(model.init_cache, "sizes", None)  # of layers that are not alike
    num_kv_heads = [apply.config.num_kv_heads] * len(layers) if sizes is None else [number for number, _ in sizes]
    num_ahead = checkpoint.config.size("num_nextn_predict_layers", 0, least=0)  # layers of the drafter, which follow
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, layer, kind in _names(checkpoint):
        if layer >= len(layers) + num_ahead:
            raise ValueError(f"{checkpoint.directory} has scales of layer {layer}, of {len(layers)} layers")
        if layer < len(layers):
            found.setdefault(layer, {})[_PARAMS[kind]] = _read_scale(checkpoint, name, num_kv_heads[layer])
    if found:
        _check_scheme(checkpoint)
    for layer, scales in found.items():
        if len(scales) < len(_PARAMS):
            raise ValueError(
                f"{checkpoint.directory} must have scales of both keys and values of layer {layer}, got {list(scales)}"
            )
        if any((scale != 1).any() for scale in scales.values()):
            on_device = {
                name: jnp.asarray(scale) if sharding is None else put(scale, sharding) for name, scale in scales.items()
            }
            layers[layer] = {**layers[layer], **on_device}
    return replace(model, params={**model.params, "layers": layers})


def _names(checkpoint: Checkpoint) -> Iterator[tuple[str, int, str]]:
    """Return the names of the scales in the files, each with its layer, and "k" or "v". One may be of both."""
    for name in checkpoint.tensors(np.dtype("float32")).names():
        if match := _SCALE.fullmatch(name):
            for kind in match["kind"] or match["of"]:
                yield name, int(match["layer"]), kind


def _read_scale(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> np.ndarray:
    """Return a scale of each kv head [kv heads] float32, from a file with one for each or one for all."""
    scale = checkpoint.tensors(np.dtype("float32")).numbers(name)
    if scale.size not in (1, num_kv_heads):
        raise ValueError(f"tensor {name} must have 1 or {num_kv_heads} numbers, for the kv heads, got {scale.shape}")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"tensor {name} must be positive and finite, got {scale.ravel().tolist()}")
    return np.broadcast_to(scale.ravel(), num_kv_heads).copy()


def _check_scheme(checkpoint: Checkpoint) -> None:
    """Raise ValueError where the config says that the scales of the cache belong to another dtype than e4m3."""
    config = checkpoint.quantization_fields
    if isinstance(config.fields.get("kv_cache_scheme"), str):
        config.only("kv_cache_scheme", "static")  # of the method fp8, whose scales are of e4m3
    elif config.fields.get("kv_cache_scheme"):
        scheme = config.table("kv_cache_scheme")
        scheme.choice("type", ("float",))
        scheme.only("num_bits", 8)
        scheme.only("symmetric", True)
    beside = checkpoint.settings("hf_quant_config.json")
    for table in (config, beside.table("quantization")):
        if table.fields.get("kv_cache_quant_algo") is not None:
            table.choice("kv_cache_quant_algo", ("FP8",))
