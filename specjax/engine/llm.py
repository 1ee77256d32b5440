"""Text in, text out: a target model with its tokenizer and what drafts for it."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax import models, proposers, verifiers
from specjax.engine import chat
from specjax.engine import compilation_cache as compilation_caches
from specjax.engine import tokenizer as tokenizers
from specjax.engine.draft_length import CHOICES
from specjax.engine.requests import CHUNK, Batch, Completion, Metrics, Piece, Result, Stream, show_progress
from specjax.models.hub import find_checkpoint
from specjax.models.vocabulary import check_same_vocabulary, resize_vocabulary
from specjax.proposers import DraftModel, NoDrafts
from specjax.sampling import SamplingParams
from specjax.types import Model, Proposer, Verifier, is_integer

__all__ = ["LLM", "Completion", "Metrics", "Piece", "Result", "Stream"]


class LLM:
    """A target model (`model`) with its `tokenizer` and what drafts for it (`proposer`).

    Args:
        model: directory of a Hugging Face checkpoint, tokenizer in it or tokenizer.json beside it; or its name on the
            Hugging Face Hub, "org/name" or "org/name@revision", which takes huggingface_hub and uses its cache; None
            is the embedded pair.
        draft: directory or name of a checkpoint with the same vocabulary, of any family, "ngram" (look-up in the text
            itself), or a proposer; None is the embedded draft for the embedded target, and no drafts for any other. A
            draft whose limit is lower drafts as long as a sequence is within it.
        num_draft_tokens: K of a draft given by its checkpoint; 0 is plain decoding, whatever the draft. "auto" chooses
            it every few steps, for the whole batch, by the recent acceptance rate: a request's tokens then depend on
            its batch, seed or not.
        verifier: one of `specjax.verifiers`. The output follows the target's law if the verifier is lossless.
        dtype: of the weights; None is float32.
        max_length: most tokens of a sequence, prompt and output; None is the model's limit.
        compilation_cache: folder where JAX keeps what this process compiles, so that later ones start sooner; None is
            specjax/xla in the user's cache directory, False leaves JAX as it is. Settings of JAX's own, as
            jax_compilation_cache_dir and jax_enable_compilation_cache, hold as they are.

    Raises:
        ValueError: for a directory, name, tokenizer, vocabulary or number that does not fit.

    Example:
        >>> import specjax
        >>> llm = specjax.LLM()
        >>> params = specjax.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        >>> len(llm.generate("def add(a, b):", params)[0].token_ids)
        4
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
    ):
        is_auto = num_draft_tokens == "auto"
        if is_auto:
            num_draft_tokens = max(CHOICES)
        if not is_integer(num_draft_tokens) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be an integer >= 0 or 'auto', got {num_draft_tokens!r}")
        if not callable(verifier):
            raise ValueError(f"verifier must be a function, as specjax.verifiers.block, got {verifier!r}")
        if model is None:
            model, draft = models.EMBEDDED / "target", models.EMBEDDED / "draft" if draft is None else draft
        compilation_caches.enable(compilation_cache)
        dtype = jnp.float32 if dtype is None else dtype
        directory = find_checkpoint("model", model)
        if draft == "ngram":
            draft = proposers.ngram(num_draft_tokens) if num_draft_tokens else None
        elif isinstance(draft, str | Path):
            draft = find_checkpoint("draft", draft)
        elif draft is not None and not hasattr(draft, "propose"):
            raise ValueError(f"draft must be a directory or a proposer, got {type(draft).__name__}")

        self.verifier = verifier
        self.model = models.load(directory, dtype=dtype)
        self.tokenizer = tokenizers.load_tokenizer(directory)
        self.eos_token_ids = tokenizers.eos_token_ids(directory, self.tokenizer)
        self._directory = directory
        limit = self.model.max_length
        self.max_length = limit if max_length is None else max_length
        if not (is_integer(self.max_length) and 2 <= self.max_length <= limit):
            raise ValueError(f"max_length must be in [2, {limit}], the model's limit, got {max_length!r}")

        if draft is None or num_draft_tokens == 0:
            draft = proposers.none()
        elif isinstance(draft, Path):
            draft = proposers.draft_model(_load_draft(draft, directory, self, dtype), num_draft_tokens)
        if isinstance(draft, DraftModel) and draft.model.vocab_size != self.model.vocab_size:
            raise ValueError(
                f"draft must have the vocabulary of the target, {self.model.vocab_size} tokens, "
                f"got {draft.model.vocab_size}"
            )
        if is_auto and not isinstance(draft, DraftModel | NoDrafts):
            raise ValueError(f"num_draft_tokens='auto' takes a draft model, got {type(draft).__name__}")
        self.proposer = draft
        self.chooses_draft_length = is_auto and isinstance(draft, DraftModel)
        self._entropy = np.random.default_rng()

    def plain(self) -> "LLM":
        """The same target, weights shared, without drafts."""
        other = copy.copy(self)
        other.proposer, other.chooses_draft_length = proposers.none(), False
        return other

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Result]:
        """Generate for all prompts in one batch.

        After the first step it is one loop on the device, unless a stop string, the progress bar or the choice of
        num_draft_tokens needs the host between steps.

        Args:
            prompts: text, or token ids, of any lengths.
            params: for all prompts, or one a prompt; None is `SamplingParams()`. A request with a seed gives the same
                output in any batch; one without never gives the same output twice.
            progress: show a progress bar on standard error.

        Returns:
            A result for every prompt, with n completions. The first of a request's samples is the one that n = 1
            gives for the same seed.

        Raises:
            ValueError: an argument is of a wrong type; a prompt is empty, too long for one more token, or has ids
                outside the vocabulary; or the number of params is not that of the prompts.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
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
        ids = [_encode(self, f"prompts[{i}]", *row) for i, row in enumerate(zip(prompts, params, strict=True))]
        batch = Batch(self, prompts, ids, params, _key_data(self, params))
        needs_host = progress or self.chooses_draft_length or any(p.stop for p in params)
        chunks = batch.run(CHUNK if needs_host else None)
        for _ in show_progress(chunks, batch.outputs) if progress else chunks:
            pass
        return batch.results()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
    ) -> Result:
        """Generate the assistant's answer to a conversation.

        Args:
            messages: each a mapping with "role" ("system", "user" or "assistant") and "content".
            params: of the request; None is `SamplingParams()`.

        Returns:
            The result; its prompt is token ids.

        Raises:
            ModuleNotFoundError: jinja2 is not installed.
            ValueError: the checkpoint has no chat template, or that refuses the messages; or as `generate`.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, up to where the assistant's answer begins, by the chat template."""
        text = chat.render(self._directory, messages)
        return self.tokenizer.encode(text, add_special_tokens=False).ids  # the template writes them

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> "Stream":
        """Generate for one prompt, a token at a time.

        The text is that of `generate` for the same seed. A token is held back while its character is incomplete, or
        while its text may be the beginning of a stop string.

        Args:
            prompt: text or token ids.
            params: of the request.

        Returns:
            An iterator over `Piece`, whose `result` is what it has given so far.

        Raises:
            ValueError: as `generate`, and for more than one completion.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        if params.num_samples > 1:
            raise ValueError(f"n and best_of must be 1 in a stream, got {params.n} and {params.best_of}")
        ids = _encode(self, "prompt", prompt, params)
        return Stream(Batch(self, [prompt], [ids], [params], _key_data(self, [params])))


def _load_draft(directory: Path, target: Path, llm: LLM, dtype: DTypeLike) -> Model:
    """The draft model; where its tokenizer is the target's, its logits have the target's size."""
    path = tokenizers.find_tokenizer(directory)
    if path is None:
        return models.load(directory, dtype=dtype)
    if path != tokenizers.find_tokenizer(target):
        check_same_vocabulary(llm.tokenizer, tokenizers.load_tokenizer(directory))
    draft = models.load(directory, dtype=dtype)
    return draft if draft.vocab_size == llm.model.vocab_size else resize_vocabulary(draft, llm.model.vocab_size)


def _encode(llm: LLM, name: str, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
    """The token ids of a prompt, checked and truncated."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"{prompt[error.start]!r} at {error.start}"
            raise ValueError(f"{name} must be text that UTF-8 can encode, got {got}") from error
        ids = np.array(llm.tokenizer.encode(prompt).ids, np.int64)
    else:
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            ids = np.empty(())
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"{name} must be a string or a list of token ids, got {prompt!r}")
    if not len(prompt) or not ids.size:
        raise ValueError(f"{name} must have at least one token, got {prompt!r}")
    ids = ids[-(params.truncate_prompt_tokens or len(ids)) :]
    if len(ids) >= llm.max_length:
        raise ValueError(
            f"{name} must leave room for one token in max_length = {llm.max_length}, got {len(ids)} tokens"
        )
    outside = ids[(ids < 0) | (ids >= llm.model.vocab_size)]
    if outside.size:
        raise ValueError(f"{name} must have token ids in [0, {llm.model.vocab_size}), got {outside[0]}")
    return ids.tolist()


def _key_data(llm: LLM, params: Sequence[SamplingParams]) -> np.ndarray:
    """The words [B, 2] of each request's key: its seed modulo 2**64 (`jax.random.key` takes half), or fresh ones."""
    seeds = [p.seed if p.seed is not None else int(llm._entropy.integers(2**64, dtype=np.uint64)) for p in params]
    return np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
