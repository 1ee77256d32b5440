"""The dtype of the cache of a built-in model, where it differs from the dtype of the parameters."""

from dataclasses import replace

from specjax.models.network import InitCache
from specjax.parallel import InitOnMesh, OnMesh
from specjax.types import Model
from specjax.validation import suggestion

CACHE_DTYPES = {"fp8": "float8_e4m3fn"}


def check_cache_dtype(cache_dtype: str | None) -> None:
    """Raise ValueError unless a cache may have this dtype."""
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        hint = suggestion(cache_dtype, CACHE_DTYPES)
        raise ValueError(f"cache_dtype must be None or {', '.join(map(repr, CACHE_DTYPES))}, got {cache_dtype!r}{hint}")


def with_cache_dtype(model: Model, cache_dtype: str | None) -> Model:
    """Return a built-in model whose cache has another dtype than its parameters. The weights are shared.

    Args:
        model: a model of `models.load` or `decoder_model`.
        cache_dtype: "fp8" rounds keys and values to float8_e4m3fn, of half the size of bfloat16. None leaves the model
            as it is.

    Raises:
        ValueError: there is no such dtype, or the model is none of the built-in ones.

    Example:
        >>> from specjax import models
        >>> model = models.with_cache_dtype(models.load(models.EMBEDDED / "draft"), "fp8")
        >>> model.init_cache(1, 16)[0]["key"].dtype
        dtype(float8_e4m3fn)
    """
    check_cache_dtype(cache_dtype)
    if cache_dtype is None:
        return model
    apply, init_cache, dtype = model.apply, model.init_cache, CACHE_DTYPES[cache_dtype]
    own = init_cache.init_cache if isinstance(init_cache, InitOnMesh) else init_cache
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
