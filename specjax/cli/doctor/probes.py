"""Probes for `specjax doctor`: each operation that has kernels, with a result that NumPy knows."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import distributions, verifiers
from specjax.models import quantized
from specjax.models.attention import attend_to_cache, attention_mask
from specjax.models.linear import linear
from specjax.sampling.cut import min_logit
from specjax.types import Array, Categorical, Draft, ModelInput

SECONDS = 0.1  # that a probe is repeated for
VOCAB, BATCH, DRAFTS = 8192, 4, 3
HIDDEN, OUTPUTS = 512, 1024
HEADS, KV_HEADS, HEAD_SIZE, SLOTS = 8, 2, 64, 256
CLOSE = 0.02  # error that bfloat16 may have, relative to the largest number


class Probe(NamedTuple):
    """An operation on inputs whose result is known."""

    name: str
    function: Callable[..., Any]  # of the arguments, and of `implementation`
    arguments: tuple[Any, ...]
    check: Callable[[Any], str | None]  # function of the result: how it is wrong, None where it is right


def measure(probe: Probe) -> dict[str, Any]:
    """Run a probe, and return its path, the microseconds of a call, and how its result is wrong."""
    row: dict[str, Any] = {"operation": probe.name, "path": "XLA", "reason": None, "microseconds": None, "error": None}
    try:
        traced = jax.jit(probe.function).trace(*probe.arguments)
        lowered = traced.lower()
        row["path"], row["reason"] = path_of(probe, lowered.as_text(), jax.default_backend())
        run = lowered.compile()
        row["error"] = probe.check(jax.block_until_ready(run(*probe.arguments)))
        row["microseconds"] = _microseconds(partial(run, *probe.arguments))
    except Exception as error:  # whatever a compiler or a driver raises is a finding
        row["error"] = f"is an error, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return row


def path_of(probe: Probe, program: str, platform: str) -> tuple[str, str | None]:
    """Return by which path a program runs a probe, and why where that is not the kernel.

    Args:
        probe: the probe.
        program: the text of its lowered program.
        platform: "cpu", "gpu" or another one for which the program was lowered.
    """
    if "triton" in program:
        return "kernel", None
    if platform != "gpu":
        return "XLA", "kernels run on NVIDIA GPUs alone"
    try:
        jax.eval_shape(partial(probe.function, implementation="pallas"), *probe.arguments)
    except NotImplementedError as error:
        return "XLA", str(error).partition("cannot run this case: ")[2] or str(error)
    return "XLA", "it is faster at this size"


def _microseconds(call: Callable[[], Any]) -> float:
    """Return the mean microseconds of a call."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        jax.block_until_ready(call())
        count += 1
    return 1e6 * (time.perf_counter() - start) / count


def probes(*, is_large: bool | None = None) -> Iterator[Probe]:
    """Yield a probe for each operation that has kernels.

    Args:
        is_large: whether a matrix has the size from which a kernel for several rows pays; None is on GPUs.
    """
    random = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    yield _verification(normal)
    yield _drawing(normal)
    yield _cut(normal)
    yield _attention("attention of a few tokens", 4, normal)
    yield _attention("attention of a prompt", 128, normal)
    weight = normal(OUTPUTS, HIDDEN)
    yield _product("product of one row", 1, weight, normal)
    repeats = 101 if (jax.default_backend() == "gpu" if is_large is None else is_large) else 1
    yield _product("product of six rows", 6, jnp.tile(weight, (repeats, 1)), normal)
    for format in quantized.FORMATS:
        yield _product(f"product with codes in {format}", 6, quantized.quantize(weight, format), normal)


