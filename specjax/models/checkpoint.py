"""Load Hugging Face checkpoints: config.json and safetensors files become a `Model`."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.models.config_file import ConfigFile
from specjax.models.families import BUILD
from specjax.models.tensors import Tensors
from specjax.types import Model


def load(
    directory: str | Path, dtype: DTypeLike = jnp.float32, *, sharding: jax.sharding.Sharding | None = None
) -> Model:
    """Load a checkpoint from a directory in the Hugging Face layout.

    Tensors are read one at a time, straight to their dtype and devices, with a progress bar if standard error is a
    terminal: beyond the weights, the host needs little memory.

    Args:
        directory: holds config.json, and model.safetensors or the shards that model.safetensors.index.json names, of
            one of the families in `specjax.models.families`; with numbers in float32, bfloat16 or float16.
        dtype: of the parameters, hence of the computation: float32, bfloat16 or float16.
        sharding: of every parameter; None puts them on the default device. Over a mesh, its axes are of type Auto.

    Returns:
        A `Model`; its logits are float32.

    Raises:
        FileNotFoundError: the directory, its config.json or a file of weights does not exist.
        ValueError: a file is damaged; a field or tensor is missing, not as it should be, or not supported; or there is
            a tensor that the model does not have. The message names it.

    Example:
        >>> from specjax import models
        >>> target = models.load(models.EMBEDDED / "target", dtype="bfloat16")
        >>> target.vocab_size, target.max_length
        (4096, 2048)
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"directory must hold a checkpoint, got {directory}, which is not a directory")
    try:
        wanted = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}") from error
    if wanted not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {wanted}")

    config = ConfigFile(directory / "config.json")
    family = config.choice("model_type", tuple(BUILD))
    tensors = Tensors(directory, wanted, sharding)
    with tensors.progress():
        return BUILD[family](config, tensors)
