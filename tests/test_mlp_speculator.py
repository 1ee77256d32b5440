"""The MLP speculator: parity with the formulas in both forms of weights, and bad files."""

import math

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import HIDDEN, VOCAB

from specjax import proposers, testing
from specjax.proposers.mlp_speculator import load_mlp_speculator as load

DEPTH, INNER = 3, 24


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2


def rms(x):
    return x / np.sqrt(np.mean(x**2) + 1e-6)


def config_of(**fields):
    config = {"model_type": "mlp_speculator", "emb_dim": HIDDEN, "inner_dim": INNER, "n_predict": DEPTH}
    return config | {"vocab_size": VOCAB, "top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5} | fields


def write(directory, **fields):
    """A checkpoint, and the reference of its formulas."""
    config = config_of(**fields)
    is_tied, scaled = config.get("tie_weights", False), config.get("scale_input", False)
    inner = config["inner_dim"] or HIDDEN
    shapes = {}
    for i in range(1 if is_tied else DEPTH):
        shapes |= {f"emb.{i}.weight": (VOCAB, inner), f"head.{i}.weight": (VOCAB, inner)}
        shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    for i in range(2 if is_tied else DEPTH):
        shapes[f"proj.{i}.weight"] = (inner, inner if i else HIDDEN)
    made = heads.random_tensors(shapes)
    tensors = {f"speculator.{name}": array for name, array in made.items()}
    if is_tied:  # as files have it that keep shared tensors for each step
        tensors["speculator.proj.2.weight"] = made["proj.1.weight"].copy()
    heads.write(directory, config, tensors)

    def logits(tokens, features, drafts):
        weight = 0.5 ** (0.5 / DEPTH)
        factor = math.sqrt((1 - weight**2) * inner / 2) / weight
        state = features.hidden[-1]
        state = rms(state) / 2**0.5 if scaled else state
        rows = []
        for i, token in enumerate([tokens[-1], *drafts[:-1]]):
            own, proj = (0, min(i, 1)) if is_tied else (i, i)
            mixed = made[f"proj.{proj}.weight"] @ state + factor * made[f"emb.{own}.weight"][token]
            state = gelu(rms(mixed) * made[f"ln.{own}.weight"] + made[f"ln.{own}.bias"])
            rows.append(made[f"head.{own}.weight"] @ state)
        return np.stack(rows)

    return logits


FORMS = {
    "own": {},
    "tied": {"tie_weights": True, "scale_input": True},
    "as wide as the target": {"inner_dim": 0, "tie_weights": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_parity(tmp_path, target, form):
    expected = write(tmp_path, **FORMS[form])
    assert proposers.kind_of(tmp_path) == "mlp_speculator"
    proposer = proposers.load(tmp_path, target, num_draft_tokens=DEPTH)
    lengths = (DEPTH, 0, DEPTH, 1) if form == "tied" else None
    heads.follow(target, proposer, expected, in_pages=form == "tied", draft_lengths=lengths)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_the_input_is_scaled_where_the_file_says_so(tmp_path, target, is_scaled):
    write(tmp_path, scale_input=is_scaled)
    hidden = 3 * np.random.default_rng(1).normal(size=(1, 1, HIDDEN)).astype(np.float32)
    expected = rms(hidden) / 2**0.5 if is_scaled else hidden
    np.testing.assert_allclose(load(tmp_path, target).first(jnp.asarray(hidden)), expected, rtol=1e-5)


def test_fewer_drafts_than_the_trained_depth(tmp_path, target):
    """The depth is part of the formula."""
    expected = write(tmp_path)
    proposer = load(tmp_path, target, num_draft_tokens=2)
    assert proposer.num_draft_tokens == 2
    heads.follow(target, proposer, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
def test_the_distribution_is_the_targets():
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def step():
        wide = {"embedding": (8, 8), "projection": (8, 8), "head": (8, 8)}
        matrices = {name: jax.random.normal(next(keys), shape) for name, shape in wide.items()}
        return matrices | {"norm": jnp.ones(8), "norm_bias": jnp.zeros(8)}

    testing.assert_proposer_lossless(proposers.mlp_speculator([step(), step()]), num_samples=30_000)


def test_bad_files(tmp_path, target):
    for fields, message in [
        ({"emb_dim": 16}, r"emb_dim in .* must be 32, the hidden size of the target, got 16"),
        ({"vocab_size": 60}, r"vocab_size in .* must be 61, the vocabulary of the target, got 60"),
        ({"inner_dim": 25}, r"tensor speculator.emb.0.weight in .* must have shape \(61, 25\), got \(61, 24\)"),
        ({"n_predict": 4}, "tensor speculator.emb.3.weight is missing"),
        ({"n_predict": 2}, "tensor speculator.emb.2.weight in .* does not belong"),
        ({"tie_weights": True}, "speculator.emb.1.weight in .* must equal speculator.emb.0.weight"),
        ({"activation": "relu"}, "activation in .* must be absent"),
        ({"model_type": "medusa"}, "model_type in .* must be 'mlp_speculator'"),
    ]:
        write(tmp_path)
        (tmp_path / "config.json").write_text(heads.json.dumps(config_of(**fields)))
        with pytest.raises(ValueError, match=message):
            load(tmp_path, target)
    write(tmp_path)
    with pytest.raises(ValueError, match=r"num_draft_tokens must be in \[1, 3\], n_predict in .*, got 4"):
        load(tmp_path, target, num_draft_tokens=4)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        load(tmp_path, target)
    step = {"embedding": jnp.ones((8, 4)), "projection": jnp.ones((4, 6)), "head": jnp.ones((8, 4))}
    step |= {"norm": jnp.ones(4), "norm_bias": jnp.zeros(4)}
    with pytest.raises(ValueError, match=r"steps\[1\]\['projection'\] must have shape \[D, D\] = \(4, 4\)"):
        proposers.mlp_speculator([step, step])
