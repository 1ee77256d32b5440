"""Split a decoder over the devices of a mesh: heads, MLP and vocabulary, with two sums over the devices a layer.

Each device has some heads of attention and some columns of the MLP; the products that follow are sums over devices. The
embedding and the head are split by tokens. Norms, biases of sums and the residual stream are whole on every device.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import shards
from specjax.models.decoder import DecoderConfig
from specjax.models.network import Apply, InitCache
from specjax.parallel import OnMesh, put
from specjax.types import Array, Model, PyTree


def tensor_parallel(model: Model, mesh: Mesh, axis_name: str = "tensor") -> Model:
    """Return a model whose work the devices along one axis of a mesh share.

    Every device has its part of the weights, of the cache and of the logits. Key and value heads are repeated where
    there are fewer than devices, and the vocabulary is padded with tokens that are never drawn. Decoding with it takes
    each step inside one `jax.shard_map`, in which logits are verified without being put together.

    Args:
        model: a decoder of `models.load` or `decoder_model`.
        mesh: the devices. Its other axes, if it has any, get copies.
        axis_name: the axis whose devices share the model.

    Returns:
        The model, with its parameters on the devices of the mesh.

    Raises:
        ValueError: the mesh has no such axis, its devices cannot share the heads or the MLP equally, or the model is
            not a decoder.
    """
    if axis_name not in mesh.shape:
        raise ValueError(f"axis_name must be an axis of the mesh, one of {list(mesh.shape)}, got {axis_name!r}")
    apply = model.apply
    if not (isinstance(apply, Apply) and isinstance(apply.config, DecoderConfig)):
        raise ValueError(f"model must be a decoder that specjax built, to be shared by devices, got {model.apply!r}")
    whole, number = apply.config, mesh.shape[axis_name]
    part = _part(whole, number, axis_name)
    specs = jax.tree_util.tree_map_with_path(partial(_spec, whole, axis_name), model.params)
    init_cache = model.init_cache
    assert isinstance(init_cache, InitCache), "a built-in decoder has it"
    on_mesh = OnMesh(
        apply=replace(apply, config=part),
        init_cache=replace(init_cache, config=part),
        mesh=mesh,
        axis_name=axis_name,
        param_specs=tuple(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))),
        cache_spec=P(None, None, axis_name),
        vocab_size=whole.vocab_size,
    )
    return replace(
        model,
        params=_split(model.params, specs, whole, part, mesh),
        apply=on_mesh,
        init_cache=replace(init_cache, config=replace(whole, num_kv_heads=part.num_kv_heads * number)),
    )


def _part(whole: DecoderConfig, number: int, axis_name: str) -> DecoderConfig:
    """Return the sizes of one device's part; raise ValueError where the devices cannot share equally."""
    for name, size in (("num_heads", whole.num_heads), ("mlp_size", whole.mlp_size)):
        if size % number:
            raise ValueError(f"{name} must be a multiple of the {number} devices that share it, got {size}")
    kv_heads = whole.num_kv_heads
    if kv_heads % number and number % kv_heads:
        raise ValueError(f"num_kv_heads must be a multiple or a divisor of the {number} devices, got {kv_heads}")
    size = shards.part_size(whole.vocab_size, number)
    return replace(
        whole,
        vocab_size=size,
        num_heads=whole.num_heads // number,
        num_kv_heads=max(1, kv_heads // number),
        mlp_size=whole.mlp_size // number,
        axis_name=axis_name,
        num_padding=number * size - whole.vocab_size,
    )


OUT_SPLIT = ("qkv", "qkv_bias", "gate_up", "gate_up_bias")  # parameters whose outputs are split, in several sections
IN_SPLIT = ("attention_out", "mlp_out")  # parameters whose inputs are split


def _name(path: tuple) -> str:
    return path[-1].key


def _out_axis(name: str, config: DecoderConfig) -> int:
    return 0 if config.transposed or name.endswith("_bias") else 1


def _spec(config: DecoderConfig, axis_name: str, path: tuple, leaf: Array) -> P:
    """Return how one parameter is split."""
    name = _name(path)
    if name in ("embedding", "head"):
        return P(axis_name)
    if name in OUT_SPLIT:
        return P(*[None] * _out_axis(name, config), axis_name)
    if name in IN_SPLIT:
        return P(*[None] * (1 - _out_axis(name, config)), axis_name)
    return P()


def _split(params: PyTree, specs: PyTree, whole: DecoderConfig, part: DecoderConfig, mesh: Mesh) -> PyTree:
    """Return the parameters on their devices, in an order in which equal parts are those of the devices."""

    def split(path: tuple, leaf: Array, spec: P) -> Array:
        arranged = _arrange(leaf, name=_name(path), whole=whole, part=part, number=mesh.shape[part.axis_name])
        return put(arranged, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(split, params, specs)


@partial(jax.jit, static_argnames=("name", "whole", "part", "number"))  # layers of equal shapes share a program
def _arrange(leaf: Array, *, name: str, whole: DecoderConfig, part: DecoderConfig, number: int) -> Array:
    """Return a parameter with the part of each device after that of the one before."""
    if name in ("embedding", "head"):
        return jnp.pad(leaf, ((0, number * part.vocab_size - leaf.shape[0]), (0, 0)))
    if name not in OUT_SPLIT:
        return leaf
    axis = _out_axis(name, whole)
    if name.startswith("gate_up"):
        sections = jnp.split(leaf, 2, axis)
    else:
        ends = whole.num_heads, whole.num_heads + whole.num_kv_heads
        sections = jnp.split(leaf, [end * whole.head_size for end in ends], axis)
        copies = part.num_kv_heads * number // whole.num_kv_heads
        sections[1:] = (_repeat_heads(section, axis, whole, copies) for section in sections[1:])
    parts = zip(*(jnp.split(section, number, axis) for section in sections), strict=True)
    return jnp.concatenate([block for own in parts for block in own], axis)


def _repeat_heads(section: Array, axis: int, config: DecoderConfig, copies: int) -> Array:
    """Return the key or value projection of all heads with each head as often in a row."""
    heads = jnp.split(section, config.num_kv_heads, axis)
    return jnp.concatenate([head for head in heads for _ in range(copies)], axis)
