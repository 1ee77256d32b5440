"""The parts that all verifiers share: the wrapper that makes a core public, rules and checks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import rules
from pallas_kernels.rows import unmarked
from specjax import distributions
from specjax.distributions import Normalized, Residual
from specjax.keys import check_step, of_step
from specjax.operations.dispatch import dispatch
from specjax.parallel import shards
from specjax.types import Array, Categorical, Draft, DraftTree, Verified
from specjax.validation import check_array as check_array
from specjax.validation import check_bonus_tokens as check_bonus_tokens
from specjax.validation import check_categorical as check_categorical
from specjax.validation import check_number as check_number
from specjax.validation import check_shapes as check_shapes
from specjax.validation import is_traced
from specjax.verifiers import kernels
from specjax.verifiers.draws import CallNumbers as CallNumbers
from specjax.verifiers.draws import Draw as Draw
from specjax.verifiers.draws import KeyDraw as KeyDraw


@dataclass(frozen=True, repr=False)
class CoreVerifier:
    """A verifier made of a core, as `from_core` makes them.

    Verifiers of equal fields are equal, so a jitted function that gets one is not traced again for another. A verifier
    is pickled by its name, as a function is, so it must stand in a module.
    """

    core: Callable[..., Verified]  # (draw, draft, target, **options), whose random choices all go through draw
    kernel: Callable[..., Verified] | None = None  # (keys, draft, target, *, interpret, **options), for CUDA
    check_options: Callable[..., None] | None = None  # (num_draft_tokens, **options), raises ValueError
    __name__: str = field(init=False, compare=False)

    keywords: ClassVar[tuple[str, ...]] = ("bonus_tokens", "log_probs")  # of every core
    form: ClassVar[str] = "(draw, draft, target, *, bonus_tokens=None, log_probs=False)"

    def __post_init__(self):
        missing = [name for name in self.keywords if not _takes(self.core, name)]
        if missing:
            name = getattr(self.core, "__name__", repr(self.core))
            raise ValueError(
                f"core must take the keywords {' and '.join(self.keywords)}, which every verifier has, got {name} "
                f"without {' and '.join(missing)}: write {self.form}"
            )
        names = {name: getattr(self.core, name, getattr(CoreVerifier, name)) for name in _NAMES}
        documentation = [inspect.getdoc(x) for x in (self.core, self.described)]
        # `help`, `doctest` and `inspect` read these as they do of a function.
        vars(self).update(
            names,
            __doc__="\n\n".join(text for text in documentation if text),
            __signature__=self._signature(),
            __wrapped__=self.core,
        )

    def __call__(
        self,
        keys: Array,
        draft: Draft,
        target: Categorical | Array,
        *,
        bonus_tokens: Array | None = None,
        log_probs: bool = False,
        outcomes: bool = False,
        axis_name: str | None = None,
        implementation: str | None = None,
        **options: Any,
    ) -> Verified:
        """Accept or reject the drafts of every row, and emit one token after those that are accepted.

        Args:
            keys: typed threefry keys, one for the step [], one for each row [B], or one for each absolute position
                [B, K+1] (`specjax.keys.positions`). Keys [] and [B] must be fresh in every step.
            draft: the tokens [B, K], -1 where a row has fewer, and the distribution that they were drawn from.
            target: a Categorical, or logits [B, K+1, V]. Row i is the distribution of the token at the place of draft
                i. The row after the last draft of a sequence is the distribution of the bonus token.
            bonus_tokens: [B] int32, emitted in place of a draw where all drafts of a row are accepted. A lossless
                verifier stays lossless only if each was drawn from that target row, independently of the draft and of
                these keys.
            log_probs: whether to fill `Verified.log_probs`, static: under `jax.jit`, bind it with
                `functools.partial` or name it in `static_argnames`.
            outcomes: whether to fill `Verified.is_accepted`, static. The kernels do not support it.
            axis_name: the axis of a `jax.shard_map` whose devices share the vocabulary, static. Each device then gives
                its part [..., V / n] of the logits of target and draft, and all get the same result. None is a whole
                vocabulary.
            implementation: "xla", "pallas" or "interpret", which interprets the kernels. None takes the kernels on CUDA
                where they support the case, and XLA elsewhere.
            **options: the options of the core.

        Returns:
            Verified: tokens [B, K+1] int32 and num_accepted [B] int32.

        Raises:
            NotImplementedError: the named implementation does not support the case.
            ValueError: an argument has a wrong shape or dtype, the keys are of another kind, an option has a wrong
                value, a static argument is traced, or the verifier does not support an argument.
        """
        check_static(log_probs=log_probs, outcomes=outcomes)
        operands = keys, *_checked(keys, draft, target, bonus_tokens, shards.num_shards(axis_name))
        optional = {"outcomes": outcomes, "axis_name": axis_name}
        return self._verify(operands, {"log_probs": log_probs} | options, optional, implementation)

    described = __call__  # its docstring describes the arguments of every verifier

    def with_draw(
        self, draw: Draw, draft: Any, target: Categorical, bonus_tokens: Array | None = None, **options: Any
    ) -> Verified:
        """Run the core with the random choices of `draw`, on arguments that are not checked."""
        return self.core(draw, canonical(draft), target, bonus_tokens=bonus_tokens, **options)

    def _verify(
        self, operands: tuple[Any, ...], options: dict[str, Any], optional: dict[str, Any], implementation: str | None
    ) -> Verified:
        """Verify checked operands (keys, draft, target, ...); `optional` has arguments that not every core supports."""
        optional = {name: value for name, value in optional.items() if value}
        for name, value in optional.items():
            if not _takes(self.core, name):
                raise ValueError(f"{name} must be left out, as {self.__name__} does not support it, got {value!r}")
        run = partial(self._run, options | optional, implementation)
        # The choice of tokens has no gradient, but their log-probabilities have one.
        verified = _unmarked(_with_auto_axes(run, *jax.lax.stop_gradient(operands)))
        if verified.log_probs is None or "axis_name" in optional:
            return verified
        target = operands[2] if verified.path is None else distributions.take(operands[2], verified.path)
        log_prob = distributions.with_gradient(verified.log_probs, target, verified.tokens)
        return verified._replace(log_probs=log_prob)

    def __repr__(self) -> str:
        return f"<verifier {self.__module__}.{vars(self)['__qualname__']}>"

    def __reduce__(self) -> str:
        return vars(self)["__qualname__"]

    def _run(self, options: dict[str, Any], implementation: str | None, *operands: Any) -> Verified:
        """Verify checked operands (keys, draft, target, ...) by the core or by its kernel."""
        return dispatch(
            operands,
            xla=partial(self._by_core, options),
            pallas=partial(self._by_kernel, options),
            reason=partial(self._why_no_kernel, options),
            is_worthwhile=lambda keys, draft, target, *others: kernels.is_worthwhile(target),
            implementation=implementation,
        )

    def _by_core(self, options: dict[str, Any], keys: Array, draft: Any, target: Categorical, *others: Any) -> Verified:
        draw = KeyDraw(of_step(keys, *draft.tokens.shape), options.get("axis_name"))
        return self.with_draw(draw, draft, target._replace(links=None), *others, **options)

    def _by_kernel(
        self,
        options: dict[str, Any],
        keys: Array,
        draft: Any,
        target: Categorical,
        bonus_tokens: Array | None,
        *,
        interpret: bool,
    ) -> Verified:
        assert self.kernel is not None, "without a kernel there is a reason against it"
        return self.kernel(keys, draft, target, bonus_tokens=bonus_tokens, interpret=interpret, **options)

    def _why_no_kernel(
        self, options: dict[str, Any], keys: Array, draft: Any, target: Categorical, *others: Any
    ) -> str | None:
        """Return why the kernel cannot run this case, or None where it can."""
        if self.kernel is None:
            return "this verifier has no kernels"
        if "axis_name" in options and not _takes(self.kernel, "axis_name"):
            return "the kernels of this verifier take whole vocabularies"
        if "outcomes" in options:
            return "the kernels take outcomes=False: they do not test the drafts after a rejected one"
        return kernels.unsupported(draft, target, options.get("axis_name"))

    def _signature(self) -> inspect.Signature:
        """Return the signature of the call, with the options of the core and the arguments that it supports."""
        written = inspect.signature(self.__call__).parameters
        positional = [p for p in written.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        named = [p for p in written.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        of_core = inspect.signature(self.core).parameters.values()
        options = [p for p in of_core if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in written]
        supported = [p for p in named if p.name == "implementation" or _takes(self.core, p.name)]
        return inspect.Signature([*positional, *options, *supported], return_annotation=Verified)


_NAMES = "__module__", "__name__", "__qualname__"  # which tell where a function is


def from_core(
    core: Callable[..., Verified],
    *,
    kernel: Callable[..., Verified] | None = None,
    check_options: Callable[..., None] | None = None,
) -> CoreVerifier:
    """Make a core `(draw, draft, target, **options) -> Verified` a public verifier `(keys, draft, target, **options)`.

    The verifier checks the arguments, gives the core a `canonical` draft and a `KeyDraw`, and handles the arguments
    that all verifiers have.

    Args:
        core: the rule of the verifier, whose random choices all go through `draw`. It takes the keywords `bonus_tokens`
            and `log_probs`.
        kernel: a function `(keys, draft, target, *, interpret, **options) -> Verified` that runs in place of the core
            on CUDA where it supports the case; None is none. It gets `axis_name` where one is given, if it takes it.
        check_options: a function `(num_draft_tokens, **options)` that raises ValueError for a wrong value of an option.
            Decoding loops call it before jit takes the values away; None checks nothing.

    Returns:
        The verifier. Its attributes `core`, `kernel` and `check_options` are the given functions.

    Raises:
        ValueError: the core lacks a keyword.
    """
    return CoreVerifier(core, kernel, check_options)


def check_static(**arguments: Any) -> None:
    """Raise ValueError where an argument that chooses the program has no value because `jax.jit` traces it."""
    for name, value in arguments.items():
        if is_traced(value):
            raise ValueError(
                f"{name} must be static, as it chooses the program that is compiled, got a value that jax.jit traces: "
                f"jit functools.partial(verifier, {name}=True), or pass static_argnames={name!r} to jax.jit"
            )


def _unmarked(verified: Verified) -> Verified:
    """Return the output of a core or kernel with ids in range, and with `is_empty`."""
    is_empty = jnp.any(verified.tokens < -1, axis=1)
    return verified._replace(tokens=unmarked(verified.tokens), is_empty=is_empty)


def _checked(
    keys: Array, draft: Draft, target: Categorical | Array, bonus_tokens: Array | None, num_shards: int
) -> tuple[Draft, Categorical, Array | None]:
    """Return the arguments of a verifier as records of JAX arrays, after the checks."""
    if not isinstance(draft, Draft):
        raise ValueError(f"draft must be a specjax.Draft, got {type(draft).__name__}")
    if target is None:
        raise ValueError("target must be a specjax.Categorical or its logits [B, K+1, V], got None")
    try:
        target = target if isinstance(target, Categorical) else Categorical(jnp.asarray(target))
        arrays: tuple[Draft, Categorical, Array | None] = jax.tree.map(jnp.asarray, (draft, target, bonus_tokens))
    except TypeError as error:  # of text
        raise ValueError(f"draft, target and bonus_tokens must hold arrays of numbers: {error}") from None
    check_shapes(*arrays)
    # The caller's array has values also where jit would turn it into a traced constant.
    check_bonus_tokens(bonus_tokens, arrays[1].logits.shape[-1] * num_shards)
    check_step(keys, *arrays[0].tokens.shape)
    return arrays


def _takes(function: Callable, name: str) -> bool:
    """Return whether a function takes a keyword."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _with_auto_axes(verify: Callable[..., Verified], *operands: Any) -> Verified:
    """Verify with the Explicit axes of a mesh as Auto axes, because cores do not say how their arrays are sharded.

    The batch axis of the results is sharded like the batch axis of the draft's tokens.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return verify(*operands)
    sharding = NamedSharding(mesh, PartitionSpec(*jax.typeof(operands[1].tokens).sharding.spec[:1]))
    return jax.jit(jax.sharding.auto_axes(verify, axes=mesh.explicit_axes, out_sharding=sharding))(*operands)


def canonical(draft: Draft) -> Draft:
    """Return a draft in the form that cores get.

    Its `num_tokens` is an array, at most the index of the first negative id, and its tokens are -1 from there on. With
    K = 0 its distribution is None.
    """
    num_draft_tokens = draft.tokens.shape[1]
    num_tokens = jnp.sum(jnp.cumprod((draft.tokens >= 0).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    if draft.num_tokens is not None:
        num_tokens = jnp.clip(jnp.minimum(num_tokens, draft.num_tokens.astype(jnp.int32)), 0, None)
    is_draft = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None] < num_tokens[:, None]
    distribution = draft.distribution if num_draft_tokens else None
    return Draft(jnp.where(is_draft, draft.tokens.astype(jnp.int32), -1), distribution, num_tokens)


def num_drafts(draft: Draft) -> Array:
    """Return the number [B] int32 of drafts of each row of a `canonical` draft."""
    assert draft.num_tokens is not None, "a canonical draft has num_tokens"
    return draft.num_tokens


def is_deterministic(draft: Draft | DraftTree) -> Array:
    """Return which rows [B] bool have deterministic drafts because their draft temperature is 0."""
    if draft.distribution is None or draft.distribution.temperature is None:
        return jnp.zeros(draft.tokens.shape[:1], bool)
    return draft.distribution.temperature == 0


def evidence(
    draft: Draft, normalized_draft: Normalized | None, target: Normalized, *, entropy: bool = False
) -> rules.Evidence:
    """Return the evidence on each draft for an acceptance rule, in arrays [B, K].

    Args:
        draft: a `canonical` draft.
        normalized_draft: the normalised distribution of the drafts; None stands for deterministic drafts.
        target: the normalised target.
        entropy: whether to compute the entropy of the target rows.
    """
    num_draft_tokens = draft.tokens.shape[1]
    drafted = distributions.take_rows(target, 0, num_draft_tokens)
    log_prob = distributions.token_log_prob(drafted, draft.tokens)
    draft_log_prob = jnp.zeros_like(log_prob)
    if normalized_draft is not None:
        draft_log_prob = distributions.token_log_prob(normalized_draft, draft.tokens)
        is_one_hot = is_deterministic(draft)
        if target.distribution.temperature is not None:
            is_one_hot |= target.distribution.temperature == 0  # a greedy row accepts its argmax wherever it came from
        draft_log_prob = jnp.where(is_one_hot[:, None], 0, draft_log_prob)
    lane = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
    return rules.Evidence(log_prob, draft_log_prob, distributions.entropy(drafted) if entropy else None, lane)


def log_ratio(draft: Draft, normalized_draft: Normalized | None, target: Normalized) -> Array:
    """Return log(target / draft probability) [B, K] of each draft token, -inf where the draft probability is 0.

    `normalized_draft` is None for deterministic drafts, whose draft probability is 1.
    """
    return rules.log_ratio(evidence(draft, normalized_draft, target))


def count_accepted(draft: Draft, accepted: Array) -> Array:
    """Return the number [B] of drafts before the first one that is not accepted."""
    is_draft = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None] < num_drafts(draft)[:, None]
    return jnp.sum(jnp.cumprod((accepted & is_draft).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def recovery(
    draft: Draft,
    normalized_draft: Normalized | None,
    target: Normalized,
    num_accepted: Array,
    scale: Array | None = None,
) -> Residual:
    """Return the residual that the token after `num_accepted` [B] drafts is drawn from.

    Where all drafts are accepted, this is the target row of the bonus token.

    Args:
        draft: a `canonical` draft.
        normalized_draft: the normalised distribution of the drafts; None stands for deterministic drafts.
        target: the normalised target.
        num_accepted: [B] int32.
        scale: [B], the factor of the target in the residual; None is 1.
    """
    rejected = num_accepted < num_drafts(draft)
    row = take_row(draft.tokens, num_accepted)
    target = distributions.take_row(target, num_accepted)
    if normalized_draft is None:
        return Residual(target, without=jnp.where(rejected, row, -1))
    one_hot = is_deterministic(draft)
    index = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    return Residual(
        target,
        distributions.take_row(normalized_draft, index),
        has_draft=rejected & ~one_hot,
        scale=scale,
        without=jnp.where(rejected & one_hot, row, -1),
    )


def take_row(values: Array, index: Array) -> Array:
    """Return values[b, index[b]] of each row b, or -1 where the index is past the end."""
    inside = jnp.arange(values.shape[1], dtype=jnp.int32)[None] == index[:, None]
    return jnp.where(index < values.shape[1], jnp.sum(jnp.where(inside, values, 0), axis=1), -1).astype(jnp.int32)


def emit(
    draft: Draft,
    num_accepted: Array,
    last: Array,
    normalized: Normalized | None,
    bonus_tokens: Array | None = None,
    accepted: Array | None = None,
) -> Verified:
    """Return the output of a verifier: the accepted drafts of each row, then one token, then -1.

    Args:
        draft: a `canonical` draft.
        num_accepted: [B] int32.
        last: [B] int32, the recovered or bonus token.
        normalized: the normalised target, to fill `Verified.log_probs`; None leaves them out.
        bonus_tokens: [B] int32, emitted in place of `last` where all drafts are accepted; None is none.
        accepted: [B, K] bool, the outcome of each draft's own test, or None.
    """
    if bonus_tokens is not None:
        last = jnp.where(num_accepted == num_drafts(draft), bonus_tokens.astype(jnp.int32), last)
    index = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)[None]
    tokens = jnp.where(index < num_accepted[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))), -1)
    tokens = jnp.where(index == num_accepted[:, None], last[:, None], tokens).astype(jnp.int32)
    log_prob = None
    if normalized is not None:
        log_prob = jnp.where(tokens != -1, distributions.token_log_prob(normalized, tokens), 0).astype(jnp.float32)
    return Verified(tokens, num_accepted, log_prob, accepted)
