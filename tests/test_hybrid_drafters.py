"""Every kind of drafter on a hybrid: the state of the target after any number of accepted drafts."""

from dataclasses import dataclass, replace
from functools import partial

import hybrids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.tree_util import Partial
from quantized_files import fp8
from safetensors.numpy import load_file, save_file
from test_hybrid_steps import ATTENTION, CONFIG, hybrid, whole

from specjax import LLM, decode, models, proposers, sampling, verifiers
from specjax.decoding.drafters import InMemory, commit_of, in_memory
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import BlockHead, trunk
from specjax.sampling import SamplingParams
from specjax.verifiers.core import num_drafts

VOCAB, NUM_DRAFTS, NUM_STEPS = 29, 3, 200
HEAD = replace(CONFIG, num_layers=1, vocab_size=VOCAB, layers=(LayerConfig(Attention(has_head_norms=True)),))
BLOCK = BlockHead(HEAD, 2, HEAD.hidden_size, VOCAB, block_size=NUM_DRAFTS + 1, mask_token=0)


@partial(jax.tree_util.register_dataclass, data_fields=["proposer"], meta_fields=["row"])
@dataclass(frozen=True)
class InRow(InMemory):
    """A proposer that drafts in one row of the batch alone, and keeps its state in all of them."""

    proposer: object
    row: int

    @property
    def num_draft_tokens(self):
        return self.proposer.num_draft_tokens

    @property
    def commit(self):
        return commit_of(self.proposer)

    def __getattr__(self, name):
        return getattr(in_memory(self.proposer), name)

    def init_memory(self, *sizes):
        return in_memory(self.proposer).init_memory(*sizes)

    def propose(self, keys, context, sampling, state):
        draft, state = in_memory(self.proposer).propose(keys, context, sampling, state)
        is_own = jnp.arange(len(context.length)) == self.row
        return draft._replace(num_tokens=jnp.where(is_own, num_drafts(draft), 0)), state


def drafters(target):
    """Drafters of each kind with random weights, whose drafts are greedy."""

    def params(head):
        own = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, trunk.random_params(head.shapes(), jax.random.key(1)))
        return own | dict.fromkeys(("embedding", "lm_head"), target.params["embedding"])

    mtp = proposers.MTPHead(replace(HEAD, layers=(ATTENTION,)), is_token_first=True)
    eagle3 = proposers.Eagle3Head(HEAD, HEAD.hidden_size, 2)
    dspark = replace(BLOCK, markov_rank=4)
    dflash2 = replace(BLOCK, conv_taps=2, conv_group=4, num_candidates=4, selector_rank=4)
    greedy = {"temperature": 0}
    return [
        proposers.mtp(mtp, params(mtp), NUM_DRAFTS, **greedy),
        proposers.eagle3(eagle3, params(eagle3), NUM_DRAFTS, **greedy),
        proposers.dflash(BLOCK, params(BLOCK), NUM_DRAFTS, **greedy),
        proposers.dspark(dspark, params(dspark), NUM_DRAFTS, **greedy),
        proposers.dflash2(dflash2, params(dflash2), NUM_DRAFTS, **greedy),
        proposers.draft_model(hybrid(VOCAB), NUM_DRAFTS, **greedy),
    ]


