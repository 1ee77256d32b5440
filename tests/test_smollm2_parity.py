"""SmolLM2-135M-Instruct against transformers' reading of the same file, which scripts/record_smollm2.py records."""

import json

import numpy as np
import pytest
import smollm2_prompts
from smollm2_file import smollm2_file

from specjax import LLM, SamplingParams
from specjax.engine.engine import Engine
from specjax.models import smollm2

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=smollm2_prompts.NUM_TOKENS)
ENGINE = {"num_slots": 1, "page_size": 64, "chunk_size": 64, "prompt_sizes": (), "warm_up": [GREEDY]}


@pytest.fixture(scope="module")
def recorded():
    return json.loads(smollm2_prompts.GOLDENS.read_text())


def llm_of(draft):
    return LLM(smollm2_file(), draft, dtype="float32", max_length=512)


def test_texts_and_log_probabilities(recorded):
    llm = llm_of(None)
    prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in smollm2_prompts.QUESTIONS]
    prompts += [llm.tokenizer.encode(text, add_special_tokens=False).ids for text in smollm2_prompts.TEXTS]
    assert prompts == [each["prompt"] for each in recorded["prompts"]] and len(prompts) == 20
    params = SamplingParams(temperature=0, max_tokens=smollm2_prompts.NUM_TOKENS, logprobs=0)
    for result, expected in zip(llm.generate(prompts, params), recorded["prompts"], strict=True):
        assert result.token_ids == expected["token_ids"]
        found = [entry[token] for entry, token in zip(result.completions[0].logprobs, result.token_ids, strict=True)]
        np.testing.assert_allclose(found, expected["log_probs"], atol=1e-3)


@pytest.mark.parametrize("draft", ["ngram", "smollm2-135m-eagle3"])
def test_every_drafter_in_an_engine(recorded, draft):
    """Four prompts, and with n-grams a conversation, whose questions find the pages of earlier prompts."""
    llm = llm_of(smollm2.default_head() if draft.endswith("eagle3") else draft)
    with Engine.of(llm, **ENGINE) as engine:
        for expected in recorded["prompts"][1::5]:
            result = engine.submit(expected["prompt"], GREEDY).result(timeout=300)
            assert result.token_ids == expected["token_ids"]
            assert result.metrics.num_drafted > 0
        if draft != "ngram":
            return
        turns, known = [], 0
        for question, expected in zip(smollm2_prompts.CHAT, recorded["conversation"], strict=True):
            turns.append({"role": "user", "content": question})
            result = engine.submit(llm.encode_chat(turns), GREEDY).result(timeout=300)
            assert result.token_ids == expected["token_ids"]
            assert result.num_cached_tokens == known
            known = (result.num_prompt_tokens - 2) // 64 * 64
            turns.append({"role": "assistant", "content": result.text})
        assert known >= 128
