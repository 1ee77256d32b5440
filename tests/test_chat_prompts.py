"""Prompts for a target that chats, its answers to them, and the acceptance that is measured on them."""

import importlib
import json
import random
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SamplingParams, metrics
from specjax.testing import bigram_model

SCRIPTS = Path(__file__).parent.parent / "scripts"
MODULE = '''"""A module.

{words}
"""

def add(first, second, *, third=None):
    """Return the sum of two numbers.

    The rest of the documentation is here.
    """
    total = first + second
    for number in third or ():
        total += number
    return total

def _hidden(x):
    """Return nothing that anybody wants to know."""
    return x
'''.format(words="This module adds numbers, and its documentation is a paragraph of some length. " * 3)


@pytest.fixture
def script(monkeypatch):
    """Import a script as it runs: beside the others."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_pieces_of_a_module(script):
    pieces = list(script("chat_prompts").functions(MODULE))
    prose, code = sorted(pieces, key=lambda piece: piece.kind, reverse=True)
    assert prose.text.startswith("This module adds numbers") and not prose.signature
    assert code.signature == "add(first, second)" and code.sentence == "Return the sum of two numbers."
    assert code.text.startswith("def add(first, second, *, third=None):\n    total =") and code.text.endswith("total")


def test_held_out_prompts_share_no_filling(script):
    prompts = script("chat_prompts")
    pieces = list(prompts.functions(MODULE))
    made = {is_held_out: prompts.make(pieces, is_held_out, 200, 0) for is_held_out in (False, True)}
    for each in made.values():
        assert set(Counter(prompt["kind"] for prompt in each)) == set(prompts.KINDS)
        assert len({prompt["prompt"] for prompt in each}) == len(each)
        assert not any("{" in prompt["prompt"] for prompt in each if prompt["kind"] in ("chat", "write code"))
    kept, others = prompts.blanks(False), prompts.blanks(True)
    assert all(not set(kept[name]) & set(others[name]) for name in kept if name not in prompts.SHARED)
    rng = random.Random(0)
    assert prompts.fill("{idea}, {idea}", {"idea": ["tides"]}, rng) == "Tides, tides"


def test_the_held_out_prompts(script):
    """Twenty of each kind, whose templates are filled with what training prompts do not have."""
    prompts = script("chat_prompts")
    found = json.loads((SCRIPTS / "held_out_prompts.json").read_text())
    assert Counter(prompt["kind"] for prompt in found) == dict.fromkeys(prompts.KINDS, 20)
    kept = prompts.blanks(False)
    chat = " ".join(prompt["prompt"] for prompt in found if prompt["kind"] == "chat")
    assert not [word for name in ("idea", "food", "animal") for word in kept[name] if f" {word}?" in chat]


def test_answers_end_where_the_target_ends(script):
    """A target whose next token is all but certain: 1, 2, 3, ... and 6 ends an answer."""
    answers = script("answer_prompts")
    target = bigram_model(jnp.asarray(50 * np.eye(7, k=1), jnp.float32))
    params = [SamplingParams(temperature=temperature, max_tokens=4) for temperature in (0.0, 0.8, 0.0)]
    given = {"width": 3, "eos_token_ids": [6]}
    found = answers.answer(target, [[1, 2, 3], [4], [0]], params, jax.random.key(0), **given)
    assert [(ids.tolist(), place) for ids, place in found] == [
        ([1, 2, 3, 4, 5, 6], 3),
        ([4, 5, 6], 1),
        ([0, 1, 2, 3, 4], 1),
    ]


def test_counts_of_rows(script, capsys):
    """Two rows of which one accepts all of two drafts in each of three steps, and the other none."""
    evaluation = script("evaluate_drafters")
    counts = [[6, 6], [6, 0], [9, 3], [3, 3], [3, 3], [[3, 3], [3, 3]], [[3, 3], [0, 0]], [0, 0], [0, 0]]
    totals = metrics.Totals(*map(np.array, counts))
    rows = [evaluation.record(totals, np.array(chosen)) for chosen in ([0], [1], [0, 1])]
    assert [row["tokens_per_step"] for row in rows] == [3.0, 1.0, 2.0]
    assert [row["by_position"] for row in rows] == [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    about = {"drafter": "x", "verifier": "block", "temperature": 0.8}
    evaluation.show(
        [about | row | {"kind": kind} for row, kind in zip(rows, ("chat", "extract", "all"), strict=True)],
        ["chat", "extract"],
    )
    assert "| x | block | 0.8 | 3.00 | 1.00 | 2.00 | 0.50 0.50 |" in capsys.readouterr().out
