"""Every network and every drafter gives the same results with quantised matrices as with the floats they stand for."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import prefill
from jax.sharding import Mesh

from specjax import ModelInput, decode, models, proposers, sampling
from specjax.models.decoder import DecoderConfig, decoder_model
from specjax.models.decoder import init_params as init_decoder
from specjax.models.families import opt
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.network import Network, init_params, network_model
from specjax.models.quantized import FORMATS, Quantized, dequantize, is_quantized, quantize

OPT = Network(opt._init, opt._apply)
SIZES = {"vocab_size": 40, "hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_size": 16}
VARIED = LayerConfig(Attention(has_bias=True, has_head_norms=True, window=3), GatedMLP("gelu", has_bias=True), True)


def rounded(params, format: str, *, transposed: bool):
    """Parameters with their matrices in few bits, and with the floats for which these stand."""

    def is_matrix(path, x) -> bool:
        return x.ndim == 2 and "position_embedding" not in jax.tree_util.keystr(path)

    def turned(path, x):
        is_table = any(entry.key in ("embedding", "head") for entry in path)
        return x if transposed or is_table else x.T

    def few(path, x):
        return quantize(turned(path, x), format) if is_matrix(path, x) else x

    def floats(path, x):
        return turned(path, dequantize(few(path, x))) if is_matrix(path, x) else x

    return (jax.tree_util.tree_map_with_path(function, params) for function in (few, floats))


@cache
def decoders():
    """Return each decoder and whether its matrices are transposed, by name."""
    return {name: (model, transposed) for name, model, transposed in _decoders()}


def _decoders():
    for transposed in (True, False):
        config = DecoderConfig(**SIZES, mlp_size=256, max_length=64, transposed=transposed)
        yield f"tied, transposed={transposed}", decoder_model(config, init_decoder(config, 0)), transposed
    config = DecoderConfig(**SIZES, mlp_size=256, max_length=64, tie_embeddings=False, layers=(VARIED,))
    yield "varied", decoder_model(config, init_decoder(config, 0)), False
    sizes = {name: size for name, size in SIZES.items() if name != "num_kv_heads"}
    config = opt.OPTConfig(**sizes, mlp_size=256, max_length=64, embedding_size=32)
    yield "opt", network_model(OPT, config, init_params(OPT, config, 0)), False


DECODERS = ("tied, transposed=True", "tied, transposed=False", "varied", "opt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, format", list(zip([name for name in DECODERS if name != "opt"], ("int8", "int4", "int4"), strict=True))
)
def test_devices_share_matrices(name, format):
    """Heads, columns and tokens of the vocabulary, with scales of a row and of groups of inputs."""
    model, transposed = decoders()[name]
    few, _ = rounded(model.params, format, transposed=transposed)
    model = replace(model, params=few)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))
    shared = models.tensor_parallel(model, mesh)
    for x in jax.tree.leaves(shared.params, is_leaf=is_quantized):
        is_shared = isinstance(x, Quantized) and x.size >= 64 * 64
        assert not is_shared or x.values.addressable_shards[0].data.size * 2 == x.values.size
    prompts = jnp.arange(8).reshape(2, 4) % 40
    rows = sampling.batch([sampling.SamplingParams(temperature=0.0, max_tokens=12)] * 2)
    tokens = []
    for one in (model, shared):
        state = prefill(one, proposers.none(), prompts, jnp.full(2, 4), rows, jax.random.key(0), max_length=16)
        tokens.append(np.asarray(decode.generate(one, proposers.none(), state).context.tokens))
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", DECODERS)
def test_networks(name, format):
    model, transposed = decoders()[name]
    few, floats = rounded(model.params, format, transposed=transposed)
    inputs = ModelInput(jnp.arange(10).reshape(2, 5), jnp.tile(jnp.arange(5), (2, 1)))
    got, expected = (model.apply(params, inputs, model.init_cache(2, 8)) for params in (few, floats))
    np.testing.assert_allclose(got[0].logits, expected[0].logits, rtol=1e-4, atol=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (got[1], expected[1])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
