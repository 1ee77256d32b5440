"""Heads of the EAGLE family: parity with the formulas in every layout of files, losslessness, and bad files."""

import re
from dataclasses import dataclass, replace

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_features
from heads import HIDDEN, VOCAB

from specjax import Context, checks, models, prompts, proposers, sampling, testing, verifiers
from specjax.models.decoder import DecoderConfig
from specjax.pages import read_slots, write_slots
from specjax.proposers import trunk
from specjax.proposers.drawing import Drawer, reduced_vocabulary
from specjax.proposers.feature_draft import FeatureDraft
from specjax.sampling import SamplingParams
from specjax.types import Features, Memory, Model, ModelInput, Verified

K, SMALL = 3, 40  # drafts, and tokens of a reduced vocabulary
D2T = np.sort(np.random.default_rng(0).permutation(VOCAB)[:SMALL]) - np.arange(SMALL)
IDS = D2T + np.arange(SMALL)
CONFIG = heads.FIELDS | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 8,  # less than the sequences have: heads state what they were trained on
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_cache": True,
}


def layer_shapes(name, size=HIDDEN, inputs=HIDDEN, has_head_norms=False):
    """As `heads.layer_shapes`, for a residual stream of any size."""
    shapes = heads.layer_shapes(name, has_head_norms=has_head_norms, inputs=inputs)
    for part in ("o", "down", "gate", "up"):
        key = f"{name}.{'self_attn' if part == 'o' else 'mlp'}.{part}_proj.weight"
        shapes[key] = (size, shapes[key][1]) if part in ("o", "down") else (shapes[key][0], size)
    return shapes | {f"{name}.{norm}.weight": (size,) for norm in ("input_layernorm", "post_attention_layernorm")}


def run_layer(tensors, name, x, residual):
    """A decoder layer on rows [T, ...] in one sequence: attention reads x and is added to the residual."""
    positions = np.arange(len(x))
    query, key = (heads.turn(heads.heads_of(tensors, name, part, x), positions) for part in "qk")
    attended = heads.attend(query, key, heads.heads_of(tensors, name, "v", x), np.tri(len(x), dtype=bool))
    return heads.after_attention(tensors, name, residual, attended)


def chain(tokens, features, drafts, embedding, run, score, recurrent=lambda x: x):
    """The logits of drafts: rows of features and of the tokens after them, then of drafts and the outputs before."""
    embedded, rows = [*embedding[tokens[1:]]], [*features]
    logits = []
    for draft in drafts:
        last = run(np.stack(embedded), np.stack(rows))[-1]
        logits.append(score(last))
        embedded.append(embedding[draft])
        rows.append(recurrent(last))
    return np.stack(logits)


def widen(logits):
    """Logits [..., D] of the reduced vocabulary, spread over the target's vocabulary."""
    wide = np.full((*logits.shape[:-1], VOCAB), -np.inf)
    wide[..., IDS] = logits
    return wide


@pytest.fixture(scope="module")
def target():
    return heads.make_target()


@pytest.fixture(scope="module")
def tapped():
    return heads.make_target(DEFAULT)


def tables(target):
    return (np.asarray(target.params[name]) for name in ("embedding", "head"))