def _verification(normal: Callable[..., Array]) -> Probe:
    """Half of the sequences draw from the target's own distribution; drafts of the others are impossible tokens."""
    target = normal(BATCH, DRAFTS + 1, VOCAB, dtype=jnp.float32)
    drafts, half = jnp.full((BATCH, DRAFTS), 2, jnp.int32), BATCH // 2
    draft = Draft(drafts, Categorical(target[:, :DRAFTS]))
    target = target.at[half:, :, ::2].set(-jnp.inf)

    def check(verified: Any) -> str | None:
        tokens, accepted = np.asarray(verified.tokens), np.asarray(verified.num_accepted)
        if accepted.tolist() != [DRAFTS] * half + [0] * (BATCH - half):
            return f"has {accepted.tolist()} accepted drafts, not {DRAFTS} in the first {half} rows and 0 in the others"
        last = tokens[np.arange(BATCH), accepted]
        is_possible = (last >= 0) & (last < VOCAB) & ((last % 2 == 1) | (np.arange(BATCH) < half))
        return None if is_possible.all() else f"ends with the impossible tokens {last[~is_possible].tolist()}"

    return Probe("verification by rejection", verifiers.rejection, (jax.random.key(0), draft, target), check)


def _drawing(normal: Callable[..., Array]) -> Probe:
    logits = normal(BATCH, 1, VOCAB)
    greedy = Categorical(logits, jnp.zeros(BATCH))
    expected = np.argmax(np.asarray(logits, np.float32), axis=-1)
    keys = jax.random.split(jax.random.key(0), (BATCH, 1))
    return Probe("draw of a token", distributions.sample, (keys, greedy), partial(_equal, expected))


def _cut(normal: Callable[..., Array]) -> Probe:
    logits = normal(BATCH, VOCAB)
    expected = np.sort(np.asarray(logits, np.float32), axis=-1)[:, -40]
    return Probe("cut of top-k", _top_k, (logits, jnp.full(BATCH, 40)), partial(_equal, expected))


def _top_k(logits: Array, top_k: Array, implementation: str | None = None) -> Array:
    return min_logit(logits, top_k=top_k, implementation=implementation)


def _attention(name: str, num_tokens: int, normal: Callable[..., Array]) -> Probe:
    query = normal(1, num_tokens, HEADS, HEAD_SIZE)
    key, value = (normal(1, num_tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
    before = {name: normal(1, SLOTS, KV_HEADS, HEAD_SIZE) for name in ("key", "value")}
    start = SLOTS - num_tokens
    inputs = ModelInput(jnp.zeros((1, num_tokens), jnp.int32), start + jnp.arange(num_tokens)[None])
    # [heads, slots, head size], and the scores of the slots up to the own one
    keys, values = (
        np.repeat(
            np.concatenate([np.asarray(old[0, :start]), np.asarray(new[0])]).astype(np.float64), HEADS // KV_HEADS, 1
        )
        for old, new in ((before["key"], key), (before["value"], value))
    )
    scores = np.einsum("thd,shd->hts", np.asarray(query[0]).astype(np.float64), keys) / np.sqrt(HEAD_SIZE)
    scores[:, np.arange(SLOTS)[None] > start + np.arange(num_tokens)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), values)
    return Probe(name, _attend, (query, key, value, before, inputs), partial(_close, expected[None]))


def _attend(query: Array, key: Array, value: Array, cache: Any, inputs: ModelInput, implementation: str | None = None):
    mask = attention_mask(inputs, SLOTS)
    return attend_to_cache(query, key, value, cache, inputs, mask, None, implementation=implementation)[0]


def _product(name: str, num_rows: int, weight: Any, normal: Callable[..., Array]) -> Probe:
    x = normal(num_rows, 1, HIDDEN) if num_rows == 1 else normal(1, num_rows, HIDDEN)
    matrix = (quantized.dequantize(weight) if quantized.is_quantized(weight) else weight)[:OUTPUTS]
    expected = np.asarray(x).astype(np.float64) @ np.asarray(matrix).astype(np.float64).T

    def check(result: Array) -> str | None:
        return _close(expected, result[..., :OUTPUTS])

    return Probe(name, partial(linear, transposed=True), (x, weight), check)


def _equal(expected: np.ndarray, result: Array) -> str | None:
    wrong = np.sum(np.asarray(result).reshape(-1) != expected.reshape(-1))
    return None if wrong == 0 else f"differs from the reference in {wrong} of {expected.size} places"


def _close(expected: np.ndarray, result: Array) -> str | None:
    error = np.abs(np.asarray(result).astype(np.float64) - expected).max() / np.abs(expected).max()
    return None if error < CLOSE else f"is {error:.2g} away from the reference, relative to the largest number"
