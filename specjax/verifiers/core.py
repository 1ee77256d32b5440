"""What all verifiers share: the chance they draw from, the wrapper that makes a core public, the shape of a result."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from specjax import distributions
from specjax import keys as streams
from specjax.distributions import Law, Residual
from specjax.types import FLOATS, Array, Categorical, Draft, Verified
from specjax.verifiers import kernels


class Draw(Protocol):
    """The only chance that a verifier has. `KeyDraw` draws it; `specjax.testing` enumerates it instead.

    Every call has noise of its own. Calls are told apart by their number, which is counted in Python; inside a loop,
    or any other function that JAX traces, that count stands still, and a call needs `index`, an integer (it may be
    traced) that no other call of the method has in the same step: the iteration, if there is one call in each.
    """

    def flip(self, probabilities: Array, *, index: Array | int | None = None) -> Array:
        """Flip one coin for every draft: bool [B, K], true with probabilities [B, K]."""

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        """Draw one token a sequence, [B] int32, from a residual."""

    def sample(self, target: Categorical, *, index: Array | int | None = None) -> Array:
        """Draw one token from every row, [B, T] int32, with the noise of the row's own position."""


class CallNumbers:
    """The numbers that tell the calls of a draw apart."""

    FIRST_INDEXED = 1 << 16  # calls with an index have the numbers from here on, counted calls those below

    def __init__(self):
        self._trace = get_opaque_trace_state(convention="specjax")
        self._counts: dict[str, int] = {}

    def is_in_traced_function(self) -> bool:
        """Whether the caller is inside a function that JAX traces by itself, such as the body of a loop."""
        return get_opaque_trace_state(convention="specjax") != self._trace

    def next(self, method: str, index: Array | int | None) -> Array | int:
        """Return the number of a call of `method`, 0 for the first one that is counted.

        Raises:
            ValueError: the call is in a traced function and has no index.
        """
        if index is not None:
            return index + self.FIRST_INDEXED
        if self.is_in_traced_function():
            raise ValueError(
                f"draw.{method} must have index= inside a loop or another traced function, got none: a call is traced "
                "once however often it runs, and would meet the same noise again. Give each call another integer, such "
                "as the iteration"
            )
        number = self._counts.get(method, 0)
        self._counts[method] = number + 1
        return number


class KeyDraw:
    """Chance from the streams of keys [B, K+1]."""

    def __init__(self, keys: Array):
        self.keys = keys
        self._calls = CallNumbers()

    def flip(self, probabilities: Array, *, index: Array | int | None = None) -> Array:
        keys = streams.numbered(self.keys[:, :1], self._calls.next("flip", index))
        drafts = jnp.arange(probabilities.shape[1])[None]
        return streams.uniform(streams.stream(keys, streams.ACCEPT, drafts)) < probabilities

    def pick(self, residual: Residual, *, index: Array | int | None = None) -> Array:
        keys = streams.numbered(self.keys[:, 0], self._calls.next("pick", index))
        return distributions.pick(residual, streams.uniform(streams.stream(keys, streams.RESIDUAL), (2,)))

    def sample(self, target: Categorical, *, index: Array | int | None = None) -> Array:
        keys = streams.numbered(self.keys, self._calls.next("sample", index))
        return distributions.sample(streams.stream(keys, streams.TARGET), target)