def write_eagle(directory, target, form="flat", **changed):
    """A head of EAGLE, and the reference of its formulas."""
    shapes = heads.layer_shapes("layers.0") | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    del shapes["layers.0.input_layernorm.weight"]
    config = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    if form != "wrapped":
        shapes["fc.bias"] = (HIDDEN,)
    if form == "wrapped":
        config = {"model_type": "eagle", "model": config | {"bias": False}, "truncated_vocab_size": None}
    elif form == "speculators":  # the config of its layer may be the target's
        config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
        config |= {
            "transformer_layer_config": CONFIG | {"num_hidden_layers": 32},
            "speculators_version": "0.1.0",
        } | changed
    tensors = heads.random_tensors(shapes)
    names = {name: name for name in tensors}
    if form == "speculators":
        names = {name: name.replace("layers.0", "transformer").replace("fc.", "fusion_fc.") for name in tensors}
    heads.write(directory, config, {names[name]: tensor for name, tensor in tensors.items()})
    embedding, head = tables(target)

    def run(embedded, rows):
        x = np.concatenate([embedded, rows], axis=-1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
        return run_layer(tensors, "layers.0", x, x)

    def logits(tokens, features, drafts):
        return chain(tokens, features.hidden, drafts, embedding, run, lambda x: head @ x)

    return logits


# Layouts of EAGLE-3: the name of the first layer, fields of config.json, and options of `eagle3_shapes`.
IDS_FIELD, DEFAULT = "eagle_aux_hidden_state_layer_ids", (2, 0, 1)
FLAT = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SMALL, IDS_FIELD: [*DEFAULT]}
LAYOUTS = {
    "authors": ("midlayer", FLAT, {}),
    "3.1": ("model.midlayer", FLAT | {"fc_norm": True, "norm_output": True}, {"norms": "each"}),
    "speculators": (
        "layers.0",
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": SMALL,
            "norm_before_residual": True,
            "norm_before_fc": True,
            IDS_FIELD: [2, 0],
            "target_hidden_size": HIDDEN,
            "speculators_config": {"algorithm": "eagle3"},
        },
        {"norms": "all", "size": 24, "taps": 2, "num_layers": 2},
    ),
    "modelopt": (
        "layers.0",
        {
            "eagle_config": {
                "use_aux_hidden_state": False,
                "use_last_layernorm": True,
                "use_input_layernorm_in_first_layer": True,
                "use_mtp_layernorm": False,
            },
        },
        {"taps": 0, "is_reduced": False},
    ),
    "deepspec": (
        "layers.0",
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 0, 1, 0]},
        {"taps": 5, "is_reduced": False, "has_head_norms": True},
    ),
    "parallel": (
        "layers.0",
        {"speculators_model_type": "peagle", "norm_before_residual": False, "mask_token_id": 60}
        | {"draft_vocab_size": SMALL, IDS_FIELD: [*DEFAULT]},
        {"num_layers": 2, "is_parallel": True},
    ),
}
TAPS = {"speculators": (2, 0), "modelopt": (), "deepspec": (1, 2, 1, 2, 1)}


def eagle3_shapes(
    first, size=HIDDEN, taps=3, norms=None, num_layers=1, is_reduced=True, has_head_norms=False, is_parallel=False
):
    shapes = layer_shapes(first, size, 2 * size, has_head_norms=has_head_norms)
    for i in range(1, num_layers):
        shapes |= layer_shapes(f"layers.{i}", size, size)
    shapes["norm.weight"] = (size,)
    if taps:
        shapes |= {"fc.weight": (size, taps * HIDDEN), f"{first}.hidden_norm.weight": (size,)}
    if norms == "each":
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(taps)}
    elif norms == "all":
        shapes["input_norm.weight"] = (taps * HIDDEN,)
    if is_reduced:
        shapes["lm_head.weight"] = (SMALL, size)
    if size != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, size)
    if is_parallel:
        shapes["mask_hidden"] = (1, 1, taps * HIDDEN)
    return shapes


