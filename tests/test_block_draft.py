"""DFlash, DFlash2 and DSpark: parity with the formulas in every layout, confidences, losslessness and bad files."""

from dataclasses import replace

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import HIDDEN, VOCAB

from specjax import models, proposers, sampling, testing, verifiers
from specjax.models.decoder import DecoderConfig
from specjax.proposers import trunk
from specjax.sampling import SamplingParams
from specjax.testing.enumeration import completed_law, enumerate_outcomes, product_law, total_variation
from specjax.types import Categorical, Draft, Features

NUM_LAYERS, BLOCK, MASK, RANK, REDUCED = 2, 4, 5, 6, 40
LAYERS = heads.FIELDS | {"model_type": "qwen3", "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False}
AUTHORS = LAYERS | {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]}}
JETSPEC = {**AUTHORS, "dflash_config": {**AUTHORS["dflash_config"], "causal_head": True, "target_hidden_size": HIDDEN}}
FLAT = LAYERS | {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [-1, 1], "num_anchors": 512}
DSPARK = FLAT | {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "draft_vocab_size": REDUCED,
}
D2T = np.sort(np.random.default_rng(3).permutation(VOCAB)[:REDUCED]) - np.arange(REDUCED)


def shapes_of(rows=VOCAB, own_tables=False, rank=0, confidence=0, has_bias=False):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(NUM_LAYERS):
        shapes |= heads.layer_shapes(f"layers.{i}", has_bias, has_head_norms=True)
    if own_tables:
        shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (rows, HIDDEN)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, rank), "markov_head.markov_w2.weight": (rows, rank)}
    if confidence:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    return shapes


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
CASES = {  # config, shapes of the tensors, layers of the target, whether the pending token gives the first draft
    "authors": (AUTHORS, shapes_of(has_bias=True), (1, 2), False),
    "jetspec": (JETSPEC, shapes_of(), (1, 2), False),
    "window": (AUTHORS | WINDOW, shapes_of(), (1, 2), False),
    "open window": (AUTHORS | WINDOW | {"sliding_window": 3, "is_causal": False}, shapes_of(), (1, 2), False),
    "flat": (FLAT, shapes_of(own_tables=True), (0, 2), True),
    "dspark": (DSPARK, shapes_of(own_tables=True, rank=RANK, confidence=HIDDEN + RANK), (0, 2), True),
    "speculators": (SPECULATORS, shapes_of(REDUCED, own_tables=True), (1, 2), False),
}


def write(directory, case, **changes):
    """A checkpoint; returns its tensors."""
    config, shapes, *_ = CASES[case]
    tensors = heads.random_tensors(shapes)
    extra = {}
    if case == "speculators":
        is_kept = np.zeros(VOCAB, bool)
        is_kept[np.arange(REDUCED) + D2T] = True
        extra = {"d2t": D2T, "t2d": is_kept}
    heads.write(directory, config | changes, tensors | extra)
    return tensors


@pytest.fixture(scope="module")
def targets():
    """The target with the layers that each case reads."""
    target = heads.make_target()
    return {case: models.with_feature_layers(target, layers) for case, (_, _, layers, _) in CASES.items()}


def outputs(tensors, config, target, tokens, taps, from_anchor, count):
    """The normalised output of the rows that give drafts."""
    context = heads.rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    seen, width = len(context), count + (not from_anchor)
    places, block = np.arange(seen), seen + np.arange(width)
    embedding = tensors.get("embed_tokens.weight", np.asarray(target.params["embedding"]))
    x = embedding[[tokens[-1], *[MASK] * (width - 1)]]
    for i in range(NUM_LAYERS):
        name = f"layers.{i}"
        normed = heads.rms(x, tensors[f"{name}.input_layernorm.weight"])
        query = heads.turn(heads.heads_of(tensors, name, "q", normed), block)
        keys = [heads.turn(heads.heads_of(tensors, name, "k", y), at) for y, at in ((context, places), (normed, block))]
        values = [heads.heads_of(tensors, name, "v", y) for y in (context, normed)]
        distance = block[:, None] - np.arange(seen + width)[None]
        mask = (distance >= 0) | (not config.get("dflash_config", {}).get("causal_head"))
        if config.get("layer_types", [None] * 9)[i] == "sliding_attention":
            mask = np.abs(distance) < config["sliding_window"]
            mask &= (distance >= 0) | (config.get("is_causal") is False)
        attended = heads.attend(query, np.concatenate(keys), np.concatenate(values), mask)
        x = heads.after_attention(tensors, name, x, attended)
    return heads.rms(x, tensors["norm.weight"])[0 if from_anchor else 1 :]


