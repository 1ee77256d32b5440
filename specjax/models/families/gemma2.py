"""Gemma 2: changes Gemma by norms after attention and MLP too, soft caps, and a window in every other layer.

VaultGemma lacks the norms after attention and MLP.
"""

from specjax.models.config_file import ConfigFile
from specjax.models.families import gemma, llama
from specjax.models.families.gemma import ACTIVATIONS, NORMS
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.models.tensors import Tensors
from specjax.types import Model

VAULT_NORMS = {name: NORMS[name] for name in ("attention_norm", "mlp_norm")}


def build(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a Gemma 2 checkpoint."""
    return _decoder(config, tensors, NORMS)


def build_vault(config: ConfigFile, tensors: Tensors) -> Model:
    """Build the model of a VaultGemma checkpoint."""
    return _decoder(config, tensors, VAULT_NORMS)


def _decoder(config: ConfigFile, tensors: Tensors, norms: dict[str, str]) -> Model:
    """Build the model, given the norms of a layer as `llama.decoder` takes them."""
    # transformers does not read hidden_act here.
    activation = config.choice("hidden_activation", tuple(ACTIVATIONS), default="gelu_pytorch_tanh")
    attention = Attention(
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=config.number("attn_logit_softcapping", config.unless_null("attn_logit_softcapping", 50.0)),
    )
    layer = LayerConfig(attention, GatedMLP(ACTIVATIONS[activation]), has_post_norms=norms is NORMS)
    layers = llama.windowed(layer, llama.windows(config, lambda i: i % 2 == 0))
    softcap = config.number("final_logit_softcapping", config.unless_null("final_logit_softcapping", 30.0))
    return gemma.decoder(config, tensors, layers, norms=norms, logit_softcap=softcap)