def write_eagle3(directory, target, layout, **changed):
    """A head of EAGLE-3, and the reference of its formulas."""
    first, fields, options = LAYOUTS[layout]
    size = options.get("size", HIDDEN)
    layers = CONFIG | {"hidden_size": size, "num_hidden_layers": options.get("num_layers", 1)}
    nested = "speculators_model_type" in fields
    config = ({"transformer_layer_config": layers} if nested else layers) | fields | changed
    tensors = heads.random_tensors(eagle3_shapes(first, **options))
    vocabulary = {}
    if options.get("is_reduced", True):
        vocabulary = {"d2t": D2T, "t2d": np.isin(np.arange(VOCAB), IDS)}
    heads.write(directory, config, tensors | vocabulary)
    embedding, head = tables(target)
    embedding, head = tensors.get("embed_tokens.weight", embedding), tensors.get("lm_head.weight", head)
    after = heads.rms

    def fused(taps):
        if options.get("norms") == "each":
            parts = np.split(taps, options.get("taps", 3), axis=-1)
            taps = np.concatenate([after(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], axis=-1)
        elif options.get("norms") == "all":
            taps = after(taps, tensors["input_norm.weight"])
        return taps @ tensors["fc.weight"].T

    def run(embedded, rows):
        normed = after(rows, tensors[f"{first}.hidden_norm.weight"]) if options.get("taps", 3) else rows
        pair = np.concatenate([after(embedded, tensors[f"{first}.input_layernorm.weight"]), normed], axis=-1)
        x = run_layer(tensors, first, pair, normed if config.get("norm_before_residual") else rows)
        for i in range(1, options.get("num_layers", 1)):
            name = f"layers.{i}"
            x = run_layer(tensors, name, after(x, tensors[f"{name}.input_layernorm.weight"]), x)
        return x

    def score(x):
        logits = head @ after(x, tensors["norm.weight"])
        return widen(logits) if vocabulary else logits

    def recurrent(x):
        return after(x, tensors["norm.weight"]) if config.get("norm_output") else x

    def logits(tokens, features, drafts):
        rows = fused(features.taps) if options.get("taps", 3) else features.hidden
        if options.get("is_parallel"):
            masked = np.repeat(fused(tensors["mask_hidden"][0]), len(drafts) - 1, axis=0)
            embedded = embedding[[*tokens[1:], *[60] * (len(drafts) - 1)]]
            return np.stack([score(x) for x in run(embedded, np.concatenate([rows, masked]))[-len(drafts) :]])
        return chain(tokens, rows, drafts, embedding, run, score, recurrent)

    return logits


def load(directory, target, **options):
    return proposers.load(directory, target, **{"num_draft_tokens": K} | options)


@pytest.mark.parametrize(
    "form, in_pages",
    [("flat", True), *(pytest.param(form, False, marks=pytest.mark.slow) for form in ("wrapped", "speculators"))],
)
def test_parity_of_eagle(tmp_path, target, form, in_pages):
    expected = write_eagle(tmp_path, target, form)
    heads.follow(target, load(tmp_path, target), expected, in_pages)


@pytest.mark.parametrize(
    "layout, in_pages",
    [
        ("authors", False),
        *(pytest.param(name, name != "deepspec", marks=pytest.mark.slow) for name in ("parallel", "3.1", *TAPS)),
    ],
)
def test_parity_of_eagle3(tmp_path, target, layout, in_pages):
    expected = write_eagle3(tmp_path, target, layout)
    layers = proposers.feature_layers(tmp_path, target)
    assert layers == TAPS.get(layout, DEFAULT)
    target = models.with_feature_layers(target, layers)
    heads.follow(target, load(tmp_path, target), expected, in_pages)


@pytest.mark.parametrize(
    "layout, draft_lengths",
    [
        pytest.param("authors", (K, 0, K, 1, 0, 0), id="authors"),
        pytest.param("parallel", (K, 0, K, 0, 0), id="parallel", marks=pytest.mark.slow),
    ],
)
def test_the_number_of_drafts_may_change_between_steps(tmp_path, layout, draft_lengths):
    """Also to none: the head then reads the features of the tokens all the same."""
    expected = write_eagle3(tmp_path, heads.make_target(DEFAULT), layout)
    target = heads.make_target(DEFAULT)
    heads.follow(target, load(tmp_path, target), expected, True, draft_lengths=draft_lengths)


def test_the_last_layer_ends_for_one_token_of_a_row():
    """The last fed one, whose output makes the first draft; the others give keys and values alone."""
    config = DecoderConfig(VOCAB, 16, 2, 4, 2, 4, 40, 64)  # of two layers, whose MLPs are 40 wide
    head = proposers.Eagle3Head(config, 16, num_taps=0)
    shapes = head.shapes() | {name: (VOCAB, 16) for name in ("lm_head", "embedding")}
    drafter = proposers.eagle3(head, trunk.random_params(shapes, jax.random.key(0)), 2)
    tokens, rows = jnp.ones((2, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (2, 6))
    inputs, hidden = ModelInput(tokens, rows, num_tokens=jnp.array([6, 3])), jnp.ones((2, 6, 16))
    memory, previous = drafter.init_memory(2, 2, 12), Features(jnp.zeros((2, 16)))

    def fed(memory):
        return drafter.prefill(inputs, tokens, previous, Features(hidden), memory)

    def updated(memory):
        context = Context(tokens, jnp.array([6, 3]), jnp.ones(2, bool))
        verified = Verified(tokens[:, :3], jnp.array([2, 0]))
        return drafter.update(context, verified, Features(hidden[:, :3]), memory)

    for function, num_tokens in ((fed, 6), (updated, 3)):
        products = re.findall(r"f32\[([\d,]+),80\] = dot_general", str(jax.make_jaxpr(function)(memory)))
        assert [np.prod([int(size) for size in found.split(",")]) for found in products] == [2 * num_tokens, 2]


@dataclass(frozen=True)
class ToyHead:
    """Keeps the states of the target of test_features in a cache, and so knows all its tokens."""

    hidden_size = 2  # the state of a token, and the token that follows

    def feature(self, params, features):
        return features.hidden

    def __call__(self, params, inputs, feature, cache):
        state = test_features.advance(feature[..., 0].astype(jnp.int32), inputs.tokens)
        cache = write_slots(cache, inputs.positions, state, inputs.pages)
        token = test_features.next_token(read_slots(cache, inputs.pages), inputs.positions + 1)
        return jnp.stack([state, token], axis=-1).astype(jnp.float32), cache

    def recurrent(self, params, output):
        return output[..., :1]

    def logits(self, params, output):
        return 10 * jax.nn.one_hot(output[..., 1].astype(jnp.int32), test_features.VOCAB)

    def init_cache(self, num_pages, page_size, dtype):
        return test_features.cache_of(num_pages, page_size)


def toy_target(params, inputs, cache):
    output, cache = test_features.apply(params, inputs, cache)
    return output._replace(features=Features(output.features["state"][..., None].astype(jnp.float32))), cache


@pytest.mark.parametrize("in_pages", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_feature_is_stale(monkeypatch, in_pages):
    """A head that knows the target is always right, also after drafts were rejected, which every other step does."""
    monkeypatch.setattr(prompts, "BUDGET", 11)  # calls of a few rows of the batch
    target = Model((), toy_target, test_features.cache_of, test_features.VOCAB, takes_pages=True)
    proposer = FeatureDraft(ToyHead(), {"embedding": jnp.zeros((1, 1))}, K)
    rejecting = jax.tree_util.Partial(verifiers.synthetic, acceptance_rates=[0.7, 0.4, 0.2])
    state, counts = heads.start(target, proposer, in_pages), np.zeros(K + 1, int)
    for number in range(200):
        active = np.asarray(state.context.active & (state.context.length > 1))
        if not state.context.active.any():
            break
        verifier = rejecting if number % 2 else jax.tree_util.Partial(verifiers.rejection)
        state, info = heads.step(target, proposer, state, verifier=verifier)
        accepted = np.asarray(info.num_accepted)[active]
        if number % 2:
            np.add.at(counts, accepted, 1)
        else:
            assert (accepted == K).all(), (number, accepted)
    assert not state.context.active.any() and (counts > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, K])
def test_greedy_is_plain(tmp_path, tapped, num_drafts):
    write_eagle3(tmp_path, tapped, "authors")
    plain, _ = heads.generate(tapped, None, temperature=0)
    proposer = load(tmp_path, tapped, num_draft_tokens=num_drafts)
    tokens, state = heads.generate(tapped, proposer, in_pages=num_drafts == K, temperature=0)
    assert tokens == plain
    assert int(state.totals.drafted.sum()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["authors", "parallel"])
def test_in_the_engine(tmp_path, tapped, layout):
    write_eagle3(tmp_path, tapped, layout)
    assert heads.in_slots(tapped, load(tmp_path, tapped)) == heads.in_slots(tapped, None)


@pytest.mark.slow
def test_after_ngrams(tmp_path, tapped):
    """In steps where the look-up drafts for all rows the head does not draft, and still learns what was committed."""
    plain, _ = heads.generate(tapped, None, temperature=0)
    for layout in ("authors", "parallel"):
        expected = write_eagle3(tmp_path / layout, tapped, layout)
        second = load(tmp_path / layout, tapped)
        proposer = proposers.fallback(proposers.ngram(5), second)
        state = heads.start(tapped, proposer, temperature=0)
        for _ in range(4):
            state, _ = heads.step(tapped, proposer, state)
        context = jax.device_get(state.context)
        of_second = Memory(state.proposer.pools[1], state.proposer.rows[1])
        drafts = jax.device_get(heads.propose(proposer.second, state._replace(proposer=of_second)))
        features = jax.device_get(heads.features_of(tapped, context.tokens))
        for b, length in enumerate(context.length):
            own = jax.tree.map(lambda x: x[b, : length - 1], features)  # noqa: B023
            logits = expected(context.tokens[b, :length], own, drafts.tokens[b])
            np.testing.assert_allclose(drafts.distribution.logits[b], logits, rtol=1e-4, atol=1e-4)
        while state.context.active.any():
            state, _ = heads.step(tapped, proposer, state)
        context = jax.device_get(state.context)
        assert [row[:n].tolist() for row, n in zip(context.tokens, context.length, strict=True)] == plain


SIZES = DecoderConfig(8, 8, 1, 2, 1, 4, 8, 64)  # for the 8 tokens of the public verdict, whose hidden states are logits
REDUCED = np.array([1, 2, 4, 6, 7])  # tokens of a draft vocabulary


def drafter(kind, target_ids=None, **options):
    config = SIZES if target_ids is None else replace(SIZES, vocab_size=len(target_ids))
    if target_ids is not None:
        options["reduced"] = reduced_vocabulary(target_ids, 8)
    head = proposers.EagleHead(config, True) if kind == "eagle" else proposers.Eagle3Head(config, 8, 1)
    keys = jax.random.split(jax.random.key(3), 4)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, trunk.random_params(head.shapes(), keys[0]))
    params["embedding"], params["lm_head"] = (
        jax.random.normal(key, (size, 8)) for key, size in zip(keys[1:], (8, config.vocab_size), strict=False)
    )
    if kind == "p_eagle":
        return proposers.p_eagle(
            head, params | {"mask_taps": jax.random.normal(keys[3], (8,))}, 2, mask_token=3, **options
        )
    return getattr(proposers, kind)(head, params, 2, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_loop")
@pytest.mark.parametrize(
    "kind, options",
    [
        ("eagle3", {"target_ids": REDUCED}),
        ("eagle", {"temperature": 0}),
        ("p_eagle", {"target_ids": REDUCED, "temperature": 0.6}),
    ],
)
def test_the_distribution_is_the_targets(kind, options):
    testing.assert_proposer_lossless(drafter(kind, **options), num_samples=20_000)


def second_is_3(logits, context):
    """Allow token 3 alone where a sequence has 5 tokens."""
    return jnp.where((context.length == 5) & (jnp.arange(8) != 3), -jnp.inf, logits)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_masks_leave_nothing_of_a_reduced_vocabulary(is_greedy):
    """Drafts end before the position where a request allows no token of the drafter, and obey masks before it."""
    params = [
        SamplingParams(allowed_token_ids=[0, 3], max_tokens=9),  # none of them is in the vocabulary
        SamplingParams(allowed_token_ids=[0, 4, 7], max_tokens=9),
        SamplingParams(logits_processors=[second_is_3], max_tokens=9),
    ]
    rows = sampling.batch(params, vocab_size=8)
    if is_greedy:
        rows = rows._replace(temperature=None)
    context = Context(jnp.ones((3, 12), jnp.int32), jnp.array([4, 4, 4]), jnp.ones(3, bool), jnp.array([2, 2, 2]))
    keys = jax.random.split(jax.random.key(0), (3, 3))
    logits = jax.random.normal(jax.random.key(1), (3, 3, 5))

    @jax.jit
    def drawn(keys, context, rows, logits):
        return Drawer(keys, context, rows, is_greedy, reduced_vocabulary(REDUCED, 8)).parallel(logits)

    draft = drawn(keys, context, rows, logits)
    assert draft.num_tokens.tolist() == [0, 3, 1]
    assert set(draft.tokens[1].tolist()) <= {4, 7}
    assert draft.tokens[2, 0] in (1, 2, 4, 6, 7)
    if not is_greedy:
        allowed = np.asarray(draft.distribution.logits[1] > -np.inf)
        assert (np.flatnonzero(allowed.all(axis=0)) == [4, 7]).all() and allowed.sum() == 6
    tokens = jnp.where(jnp.arange(3)[None] < draft.num_tokens[:, None], draft.tokens, -1)
    checks.validate(draft._replace(tokens=tokens), jnp.zeros((3, 4, 8)))


def change(**changed):
    return lambda config, tensors: config.update(changed)


def drop(name):
    return lambda config, tensors: tensors.pop(name)


def drop_field(name):
    return lambda config, tensors: config.pop(name)


def without_d2t(config, tensors):
    del tensors["d2t"], tensors["t2d"]


def swapped(config, tensors):
    tensors["d2t"] = tensors["d2t"].copy()
    tensors["d2t"][:2] += 1


def other_target(config, tensors):
    config["target_hidden_size"] = 64


EAGLE_CONFIG = {"eagle_config": {"use_mtp_layernorm": True}}
BAD = [
    (other_target, r"target_hidden_size in .*config.json must be 32, the hidden size of the target, got 64"),
    (change(vocab_size=62), r"vocab_size in .* must be 61, the vocabulary of the target, got 62"),
    (without_d2t, r"tensor d2t must say which tokens of V = 61 the 40 logits are for, got none"),
    (swapped, r"tensors d2t and t2d must name the same tokens"),
    (change(draft_vocab_size=41), r"tensor model.d2t in .* must be of integers of shape \(41,\)"),
    (change(**{IDS_FIELD: [2, 3, 4]}), r"ids in .* must be layers of the target, which has 2, got"),
    (change(**{IDS_FIELD: [2, 0]}), r"must be 3 layers, those of fc.weight for H = 32, .*, got 2"),
    (change(norm_output_twice=True), r"norm_output_twice in .* must be absent"),
    (change(**EAGLE_CONFIG), r"eagle_config.use_mtp_layernorm in .* must be absent"),
    (change(num_experts=8), r"num_experts in .* must be absent"),
    (change(model_type="gemma"), r"model_type in .* must be 'llama' or"),
    (change(fc_norm=True), r"tensor model.fc_norm.0.weight is missing"),
    (drop("midlayer.mlp.up_proj.weight"), r"tensor model.midlayer.mlp.up_proj.weight is missing"),
    (drop("fc.weight"), r"tensor model.fc.weight is missing"),
]


@pytest.fixture
def write_changed(tmp_path, tapped, monkeypatch):
    """Write the head of the authors' layout after a change of its config and tensors."""

    def write_changed(change_files):
        def write(directory, config, tensors):
            change_files(config, tensors)
            return written(directory, config, tensors)

        written = heads.write
        monkeypatch.setattr(heads, "write", write)
        write_eagle3(tmp_path, tapped, "authors")

    return write_changed


@pytest.mark.parametrize("change_files, message", BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_files(tmp_path, tapped, write_changed, change_files, message):
    write_changed(change_files)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tapped)


def test_norms_of_eagle_in_the_layout_of_speculators(tmp_path, target):
    """A head with these norms leaves undefined which numbers its rows read in place of features."""
    write_eagle(tmp_path, target, "speculators", layernorms=True)
    with pytest.raises(ValueError, match=r"layernorms in .* must be False, the only value that specjax supports"):
        load(tmp_path, target)


def test_files_without_a_head_take_rows_of_the_target(tmp_path, tapped, write_changed):
    write_changed(drop("lm_head.weight"))
    np.testing.assert_array_equal(load(tmp_path, tapped).params["lm_head"], tapped.params["head"][IDS])


def test_the_head_tells_the_size_of_a_reduced_vocabulary(tmp_path, tapped, write_changed):
    write_changed(drop_field("draft_vocab_size"))
    assert load(tmp_path, tapped).params["lm_head"].shape == (SMALL, HIDDEN)


def test_bad_arguments(tmp_path, target, tapped):
    write_eagle3(tmp_path, target, "authors")
    with pytest.raises(ValueError, match=r"target must have feature_layers = \(2, 0, 1\), .* got \(\)"):
        load(tmp_path, target)
    with pytest.raises(ValueError, match="num_draft_tokens must be >= 1"):
        load(tmp_path, tapped, num_draft_tokens=0)
    proposer = load(tmp_path, tapped, rope_theta=7.0)
    assert proposer.head.config.rope_theta == 7
    assert load(tmp_path, tapped, fields={"norm_output": True}).head.norm_output
    with pytest.raises(ValueError, match=r"features.taps, which models.with_feature_layers asks for, got none"):
        heads.start(target, proposer)
    with pytest.raises(ValueError, match=r"features.taps must be of 3 layers with H = 32, 96 numbers a token, got 32"):
        heads.start(models.with_feature_layers(target, (1,)), proposer)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        load(tmp_path, tapped)
    with pytest.raises(ValueError, match=r"draft holds an ordinary model, not a drafter on features; .*draft_model"):
        load(models.EMBEDDED / "draft", tapped)


@pytest.mark.parametrize(
    "ids, expected",
    [
        (None, (2, 16, 29)),
        ([2, 16, 29], (2, 16, 29)),
        ([1, 15, 28], (2, 16, 29)),  # layers whose output is read
        ([24, 30, 32], (24, 30, 32)),
    ],
)
def test_layer_ids(tmp_path, target, ids, expected):
    write_eagle3(tmp_path, target, "authors", **{IDS_FIELD: None, "eagle_config": {IDS_FIELD: ids}})
    deep = replace(target, apply=replace(target.apply, config=replace(heads.CONFIG, num_layers=32)))
    assert proposers.feature_layers(tmp_path, deep) == expected
