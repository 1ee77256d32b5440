"""Time whole decoding steps on this machine's accelerator, with random weights or the embedded models.

    python scripts/bench_decode.py --preset 8b-1b
    python scripts/bench_decode.py --preset 8b-eagle3 --num-drafts 3 5
    python scripts/bench_decode.py --preset 8b-block --batches 1 --num-drafts 7
    python scripts/bench_decode.py --preset 8b-ngram --batches 1 --num-drafts 5
    python scripts/bench_decode.py --preset 8b-self --batches 1 --num-drafts 3 4 5
    python scripts/bench_decode.py --preset 8b-1b --batches 1 --contexts 512 4096 --num-drafts 5
    python scripts/bench_decode.py --preset 8b --batches 64 --contexts 4096 --cache-dtype fp8
    python scripts/bench_decode.py --preset 8b --quantization int4 --batches 1 64
    python scripts/bench_decode.py --preset 8b-eagle3 --quantization int4 --draft-quantization int8 --batches 1
    python scripts/bench_decode.py --preset embedded --batches 1 --contexts 16 --num-drafts 2

The script prints the tables of the README, each row as soon as it is measured; the last command is the quickest run.

* The time of a step is a slope of `specjax.generate`: the difference between LONG and SHORT steps, divided by the
  difference of their numbers. All steps continue one state.
* With --parts, drafting, scoring and verifying are timed alone, each in a separate loop. "Other" is the rest of the
  step.
* A step costs the same whatever it accepts, so tokens/s at an acceptance rate are the expected tokens of a step divided
  by its time. With --parts, the JSON also holds the tokens/s that a short run with `verifiers.synthetic` reached.
* The floor is the time to read, once per call, the weights and the filled part of the cache at PEAK bytes/s.
* Figures of other systems (`peers.py`) stand under a row with models of the same shapes, batch size and number of
  drafts.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers
from bench_quantized import random_weight
from jax.tree_util import Partial

from specjax import decode, models, proposers, sampling, scorers, theory, verifiers
from specjax.decoding.drafters import num_fed, propose, with_tree
from specjax.keys import fold, positions
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.models.layer import Attention, LayerConfig
from specjax.proposers import BlockHead, trunk
from specjax.proposers.block_draft import BlockDraft, check_block
from specjax.proposers.drawing import reduced_vocabulary
from specjax.proposers.feature_draft import FeatureDraft
from specjax.proposers.files import target_weights
from specjax.proposers.ngram import NGram
from specjax.proposers.self_draft import SelfDraft
from specjax.sampling import SamplingParams
from specjax.types import Draft, Model, Proposer

PEAK = 4.3e12  # bytes/s that a copy reaches on an H200
SHORT, LONG, REPEATS = 2, 12, 5  # steps of a short and a long run, and timed runs of each
RATES = (1.0, 0.9, 0.7)  # acceptance rates at which tokens/s are computed
COLUMNS = (1.0, 0.7)  # rates that a table shows
SELF_COLUMNS = (1.0, 0.9)  # the same for a target that drafts for itself

COMMON = {"vocab_size": 128256, "max_length": 131072, "rope_theta": 5e5, "transposed": True}
SHAPES = {
    "8b": DecoderConfig(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        mlp_size=14336,
        tie_embeddings=False,
        **COMMON,
    ),
    "1b": DecoderConfig(
        hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_size=64, mlp_size=8192, **COMMON
    ),
    "100m": DecoderConfig(
        hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, head_size=64, mlp_size=2048, **COMMON
    ),
}
BLOCK = DecoderConfig(  # of a drafter in blocks of 8 tokens for the target "8b"
    hidden_size=4096,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_size=14336,
    tie_embeddings=False,
    layers=(LayerConfig(Attention(has_head_norms=True)),),
    **COMMON,
)
BLOCK_LAYERS = (2, 9, 16, 23, 30)  # of the target, whose stream it reads
EAGLE = replace(BLOCK, num_layers=1, layers=(LayerConfig(),), vocab_size=32000)  # an EAGLE-3 head for the target "8b"
EAGLE_LAYERS = (2, 16, 29)
PRESETS = ("8b", "8b-1b", "8b-eagle3", "8b-block", "8b-ngram", "8b-self", "1b-100m", "embedded")
Drafter = Model | BlockDraft | FeatureDraft | NGram | SelfDraft


def random_model(config: DecoderConfig) -> Model:
    """Return a model with random bfloat16 weights, made on the device."""

    @partial(jax.jit, static_argnums=1)
    def weights(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, jnp.bfloat16) if len(shape) > 1 else jnp.ones(shape, jnp.bfloat16)

    leaves, tree = jax.tree.flatten(param_shapes(config))
    keys = jax.random.split(jax.random.key(config.hidden_size), len(leaves))
    return decoder_model(config, tree.unflatten([weights(k, x.shape) for k, x in zip(keys, leaves, strict=True)]))


def random_block(target: Model) -> BlockDraft:
    """Return a block-parallel drafter of random bfloat16 weights, with the embedding and the head of the target."""
    head = BlockHead(BLOCK, len(BLOCK_LAYERS), BLOCK.hidden_size, target.vocab_size, block_size=8, mask_token=0)
    params = trunk.random_params(head.shapes(), jax.random.key(1), jnp.bfloat16)
    tables = {"embedding": target.params["embedding"], "lm_head": target.params["head"]}
    return proposers.dflash(head, params | tables)


def random_head(target: Model, config: DecoderConfig = EAGLE) -> FeatureDraft:
    """Return an EAGLE-3 head of random bfloat16 weights, with the embedding of the target and 32,000 of its tokens."""
    head = proposers.Eagle3Head(config, config.hidden_size, len(EAGLE_LAYERS))
    shapes = head.shapes() | {"lm_head": (config.vocab_size, config.hidden_size)}
    params = trunk.random_params(shapes, jax.random.key(1), jnp.bfloat16)
    params |= {"embedding": target_weights(target).embedding}
    reduced = reduced_vocabulary(np.arange(config.vocab_size) * 4, target.vocab_size)
    return proposers.eagle3(head, params, 1, reduced=reduced)


def replaced(part, quantization: str):
    """Return a part of a model's or a drafter's parameters with random matrices of few bits in place of matrices."""
    format = {"fp8": "fp8-blocks"}.get(quantization, quantization)
    return jax.tree.map(lambda x: x if x.ndim < 2 else random_weight(format, x.shape), part)


def quantized(model: Model, quantization: str, with_head: bool) -> Model:
    """Return the model with random matrices of few bits in its layers, and in its head if `with_head`."""
    names = ("layers", "head") if with_head else ("layers",)
    params = {name: replaced(part, quantization) if name in names else part for name, part in model.params.items()}
    return replace(model, params=params)


def quantized_draft(draft: Model | FeatureDraft | BlockDraft, quantization: str) -> Model | FeatureDraft | BlockDraft:
    """Return a drafter with random matrices of few bits in place of all its matrices but the embedding."""
    params = {
        name: part if name == "embedding" else replaced(part, quantization) for name, part in draft.params.items()
    }
    return replace(draft, params=params)


def load(preset: str) -> tuple[Model, Drafter | None]:
    """Return the target and the draft of a preset."""
    if preset == "8b":
        return random_model(SHAPES["8b"]), None
    if preset == "8b-block":
        target = models.with_feature_layers(random_model(SHAPES["8b"]), BLOCK_LAYERS)
        return target, random_block(target)
    if preset == "8b-eagle3":
        target = models.with_feature_layers(random_model(SHAPES["8b"]), EAGLE_LAYERS)
        return target, random_head(target)
    if preset == "8b-ngram":
        return random_model(SHAPES["8b"]), proposers.ngram(1)
    if preset == "8b-self":
        target = random_model(SHAPES["8b"])
        return target, proposers.self_draft(target, 1)
    if preset == "embedded":
        return tuple(models.load(models.EMBEDDED / name) for name in ("target", "draft"))
    return tuple(random_model(SHAPES[name]) for name in preset.split("-"))


def bytes_read(model: Model, batch: int, context: int) -> int:
    """Return the bytes that one call with few tokens reads: the weights and the filled cache.

    An embedding that is not tied to the head does not count, because only a few of its rows are read.
    """
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(part)) for name, part in model.params.items()}
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    cached = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return sum(sizes.values()) - ("head" in sizes) * sizes["embedding"] + batch * context * cached


def bytes_of_drafts(draft: Drafter | None, batch: int, context: int, num_drafts: int) -> int:
    """Return the bytes that the drafts of a step read.

    A model or a head reads all it has for each draft, a block once, and n-grams read no more than a few tokens.
    """
    if not num_drafts or isinstance(draft, NGram):
        return 0
    if isinstance(draft, Model | SelfDraft):
        return num_drafts * bytes_read(draft if isinstance(draft, Model) else draft.model, batch, context)
    read = {name: part for name, part in draft.params.items() if name != "embedding"}
    cache = jax.eval_shape(lambda: draft.init(1, 1))
    cached = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    once = sum(x.nbytes for x in jax.tree.leaves(read)) + batch * context * cached
    if isinstance(draft, BlockDraft):
        return once
    return num_drafts * once - (num_drafts - 1) * read["fc"].nbytes  # a row of a draft has no feature to make


def drafter(draft: Drafter | None, num_drafts: int) -> Proposer:
    """Return the proposer that makes `num_drafts` drafts."""
    if not num_drafts:
        return proposers.none()
    if isinstance(draft, Model):
        return proposers.draft_model(draft, num_drafts)
    if isinstance(draft, FeatureDraft | NGram | SelfDraft):
        return replace(draft, num_draft_tokens=num_drafts)
    return replace(draft, num_draft_tokens=check_block(draft.head, draft.params, num_drafts))


def slope(call) -> float:
    """Return the seconds that one more iteration adds to `call(iterations)`."""
    medians = []
    for iterations in (SHORT, LONG):
        call(iterations)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            call(iterations)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return (medians[1] - medians[0]) / (LONG - SHORT)


def loop_slope(loop, cache, model) -> float:
    """Return the seconds of one more iteration of `loop(iterations, cache, model)`, which donates its cache."""
    return loop_slope_and_cache(loop, cache, model)[0]


def loop_slope_and_cache(loop, cache, model):
    """Return what `loop_slope` returns, and the cache after the last call."""

    def call(iterations: int) -> None:
        nonlocal cache
        cache = jax.block_until_ready(loop(iterations, cache, model))[1]

    return slope(call), cache


class Run:
    """Decoding of one batch from a context length with K drafts; the state continues from call to call.

    `tree` is the number of nodes of a coupled tree whose paths have up to K drafts; None is a chain.
    """

    def __init__(
        self, target: Model, draft: Drafter | None, batch: int, context: int, num_drafts: int, tree: int | None = None
    ):
        self.target, self.batch = target, batch
        self.proposer = drafter(draft, num_drafts)
        if tree is not None:
            self.proposer = with_tree(self.proposer, tree, coupled=True)
        steps = (REPEATS + 1) * (SHORT + LONG) + 2 * LONG
        size = context + (num_drafts + 1) * steps + num_fed(self.proposer)
        prompts = jax.random.randint(jax.random.key(0), (batch, context), 0, target.vocab_size)
        rows = sampling.batch([SamplingParams(temperature=1.0, max_tokens=size)] * batch)
        self.state = jax.jit(decode.prefill, static_argnames="max_length")(
            target, self.proposer, prompts, jnp.full(batch, context), rows, jax.random.key(1), max_length=size
        )

    def steps(self, count: int, verifier) -> int:
        """Take `count` steps and return the number of tokens that they emitted."""
        before = int(self.state.context.length.sum())
        self.state = decode.generate(self.target, self.proposer, self.state, verifier=verifier, max_steps=count)
        return int(self.state.context.length.sum()) - before

    def parts(self) -> dict[str, float]:
        """Return the seconds of drafting, scoring and verifying alone. The run ends, because its state is donated."""
        num_drafts, context = self.proposer.num_draft_tokens, self.state.context
        keys = positions(self.state.keys, context.length, num_drafts)
        tokens = jnp.ones((self.batch, num_drafts), jnp.int32)
        return {
            "draft": self._draft_seconds(keys, tokens),
            "score": self._score_seconds(tokens),
            "verify": self._verify_seconds(keys, tokens),
        }

    def _draft_seconds(self, keys: jax.Array, tokens: jax.Array) -> float:
        context, rows = self.state.context, self.state.sampling
        memories = self.state.proposer, self.state.cache  # a self-draft writes the cache of the target

        @partial(jax.jit, donate_argnums=1)
        def loop(n, memories, models):
            target, proposer = models

            def body(i, carry):
                drafts, memories = carry
                # Each call depends on the result of the previous one.
                last = context.tokens.at[jnp.arange(self.batch), context.length - 1].set(drafts[:, 0])
                changed = context._replace(tokens=last)
                draft, *memories = propose(target, proposer, fold(keys, i), changed, rows, *memories)
                return draft.tokens, tuple(memories)

            return jax.lax.fori_loop(0, n, body, (tokens, memories))

        seconds, (_, cache) = loop_slope_and_cache(loop, memories, (self.target, self.proposer))
        self.state = self.state._replace(cache=cache)
        return seconds

    def _score_seconds(self, tokens: jax.Array) -> float:
        context = self.state.context

        @partial(jax.jit, donate_argnums=1)
        def loop(n, cache, target):
            def body(i, carry):
                drafts, cache = carry
                output, cache = scorers.mqa(target, context, Draft(drafts), cache)
                return jnp.argmax(output.logits, axis=-1)[:, 1:].astype(jnp.int32), cache

            return jax.lax.fori_loop(0, n, body, (tokens, cache))

        return loop_slope(loop, self.state.cache, self.target)

    def _verify_seconds(self, keys: jax.Array, tokens: jax.Array) -> float:
        context, rows = self.state.context, self.state.sampling
        shape = self.batch, self.proposer.num_draft_tokens + 1, self.target.vocab_size
        logits = jax.random.normal(jax.random.key(2), shape)

        @jax.jit
        def loop(n, logits, drafts):
            def body(i, drafts):
                logits_, drafts = jax.lax.optimization_barrier((logits, drafts))
                draft = Draft(drafts, sampling.process(rows, logits_[:, :-1], context, drafts))
                target = sampling.process(rows, logits_, context, drafts)
                return verifiers.rejection(fold(keys, i), draft, target).tokens[:, :-1]

            return jax.lax.fori_loop(0, n, body, drafts)

        return slope(lambda n: jax.block_until_ready(loop(n, logits, tokens)))


def measure(target: Model, draft: Drafter | None, batch: int, context: int, num_drafts: int, with_parts: bool) -> dict:
    """Measure one setting: seconds of a step and of its parts, bytes read, seconds of compilation, tokens/s."""
    run = Run(target, draft, batch, context, num_drafts)
    verifiers_at = {
        rate: Partial(verifiers.synthetic, acceptance_rates=[rate ** (i + 1) for i in range(num_drafts)])
        for rate in (RATES if num_drafts else ())
    }
    start = time.perf_counter()
    run.steps(0, verifiers.rejection)
    row = {"batch": batch, "context": context, "num_drafts": num_drafts, "compile_s": time.perf_counter() - start}
    row["step_s"] = slope(lambda n: run.steps(n, verifiers.rejection))
    row["tokens_per_s"] = {
        rate: batch * float(theory.expected_tokens(rate, num_drafts)) / row["step_s"] for rate in verifiers_at or (1.0,)
    }
    row["bytes"] = bytes_read(target, batch, context) + bytes_of_drafts(draft, batch, context, num_drafts)
    row["floor_s"] = row["bytes"] / PEAK
    if num_drafts and with_parts:
        measured = row["measured_tokens_per_s"] = {}
        for rate, verifier in verifiers_at.items():
            run.steps(0, verifier)
            start = time.perf_counter()
            measured[rate] = run.steps(LONG, verifier) / (time.perf_counter() - start)
        row |= {f"{name}_s": seconds for name, seconds in run.parts().items()}
        row["other_s"] = row["step_s"] - sum(row[f"{name}_s"] for name in ("draft", "score", "verify"))
    return row


def print_header(rates: tuple[float, ...]) -> None:
    """Print the header of the table of steps, with tokens/s at some acceptance rates."""
    print(
        "| by | B | context | K | ms a step | draft / score / verify / other, ms | floor / measured, % | compile, s |",
        end="",
    )
    print(" tokens/s at acceptance " + " | at ".join(map(str, rates)) + f" | against plain at {rates[-1]} |")
    print("|---" * 11 + "|")


def print_row(by: str, row: dict, plain: float | None, at: tuple[float, ...] = COLUMNS) -> None:
    """Print a row of this library or of a peer, whose rows have fewer figures; `plain` is its speed without drafts."""
    split = floor = compile_s = "-"
    if "compile_s" in row:
        compile_s = f"{row['compile_s']:.0f}"
        if jax.default_backend() == "gpu":
            floor = f"{100 * row['floor_s'] / row['step_s']:.0f}"
    if "other_s" in row:
        split = " / ".join(f"{1e3 * row[f'{part}_s']:.2f}" for part in ("draft", "score", "verify", "other"))
    rates = [row["tokens_per_s"].get(rate, row["tokens_per_s"][1.0]) for rate in at]
    cells = [by, row["batch"], row.get("context", "-"), row["num_drafts"], f"{1e3 * row['step_s']:.2f}"]
    cells += [
        split,
        floor,
        compile_s,
        *(f"{rate:.0f}" for rate in rates),
        "-" if plain is None else f"{rates[-1] / plain:.2f}",
    ]
    print(f"| {' | '.join(map(str, cells))} |")


def time_decoding(args: argparse.Namespace, target: Model, draft: Drafter | None) -> list[dict]:
    """Print the table of steps and return its rows."""
    settings = [0] if draft is None else [0, *args.num_drafts]
    known = any(peers.of_decoding(args.preset, batch, k) for batch in args.batches for k in settings)
    print(f"{peers.DECODE_SOURCE if known else peers.NONE}\n")
    rates = SELF_COLUMNS if args.preset == "8b-self" else COLUMNS
    print_header(rates)
    rows = []
    for batch in args.batches:
        for context in args.contexts:
            plain = {}
            for num_drafts in settings:
                rows.append(measure(target, draft, batch, context, num_drafts, args.parts))
                print_row("specjax", rows[-1], plain.setdefault("specjax", rows[-1]["tokens_per_s"][1.0]), rates)
                has_peers = context == args.contexts[0]  # the context of the peers was not noted
                for peer in peers.of_decoding(args.preset, batch, num_drafts) if has_peers else ():
                    row = {"peer": peer.name, "batch": batch, "num_drafts": num_drafts}
                    rows.append(row | {"step_s": peer.step_ms / 1e3, "tokens_per_s": peer.tokens_per_s})
                    if not num_drafts:
                        plain[peer.name] = peer.tokens_per_s[1.0]
                    print_row(f"peer: {peer.name}", rows[-1], plain.get(peer.name), rates)
    return rows


def time_trees(args: argparse.Namespace, target: Model, draft: Drafter) -> list[dict]:
    """Print the table of steps with trees of the largest K, verified by match, and return its rows."""
    rows, num_drafts = [], max(args.num_drafts)
    print("\n| B | context | K | nodes | ms a step | against the chain |\n" + "|---" * 6 + "|")
    for batch in args.batches:
        for context in args.contexts:
            chain = None
            for tree in (None, *args.trees):
                run = Run(target, draft, batch, context, num_drafts, tree)
                run.steps(0, verifiers.match)
                seconds = slope(partial(run.steps, verifier=verifiers.match))
                chain = seconds if chain is None else chain
                rows.append(
                    {"batch": batch, "context": context, "num_drafts": num_drafts, "tree": tree, "step_s": seconds}
                )
                nodes = num_fed(run.proposer)
                print(f"| {batch} | {context} | {num_drafts} | {nodes} | {1e3 * seconds:.2f} | {seconds / chain:.2f} |")
    return rows


def print_best(args: argparse.Namespace, rows: list[dict]) -> None:
    """Print the number of drafts that is fastest at some acceptance rates."""
    print("\n| B | context | best K at acceptance 0.5 | 0.7 | 0.9 |\n|---|---|---|---|---|")
    for batch in args.batches:
        for context in args.contexts:
            costs = {r["num_drafts"]: r["step_s"] for r in rows if (r["batch"], r.get("context")) == (batch, context)}
            best = (theory.best_draft_length(rate, costs) for rate in (0.5, 0.7, 0.9))
            print(f"| {batch} | {context} | " + " | ".join(map(str, best)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="embedded")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512])
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8", "mxfp4"), help="of the target's layers")
    parser.add_argument("--draft-quantization", choices=("int8", "int4", "fp8", "mxfp4"), help="of the drafter")
    parser.add_argument("--quantized-head", action="store_true", help="quantise the head of the target, too")
    parser.add_argument("--cache-dtype", choices=("fp8",), help="of target and draft model; default: as the weights")
    parser.add_argument("--trees", type=int, nargs="+", default=[], metavar="N", help="also time trees of N nodes")
    parser.add_argument("--parts", action="store_true", help="also time the parts of a step alone")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    target, draft = load(args.preset)
    if args.quantization is not None:
        target = quantized(target, args.quantization, args.quantized_head)
    if args.draft_quantization is not None:
        if not isinstance(draft, Model | FeatureDraft | BlockDraft):
            parser.error(f"--draft-quantization needs a drafter with matrices, got --preset {args.preset}")
        draft = quantized_draft(draft, args.draft_quantization)
    target = models.with_cache_dtype(target, args.cache_dtype)
    if isinstance(draft, Model):
        draft = models.with_cache_dtype(draft, args.cache_dtype)
    device = jax.devices()[0]
    drafts = "" if args.draft_quantization is None else f", drafter in {args.draft_quantization}"
    kind = f"{args.quantization or target.params['embedding'].dtype}{drafts}, cache in {args.cache_dtype or 'the same'}"
    print(f"device {device.device_kind}, jax {jax.__version__}, {args.preset}, {kind}.")
    rows = time_decoding(args, target, draft)

    if draft is not None:
        print_best(args, rows)
        if args.trees:
            rows += time_trees(args, target, draft)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(f"\npeak memory {peak / 2**30:.1f} GiB")
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "preset": args.preset, "peak_bytes": peak}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
