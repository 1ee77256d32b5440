"""Split a decoder over the devices of a mesh: heads, MLP and vocabulary, with two sums over the devices a layer.

Each device has some heads of attention and some columns of the MLP; the products that follow are sums over devices. The
embedding and the head are split by tokens. Norms, biases of sums and the residual stream are whole on every device. A
recurrent mixer beside attention takes one more sum, and so do the norms of Mamba-2 with fewer groups than devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.models.beside_mlp import BesideMLP
from specjax.models.decoder import DecoderConfig
from specjax.models.delta_net import DeltaNet
from specjax.models.experts import Experts
from specjax.models.families.opt import OPTConfig
from specjax.models.latent_attention import InitLatents, LatentAttention, latent_mixer
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.mamba import Mamba2
from specjax.models.network import Apply, InitCache
from specjax.models.quantized import Quantized, dequantize
from specjax.models.quantized_parts import Run, specs_of, split_quantized
from specjax.models.recurrent import HEAD_AXES, InitRows, Recurrent
from specjax.models.short_conv import ShortConv
from specjax.models.tensors import Stored, StoredMatrix, place
from specjax.parallel import InitOnMesh, InitRowsOnMesh, OnMesh, check_axis, put, shards
from specjax.parallel.links import links_of
from specjax.types import Array, Model

Config = DecoderConfig | OPTConfig
# Matrices of which a device has some inputs; of the others it has some outputs.
CUT_INPUTS = "attention_out", "conv_out", "delta_out", "mamba_out", "mlp_out", "shared_out", "experts_out"

# Arrays whose first axis is of heads or tokens, whatever the layout of matrices.
OUTPUTS_FIRST = (
    *("embedding", "head", "latent_up", "delta_conv", "delta_decay"),
    *("mamba_conv", "mamba_decay", "mamba_skip", "conv_taps"),
)


def tensor_parallel(model: Model, mesh: Mesh, axis_name: str = "tensor") -> Model:
    """Return a model whose work the devices along one axis of a mesh share.

    Every device has its part of the weights, of the cache and of the logits. Key and value heads, and the groups of
    Mamba-2, are repeated where there are fewer than devices, and the vocabulary is padded with tokens that are never
    drawn. Decoding with it takes each step inside one `jax.shard_map`, in which logits are verified without being put
    together.

    The whole model is on one device before. `models.load(directory, mesh=mesh)` returns the same and reads for each
    device no more than its part.

    Args:
        model: a model of `models.load` or `decoder_model`.
        mesh: the devices, with axes of the type Auto. Along its other axes, if it has any, each has a copy;
            `models.data_parallel` uses one.
        axis_name: the axis whose devices share the model.

    Returns:
        The model, with its parameters on the devices of the mesh.

    Raises:
        ValueError: the mesh has no such axis or has axes of another type, its devices cannot share the heads, the
            groups of Mamba-2 or the MLP equally, or the model is not one that specjax built.
    """
    check_axis(mesh, axis_name)
    apply, init_cache = model.apply, model.init_cache
    if not (
        isinstance(apply, Apply)
        and isinstance(apply.config, Config)
        and isinstance(init_cache, InitCache | InitLatents)
    ):
        raise ValueError(f"model must be one that specjax built, to be shared by devices, got {model.apply!r}")
    whole, number = apply.config, mesh.shape[axis_name]
    part = _part(whole, number, axis_name)
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        model.params, is_leaf=lambda leaf: isinstance(leaf, Quantized)
    )
    split, specs = [], []
    for path, leaf in leaves:
        leaf = leaf.read() if isinstance(leaf, StoredMatrix) else leaf
        if isinstance(leaf, Quantized) and leaf.order is not None and _name(path) in CUT_INPUTS:
            leaf = dequantize(leaf, leaf.dtype)  # the inputs of a device would lie apart in the codes
            leaf = leaf if _is_transposed(whole) or leaf.ndim > 2 else leaf.T
        is_transposed = isinstance(leaf, Quantized) or _is_transposed(whole)
        cut = _cut(_name(path), _of_layer(whole, path), _of_layer(part, path), number, is_transposed=is_transposed)
        spec = P() if cut is None else P(*[None] * cut.axis, axis_name)
        split.append(_split(leaf, cut, NamedSharding(mesh, spec)))
        specs += specs_of(leaf, spec) if isinstance(leaf, Quantized) else [spec]
    params = jax.tree.unflatten(structure, split)
    if isinstance(whole, DecoderConfig) and (links := links_of(mesh, axis_name)) is not None:
        spread = jax.tree.unflatten(jax.tree.structure(params), specs) | {"links": P(*mesh.axis_names)}
        params, specs = params | {"links": links}, jax.tree.leaves(spread)
    on_mesh = OnMesh(
        apply=replace(apply, config=part),
        init_cache=_init_cache(init_cache, part),
        mesh=mesh,
        axis_name=axis_name,
        param_specs=tuple(specs),
        cache_spec=P() if _latent_mixer(whole) else P(None, None, axis_name),
        vocab_size=whole.vocab_size,
    )
    init_rows, of_all = model.init_rows, _with_copies(whole, part, number)
    if isinstance(init_rows, InitRows) and isinstance(part, DecoderConfig) and isinstance(of_all, DecoderConfig):
        of_part, specs = replace(init_rows, mixers=part.recurrent), _specs_of_rows(init_rows, axis_name)
        on_mesh, init_rows = (
            replace(on_mesh, init_rows=of_part, row_specs=specs),
            InitRowsOnMesh(replace(init_rows, mixers=of_all.recurrent), mesh, specs),
        )
    init_cache = InitOnMesh(_init_cache(init_cache, of_all), on_mesh.of_cache)
    return replace(model, params=params, apply=on_mesh, init_cache=init_cache, init_rows=init_rows)


def _specs_of_rows(init_rows: InitRows, axis_name: str) -> tuple[P, ...]:
    """Return how devices share the leaves of rows: the heads, and the channels of the convolution."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(partial(init_rows, 1)))
    axes = [HEAD_AXES.get(path[-1].key) for path, _ in leaves]
    return tuple(P() if axis is None else P(*[None] * axis, axis_name) for axis in axes)