def reference(tensors, case, target):
    config, _, _, from_anchor = CASES[case]

    def logits(tokens, features, drafts):
        rows = outputs(tensors, config, target, tokens, features.taps, from_anchor, len(drafts))
        head = tensors.get("lm_head.weight", np.asarray(target.params["head"]))
        result = rows @ head.T
        if config.get("markov_rank"):
            before = tensors["markov_head.markov_w1.weight"][[tokens[-1], *drafts[:-1]]]
            result = result + before @ tensors["markov_head.markov_w2.weight"].T
        if case == "speculators":
            wide = np.full((len(result), VOCAB), -np.inf)
            wide[:, np.arange(REDUCED) + D2T] = result
            return wide
        return result

    return logits


SLOW = "jetspec", "window", "open window", "flat", "dspark", "speculators"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_parity(tmp_path, targets, case):
    target, tensors = targets[case], write(tmp_path, case)
    assert proposers.kind_of(tmp_path) == ("dspark" if case == "dspark" else "dflash")
    assert proposers.feature_layers(tmp_path, target) == CASES[case][2]
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    heads.follow(target, proposer, reference(tensors, case, target), in_pages=case in ("authors", "dspark"))


@pytest.mark.slow
def test_the_number_of_drafts_may_change_between_steps(tmp_path, targets):
    target, tensors = targets["authors"], write(tmp_path, "authors")
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    heads.follow(target, proposer, reference(tensors, "authors", target), True, draft_lengths=(3, 0, 3, 1, 0, 0))


def test_windows_are_counted_from_each_token(tmp_path, targets):
    """In all layouts but the layout of speculators; the window is shorter than the block."""
    case = "open window"
    target, tensors = targets[case], write(tmp_path, case)
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    state = heads.start(target, proposer)
    context, draft = jax.device_get((state.context, heads.propose(proposer, state)))
    taps, logits = np.asarray(heads.features_of(target, context.tokens).taps), reference(tensors, case, target)
    for b, length in enumerate(context.length):
        features = Features(None, taps[b, : length - 1])
        if length > 1:
            expected = logits(context.tokens[b, :length], features, draft.tokens[b])
            np.testing.assert_allclose(draft.distribution.logits[b], expected, rtol=1e-4, atol=1e-4)


OPEN = {"transformer_layer_config": WINDOW, "sliding_window_non_causal": True}
IN_TABLE = {"use_swa": True, "swa_window_size": 5}


@pytest.mark.parametrize(
    "case, changes, windows, is_causal, from_anchor",
    [
        ("authors", WINDOW, (6, None), None, False),
        ("authors", WINDOW | {"is_causal": False}, (6, None), False, False),
        ("authors", WINDOW | {"dflash_config": {"causal": False}}, (6, None), False, False),
        ("authors", WINDOW | {"is_causal": True, "dflash_config": {"causal": False}}, (6, None), True, False),
        ("authors", {"dflash_config": IN_TABLE}, (5, 5), False, False),
        ("authors", {"layer_types": ["full_attention"] * 2, "dflash_config": IN_TABLE}, (5, 5), False, False),
        ("authors", {"dflash_config": IN_TABLE | {"causal": True}}, (5, 5), True, False),
        ("jetspec", {}, (None, None), True, False),
        ("authors", WINDOW | {"dflash_config": IN_TABLE}, (5, None), None, False),
        ("speculators", {}, (None, None), None, False),
        ("speculators", {"transformer_layer_config": WINDOW}, (6, None), None, True),
        ("speculators", OPEN, (6, None), False, True),
    ],
)
def test_windows_in_each_layout(tmp_path, targets, case, changes, windows, is_causal, from_anchor):
    own = CASES[case][0]
    nested = {name: own[name] | values for name, values in changes.items() if isinstance(values, dict)}
    write(tmp_path, case, **changes | nested)
    head = proposers.load(tmp_path, targets[case], num_draft_tokens=3).head
    assert (head.config.windows, head.is_causal, head.window_from_anchor) == (windows, is_causal, from_anchor)


