"""The embedded family: its size, its exactness, and how often its drafts are accepted."""

import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import SamplingParams, models
from specjax.proposers import DraftModel, Eagle3Head

# A target of 16 layers. All requests ask for log-probabilities, so that steps have one use.
pytestmark = pytest.mark.slow

PROMPTS = [
    "def fibonacci(n):",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n",
    "x",
    "# Café, naïve, 日本語\ndef greet(name='世界'):\n    return",
]
HELD_OUT = ("textwrap", "heapq", "statistics", "calendar", "csv", "queue")  # modules that the family has not seen
FLOORS = {"eagle3": (2.8, 2.1), "dflash": (2.3, 1.8)}  # tokens a step at temperatures 0 and 0.8


@pytest.fixture(scope="module")
def llm():
    return specjax.LLM()


def num_parameters(model) -> int:
    return sum(x.size for x in jax.tree.leaves(model.params))


def test_sizes(llm):
    target = num_parameters(llm.model)
    assert 10e6 <= target <= 15e6
    assert num_parameters(models.load(models.EMBEDDED / "draft")) <= target / 10
    files = list(models.EMBEDDED.rglob("*.safetensors"))
    assert max(f.stat().st_size for f in files) <= 15e6
    assert sum(f.stat().st_size for f in files if f.parent.name in ("target", "draft")) <= 32e6
    assert sum(f.stat().st_size for f in files if f.parent.name in ("eagle3", "dflash")) <= 8e6


def test_tokenizer_keeps_every_text(llm):
    for text in [
        *PROMPTS,
        "\t\r\n \x00 \u200b 👩‍👩‍👧 ﷽",
        Path(sysconfig.get_paths()["stdlib"], "textwrap.py").read_text(),
    ]:
        assert llm.tokenizer.decode(llm.tokenizer.encode(text).ids) == text


def test_greedy_is_plain(llm):
    """Token for token, in float32, in a batch of prompts of different lengths; test_decode.py has other numbers."""
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=0)
    fast, plain = llm.generate(PROMPTS, params), llm.plain().generate(PROMPTS, params)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    assert all(r.metrics.num_drafted > 0 for r in fast)


def test_seeded_requests_do_not_change_with_their_batch(llm):
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=32, logprobs=0) for i, t in enumerate((0.8, 1.2, 0.5, 1.0))
    ]
    together = [r.token_ids for r in llm.generate(PROMPTS, params)]
    assert llm.generate(PROMPTS[1], params[1])[0].token_ids == together[1]  # the longest: each length is compiled
    assert llm.generate(PROMPTS[::-1], params[::-1])[0].token_ids == together[-1]


def test_default_drafters(llm):
    assert isinstance(llm.proposer.head, Eagle3Head)
    assert isinstance(specjax.LLM(num_draft_tokens="auto").proposer, DraftModel)


@pytest.mark.parametrize("name", FLOORS)
def test_mean_acceptance_length_on_held_out_modules(llm, name):
    """One batch has greedy and sampled requests. The default head is an EAGLE-3."""
    if name != "eagle3":
        llm = specjax.LLM(draft=models.EMBEDDED / name)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    prompts = []
    for module in HELD_OUT:
        ids = llm.tokenizer.encode((stdlib / f"{module}.py").read_text()).ids
        prompts += [ids[start : start + 64] for start in (0, len(ids) // 2)]
    parts = {0.0: [], 0.8: []}
    for start in range(0, len(prompts), 4):  # eight requests at a time, which need no other programs
        params = [
            SamplingParams(temperature=temperature, seed=start + i, max_tokens=48, logprobs=0, ignore_eos=True)
            for temperature in parts
            for i in range(4)
        ]
        results = llm.generate(2 * prompts[start : start + 4], params)
        for part, found in zip(parts.values(), (results[:4], results[4:]), strict=True):
            part += found
    for part, floor in zip(parts.values(), FLOORS[name], strict=True):
        accepted = sum(r.metrics.num_accepted for r in part)
        steps = sum(r.metrics.num_drafted for r in part) / 4
        assert accepted / steps + 1 >= floor


def test_bfloat16_tokens_are_near_ties(llm):
    """In bfloat16 one token and K+1 tokens differ in the last bits: every token is then nearly the argmax."""
    half = specjax.LLM(dtype="bfloat16")
    (result,) = half.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=32, logprobs=0))
    ids = half.tokenizer.encode(PROMPTS[0]).ids
    tokens = np.array([ids + result.token_ids], np.int32)
    inputs = specjax.ModelInput(tokens, np.arange(tokens.shape[1])[None])
    logits = np.asarray(jax.jit(half.model.apply)(half.model.params, inputs, None)[0].logits)[0, len(ids) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(result.token_ids)[:, None], axis=1)[:, 0]
    assert (logits.max(axis=1) - chosen < 0.25).all()
