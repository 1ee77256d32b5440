"""Data of drafters: documents, packed rows, replay, and drafters that are written and read back."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import SamplingParams, models, proposers, training
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.layer import Attention, LayerConfig
from specjax.models.quantized import dequantize, quantize
from specjax.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from specjax.models.tensors import Tensors
from specjax.proposers.block_draft import BlockHead
from specjax.proposers.dflash import dflash
from specjax.proposers.drawing import reduced_vocabulary
from specjax.proposers.dspark import dspark
from specjax.proposers.eagle3 import Eagle3Head, eagle3
from specjax.proposers.p_eagle import p_eagle
from specjax.testing import BigramProposer, bigram_model
from specjax.training import Document
from specjax.types import ModelInput


def test_documents(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.py").write_text("b")
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "folder" / "c.bin").write_text("c")
    (tmp_path / "folder" / "latin.txt").write_bytes("ä".encode("latin-1"))
    lines = [{"text": "one"}, {"prompt": "two ", "completion": "three"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = training.documents([tmp_path / "folder", tmp_path / "lines.jsonl"])
    assert found == ["a", "b", "one", "two three"]
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"other": 1}')
    with pytest.raises(ValueError, match=r"line 2 of .*bad\.jsonl must be an object with \"text\""):
        training.documents([tmp_path / "bad.jsonl"])
    with pytest.raises(ValueError, match=r"latin\.txt must be UTF-8"):
        training.documents([tmp_path / "folder" / "latin.txt"])
    with pytest.raises(FileNotFoundError, match="missing"):
        training.documents([tmp_path / "missing"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="must hold texts, got none"):
        training.documents([tmp_path / "empty.txt"])


def test_pack():
    """Every token stands in a row once, with its document, and is learned unless it belongs to a prompt."""
    batch = training.pack([range(10, 17), Document([1, 2, 3], learn_from=2), [7]], length=4)
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [14, 15, 16, 7], [1, 2, 3, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 0]]
    assert batch.loss_mask.tolist() == [[True] * 4, [True] * 4, [False, False, True, False]]
    cut = training.pack([Document(range(6), learn_from=5)], length=4)
    assert cut.loss_mask.tolist() == [[False] * 4, [False, True, False, False]]
    many = training.pack([[i] * (1 + i % 5) for i in range(1, 500)], length=6)
    assert np.bincount(many.tokens[many.segments > 0], minlength=500)[1:].tolist() == [1 + i % 5 for i in range(1, 500)]
    for texts, length, message in (([[1]], 1, "length must be an integer >= 2"), ([[]], 4, "texts must have tokens")):
        with pytest.raises(ValueError, match=message):
            training.pack(texts, length)


def test_regenerate_keeps_prompts_apart_from_what_was_written():
    def generate(prompts, params):
        return [SimpleNamespace(token_ids=[p.seed, p.seed]) for p in params]

    params = [SamplingParams(seed=i) for i in range(3)]
    made = training.regenerate(SimpleNamespace(generate=generate), [[9], [8, 7], [6]], params, batch_size=2)
    assert made == [Document([9, 0, 0], 1), Document([8, 7, 1, 1], 2), Document([6, 2, 2], 1)]


@pytest.mark.slow
def test_replay_counts_what_is_accepted():
    """A drafter that is the target itself has all accepted; one step from a prompt counts one step."""
    logits = jnp.asarray(3 * np.random.default_rng(0).normal(size=(7, 7)), jnp.float32)
    params = SamplingParams(temperature=1.0, max_tokens=9)
    given = bigram_model(logits), BigramProposer(logits, 2), [[1, 2, 3], [4]], params
    same = training.replay(*given, key=jax.random.key(0))
    assert same.by_position.tolist() == [1, 1] and same.tokens_per_step == 3
    other = given[0], BigramProposer(-logits, 2), [[1, 2, 3]] * 4, params
    one = training.replay(*other, key=jax.random.key(0), max_steps=1)
    assert one.tokens_per_step in (1 + np.arange(9) / 4).tolist() and one.tokens_per_step < 3


SIZES = {"vocab_size": 29, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 24, "max_length": 64}
VOCAB = 11


@pytest.fixture(scope="module")
def target():
    config = DecoderConfig(hidden_size=16, num_layers=3, **SIZES)
    return models.with_feature_layers(decoder_model(config, init_params(config, seed=0)), (1, 2))


NORMED = (LayerConfig(Attention(has_head_norms=True)),)


def windowed(*windows):
    """The layers of a block drafter with these windows."""
    return tuple(LayerConfig(Attention(window=window, has_head_norms=True)) for window in windows)


def drafter(kind, target, layers=None, **options):
    """A drafter with random numbers; its embedding is the target's. `layers` are options of its layers."""
    sizes = SIZES | {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2}
    own = {"layers": NORMED if kind in ("dflash", "dspark") else (LayerConfig(),)}
    config = DecoderConfig(**sizes | {"tie_embeddings": False} | own | (layers or {}))
    if kind in ("eagle3", "p_eagle"):
        head, make = Eagle3Head(config, 16, 2, **options), eagle3
    else:
        head, make = BlockHead(config, 2, 16, 29, 4, 28, **options), dspark if kind == "dspark" else dflash
    shapes = head.shapes() | {"lm_head": (VOCAB, 16)}
    if kind == "p_eagle":
        shapes, make = shapes | {"mask_taps": (32,)}, partial(p_eagle, mask_token=28)
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tree.unflatten([jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)])
    params["embedding"] = target.params["embedding"]
    reduced = reduced_vocabulary(np.arange(VOCAB) * 2 + 1, 29)
    return make(head, params, 3, reduced=reduced)