def confidences_of(tensors, target, tokens, taps, drafts):
    rows = outputs(tensors, DSPARK, target, tokens, taps, True, len(drafts))
    before = tensors["markov_head.markov_w1.weight"][[tokens[-1], *drafts[:-1]]]
    read = np.concatenate([rows, before], axis=-1)
    score = read @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"]
    return 1 / (1 + np.exp(-score))


def test_drafts_end_before_the_first_of_small_confidence(tmp_path, targets):
    """With a threshold, each row drafts the same tokens as without, but fewer of them."""
    target, tensors = targets["dspark"], write(tmp_path, "dspark")
    whole = proposers.load(tmp_path, target, num_draft_tokens=3)
    state = heads.start(target, whole)
    context, drafts = jax.device_get((state.context, heads.propose(whole, state).tokens))
    taps = jax.device_get(heads.features_of(target, context.tokens)).taps
    rows = np.flatnonzero(context.length > 1)
    found = {
        b: confidences_of(tensors, target, context.tokens[b, :n], taps[b, : n - 1], drafts[b])
        for b, n in zip(rows, context.length[rows], strict=True)
    }
    threshold = float(np.median([values[0] for values in found.values()])) - 1e-4
    cut = proposers.dspark(whole.head, whole.params, 3, min_confidence=threshold)
    draft = jax.device_get(heads.propose(cut, state))
    counts = {b: int(np.cumprod(values >= threshold).sum()) for b, values in found.items()}
    assert len(set(counts.values())) > 1
    for b, count in counts.items():
        assert draft.num_tokens[b] == count
        assert draft.tokens[b].tolist() == [*drafts[b, :count], *[-1] * (3 - count)]


def small(key, num_drafts, options, **sizes):
    """A drafter for the 8 tokens of the public verdict, whose target's one tap are its logits."""
    config = DecoderConfig(8, 8, 1, 2, 1, 4, 8, 64, tie_embeddings=False)
    head = proposers.BlockHead(config, 1, 8, 8, 3, mask_token=7, from_anchor=True, **sizes)
    params = trunk.random_params(head.shapes() | {"embedding": (8, 8), "lm_head": (8, 8)}, jax.random.key(key))
    params = jax.tree.map(lambda x: 50 * x if x.ndim > 1 else x, params)
    if head.confidence:
        params["confidence"] = 3 * jax.random.normal(jax.random.key(9), params["confidence"].shape)
    make = proposers.dflash2 if head.num_candidates else proposers.dspark if head.markov_rank else proposers.dflash
    return make(head, params, num_drafts, **options)


CANDIDATES = {"num_candidates": 3, "selector_rank": 4, "conv_taps": 2, "conv_group": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, sizes",
    [
        ({"min_confidence": 0.5}, {"markov_rank": 4, "confidence": "both"}),
        ({}, CANDIDATES),
    ],
)
@pytest.mark.usefixtures("optimized_loop")
def test_the_distribution_is_the_targets(options, sizes):
    proposer = small(1, 3, options, **sizes)
    testing.assert_proposer_lossless(proposer, num_samples=20_000)


def test_masks_may_leave_no_candidate():
    """The drafts of a row end before the first for which the request allows no candidate, and obey masks before."""
    proposer = small(1, 3, {}, **CANDIDATES)
    target = testing.bigram_model(jax.random.normal(jax.random.key(0), (8, 8)))

    def draft_of(ids):
        rows = sampling.batch([SamplingParams(allowed_token_ids=ids, max_tokens=9)])
        prompts, length = jnp.array([[0, 3, 4]]), jnp.array([3])
        state = heads.prefill(target, proposer, prompts, length, rows, jax.random.key(1), max_length=16)
        return jax.device_get(heads.propose(proposer, state))

    whole = draft_of(list(range(8)))
    candidates = [np.flatnonzero(row > -np.inf).tolist() for row in whole.distribution.logits[0]]
    assert [len(ids) for ids in candidates] == [3, 3, 3] and whole.num_tokens.tolist() == [3]
    others = [token for token in range(8) if token not in candidates[0]]
    assert draft_of(others).num_tokens.tolist() == [0]
    only = draft_of([candidates[0][1], *[token for token in others if token not in candidates[1]]])
    assert only.num_tokens[0] >= 1 and only.tokens[0, 0] == candidates[0][1]


