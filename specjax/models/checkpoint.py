"""Load a Hugging Face checkpoint, config.json and files of tensors, as a `Model`."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from specjax.models.cache_dtype import check_cache_dtype, with_cache_dtype, with_cache_scales
from specjax.models.config_file import DTYPES, ConfigFile
from specjax.models.directory import Checkpoint
from specjax.models.families import BUILD
from specjax.models.network import with_feature_layers
from specjax.models.sharding import tensor_parallel
from specjax.parallel import check_axis, check_mesh, data_parallel
from specjax.types import Model
from specjax.validation import suggestion


def load(
    directory: str | Path | Checkpoint,
    dtype: DTypeLike = jnp.float32,
    *,
    sharding: jax.sharding.Sharding | None = None,
    mesh: Mesh | None = None,
    feature_layers: Sequence[int] = (),
    quantization: str | None = None,
    cache_dtype: str | None = None,
) -> Model:
    """Load a checkpoint from a directory in the Hugging Face layout.

    Tensors are read one at a time, straight to their dtype and devices, so the host needs little memory beyond the
    weights. With a mesh only the part of one tensor that one device gets is on the host at a time, so a checkpoint may
    be larger than the memory of any device and of the host. A progress bar shows if standard error is a terminal.

    Args:
        directory: a `Checkpoint`, or its directory with config.json, and with model.safetensors or the shards that
            model.safetensors.index.json names, or else with pytorch_model.bin or its shards. The model must belong to
            one of the families in `specjax.models.families`. Its tensors must be float32, bfloat16 or float16, or its
            matrices in codes of a format that docs/models.md names, which stay as they are.
        dtype: dtype of the parameters and therefore of the computation: float32, bfloat16 or float16.
        sharding: sharding of every parameter; None puts the parameters on the default device. The axes of a mesh must
            have the axis type Auto.
        mesh: the devices that share the model. Devices along an axis "tensor" share its weights, as
            `models.tensor_parallel` says; devices along an axis "batch" share the rows of a batch, as
            `models.data_parallel` says. Both axes must have the axis type Auto. None is a model of one device, or of a
            sharding.
        feature_layers: layers whose residual stream the model gives to proposers, as `with_feature_layers` takes them;
            `proposers.feature_layers` says which ones a drafter wants.
        quantization: "int8", "int4" or "fp8", to which the matrices of layers are rounded, one after the other, when
            they are read; embeddings and head stay as they are. None rounds nothing, or as the `Checkpoint` says.
        cache_dtype: "fp8" for a cache in float8_e4m3fn, with the scales that the checkpoint has, or 1; None is the
            dtype of the parameters.

    Returns:
        A `Model` whose logits are float32.

    Raises:
        FileNotFoundError: the directory, its config.json or a file of weights does not exist.
        MemoryError: the parameters do not fit into the memory of the device or of the host.
        ValueError: a file is damaged; a field or tensor is missing, has a wrong value or shape, or is not supported; or
            the files hold a tensor that the model does not have. The message names the file and the field or tensor.
            Also, a mesh has an axis of another name or type, stands beside a sharding, or has devices that cannot share
            the model equally.

    Example:
        >>> from specjax import models
        >>> target = models.load(models.EMBEDDED / "target", dtype="bfloat16")
        >>> target.vocab_size, target.max_length
        (4096, 2048)
    """
    checkpoint = Checkpoint.of(directory)
    check_cache_dtype(cache_dtype)
    if quantization is not None:
        checkpoint = Checkpoint(checkpoint.directory, quantization, keep_codes=checkpoint.keep_codes)
    wanted = _dtype(dtype)
    config = checkpoint.config
    family = _family(config)
    shares_weights = mesh is not None and "tensor" in _axes(mesh, sharding)
    sharding = sharding if mesh is None else NamedSharding(mesh, PartitionSpec())
    tensors = checkpoint.tensors(wanted, sharding, in_parts=shares_weights)
    with tensors.progress(), _enough_memory(checkpoint.directory, wanted):
        model = BUILD[family](config, tensors)
        if cache_dtype is not None:
            scaled = with_cache_scales(model, checkpoint, None if shares_weights else sharding)
            model = with_cache_dtype(scaled, cache_dtype)
        model = tensor_parallel(model, mesh) if mesh is not None and shares_weights else model
    model = data_parallel(model, mesh) if mesh is not None and "batch" in mesh.shape else model
    return with_feature_layers(model, feature_layers)


def _dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of the parameters."""
    try:
        wanted = jnp.dtype(dtype)
    except TypeError as error:
        got = f"{dtype!r}{suggestion(dtype, DTYPES)}"
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {got}") from error
    if wanted.name not in DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {wanted}")
    return wanted


def _family(config: ConfigFile) -> str:
    """Return the family of a checkpoint; raise ValueError if there is none."""
    family = config.get("model_type", str)
    if family not in BUILD:
        raise ValueError(
            f"specjax has no family {family!r}, which is model_type in {config.path}; it has {', '.join(BUILD)} "
            "(docs/models.md), and takes models in JAX that you bring yourself (docs/own-models.md)"
        )
    config.ignore("quantization_config")  # `Checkpoint.scheme` has read it
    return family


@contextlib.contextmanager
def _enough_memory(directory: Path, dtype: np.dtype) -> Iterator[None]:
    """Let an error of memory name the model that does not fit, and the remedy."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"the weights of {directory} in {dtype.name} do not fit into the memory that is free; load them in "
            f"bfloat16, let several devices share them (tensor_parallel, or a mesh), or take a smaller model: {error}"
        ) from error


def _axes(mesh: Mesh, sharding: jax.sharding.Sharding | None) -> Collection[str]:
    """Return the axes of a mesh; raise ValueError unless they say how the devices share the model."""
    if sharding is not None:
        raise ValueError(f"sharding must be None where mesh is given, got {sharding}")
    check_mesh(mesh)
    if not mesh.shape or not set(mesh.shape) <= {"tensor", "batch"}:
        raise ValueError(f"mesh must have the axes 'tensor', 'batch' or both, got {list(mesh.shape)}")
    for axis in mesh.shape:
        check_axis(mesh, axis)
    return mesh.shape