CASES = {
    "eagle3": ("eagle3", {}),
    "yarn": ("eagle3", {"layers": {"rope_scaling": YarnScaling(4.0, 16, 10000.0, 24.0, 2.0, False, 1.2)}}),
    "3.1": ("eagle3", {"tap_norms": "each", "norm_output": True, "norm_before_residual": True}),
    "norm of all": ("eagle3", {"tap_norms": "all"}),
    "norms of heads": ("eagle3", {"layers": {"layers": NORMED, "rope_scaling": LinearScaling(2.0)}}),
    "dflash": ("dflash", {}),
    "windows": (
        "dflash",
        {"layers": {"layers": windowed(4, None), "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 16)}, "is_causal": False},
    ),
    "from the anchor": ("dflash", {"from_anchor": True}),
    "p_eagle": ("p_eagle", {"norm_before_residual": True}),
    "dspark": ("dspark", {"from_anchor": True, "markov_rank": 5, "confidence": "both"}),
    "own places, no table": ("dspark", {"confidence": "hidden"}),
}


@pytest.mark.parametrize("on_one_gpu", [False, True])
@pytest.mark.parametrize("layout", ["own", "speculators"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read(name, layout, on_one_gpu, target, tmp_path, monkeypatch):
    """Matrices are read transposed on a GPU, and in the files they lie as ever."""
    monkeypatch.setattr(Tensors, "on_one_gpu", on_one_gpu)
    kind, options = CASES[name]
    layers = options.get("layers", {}) | {"transposed": on_one_gpu}
    if name == "windows":  # the layouts count them from different tokens
        options = options | {"window_from_anchor": layout == "speculators"}
    made = drafter(kind, target, **options | {"layers": layers})
    training.save_pretrained(made, tmp_path, target=target, layout=None if layout == "own" else layout)
    assert proposers.kind_of(tmp_path) == kind
    assert proposers.feature_layers(tmp_path, target) == target.feature_layers
    found = proposers.load(tmp_path, target, num_draft_tokens=3)
    assert found.head == made.head
    assert jax.tree.structure(found) == jax.tree.structure(made)  # with its static fields
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(x, y)


def test_speculators_is_told_the_layers(target, tmp_path):
    """By the field that it reads, also where the first layer is 1, which means another one in files of others."""
    training.save_pretrained(drafter("eagle3", target), tmp_path, target=target, layout="speculators")
    assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert proposers.feature_layers(tmp_path, target) == (1, 2)


def test_codes_are_not_written_but_floats_of_tables_are(target, tmp_path):
    made = drafter("eagle3", target)
    head = quantize(made.params["lm_head"], "int8")
    made = replace(made, params=made.params | {"lm_head": head})
    training.save_pretrained(made, tmp_path, target=target)
    found = proposers.load(tmp_path, target, num_draft_tokens=made.num_draft_tokens).params["lm_head"]
    np.testing.assert_array_equal(found, dequantize(head))
    made = replace(made, params=made.params | {"fc": quantize(made.params["fc"].T, "int8")})
    with pytest.raises(ValueError, match=r"proposer must have matrices of floats to be written, got codes in \['fc'\]"):
        training.save_pretrained(made, tmp_path, target=target)


def test_drafters_that_have_no_layout(target, tmp_path):
    with pytest.raises(ValueError, match="layout must be 'eagle3' or 'speculators' for eagle3, got 'dflash'"):
        training.save_pretrained(drafter("eagle3", target), tmp_path, target=target, layout="dflash")
    for options in ({"is_causal": True}, {"layers": {"layers": (LayerConfig(),)}}):
        with pytest.raises(ValueError, match="layout 'speculators' must be given a head with norms of queries and"):
            training.save_pretrained(
                drafter("dflash", target, **options), tmp_path, target=target, layout="speculators"
            )
    for layout, from_anchor in (("speculators", False), ("dflash", True)):
        one = drafter("dflash", target, layers={"layers": windowed(4, None)}, window_from_anchor=from_anchor)
        with pytest.raises(ValueError, match=f"'speculators' must be given a head with window_from_.* {from_anchor}$"):
            training.save_pretrained(one, tmp_path, target=target, layout=layout)
    sizes = {"layers": {"layers": windowed(4, 5)}}
    with pytest.raises(ValueError, match=r"config\.windows must be of one size to be written, got \(4, 5\)"):
        training.save_pretrained(drafter("dflash", target, **sizes), tmp_path, target=target)
    with pytest.raises(
        ValueError, match="proposer must be a drafter of EAGLE-3, P-EAGLE, DFlash, DSpark or Medusa, got"
    ):
        training.save_pretrained(proposers.ngram(2), tmp_path, target=target)


@pytest.mark.parametrize("layer", [{}, {"has_bias": True, "has_out_bias": True}, {"has_head_norms": True}], ids=str)
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_decoder_that_is_written_is_read(layer, tie_embeddings, tmp_path):
    """In as many files as the largest size asks for; files of an earlier decoder are gone."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 24, "max_length": 64}
    config = DecoderConfig(40, 16, 2, **sizes, layers=(LayerConfig(Attention(**layer)),), tie_embeddings=tie_embeddings)
    leaves, structure = jax.tree.flatten(init_params(config, seed=0))
    rng = np.random.default_rng(0)
    params = structure.unflatten([jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves])
    for max_shard_bytes, num_files in ((4096, range(2, 20)), (1 << 20, [1])):
        training.save_decoder(config, params, tmp_path, fields={"eos_token_id": 3}, max_shard_bytes=max_shard_bytes)
        files = sorted(tmp_path.glob("*.safetensors"))
        assert len(files) in num_files
        if len(files) > 1:
            assert len(files[0].name) == len("model-00001-of-00002.safetensors")
            assert all(file.stat().st_size < 4096 + 2048 for file in files)
        assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
        assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 3
        read = models.load(tmp_path, dtype="float32")
        ids = jnp.asarray(rng.integers(0, 40, (1, 9)))
        inputs = ModelInput(ids, jnp.arange(9)[None])
        expected = decoder_model(config, params).apply(params, inputs, None)[0].logits
        np.testing.assert_allclose(read.apply(read.params, inputs, None)[0].logits, expected, atol=1e-5)


def test_the_embedded_target_is_written_as_it_is(tmp_path):
    """The bytes of its tensors and the fields of its config."""
    source = models.EMBEDDED / "target"
    target = models.load(source, dtype="bfloat16")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    training.save_decoder(target.apply.config, target.params, tmp_path, fields=ends, max_shard_bytes=14_000_000)
    for file in ("config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / file).read_text()) == json.loads((source / file).read_text())
    for file in sorted(source.glob("*.safetensors")):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"logit_softcap": 30.0}, r"config must have the options .* got \{'logit_softcap': 30.0\}"),
        ({"layers": (LayerConfig(Attention(has_bias=True)),)}, "got .*has_out_bias=False"),
        ({"layers": (LayerConfig(Attention(window=8)),)}, "got .*window=8"),
        ({"layers": (LayerConfig(has_post_norms=True),)}, "got .*has_post_norms=True"),
        ({"rotary_size": 4}, r"got \{'rotary_size': 4\}"),
        ({"rope_is_interleaved": True}, r"got \{'rope_is_interleaved': True\}"),
    ],
)
def test_decoders_that_are_not_written(options, message, tmp_path):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 24, "max_length": 64}
    config = DecoderConfig(40, 16, 2, **sizes, **options)
    with pytest.raises(ValueError, match=message):
        training.save_decoder(config, init_params(config, seed=0), tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_bytes must be > 0, got 0"):
        training.save_decoder(config, {}, tmp_path / "out", max_shard_bytes=0)
    assert not (tmp_path / "out").exists()