@pytest.mark.slow
def test_confidences_change_the_number_of_drafts():
    """In the proposer of the verdict above: of all numbers, and depending on the drafts before."""
    proposer = small(1, 3, {"min_confidence": 0.5}, markov_rank=4, confidence="both")
    target = testing.bigram_model(jax.random.normal(jax.random.key(0), (8, 8)))
    rows = sampling.batch([SamplingParams(max_tokens=9)] * 64)
    prompts = jnp.tile(jnp.array([[0, 3], [0, 5]]), (32, 1))
    lengths = jnp.full(64, 2)
    state = heads.prefill(target, proposer, prompts, lengths, rows, jax.random.key(1), max_length=16)
    counts = np.asarray(heads.propose(proposer, state).num_tokens)
    assert max(len(set(counts[start::2].tolist())) for start in (0, 1)) > 1, counts


@pytest.mark.slow
def test_greedy_is_plain(tmp_path, targets):
    """In a dense cache; slots have pages."""
    target = targets["dspark"]
    write(tmp_path, "dspark")
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    rows, _ = heads.generate(target, proposer, temperature=0)
    heads.assert_greedy_rows(target, rows)


@pytest.mark.slow
def test_slots(tmp_path, targets):
    target = targets["dspark"]
    write(tmp_path, "dspark")
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    heads.assert_greedy_requests(target, heads.in_slots(target, proposer))


def test_the_base_of_the_rotation_can_be_replaced(tmp_path, targets):
    target = targets["authors"]
    write(tmp_path, "authors")
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3, rope_theta=1e4)
    assert proposer.head.config.rope_theta == 1e4
    fields = {"sample_from_anchor": True}
    assert proposers.load(tmp_path, target, num_draft_tokens=4, fields=fields).num_draft_tokens == 4


def table(**fields):
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]} | fields}


BAD = [
    ("authors", table(selector_rank=8), r"dflash_config\.selector_rank in"),
    ("authors", table(projector_type="domino"), r"projector_type in .* must be 'dflash' or 'dspark'"),
    ("authors", table(target_layer_ids=[0, 2]), "target_layer_ids in .* must be layers of the target, which has 2"),
    (
        "authors",
        table(target_layer_ids=[0]),
        r"target_layer_ids in .* must be 2 layers, those of fc\.weight for H = 32",
    ),
    ("authors", table(mask_token_id=VOCAB), r"mask_token must be in the embedding, in \[0, 61\), got 61"),
    ("authors", table(mask_token_id=None), r"must have the field dflash_config\.mask_token_id"),
    ("authors", {"block_size": 3}, r"num_draft_tokens must be in \[1, 2\], the trained depth of blocks of 3 tokens"),
    ("authors", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, r"rope_scaling\.rope_type in .* must be"),
    ("authors", {"vocab_size": 60}, "vocab_size in .* must be 61, the vocabulary of the target"),
    ("authors", {"num_hidden_layers": 3}, r"tensor layers\.2\..* is missing"),
    ("authors", {"num_hidden_layers": 1}, r"tensor layers\.1\..* does not belong"),
    ("authors", {"final_logit_softcapping": 30.0}, "final_logit_softcapping in .* must be absent"),
    ("dspark", {"markov_head_type": "gated"}, "markov_head_type in .* must be 'vanilla'"),
    ("dspark", {"markov_rank": 8}, r"tensor markov_head\.markov_w1\.weight in .* must have shape \(61, 8\)"),
    ("speculators", {"draft_vocab_size": 41}, r"tensor d2t in .* must be of integers of shape \(41,\)"),
]


@pytest.mark.parametrize("case, changes, message", BAD)
def test_bad_fields(tmp_path, targets, case, changes, message):
    write(tmp_path, case, **changes)
    with pytest.raises(ValueError, match=message):
        proposers.load(tmp_path, targets[case], num_draft_tokens=3)


