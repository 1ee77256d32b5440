"""SmolLM2-135M-Instruct against transformers' reading of the same file, which scripts/record_smollm2.py records."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import smollm2_prompts
from smollm2_file import smollm2_file

from specjax import LLM, SamplingParams, metrics, models
from specjax.engine.engine import Engine
from specjax.models import Checkpoint, smollm2
from specjax.types import ModelInput

SCRIPTS = Path(__file__).parent.parent / "scripts"
pytestmark = pytest.mark.slow

LISTED = SamplingParams(temperature=0, max_tokens=smollm2_prompts.NUM_TOKENS, logprobs=0)
SHORT = replace(LISTED, max_tokens=8)  # the first recorded tokens
ENGINE = {"num_slots": 2, "page_size": 64, "chunk_size": 64, "prompt_sizes": (), "warm_up": [LISTED]}
FLOORS = {"eagle3": 1.65, "dflash": 1.55}  # mean tokens of a step at temperature 0; a head that fits nothing has 1


@pytest.fixture(scope="module")
def recorded():
    return json.loads(smollm2_prompts.GOLDENS.read_text())


@pytest.fixture(scope="module")
def target():
    return models.load(Checkpoint(smollm2_file(), keep_codes=False))


def test_the_target_alone(recorded, target):
    """Each recorded token of all texts is the most likely one after those before it, with its log-probability."""
    texts = [each["prompt"] + each["token_ids"] for each in recorded["prompts"]]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def likely(params, inputs):
        log_probs = jax.nn.log_softmax(target.apply(params, inputs, None)[0].logits)
        return jnp.argmax(log_probs, axis=-1), jnp.max(log_probs, axis=-1)

    best, log_probs = map(np.asarray, likely(target.params, ModelInput(jnp.asarray(tokens), jnp.asarray(positions))))
    assert sum(len(each["token_ids"]) for each in recorded["prompts"]) > 500
    for row, found, each in zip(best, log_probs, recorded["prompts"], strict=True):
        last = len(each["prompt"]) - 1
        own = slice(last, last + len(each["token_ids"]))
        assert row[own].tolist() == each["token_ids"]
        np.testing.assert_allclose(found[own], each["log_probs"], atol=1e-3)


def test_in_an_engine(recorded):
    """Prompts and their log-probabilities with the default head, whose acceptance is as it was measured.

    In a conversation questions find the pages of earlier prompts.
    """
    llm = LLM(smollm2_file(), smollm2.default_head(), dtype="float32", max_length=256)
    prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in smollm2_prompts.QUESTIONS]
    prompts += [llm.tokenizer.encode(text, add_special_tokens=False).ids for text in smollm2_prompts.TEXTS]
    assert prompts == [each["prompt"] for each in recorded["prompts"]] and len(prompts) == 20
    with Engine.of(llm, **ENGINE) as engine:
        requests = [engine.submit(prompt, SHORT) for prompt in prompts]
        results = [request.result(timeout=300) for request in requests]
        for result, expected in zip(results, recorded["prompts"], strict=True):
            check(result, expected)
        num_steps = sum(result.metrics.num_drafted for result in results) / 4
        assert 1 + sum(result.metrics.num_accepted for result in results) / num_steps >= FLOORS["eagle3"]
        turns, known = [], 0
        for question, expected in zip(smollm2_prompts.CHAT, recorded["conversation"], strict=True):
            turns.append({"role": "user", "content": question})
            result = engine.submit(llm.encode_chat(turns), SHORT).result(timeout=300)
            check(result, expected)
            assert result.num_cached_tokens == known
            known = (result.num_prompt_tokens - 2) // 64 * 64
            answer = llm.tokenizer.decode(expected["token_ids"], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": answer})
        assert known >= 128


def check(result, expected):
    """Compare the first tokens of an answer with the recorded ones."""
    count = min(SHORT.max_tokens, len(expected["token_ids"]))
    assert result.token_ids == expected["token_ids"][:count]
    found = [entry[token] for entry, token in zip(result.completions[0].logprobs, result.token_ids, strict=True)]
    np.testing.assert_allclose(found, expected["log_probs"][:count], atol=1e-3)


def test_the_other_head(recorded, target, monkeypatch):
    """Greedy texts equal transformers', and acceptance is as it was measured."""
    monkeypatch.syspath_prepend(SCRIPTS)
    evaluation = importlib.import_module("evaluate_drafters")
    num_tokens = smollm2_prompts.NUM_TOKENS
    questions = recorded["prompts"][: len(smollm2_prompts.QUESTIONS)]
    answers = [each for each in questions if len(each["token_ids"]) == num_tokens][:4]
    params = [SamplingParams(temperature=0, max_tokens=num_tokens)] * len(answers)
    models_of_head = evaluation.with_drafter(target, str(smollm2.HEADS / "dflash"), 4)
    state = evaluation.run(*models_of_head, "rejection", [each["prompt"] for each in answers], params)
    for tokens, each in zip(np.asarray(state.context.tokens), answers, strict=True):
        assert tokens[len(each["prompt"]) :][:num_tokens].tolist() == each["token_ids"]
    assert metrics.mean_acceptance_length(state.totals) >= FLOORS["dflash"]