def _part(whole: Config, number: int, axis_name: str) -> Config:
    """Return the sizes of one device's part; raise ValueError where the devices cannot share equally."""
    names = ["num_heads", *(name for name in ("mlp_size", "expert_size", "shared_size") if hasattr(whole, name))]
    for name in names:
        if getattr(whole, name) % number:
            got = getattr(whole, name)
            raise ValueError(f"{name} must be a multiple of the {number} devices that share it, got {got}")
    kv_heads = _part_of_key_heads("num_kv_heads", whole.num_kv_heads, number)
    size = shards.part_size(whole.vocab_size, number)
    own: dict[str, Any] = {}
    if isinstance(whole, DecoderConfig):
        if len({mixer for _, mixer in whole.recurrent}) > 1:
            raise ValueError("model must have recurrent layers of one size, to be shared by devices")
        own = {"num_kv_heads": kv_heads, "layers": tuple(_part_of_layer(layer, number) for layer in whole.layers)}
    return replace(
        whole,
        vocab_size=size,
        **{name: getattr(whole, name) // number for name in names},
        axis_name=axis_name,
        num_padding=number * size - whole.vocab_size,
        **own,
    )


def _part_of_layer(layer: LayerConfig, number: int) -> LayerConfig:
    """Return one device's part of a layer. Sizes that the layer does not say are the config's."""
    ffn = layer.ffn
    mlp = ffn.mlp if isinstance(ffn, BesideMLP) else ffn
    if isinstance(mlp, GatedMLP) and mlp.size is not None:
        if mlp.size % number:
            raise ValueError(f"size of an MLP must be a multiple of the {number} devices that share it, got {mlp.size}")
        own = replace(mlp, size=mlp.size // number)
        ffn = replace(ffn, mlp=own) if isinstance(ffn, BesideMLP) else own
    mixer, beside = (_part_of_mixer(one, number) for one in (layer.mixer, layer.beside))
    return replace(layer, mixer=mixer, ffn=ffn, beside=beside)


def _part_of_mixer(mixer: Any, number: int) -> Any:
    """Return one device's part of a mixer."""
    if isinstance(mixer, Attention):
        own = {}
        if mixer.num_heads is not None:
            own["num_heads"] = _part_of_heads("num_heads of a layer", mixer.num_heads, number)
        if mixer.num_kv_heads is not None:
            own["num_kv_heads"] = _part_of_key_heads("num_kv_heads", mixer.num_kv_heads, number)
        return replace(mixer, **own)
    if isinstance(mixer, Mamba2):
        groups = mixer.num_key_heads
        return replace(
            mixer,
            num_key_heads=_part_of_key_heads("num_key_heads of Mamba-2, its groups,", groups, number),
            num_value_heads=_part_of_heads("num_value_heads of Mamba-2", mixer.num_value_heads, number),
            num_sharing=max(1, number // groups),
        )
    if isinstance(mixer, ShortConv):
        channels = _part_of_heads("num_channels of short convolutions", mixer.num_channels, number)
        return replace(mixer, num_channels=channels)
    if not isinstance(mixer, DeltaNet):
        return mixer
    heads = _part_of_heads("num_key_heads of gated delta nets", mixer.num_key_heads, number)
    return replace(mixer, num_key_heads=heads, num_value_heads=mixer.num_value_heads // number)


def _part_of_heads(name: str, heads: int, number: int) -> int:
    """Return the number of heads of a device; raise ValueError with the name where the devices cannot share equally."""
    if heads % number:
        raise ValueError(f"{name} must be a multiple of the {number} devices that share them, got {heads}")
    return heads // number


def _part_of_key_heads(name: str, heads: int, number: int) -> int:
    """Return the number of key heads of a device, which several devices have where there are fewer than devices."""
    if heads % number and number % heads:
        raise ValueError(f"{name} must be a multiple or a divisor of the {number} devices, got {heads}")
    return max(1, heads // number)


def _with_copies(whole: Config, part: Config, number: int) -> Config:
    """Return the sizes of the whole, with the key heads of all devices."""
    if not isinstance(whole, DecoderConfig) or not isinstance(part, DecoderConfig):
        return whole

    def mixer(own: Any, of_device: Any) -> Any:
        name = "num_key_heads" if isinstance(own, Recurrent) else "num_kv_heads"
        heads = getattr(of_device, name, None)
        return own if heads is None else replace(own, **{name: heads * number})

    layers = tuple(
        replace(own, mixer=mixer(own.mixer, other.mixer), beside=mixer(own.beside, other.beside))
        for own, other in zip(whole.layers, part.layers, strict=True)
    )
    return replace(whole, num_kv_heads=part.num_kv_heads * number, layers=layers)


def _init_cache(init_cache: Any, config: Config) -> Any:
    """Return the function that makes the cache of a config."""
    if isinstance(init_cache, InitCache) and isinstance(config, DecoderConfig):
        return replace(init_cache, config=config, sizes=config.cache_sizes)
    return replace(init_cache, config=config)


def _of_layer(config: Config, path: tuple) -> Config:
    """Return the config with the sizes of the layer that a parameter belongs to."""
    if not isinstance(config, DecoderConfig) or path[0].key != "layers":
        return config
    layer = config.each_layer[path[1].key]
    ffn = getattr(layer.ffn, "mlp", layer.ffn)
    sized = layer.mixer.sized(config) if isinstance(layer.mixer, Attention) else config
    size = ffn.width(config) if isinstance(ffn, GatedMLP) else config.mlp_size
    return replace(sized, num_layers=1, layers=(layer,), mlp_size=size)


@dataclass(frozen=True)
class Cut:
    """How devices share a parameter: each has some runs of one axis, one after the other, and zeros after them."""

    axis: int
    size: int  # of a device's part of the axis
    runs: tuple[tuple[Run, ...], ...]  # of each device


def _name(path: tuple) -> str:
    """Return the name of a parameter; a bias that stands beside a weight has the weight's name and "_bias"."""
    *rest, last = (entry.key for entry in path)
    if last not in ("weight", "bias"):
        return last
    return rest[-1] if last == "weight" else f"{rest[-1]}_bias"


def _is_transposed(config: Config) -> bool:
    """Return whether matrices of floats are [outputs, inputs]."""
    return isinstance(config, DecoderConfig) and config.transposed


def _cut(name: str, whole: Config, part: Config, number: int, *, is_transposed: bool) -> Cut | None:
    """Return how the devices share a parameter; None where each has it whole."""
    runs = [_runs(name, device, whole, part, number) for device in range(number)]
    if not runs[0]:
        return None
    first = 1 if name.startswith("experts_") else 0  # experts are stacked, [outputs, inputs] each
    is_vector = name.endswith(("_bias", "_scale", "sinks", "_norm"))
    axis = 0 if first or is_transposed or is_vector or name in OUTPUTS_FIRST else 1
    if name in CUT_INPUTS:
        axis = 1 - axis
    return Cut(first + axis, max(sum(stop - start for start, stop in own) for own in runs), tuple(map(tuple, runs)))


def _runs(name: str, device: int, whole: Config, part: Config, number: int) -> list[Run]:
    """Return a device's part of the axis of a parameter that is split; nothing where none is."""

    def own(size: int, begin: int = 0) -> Run:
        return begin + device * size, begin + (device + 1) * size

    if name in ("embedding", "head", "head_bias"):
        start, stop = own(part.vocab_size)
        return [(min(start, whole.vocab_size), min(stop, whole.vocab_size))]
    head, mlp = whole.head_size, part.mlp_size
    if name.startswith(("experts_", "shared_")):
        return _runs_of_experts(name, device, whole, part)
    if name.startswith("delta_"):
        return _runs_of_delta_net(name, device, part, number)
    if name.startswith("mamba_"):
        return _runs_of_mamba(name, device, whole, part)
    if name.startswith("conv_"):
        return _runs_of_short_conv(name, device, whole, part)
    if mixer := _latent_mixer(whole):
        sizes = {
            "query_up": mixer.query_size,
            "latent_up": mixer.key_size + mixer.value_size,
            "attention_out": mixer.value_size,
        }
        if name in sizes:
            return [own(part.num_heads * sizes[name])]
    if name == "sinks":
        return [own(part.num_heads)]
    if name == "attention_out":
        return [own(part.num_heads * _value_size(whole))]
    if name == "attention_gate":
        assert isinstance(whole, DecoderConfig), "no other network has one"
        return [own(part.num_heads * whole.layers[0].mixer.output_gate.size(head))]
    if name in ("mlp_in", "mlp_in_bias", "mlp_out"):
        return [own(mlp)]
    if name in ("gate_up", "gate_up_bias"):
        return [own(mlp), own(mlp, whole.mlp_size)]
    numbers = _numbers_of_norms(whole)
    if name in ("query_norm", "key_norm") and not numbers:
        return []
    if name == "query_norm":
        return [own(part.num_heads * numbers)]
    if name in ("qkv", "qkv_bias", "key_norm", "key_scale", "value_scale"):
        copies = part.num_kv_heads * number // whole.num_kv_heads
        first = device * part.num_kv_heads // copies
        if name.endswith("_scale"):
            return [(first, first + part.num_kv_heads)]
        queries = _query_parts(whole)
        first_key = queries * whole.num_heads + first
        if name == "key_norm":
            return [(first * numbers, (first + part.num_kv_heads) * numbers)]
        if isinstance(whole, DecoderConfig) and getattr(whole.layers[0].mixer, "by_groups", False):
            return _runs_of_groups(device, whole, part, copies)
        key = first_key * head, (first_key + part.num_kv_heads) * head
        values, size = (queries * whole.num_heads + whole.num_kv_heads) * head, _value_size(whole)
        value = values + first * size, values + (first + part.num_kv_heads) * size
        return [own(queries * part.num_heads * head), *(key, value)[: _num_projected(whole)]]
    return []


def _latent_mixer(config: Config) -> LatentAttention | None:
    """Return the attention on latents, of which each device has some heads, and all latents."""
    return latent_mixer(config.layers) if isinstance(config, DecoderConfig) else None


def _numbers_of_norms(config: Config) -> int:
    """Return how many places of the scales of norms of queries and keys belong to a head; 0 where all heads share them.

    A device has the places of its heads.
    """
    mixer = config.layers[0].mixer if isinstance(config, DecoderConfig) else None
    if not isinstance(mixer, Attention):
        return 0
    return 1 if mixer.norms_by_head else config.head_size if mixer.has_wide_norms else 0


def _query_parts(config: Config) -> int:
    """Return the number of heads that each query head's projection has: the query, and maybe its gate."""
    mixer = config.layers[0].mixer if isinstance(config, DecoderConfig) else None
    return mixer.query_parts if isinstance(mixer, Attention) else 1


def _value_size(config: Config) -> int:
    """Return the numbers of a value."""
    mixer = config.layers[0].mixer if isinstance(config, DecoderConfig) else None
    return (isinstance(mixer, Attention) and mixer.value_size) or config.head_size


def _num_projected(config: Config) -> int:
    """Return how many of keys and values have a projection."""
    mixer = config.layers[0].mixer if isinstance(config, DecoderConfig) else Attention()
    return (1 + mixer.has_values) * (mixer.keys_of is None)


def _runs_of_groups(device: int, whole: Config, part: Config, copies: int) -> list[Run]:
    """Return a device's part of projections that lie together by key heads, of which so many devices have each."""
    size, queries, own = whole.head_size, whole.num_heads // whole.num_kv_heads, part.num_heads // part.num_kv_heads
    first, runs = device * part.num_kv_heads // copies, []
    for group in range(first, first + part.num_kv_heads):
        query = group * (queries + 2) + device % copies * own
        key = group * (queries + 2) + queries
        runs += [(query * size, (query + own) * size), (key * size, (key + 2) * size)]
    return runs


def _runs_of_delta_net(name: str, device: int, part: Config, number: int) -> list[Run]:
    """Return a device's part of a gated delta net: some key heads, and the value heads that share them."""
    assert isinstance(part, DecoderConfig), "no other network has one"
    net = part.recurrent[0][1]
    assert isinstance(net, DeltaNet), "others are not shared"
    key, heads = net.num_key_heads * net.key_size, net.num_value_heads
    value = heads * net.value_size
    sizes = {
        "delta_in": [key, key, value, value],
        "delta_qkv": [key, key, value],
        "delta_conv": [key, key, value],
        "delta_beta": [heads],
        "delta_decay_up": [heads * net.key_size],
        "delta_channel_bias": [heads * net.key_size],
        "delta_gate_up": [value],
        "delta_rates": [heads, heads],
        "delta_decay": [heads],
        "delta_decay_bias": [heads],
        "delta_out": [value],
    }
    parts = sizes.get(name, [])
    if net.by_heads and name in ("delta_in", "delta_rates"):  # which lie together for each key head
        parts = [sum(parts)]
    begins = [number * sum(parts[:i]) for i in range(len(parts))]
    return [(begin + device * size, begin + (device + 1) * size) for begin, size in zip(begins, parts, strict=True)]


def _runs_of_mamba(name: str, device: int, whole: Config, part: Config) -> list[Run]:
    """Return a device's part of a layer of Mamba-2: some heads, and the groups that have them."""
    assert isinstance(whole, DecoderConfig) and isinstance(part, DecoderConfig), "no other network has one"
    of_all, own = whole.recurrent[0][1], part.recurrent[0][1]
    assert isinstance(of_all, Mamba2) and isinstance(own, Mamba2), "its parameters have these names"
    first = device * own.num_value_heads  # head
    group = first * of_all.num_key_heads // of_all.num_value_heads
    # Each piece of an axis: its units on all devices and on this one, the first one here, and the numbers of a unit.
    heads = of_all.num_value_heads, own.num_value_heads, first, 1
    values = *heads[:3], own.value_size
    keys = of_all.num_key_heads, own.num_key_heads, group, own.key_size
    channels = [values, keys, keys]
    pieces = {
        "mamba_in": [values, *channels, heads],
        "mamba_in_bias": [values, *channels, heads],
        "mamba_conv": channels,
        "mamba_conv_bias": channels,
        "mamba_scale": [values],
        "mamba_out": [values],
        "mamba_out_bias": [],
    }
    runs, begin = [], 0
    for total, number, start, size in pieces.get(name, [heads]):
        runs.append((begin + start * size, begin + (start + number) * size))
        begin += total * size
    return runs


def _runs_of_short_conv(name: str, device: int, whole: Config, part: Config) -> list[Run]:
    """Return a device's part of a short convolution: some channels."""
    assert isinstance(whole, DecoderConfig) and isinstance(part, DecoderConfig), "no other network has one"
    total, size = (config.recurrent[0][1].channels for config in (whole, part))
    parts = {"conv_in": 3, "conv_in_bias": 3, "conv_out_bias": 0}.get(name, 1)
    return [(i * total + device * size, i * total + (device + 1) * size) for i in range(parts)]


def _runs_of_experts(name: str, device: int, whole: Config, part: Config) -> list[Run]:
    """Return a device's part of the width of every expert, and of the MLP beside them."""
    if not isinstance(whole, DecoderConfig) or not isinstance(part, DecoderConfig):
        return []
    kind, _, rest = name.partition("_")
    size, total = (getattr(config, "expert_size" if kind == "experts" else "shared_size") for config in (part, whole))
    start, stop = device * size, (device + 1) * size
    if rest == "out":
        return [(start, stop)]
    if rest not in ("gate_up", "gate_up_bias"):
        return []
    ffn = whole.layers[0].ffn
    mixture = ffn.experts if isinstance(ffn, BesideMLP) else ffn
    assert isinstance(mixture, Experts), "its parameters have these names"
    if kind == "experts" and mixture.is_interleaved:
        return [(2 * start, 2 * stop)]
    projections = mixture.gate if kind == "experts" else mixture.shared
    assert projections is not None, "it has parameters"
    return [(i * total + start, i * total + stop) for i in range(projections.num_parts)]


def _split(leaf: Any, cut: Cut | None, sharding: NamedSharding) -> Any:
    """Return a parameter on its devices; an array in files is read part by part."""
    if isinstance(leaf, Quantized) and cut is not None:
        return split_quantized(leaf, cut.axis, cut.size, cut.runs, sharding)
    if isinstance(leaf, Stored):
        return place(leaf if cut is None else _arrange_stored(leaf, cut), sharding)
    return put(leaf if cut is None else _arrange(leaf, cut), sharding)


@partial(jax.jit, static_argnames="cut")  # layers of equal shapes share a program
def _arrange(leaf: Array, cut: Cut) -> Array:
    """Return a parameter as the parts of all devices, one after the other."""
    parts = []
    for runs in cut.runs:
        own = jnp.concatenate([jax.lax.slice_in_dim(leaf, *run, axis=cut.axis) for run in runs], cut.axis)
        padding = [(0, cut.size - own.shape[cut.axis] if axis == cut.axis else 0) for axis in range(leaf.ndim)]
        parts.append(jnp.pad(own, padding))
    return jnp.concatenate(parts, cut.axis)


def _arrange_stored(stored: Stored, cut: Cut) -> Stored:
    """Do as `_arrange` does with a parameter in files, of which the part of one device is read at a time."""

    def fill(out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
        along, end = np.moveaxis(out, cut.axis, 0), 0
        for start, stop in cut.runs[bounds[cut.axis][0] // cut.size]:
            own = np.moveaxis(along[end : end + stop - start], 0, cut.axis)
            stored.fill(own, [*bounds[: cut.axis], (start, stop), *bounds[cut.axis + 1 :]])
            end += stop - start
        along[end:] = 0

    shape = (*stored.shape[: cut.axis], cut.size * len(cut.runs), *stored.shape[cut.axis + 1 :])
    return Stored(shape, stored.dtype, fill)