def test_bad_files(tmp_path, targets):
    target = targets["authors"]
    tensors = write(tmp_path, "authors")
    with pytest.raises(ValueError, match=r"target must have feature_layers = \(1, 2\), .*, got \(0, 2\)"):
        proposers.load(tmp_path, targets["dspark"], num_draft_tokens=3)
    proposer = proposers.load(tmp_path, target, num_draft_tokens=3)
    with pytest.raises(ValueError, match=r"features\.taps"):
        heads.start(heads.make_target(), proposer)
    heads.write(tmp_path, AUTHORS, tensors | {"fc.weight": np.zeros((HIDDEN, 70), np.float32)})
    with pytest.raises(ValueError, match=r"tensor fc\.weight of .* must have a multiple of H = 32 columns.*got 70"):
        proposers.load(tmp_path, target, num_draft_tokens=3)
    heads.write(tmp_path, AUTHORS, tensors | {"layers.0.attention_conv.base_kernel": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"tensor layers\.0\.attention_conv.* does not belong"):
        proposers.load(tmp_path, target, num_draft_tokens=3)
    with pytest.raises(ValueError, match=r"head\.markov_rank must be 0"):
        proposers.dflash(proposers.BlockHead(proposer.head.config, 1, 8, 8, 3, 1, markov_rank=2), proposer.params)
    with pytest.raises(ValueError, match=r"head\.num_candidates must be in \[1, 61\], the draft vocabulary, got 0"):
        proposers.dflash2(proposer.head, proposer.params)
    chooses = replace(proposer.head, num_candidates=4)
    for make in (proposers.dflash, proposers.dspark):
        with pytest.raises(
            ValueError, match=r"head\.num_candidates must be 0 \(proposers\.dflash2 takes others\), got 4"
        ):
            make(chooses, proposer.params)
    with pytest.raises(ValueError, match=r"head\.markov_rank must be 0 and head\.confidence None"):
        proposers.dflash2(replace(chooses, markov_rank=2), proposer.params)
    with pytest.raises(ValueError, match=r"min_confidence must be None for a head without confidences, got 0\.3"):
        proposers.dspark(proposer.head, proposer.params, min_confidence=0.3)
    with pytest.raises(ValueError, match=r"min_confidence must be None or a number in \[0, 1\], got 2"):
        proposers.dspark(proposer.head, proposer.params, min_confidence=2)


def variation_of(verifier, stops):
    """The total variation of one step's output from the target, where a row stops before its second draft by a rule.

    `stops(first, second)` says whether a row with these two drafts keeps the first alone. All pairs of drafts are rows.
    """
    rng, size = np.random.default_rng(0), 3
    tables = [rng.dirichlet(np.ones(size), (size,) * depth) for depth in range(3)]  # of the target
    first, second = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size), size)  # of the drafter
    pairs = np.array([(a, b) for a in range(size) for b in range(size)], np.int32)
    a, b = pairs.T
    counts = np.array([1 if stops(*pair) else 2 for pair in pairs], np.int32)
    draft = Draft(
        jnp.asarray(pairs),
        Categorical(jnp.log(jnp.stack([jnp.tile(first, (len(pairs), 1)), jnp.asarray(second[a])], axis=1))),
        jnp.asarray(counts),
    )
    target = jnp.log(jnp.stack([jnp.tile(tables[0], (len(pairs), 1)), tables[1][a], tables[2][a, b]], axis=1))
    verified, weight = enumerate_outcomes(verifier, draft, target)
    mass = ((first[a] * second[a, b])[:, None] * weight).reshape(-1)
    return total_variation(completed_law(verified.tokens, mass, tables), product_law(tables))


@pytest.mark.parametrize("verifier", [verifiers.rejection, verifiers.block, verifiers.match])
def test_where_drafts_end_may_depend_on_those_before(verifier):
    """The rule by which confidences end drafts is exact; one that looks at the draft itself is not."""
    assert variation_of(verifier, lambda a, b: a != 1) < 1e-6
    if verifier is not verifiers.match:  # which compares with the target's own token, whatever was drafted
        assert variation_of(verifier, lambda a, b: b == 1) > 1e-3