@pytest.mark.slow
def test_the_state_after_random_numbers_of_accepted_drafts():
    """In 200 steps, each of whose tokens has the probability of one call over the whole sequence.

    Each row has another drafter, and all drafters keep their states.
    """
    target = models.with_feature_layers(hybrid(VOCAB), (1, 2))
    *others, last = drafters(target)
    for row, one in enumerate(others):
        last = proposers.fallback(InRow(one, row), last)
    size, batch = 8 + NUM_STEPS * (NUM_DRAFTS + 1), len(others) + 1
    prompts = np.random.default_rng(0).integers(1, VOCAB, (batch, 7)).astype(np.int32)
    rows = sampling.batch([SamplingParams(temperature=1, max_tokens=size)] * batch)
    lengths = np.array([7, 2, 5, 3, 1, 4])
    given = target, last, prompts, lengths, rows, jax.random.key(0)
    state = jax.jit(partial(decode.prefill, max_length=size, num_logprobs=0))(*given)
    verifier = Partial(verifiers.synthetic, acceptance_rates=[0.7, 0.5, 0.3])
    state = decode.generate(target, last, state, verifier=verifier, max_steps=NUM_STEPS)
    accepted, length = np.asarray(state.totals.accepted), np.asarray(state.context.length)
    assert (accepted > NUM_STEPS / 2).all() and (length == lengths + NUM_STEPS + accepted).all()
    logits = whole(target, state.context.tokens)
    expected = jax.nn.log_softmax(logits)[:, :-1]
    expected = jnp.take_along_axis(expected, state.context.tokens[:, 1:, None], axis=2)[..., 0]
    place = np.arange(1, size)[None]
    is_new = (place >= lengths[:, None]) & (place < length[:, None])
    difference = np.abs(state.log_probs.chosen[:, 1:] - expected)
    assert np.where(is_new, difference, 0).max() < 1e-4 * np.abs(logits).max()


def as_released(directory, tokens_in_block=128):
    """Give a checkpoint of floats the layout of the releases in FP8: codes and scales of blocks, and parts of images.

    The projections to rates, the head and the projection of the module for multi-token prediction stay as they are.
    """
    rng = np.random.default_rng(0)
    arrays = {"model.visual.patch_embed.proj.weight": np.zeros((4, 3), np.float32)}
    for name, array in load_file(directory / "model.safetensors").items():
        is_matrix = array.ndim == 2 and not any(
            part in name for part in ("embed", "head", "in_proj_a", "in_proj_b", "fc")
        )
        if is_matrix:
            codes, _ = fp8(rng, *array.shape, (tokens_in_block, tokens_in_block))
            arrays |= {name.removesuffix("weight") + key: x for key, x in codes.items()}
        else:
            arrays[name] = array
    save_file(arrays, directory / "model.safetensors")


def write_words(directory):
    """A tokenizer in a directory, in which each token is a word."""
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(hybrids.SMALL["vocab_size"])}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
def test_too_many_drafts_are_refused_before_the_first_call(tmp_path, draft):
    directory = hybrids.write(tmp_path / "x", "qwen3_5_text", hybrids.SMALL, has_mtp=True)
    write_words(directory)
    message = "num_draft_tokens must be at most 15 for this target, which takes at most 16 tokens .* in a step, got"
    with pytest.raises(ValueError, match=f"{message} 16"):
        LLM(directory, draft, num_draft_tokens=16)
    llm = LLM(directory, draft, num_draft_tokens=15)
    with pytest.raises(ValueError, match=f"{message} 17"):
        LLM.of(llm.model, llm.tokenizer, proposers.ngram(17))
    rows = sampling.batch([SamplingParams()])
    with pytest.raises(ValueError, match=f"{message} 20"):
        decode.prefill(llm.model, proposers.ngram(20), np.ones((1, 4), int), [4], rows, jax.random.key(0), max_length=8)


@pytest.mark.slow
def test_text_of_a_release(tmp_path):
    """The files of a Qwen3.5 or 3.6 in FP8 give a target and its own drafter."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    text = hybrids.SMALL | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "quantization_config": quantization}
    directory = hybrids.write(tmp_path / "x", "qwen3_5_text", config, prefix="model.language_model.", has_mtp=True)
    as_released(directory)
    write_words(directory)
    llm = LLM(directory, "mtp", num_draft_tokens=2, dtype="float32", max_length=32)
    (result,) = llm.generate([[3, 4, 5, 6, 7]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    made = result.completions[0].token_ids
    tokens = np.array([[3, 4, 5, 6, 7, *made]], np.int32)
    likely = np.asarray(whole(models.load(directory, dtype="float32"), tokens).argmax(axis=2))
    assert len(made) == 12 and made == likely[0, 4:-1].tolist()
    assert len(result.text.split()) == 12 and result.metrics.num_drafted > 0
