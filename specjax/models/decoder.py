"""The decoder of most families: embeddings, layers of `models/layer.py`, a norm and a head.

Families that vary it describe their layers and set options of `DecoderConfig`; a network with another structure has a
separate file.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import Window
from specjax.models import network, recurrent
from specjax.models.attention import cache_scales, memories, num_slots
from specjax.models.latent_attention import InitLatents, latent_mixer
from specjax.models.layer import Attention, GatedMLP, LayerConfig, Shapes, norm_of, run_layer, times, unit_norm
from specjax.models.layer_input import LayerInput
from specjax.models.linear import AnyNorm, linear, rms_norm
from specjax.models.recurrent import RowMixer
from specjax.models.rope import DynamicScaling, LongRopeScaling, QueryScaling, Rope, RopeScaling, Rotation, rotation
from specjax.models.shared_keys import Borrowed, Lender
from specjax.models.vocabulary import ResizedApply
from specjax.parallel import OnMesh
from specjax.types import Array, Memory, Model, ModelInput, ModelOutput, PyTree


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder, and the kinds of its layers.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`, `head_size` is odd, norms that keep the mean have
            biases, or `layers` are neither one nor as many as `num_layers`, or attend to latents in part.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int  # width of the MLP of layers without experts
    max_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    rope_scaling: RopeScaling | None = None
    layers: tuple[LayerConfig, ...] = (LayerConfig(),)  # of each layer, or one of all layers
    norm_offset: float = 0.0  # number added to the scale of every norm
    norms_are_centred: bool = False  # whether every norm subtracts the mean first
    norms_have_biases: bool = False  # whether the norms of the stream, which then subtract the mean, add a bias
    head_has_bias: bool = False  # whether logits have a bias
    embedding_factor: float = 1.0  # factor on embeddings, multiplied in float32
    scales_embeddings: bool = False  # whether each embedding is scaled to unit root mean square
    logit_divisor: float = 1.0  # number that divides logits, before their soft cap
    logit_softcap: float | None = None  # cap c that turns a logit s into c tanh(s / c)
    transposed: bool = False  # whether matrices are [out, in]: faster on GPUs for one token, slower on CPUs for a few
    axis_name: str | None = None  # mesh axis whose devices share the decoder; the sizes then describe one device's part
    query_scaling: QueryScaling | None = None  # factor on the queries of all layers by their position; None for none
    rotary_size: int | None = None  # numbers of a head that turn with the position, the first ones; None is all
    rope_is_interleaved: bool = False  # whether two numbers that turn together stand side by side in a head
    expert_size: int = 0  # width of each expert
    shared_size: int = 0  # width of the MLP beside the experts
    num_padding: int = 0  # ids of the vocabulary that are padding, after the others on the last devices
    room: int | None = None  # positions by which scalings of rotary positions go; None is those that a row has room for

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size must be even (rotary positions turn pairs), got {self.head_size}")
        if len(self.layers) not in (1, self.num_layers):
            raise ValueError(f"layers must be 1 or num_layers = {self.num_layers} descriptions, got {len(self.layers)}")
        if self.norms_have_biases and not self.norms_are_centred:
            raise ValueError("norms_have_biases must be False where norms_are_centred is, got True")
        latent_mixer(self.layers)

    @property
    def rope(self) -> Rope:
        """How the heads turn in layers that do not say it themselves."""
        return Rope(self.rope_theta, self.rope_scaling, self.rotary_size, self.rope_is_interleaved)

    @property
    def each_layer(self) -> tuple[LayerConfig, ...]:
        """The description of each of the `num_layers` layers."""
        return self.layers if len(self.layers) == self.num_layers else self.layers * self.num_layers

    @property
    def recurrent(self) -> tuple[tuple[int, RowMixer], ...]:
        """The layers that are recurrent, beside attention or in its place, each by its index, with their mixers."""
        mixers = enumerate(layer.mixer if layer.beside is None else layer.beside for layer in self.each_layer)
        return tuple((i, mixer) for i, mixer in mixers if isinstance(mixer, RowMixer))

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer attends, to the keys and values that it keeps or that another layer lends it."""
        mixers = [layer.mixer for layer in self.each_layer]
        return tuple(mixer is not None and not isinstance(mixer, RowMixer) for mixer in mixers)

    @property
    def has_own_sizes(self) -> bool:
        """Whether a layer has heads of another size or number, or an MLP of another width, than the config says."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        mlps = [layer.ffn for layer in self.layers if isinstance(layer.ffn, GatedMLP)]
        return any(mixer.sized(self) != self for mixer in mixers) or any(mlp.size is not None for mlp in mlps)

    @property
    def cache_sizes(self) -> tuple[tuple[int, int], ...] | None:
        """The number of key heads of each layer, and their size; None where all layers have the config's."""
        if not self.has_own_sizes:
            return None
        sized = [self if layer.mixer is None else layer.mixer.sized(self) for layer in self.each_layer]
        return tuple((one.num_kv_heads, one.head_size) for one in sized)

    @property
    def owners(self) -> tuple[int, ...]:
        """The layer whose memory each layer reads: its own, or an earlier one with its keys and values."""
        lenders = [getattr(layer.mixer, "keys_of", None) for layer in self.each_layer]
        return tuple(i if lender is None else lender for i, lender in enumerate(lenders))

    @property
    def input(self) -> LayerInput | None:
        """The numbers that tokens give to the layers; None for none."""
        return self.layers[0].input

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer: the number of positions that a token sees, its own included; None is all."""
        return tuple(getattr(layer.mixer, "window", None) for layer in self.each_layer)

    @property
    def seen(self) -> tuple[Window, ...]:
        """The positions that tokens of each layer see: its window, or the parts of its sequence."""
        return tuple(layer.mixer.seen if isinstance(layer.mixer, Attention) else None for layer in self.each_layer)


def _init(config: DecoderConfig, seed: int) -> PyTree:
    """Return random parameters: normal matrices, norms that scale by 1, and biases of zeros."""
    hidden, key = config.hidden_size, jax.random.key(seed)
    num_drawn = itertools.count()

    def draw() -> Array:
        return jax.random.fold_in(key, next(num_drawn))

    def drawn(shapes: Shapes) -> dict[str, Array]:
        inner, outer = draw(), draw()

        def param(name: str, shape: tuple[int, ...]) -> Array:
            if len(shape) == 1 or name.endswith("norm"):
                if name.endswith("_scale"):
                    return jnp.ones(shape, jnp.float32)
                return jnp.full(shape, 1 - config.norm_offset if name.endswith("norm") else 0.0, jnp.float32)
            if name.endswith("_out"):  # the more layers add to the stream, the less each adds
                return 0.02 / (2 * config.num_layers) ** 0.5 * jax.random.normal(outer, shape)
            return 0.02 * jax.random.normal(inner, shape)

        return {name: param(name, shape) for name, shape in shapes.items()}

    params = {"embedding": 0.02 * jax.random.normal(draw(), (config.vocab_size, hidden))}
    params |= {"layers": {i: drawn(one.shapes(config)) for i, one in enumerate(config.each_layer)}}
    params |= {"norm": jnp.full((hidden,), 1 - config.norm_offset, jnp.float32)}
    if config.norms_have_biases:
        params |= {"norm_bias": jnp.zeros(hidden)}
    if not config.tie_embeddings:
        params |= {"head": 0.02 * jax.random.normal(draw(), (config.vocab_size, hidden))}
    if config.head_has_bias:
        params |= {"head_bias": jnp.zeros(config.vocab_size)}
    if config.input is not None:
        params |= drawn(config.input.shapes_of_all(config))
    return params


def _apply(
    config: DecoderConfig,
    params: PyTree,
    inputs: ModelInput,
    cache: list | Memory | None,
    feature_layers: tuple[int, ...],
) -> tuple[ModelOutput, list | Memory | None]:
    """Run the tokens of `inputs`. It computes in the dtype of the parameters; logits are float32.

    Args:
        config: sizes and options.
        params: as `init_params` names them.
        inputs: tokens and positions [B, T]. Without a cache they are whole sequences from position 0, attended
            causally or as `inputs.mask` says.
        cache: keys and values of each layer; with recurrent layers, a `Memory` with these pools and the rows of
            `recurrent.InitRows`; None computes without a cache.
        feature_layers: layers of `Features.taps`, static.

    Returns:
        Logits [B, T, V] float32 with `Features`, and the new cache.
    """
    embedding = params["embedding"]
    # By default a GPU multiplies float32 in TF32, and logits then depend visibly on the number of tokens in a call.
    precision = "highest" if embedding.dtype == jnp.float32 else None
    with jax.default_matmul_precision(precision):
        x = network.embed(embedding, inputs.tokens, config.axis_name, params.get("links"))
        if config.embedding_factor != 1:
            x = times(x, config.embedding_factor)
        x = unit_norm(config, x) if config.scales_embeddings else x
        taps = network.Taps(feature_layers)
        taps.collect(0, x)
        found, new_cache = _memories(config, params, inputs, cache), [{}] * config.num_layers
        lent: dict[int, Borrowed] = {}
        turns = _rotations(config, inputs, cache)
        scalings = dict.fromkeys(_query_scaling(config, layer) for layer in config.each_layer)
        factors = {scaling: None if scaling is None else scaling(inputs.positions) for scaling in scalings}
        links = {name: params[name] for name in {"links"} & params.keys()}  # of the devices that share the model
        given = None if config.input is None else config.input.of_all(config, params, inputs.tokens, x)
        for i, layer in enumerate(config.each_layer):
            weights = params["layers"][i] | links
            owner, of_layer = config.owners[i], turns[_turning(config, layer)]
            memory = lent.get(owner, found[i])
            own, factor = None if given is None else given[:, :, i], factors[_query_scaling(config, layer)]
            x, kept = run_layer(config, layer, weights, x, of_layer, memory, None, factor, own)
            if isinstance(kept, Borrowed):
                lent[owner], kept = kept, kept.kept
            new_cache[owner] = kept
            taps.collect(i + 1, x)
        norm = norm_of(params["norm"], config, params.get("norm_bias"))
        features = taps.beside(rms_norm(x, norm))
        head = embedding if config.tie_embeddings else params["head"]
        logits = network.by_group(inputs, x, lambda part: _logits(config, head, params.get("head_bias"), norm, part))
    return ModelOutput(logits, features), _kept(config, inputs, cache, new_cache)


def _logits(config: DecoderConfig, head: Array, bias: Array | None, norm: AnyNorm, x: Array) -> Array:
    residual = None if bias is None else bias.astype(jnp.float32)[None, None]
    logits = linear(x, head, transposed=True, norm=norm, residual=residual, dtype=jnp.float32)
    if config.logit_divisor != 1:
        logits = logits / config.logit_divisor
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return network.without_padding(logits, config.num_padding, config.axis_name)


def _query_scaling(config: DecoderConfig, layer: LayerConfig) -> QueryScaling | None:
    """Return the factor on the queries of a layer."""
    own = layer.mixer.query_scaling if isinstance(layer.mixer, Attention) else None
    return config.query_scaling if own is None else own


def _turning(config: DecoderConfig, layer: LayerConfig) -> tuple[Rope, int]:
    """Return how the heads of a layer turn, and their size."""
    if not isinstance(layer.mixer, Attention):
        return config.rope, config.head_size
    own = layer.mixer.rope
    return config.rope if own is None else own, layer.mixer.sized(config).head_size


def _rotations(
    config: DecoderConfig, inputs: ModelInput, cache: list | Memory | None
) -> dict[tuple[Rope, int], Rotation | None]:
    """Return the rotation of each way in which the layers turn in a call."""
    length = inputs.tokens.shape[1]
    if config.room is not None:
        length = config.room
    elif cache is not None:
        pools = cache.pools if isinstance(cache, Memory) else cache
        length = next(num_slots(pool, inputs) for pool in pools if pool)

    ways = dict.fromkeys(_turning(config, layer) for layer in config.each_layer)
    return {
        (rope, size): rotation(inputs.positions, size, rope.theta, rope.scaling, rope.size, length)
        for rope, size in ways
    }


def _memories(config: DecoderConfig, params: PyTree, inputs: ModelInput, cache: list | Memory | None) -> list[Any]:
    """Return the memory of each layer in a call, as `run_layer` takes it; None of a layer that borrows one."""
    recurs, owners = dict(config.recurrent), config.owners
    pools = cache.pools if isinstance(cache, Memory) else cache
    attends = [i for i, one in enumerate(config.attends) if one and owners[i] == i]
    windows = [config.seen[i] for i in attends]
    scales = [cache_scales(params["layers"][i]) for i in attends]
    own = None if pools is None else [pools[i] for i in attends]
    found: dict[int, Any] = dict(zip(attends, memories(inputs, own, windows, scales=scales), strict=True))
    if recurs:
        assert cache is None or isinstance(cache, Memory), "such a model has init_rows"
        rows = recurrent.memories(inputs, cache, tuple(recurs))
        found |= {i: (found[i], own) if i in found else own for i, own in rows.items()}
    lenders = {owner for i, owner in enumerate(owners) if owner != i}
    found |= {i: Lender(found[i]) for i in lenders}
    return [found.get(i) for i in range(config.num_layers)]


def _kept(config: DecoderConfig, inputs: ModelInput, cache: list | Memory | None, new: list) -> list | Memory | None:
    """Return the cache after a call, given the records of all layers."""
    if not isinstance(cache, Memory):
        return None if cache is None else new
    pools, rows = list(new), []
    for i, _ in config.recurrent:
        pools[i], own = new[i] if config.attends[i] else ({}, new[i])
        rows.append(own)
    return recurrent.after_call(inputs, cache, pools, rows)


DECODER = network.Network(_init, _apply)


def init_params(config: DecoderConfig, seed: int) -> PyTree:
    """Return random float32 parameters, a nested dict with the names and shapes of `param_shapes`."""
    return network.init_params(DECODER, config, seed)


def param_shapes(config: DecoderConfig) -> PyTree:
    """Return the names, shapes and dtypes of the parameters: a nested dict of `jax.ShapeDtypeStruct`."""
    return network.param_shapes(DECODER, config)


def with_room(model: Model, room: int) -> Model:
    """Return a model whose rows of any size turn their heads as rows with room for so many positions do.

    Models whose heads turn alike in all rows, and models of another kind, stay as they are.
    """
    return replace(model, apply=_with_room(model.apply, room))


def _with_room(apply: Any, room: int) -> Any:
    """Return `Model.apply` of a model that `with_room` gives."""
    if isinstance(apply, OnMesh | ResizedApply):
        return replace(apply, apply=_with_room(apply.apply, room))
    config = getattr(apply, "config", None)
    if not isinstance(config, DecoderConfig):
        return apply
    scalings = {rope.scaling for rope, _ in (_turning(config, layer) for layer in config.layers)}
    if not any(isinstance(scaling, DynamicScaling | LongRopeScaling) for scaling in scalings):
        return apply
    return replace(apply, config=replace(config, room=min(room, config.max_length)))


def decoder_model(config: DecoderConfig, params: PyTree, feature_layers: Sequence[int] = ()) -> Model:
    """Return the `Model` of a decoder with these parameters; its cache has their dtype.

    Args:
        config: sizes and options.
        params: the parameters, as `init_params` names them.
        feature_layers: as `models.with_feature_layers` takes them.
    """
    model, dtype = network.network_model(DECODER, config, params, feature_layers), str(params["embedding"].dtype)
    if latent_mixer(config.layers) is not None:
        init_cache = InitLatents(config, dtype)
        return replace(model, init_cache=init_cache) if not config.recurrent else _hybrid(config, model, init_cache)
    if not any(config.attends):
        raise ValueError("config.layers must have a layer that attends, got none")
    if not config.recurrent:
        if not config.has_own_sizes and all(config.attends):
            return model
        owns = tuple(
            one and owner == i for i, (one, owner) in enumerate(zip(config.attends, config.owners, strict=True))
        )
        return replace(model, init_cache=network.InitCache(config, dtype, owns, config.cache_sizes))
    return _hybrid(config, model, network.InitCache(config, dtype, config.attends))


def _hybrid(config: DecoderConfig, model: Model, init_cache: network.InitCache | InitLatents) -> Model:
    """Return a model whose recurrent layers keep rows, given the caches of the others."""
    return replace(
        model,
        init_cache=init_cache,
        init_rows=recurrent.InitRows(config.recurrent, init_cache.dtype),
        commit=recurrent.commit,
        max_step=recurrent.MAX_STEP,
        takes_groups=False,
        takes_ragged=False,
    )
