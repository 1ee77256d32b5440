"""Attention with a cache for models of users, against NumPy, and models of users in an `LLM`."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, Model, ModelInput, models, proposers

SHAPE = SLOTS, KV_HEADS, SIZE = 8, 2, 4


def expected(query, keys, values, *, scale=SIZE**-0.5, window=SLOTS, softcap=None):
    """The attention of the last T of S tokens, of queries [T, H, D] to keys and values [S, kv heads, D], row by row."""
    heads, total = query.shape[1], len(keys)
    attended = np.zeros(query.shape)
    for t, own in enumerate(range(total - len(query), total)):
        for head in range(heads):
            kv = head // (heads // KV_HEADS)
            seen = slice(max(0, own - window + 1), own + 1)
            scores = scale * keys[seen, kv] @ query[t, head]
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            attended[t, head] = weights @ values[seen, kv] / weights.sum()
    return attended


@pytest.mark.parametrize("options", [{}, {"window": 3, "softcap": 2.0, "scale": 0.7}])
def test_attention_with_a_cache(options):
    """Three tokens follow four others; later slots have garbage."""
    rng = np.random.default_rng(0)
    query, (keys, values) = rng.normal(size=(3, 4, SIZE)), rng.normal(size=(2, 7, KV_HEADS, SIZE))
    memory = {name: np.full((1, *SHAPE), 9.0, np.float32) for name in ("key", "value")}
    memory["key"][0, :4], memory["value"][0, :4] = keys[:4], values[:4]
    inputs = ModelInput(jnp.zeros((1, 3), jnp.int32), 4 + jnp.arange(3)[None])
    new = (jnp.asarray(x[None], jnp.float32) for x in (query, keys[4:], values[4:]))
    attended, memory = models.cached_attention(*new, {k: jnp.asarray(x) for k, x in memory.items()}, inputs, **options)
    np.testing.assert_allclose(attended[0], expected(query, keys, values, **options), atol=1e-5)
    np.testing.assert_allclose(memory["key"][0, :7], keys, atol=1e-6)
    assert np.all(np.asarray(memory["value"])[0, 7] == 9)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"query": np.zeros((1, 2, 4, SIZE))},
            r"query must have shape \[R, T, heads, head size\] with R, T = \(1, 3\)",
        ),
        (
            {"key": np.zeros((1, 3, 3, SIZE))},
            r"key must have shape \[1, 3, kv heads, 4\], with kv heads that divide 4",
        ),
        (
            {"value": np.zeros((1, 3, 1, SIZE))},
            r"value must have the shape of key, \(1, 3, 2, 4\), got \(1, 3, 1, 4\)",
        ),
        (
            {"memory": {"key": np.zeros((1, *SHAPE))}},
            r"memory must be a dict with \"key\" and \"value\".* got \['key'\]",
        ),
        ({"memory": np.zeros(3)}, "memory must be a dict .* got ndarray"),
        ({"memory": dict.fromkeys(("key", "value"), np.zeros((1, 8, 1, SIZE)))}, r"memory\['key'\] must have shape"),
        ({"window": 0}, "window must be None or at least 1, got 0"),
    ],
)
def test_wrong_arguments(changes, message):
    given = {
        "query": jnp.zeros((1, 3, 4, SIZE)),
        "key": jnp.zeros((1, 3, KV_HEADS, SIZE)),
        "value": jnp.zeros((1, 3, KV_HEADS, SIZE)),
        "memory": {name: jnp.zeros((1, *SHAPE)) for name in ("key", "value")},
        "inputs": ModelInput(jnp.zeros((1, 3), jnp.int32), jnp.arange(3)[None]),
    }
    with pytest.raises(ValueError, match=message):
        models.cached_attention(**given | changes)


MODEL = Model({}, len, len, 5)
TOKENIZER = SimpleNamespace(get_vocab_size=lambda: 5)


class TestLLM:
    def test_of_a_model(self):
        proposer = proposers.ngram(np.uint8(2))
        llm = LLM.of(MODEL, TOKENIZER, proposer, eos_token_ids=[4], max_length=np.int64(9), num_slots=np.uint8(200))
        assert (llm.max_length, llm.eos_token_ids, llm.proposer.num_draft_tokens) == (9, (4,), 2)
        # Sums in a small type of NumPy would overflow.
        assert {type(n) for n in (llm.max_length, llm.setup.room, llm.num_slots, proposer.num_draft_tokens)} == {int}
        assert llm.plain().proposer.num_draft_tokens == 0
        with pytest.raises(ValueError, match="messages need a chat template"):
            llm.encode_chat([{"role": "user", "content": "a"}])

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"model": "path"}, "model must be a specjax.Model, got str"),
            ({"tokenizer": SimpleNamespace(get_vocab_size=lambda: 6)}, "Tokenizer of at most 5 tokens, got 6 tokens"),
            ({"tokenizer": 3}, "Tokenizer of at most 5 tokens, got int"),
            ({"eos_token_ids": [5]}, r"eos_token_ids must be ids in \[0, 5\), got \[5\]"),
            ({"max_length": None}, "max_length must be an integer for a model without a limit, got None"),
            ({"max_length": 1}, "max_length must be in"),
            ({"num_slots": 0}, "num_slots must be None or an integer >= 1, got 0"),
            ({"verifier": "block"}, "verifier must be a function such as specjax.verifiers.block, got 'block'"),
            ({"proposer": proposers.draft_model(Model({}, len, len, 3), 2)}, "draft must have"),
        ],
    )
    def test_wrong_arguments(self, changes, message):
        given = {"model": MODEL, "tokenizer": TOKENIZER, "max_length": 9} | changes
        with pytest.raises(ValueError, match=message):
            LLM.of(**given)

    def test_the_limit_of_the_model(self):
        limited = Model({}, len, len, 5, max_length=7)
        assert LLM.of(limited, TOKENIZER).max_length == 7
        with pytest.raises(ValueError, match=r"max_length must be in \[2, 7\], the model's limit, got 8"):
            LLM.of(limited, TOKENIZER, max_length=8)