def from_core(
    core: Callable[..., Verified], *, kernel: Callable[..., Verified] | None = None
) -> Callable[..., Verified]:
    """Make a core `(draw, draft, target, **options) -> Verified` a public verifier `(keys, draft, target, **options)`.

    The wrapper checks shapes, brings the draft to one form (`canonical`), turns keys into streams, and serves the
    common keywords `bonus_tokens`, `outcomes` and `implementation`. The core stays reachable as `verifier.core`. A
    `kernel` `(keys, draft, target, *, interpret, **options) -> Verified` runs in its place on CUDA where it supports
    the case.
    """

    @wraps(core, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def verify(
        keys: Array,
        draft: Draft,
        target: Categorical | Array,
        *,
        bonus_tokens: Array | None = None,
        log_probs: bool = False,
        outcomes: bool = False,
        implementation: str | None = None,
        **options: Any,
    ) -> Verified:
        if implementation not in (None, "xla", "pallas", "interpret"):
            raise ValueError(f"implementation must be None, 'xla', 'pallas' or 'interpret', got {implementation!r}")
        if not isinstance(draft, Draft):
            raise ValueError(f"draft must be a specjax.Draft, got {type(draft).__name__}")
        target = target if isinstance(target, Categorical) else jnp.asarray(target)
        draft, target, bonus_tokens = jax.tree.map(
            jnp.asarray, (draft, distributions.as_categorical(target), bonus_tokens)
        )
        check_shapes(draft, target, bonus_tokens)
        check_bonus_tokens(bonus_tokens, target.logits.shape[-1])
        batch_size, num_draft_tokens = draft.tokens.shape
        streams.check_step(keys, batch_size, num_draft_tokens)

        def by_core(keys: Array, draft: Draft, target: Categorical, bonus_tokens: Array | None) -> Verified:
            draw = KeyDraw(streams.of_step(keys, batch_size, num_draft_tokens))
            own = {"outcomes": True} if outcomes else {}
            common = {"bonus_tokens": bonus_tokens, "log_probs": log_probs}
            return core(draw, canonical(draft), target, **common, **own, **options)

        def by_kernel(keys: Array, draft: Draft, target: Categorical, bonus_tokens: Array | None) -> Verified:
            common = {"bonus_tokens": bonus_tokens, "log_probs": log_probs}
            return kernel(keys, draft, target, interpret=implementation == "interpret", **common, **options)

        lack = "a verifier with a kernel" if kernel is None else kernels.unsupported(draft, target)
        if outcomes:
            lack = "outcomes=False: drafts after a rejected one are not tested"
        if implementation in ("pallas", "interpret") and lack is not None:
            raise NotImplementedError(f"implementation={implementation!r} supports {lack}")

        def by_either(*operands: Any) -> Verified:
            if implementation in ("pallas", "interpret"):
                return by_kernel(*operands)
            if implementation is None and lack is None and kernels.is_worthwhile(operands[2]):
                return jax.lax.platform_dependent(*operands, cuda=by_kernel, default=by_core)
            return by_core(*operands)

        # Tokens are drawn, which has no gradient; their log-probabilities have one.
        verified = _with_auto_axes(by_either, *jax.lax.stop_gradient((keys, draft, target, bonus_tokens)))
        if verified.log_probs is None:
            return verified
        log_prob = distributions.with_gradient(verified.log_probs, target, verified.tokens)
        return verified._replace(log_probs=log_prob)

    del verify.__wrapped__  # help() shows what callers pass, not what the core takes
    verify.__signature__ = _public_signature(core, verify)
    verify.core = core
    return verify


def _public_signature(core: Callable[..., Verified], verify: Callable[..., Verified]) -> inspect.Signature:
    """The signature of a verifier made of a core: its own options, with the common keywords that it supports."""
    options = [p for p in inspect.signature(core).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    supported = {option.name for option in options} | {"implementation"}
    common = inspect.signature(verify).parameters
    own = [option for option in options if option.name not in common]
    shared = [common[name] for name in ("bonus_tokens", "log_probs", "outcomes", "implementation") if name in supported]
    positional = [common[name] for name in ("keys", "draft", "target")]
    return inspect.Signature([*positional, *own, *shared], return_annotation=Verified)


def _with_auto_axes(
    verify: Callable[..., Verified], keys: Array, draft: Draft, target: Categorical, bonus_tokens: Array | None
) -> Verified:
    """Verify, with the Explicit axes of a mesh taken as Auto; results are split as the draft's tokens are."""
    operands = keys, draft, target, bonus_tokens
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return verify(*operands)
    sharding = NamedSharding(mesh, PartitionSpec(*jax.typeof(draft.tokens).sharding.spec[:1]))
    return jax.jit(jax.sharding.auto_axes(verify, axes=mesh.explicit_axes, out_sharding=sharding))(*operands)


def canonical(draft: Draft) -> Draft:
    """The draft with `num_tokens` = min(num_tokens, index of the first negative id), and -1 from there on.

    With K = 0 there is no distribution either.
    """
    num_draft_tokens = draft.tokens.shape[1]
    num_tokens = jnp.sum(jnp.cumprod((draft.tokens >= 0).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    if draft.num_tokens is not None:
        num_tokens = jnp.clip(jnp.minimum(num_tokens, draft.num_tokens.astype(jnp.int32)), 0, None)
    is_draft = jnp.arange(num_draft_tokens)[None] < num_tokens[:, None]
    distribution = draft.distribution if num_draft_tokens else None
    return Draft(jnp.where(is_draft, draft.tokens.astype(jnp.int32), -1), distribution, num_tokens)


def is_deterministic(draft: Draft) -> Array:
    """Which rows [B] have one-hot drafts by their draft temperature."""
    temperature = draft.distribution.temperature
    if temperature is None:
        return jnp.zeros(draft.tokens.shape[:1], bool)
    return temperature == 0


def log_ratio(draft: Draft, draft_law: Law, target: Law) -> Array:
    """Log of target / draft probability [B, K] of each draft token; -inf where the draft's is 0."""
    drafted = distributions.slice_law(target, 0, draft.tokens.shape[1])
    target_log_prob = distributions.token_log_prob(drafted, draft.tokens)
    draft_log_prob = distributions.token_log_prob(draft_law, draft.tokens)
    draft_log_prob = jnp.where(is_deterministic(draft)[:, None], 0, draft_log_prob)
    ratio = target_log_prob - jnp.where(draft_log_prob > -jnp.inf, draft_log_prob, 0)
    return jnp.where(draft_log_prob > -jnp.inf, ratio, -jnp.inf)


def count_accepted(draft: Draft, accepted: Array) -> Array:
    """Number of drafts [B] before the first that was not accepted."""
    is_draft = jnp.arange(draft.tokens.shape[1])[None] < draft.num_tokens[:, None]
    return jnp.sum(jnp.cumprod((accepted & is_draft).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def recovery(
    draft: Draft, draft_law: Law | None, target: Law, num_accepted: Array, scale: Array | None = None
) -> Residual:
    """What the token after `num_accepted` [B] drafts is drawn from: a residual after a rejection, else the target row.

    `draft_law` None stands for deterministic drafts.
    """
    rejected = num_accepted < draft.num_tokens
    row = take_row(draft.tokens, num_accepted)
    target = distributions.take_law(target, num_accepted)
    if draft_law is None:
        return Residual(target, without=jnp.where(rejected, row, -1))
    one_hot = is_deterministic(draft)
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    return Residual(
        target,
        distributions.take_law(draft_law, index),
        has_draft=rejected & ~one_hot,
        scale=scale,
        without=jnp.where(rejected & one_hot, row, -1),
    )


def take_row(values: Array, index: Array) -> Array:
    """values[b, index[b]], and -1 where the index is past the end."""
    inside = jnp.arange(values.shape[1])[None] == index[:, None]
    return jnp.max(jnp.where(inside, values, -1), axis=1, initial=-1)


def emit(
    draft: Draft,
    num_accepted: Array,
    last: Array,
    law: Law | None,
    bonus_tokens: Array | None = None,
    accepted: Array | None = None,
) -> Verified:
    """Accepted drafts [B, K], then `last` [B] (a bonus token where one is given and all passed), then -1.

    Log-probabilities are filled under `law`, the target's, unless it is None. `accepted` [B, K] are outcomes to report.
    """
    if bonus_tokens is not None:
        last = jnp.where(num_accepted == draft.num_tokens, bonus_tokens.astype(jnp.int32), last)
    index = jnp.arange(draft.tokens.shape[1] + 1)[None]
    tokens = jnp.where(index < num_accepted[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))), -1)
    tokens = jnp.where(index == num_accepted[:, None], last[:, None], tokens).astype(jnp.int32)
    log_prob = None
    if law is not None:
        log_prob = jnp.where(tokens >= 0, distributions.token_log_prob(law, tokens), 0).astype(jnp.float32)
    return Verified(tokens, num_accepted, log_prob, accepted)


def check_shapes(draft: Draft, target: Categorical, bonus_tokens: Array | None) -> None:
    """Raise ValueError where a shape or dtype of the arguments is not what verifiers take."""
    check_array("draft.tokens", draft.tokens, "[B, K]", (None, None), jnp.integer)
    batch_size, num_draft_tokens = draft.tokens.shape
    if draft.num_tokens is not None:
        check_array("draft.num_tokens", draft.num_tokens, "[B]", (batch_size,), jnp.integer)
    if bonus_tokens is not None:
        check_array("bonus_tokens", bonus_tokens, "[B]", (batch_size,), jnp.integer)
    vocab_size = check_categorical("target", target, "K+1", (batch_size, num_draft_tokens + 1))
    if draft.distribution is not None:
        if not isinstance(draft.distribution, Categorical):
            got = type(draft.distribution).__name__
            raise ValueError(f"draft.distribution must be a Categorical or None (deterministic drafts), got {got}")
        shape = (batch_size, num_draft_tokens)
        check_categorical("draft.distribution", draft.distribution, "K", shape, vocab_size)


def check_bonus_tokens(bonus_tokens: Array | None, vocab_size: int) -> None:
    """Raise ValueError for an id outside [0, V), where there are values: not under jit, nor on other hosts."""
    if bonus_tokens is None or isinstance(bonus_tokens, jax.core.Tracer) or not bonus_tokens.is_fully_addressable:
        return
    values = np.asarray(bonus_tokens)
    is_valid = (values >= 0) & (values < vocab_size)
    if not is_valid.all():
        index = is_valid.argmin()
        raise ValueError(f"bonus_tokens[{index}] must be in [0, V = {vocab_size}), got {values[index]}")


def check_categorical(
    name: str, distribution: Categorical, rows: str, shape: tuple[int | None, int | None], vocab_size: int | None = None
) -> int:
    """Raise ValueError unless the fields fit a distribution [*shape, V] (None: any size); give V."""
    logits, temperature, min_logit, log_normalizer, row_index = distribution
    if row_index is None:
        check_array(name, logits, f"[B, {rows}, V]", (*shape, vocab_size), jnp.floating)
        field_axes, field_shape, shape = f"[B, {rows}]", logits.shape[:2], logits.shape[:2]
    else:
        check_array(f"{name}.logits", logits, "[R, V]", (None, vocab_size), jnp.floating)
        check_array(f"{name}.rows", row_index, f"[B, {rows}]", shape, jnp.integer)
        field_axes, field_shape, shape = "[R]", logits.shape[:1], row_index.shape
    if temperature is not None:
        check_array(f"{name}.temperature", temperature, "[B]", shape[:1], jnp.floating)
    if min_logit is not None:
        check_array(f"{name}.min_logit", min_logit, field_axes, field_shape, jnp.floating)
    if log_normalizer is not None:
        check_array(f"{name}.log_normalizer", log_normalizer, field_axes, field_shape, jnp.floating)
    if logits.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one token in its vocabulary, got shape {logits.shape}")
    return logits.shape[-1]


def check_number(name: str, value: Any, expected: str, least: float, most: float) -> None:
    """Raise ValueError unless `value` is one number in [least, most]; of a traced one the shape is checked alone."""
    if isinstance(value, jax.core.Tracer):
        is_valid = value.shape == ()
    else:
        array = np.asarray(value)
        is_valid = array.shape == () and jnp.issubdtype(array.dtype, jnp.number) and least <= array <= most
    if not is_valid:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_array(name: str, array: Array, axes: str, shape: tuple[int | None, ...], kind: type) -> None:
    """Raise ValueError unless `array` has this shape (None: any size) and a dtype of this kind that is supported."""
    if not hasattr(array, "dtype"):
        raise ValueError(f"{name} must be an array, got {type(array).__name__}")
    got = jnp.shape(array)
    expected = str(tuple("any" if n is None else n for n in shape)).replace("'", "")
    if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
        raise ValueError(f"{name} must have shape {axes} = {expected}, got {got}")
    dtype = jnp.result_type(array)
    if kind is jnp.floating and dtype.name not in FLOATS:
        raise ValueError(f"{name} must be of one of the dtypes {', '.join(FLOATS)}, got {dtype}")
    if not jnp.issubdtype(dtype, kind):
        raise ValueError(f"{name} must be of {kind.__name__} dtype, got {dtype}")
