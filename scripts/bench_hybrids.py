"""Time steps and prompts of hybrids in FP8, with random weights of the shapes and formats of released checkpoints.

    python scripts/bench_hybrids.py
    python scripts/bench_hybrids.py --models 35b-a3b --rows plain:1:0 dflash2:1:7 --prompt 0
    python scripts/bench_hybrids.py --models small --rows plain:1:0 mtp:2:3 --context 16 --prompt 0

A row is DRAFTER:B:K, a step of `specjax.generate`. The script prints each row as soon as it is measured; the last
command is the quickest run.

* Codes and scales are made on the device as they are: no matrix exists in more bits first. Matrices of the layers have
  blocks of 128 x 128 codes with one scale; heads, routers, convolutions and the projections to rates are bfloat16.
* The memory of a row is filled with random numbers in place of a prompt. Drafts are accepted so that a step gives the
  numbers of tokens in TOKENS on average, so the next step replays as many.
* The floor is the time to read at PEAK bytes/s: the matrices of the target once, the matrices of the drafter and the
  head once for each pass of the drafter, the filled caches, and the states, which are also written. Experts count as
  often as they are chosen on average by tokens that choose independently.
* A prompt is fed by `specjax.prompts.feed`. Its floor is the arithmetic of matrices and attention, at the rate of the
  product of the prompt with the widest matrix in bfloat16, measured here.
"""

import argparse
import json
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from bench_decode import slope
from bench_experts import bytes_of
from bench_prefill import prefill_seconds
from jax.tree_util import Partial
from timing import device_seconds

from pallas_kernels.quantized import Quantized
from specjax import decode, models, proposers, sampling, verifiers
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.models.delta_net import DeltaNet
from specjax.models.experts import Experts, Shared, SoftmaxTopK
from specjax.models.layer import Attention, GatedMLP, LayerConfig
from specjax.proposers import BlockHead, MTPHead
from specjax.sampling import SamplingParams
from specjax.types import Model, Proposer

PEAK = {"NVIDIA H100 80GB HBM3": 3.0e12, "NVIDIA H200": 4.3e12}  # bytes/s that a copy reaches
TOKENS = {"mtp": 2.4, "dflash2": 3.58}  # mean tokens of a step that are set
ROWS = ("plain:1:0", "mtp:1:3", "dflash2:1:7")
ATTENTION = Attention(has_head_norms=True, has_gate=True)
FLOATS = ("head", "router", "delta_rates", "delta_conv", "shared_gate", "embedding", "fc")  # matrices without codes
COMMON = {"norm_offset": 1.0, "norm_eps": 1e-6, "tie_embeddings": False, "transposed": True, "max_length": 262144}


def hybrid(net: DeltaNet, ffn: GatedMLP | Experts, **sizes) -> DecoderConfig:
    """Return the config of a hybrid whose every fourth layer attends."""
    kinds = [LayerConfig(ATTENTION if i % 4 == 3 else net, ffn) for i in range(sizes["num_layers"])]
    return DecoderConfig(**COMMON, **sizes, rope_theta=1e7, layers=tuple(kinds))


MODELS = {
    "27b": hybrid(
        DeltaNet(16, 48, 128, 128),
        GatedMLP(),
        vocab_size=248320,
        hidden_size=5120,
        num_layers=64,
        num_heads=24,
        num_kv_heads=4,
        head_size=256,
        rotary_size=64,
        mlp_size=17408,
    ),
    "35b-a3b": hybrid(
        DeltaNet(16, 32, 128, 128),
        Experts(SoftmaxTopK(256, 8), shared=Shared(is_gated=True)),
        vocab_size=248320,
        hidden_size=2048,
        num_layers=40,
        num_heads=16,
        num_kv_heads=2,
        head_size=256,
        rotary_size=64,
        mlp_size=6144,  # of the drafters
        expert_size=512,
        shared_size=512,
    ),
    "small": hybrid(
        DeltaNet(1, 2, 16, 16),
        GatedMLP(),
        vocab_size=1000,
        hidden_size=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        rotary_size=4,
        mlp_size=128,
    ),
}


@partial(jax.jit, static_argnums=0)
def random_codes(shape: tuple[int, ...], key: jax.Array) -> Quantized:
    """Return a random matrix [..., N, K] of e4m3 in blocks of 128 x 128, with entries of about 0.02."""
    *outer, num_outputs, size = shape
    bits = jax.random.bits(key, (*outer, num_outputs, -(-size // 128) * 32), jnp.uint32)
    # Without the lowest bit, no code is NaN. The root mean square of the numbers is about 100.
    words = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFEFEFEFE), jnp.int32)
    blocks = *outer, -(-num_outputs // 128), -(-size // 128)
    scale = jax.random.uniform(key, blocks, minval=1.5e-4, maxval=2.5e-4)
    return Quantized(words, scale, code="e4m3", group=(128, 128), padding=-size % 128)


@partial(jax.jit, static_argnums=0)
def random_floats(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return a random matrix in bfloat16."""
    return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)


def random_params(shapes, *, in_codes: bool = True):
    """Return random parameters of these shapes by name; matrices of layers have codes if `in_codes`."""

    def leaf(path: tuple, shape: tuple[int, ...]) -> jax.Array | Quantized:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if len(shape) == 1 or name.endswith("norm"):
            is_one = name == "delta_scale" or (not in_codes and name.endswith("norm"))  # others are stored less 1
            return jnp.full(shape, 1 if is_one else 0, jnp.bfloat16)
        make = random_codes if in_codes and name not in FLOATS else random_floats
        return make(shape, jax.random.key(zlib.crc32(str(path).encode())))

    return jax.tree_util.tree_map_with_path(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def random_model(config: DecoderConfig) -> Model:
    """Return a hybrid with random weights."""
    return decoder_model(config, random_params(jax.tree.map(lambda x: x.shape, param_shapes(config))))


def tables(target: Model) -> dict[str, jax.Array]:
    """Return the embedding and the head of the target, as drafters name them."""
    return {"embedding": target.params["embedding"], "lm_head": target.params["head"]}


def with_drafter(name: str, config: DecoderConfig, plain: Model, num_drafts: int) -> tuple[Model, Proposer, int]:
    """Return the target and a drafter, and the bytes of matrices that the drafts of a step read."""
    head_bytes = bytes_of(plain.params["head"])
    if name == "plain":
        return plain, proposers.none(), 0
    if name == "mtp":
        layers = (next(layer for layer in config.layers if isinstance(layer.mixer, Attention)),)
        head = MTPHead(replace(config, num_layers=1, layers=layers), is_token_first=True)
        params = random_params(head.shapes())
        size = bytes_of(params) + head_bytes
        return plain, proposers.mtp(head, params | tables(plain), num_drafts), num_drafts * size
    own = replace(
        config,
        num_layers=5,
        num_heads=32 if config.hidden_size > 128 else 2,
        num_kv_heads=8 if config.hidden_size > 128 else 1,
        head_size=128 if config.hidden_size > 128 else 16,
        rotary_size=None,
        norm_offset=0.0,
        layers=(LayerConfig(Attention(has_head_norms=True)),),
    )
    taps = tuple(1 + i * (config.num_layers - 1) // 5 for i in range(5))
    head = BlockHead(
        own,
        len(taps),
        config.hidden_size,
        config.vocab_size,
        block_size=8,
        mask_token=0,
        conv_taps=2,
        num_candidates=16,
        selector_rank=256,
    )
    params = random_params(head.shapes(), in_codes=False)
    of_rows = {"selector_in", "selector_out"}  # tables of which a draft reads a few rows
    size = sum(bytes_of(part) for key, part in params.items() if key not in of_rows) + head_bytes
    return models.with_feature_layers(plain, taps), proposers.dflash2(head, params | tables(plain), num_drafts), size


def filled(shapes):
    """Return arrays of these shapes: random floats, and zeros for integers."""

    def leaf(x) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)

    return jax.jit(lambda: jax.tree.map(leaf, shapes))()


class Run:
    """Decoding of one batch with K drafts, whose state continues from call to call."""

    def __init__(self, target: Model, proposer: Proposer, batch: int, context: int, verifier):
        self.target, self.proposer, self.verifier = target, proposer, verifier
        size = context + (proposer.num_draft_tokens + 1) * 128
        tokens = jax.random.randint(jax.random.key(0), (batch, context), 0, target.vocab_size)
        rows = sampling.batch([SamplingParams(temperature=1.0, max_tokens=size)] * batch)
        prefill = partial(decode.prefill, max_length=size)
        given = target, proposer, tokens[:, :2], jnp.full(batch, 2), rows, jax.random.key(1)
        state = jax.jit(prefill).eval_shape(*given)
        context_ = decode.Context(
            jnp.zeros((batch, size), jnp.int32).at[:, :context].set(tokens),
            jnp.full(batch, context, jnp.int32),
            jnp.ones(batch, bool),
            prompt_length=jnp.full(batch, context, jnp.int32),
        )
        self.state = state._replace(
            context=context_,
            cache=filled(state.cache),
            proposer=filled(state.proposer),
            sampling=rows,
            keys=jax.random.split(jax.random.key(2), batch),
            finished=jnp.zeros(batch, jnp.int32),
            totals=filled(state.totals),
        )

    def steps(self, count: int) -> int:
        """Take `count` steps and return the tokens that they gave."""
        before = int(self.state.context.length.sum())
        self.state = decode.generate(self.target, self.proposer, self.state, verifier=self.verifier, max_steps=count)
        if not self.state.context.active.all():
            raise RuntimeError(f"all rows must go on, got {self.state.finished}: logits of a row are not finite")
        return int(self.state.context.length.sum()) - before


def memory_bytes(model: Model, proposer: Proposer, batch: int, context: int) -> int:
    """Return the bytes of the caches that a step reads, and of the states that it reads and writes."""
    pools = [jax.eval_shape(partial(one.init_memory, 1, 1, 1)).pools for one in (model, proposer)]
    of_token = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
    nets = [layer.mixer for layer in model.apply.config.each_layer if isinstance(layer.mixer, DeltaNet)]
    states = sum(4 * net.num_value_heads * net.key_size * net.value_size for net in nets)
    return batch * (context * of_token + 2 * states)


def matrix_bytes(config: DecoderConfig, model: Model, num_tokens: int) -> float:
    """Return the bytes of the matrices that a call with so many tokens reads."""
    total = bytes_of(model.params) - bytes_of(model.params["embedding"])
    ffn = config.layers[0].ffn
    if not isinstance(ffn, Experts):
        return total
    layers = model.params["layers"].values()
    of_experts = sum(bytes_of(x) for layer in layers for name, x in layer.items() if name.startswith("experts_"))
    return total - of_experts * (1 - ffn.router.num_chosen / ffn.router.num_experts) ** num_tokens


def time_steps(args: argparse.Namespace, name: str, plain: Model, peak: float | None) -> list[dict]:
    """Print the rows of steps of a model and return them."""
    config, rows = MODELS[name], []
    for given in args.rows:
        drafter, batch, num_drafts = given.split(":")[0], *map(int, given.split(":")[1:])
        target, proposer, draft_bytes = with_drafter(drafter, config, plain, num_drafts)
        wanted = min(TOKENS.get(drafter, 1.0), num_drafts + 1)
        verifier = Partial(verifiers.synthetic, acceptance_length=wanted) if num_drafts else verifiers.rejection
        run = Run(target, proposer, batch, args.context, verifier)
        seconds = slope(run.steps)
        size = matrix_bytes(config, plain, batch * (num_drafts + 1)) + draft_bytes
        size += memory_bytes(target, proposer, batch, args.context)
        row = {"model": name, "drafter": drafter, "batch": batch, "num_drafts": num_drafts, "tokens": wanted}
        rows.append(row | {"bytes": size, "step_s": seconds})
        share = f"{100 * size / peak / seconds:.0f}" if peak else "-"
        cells = *row.values(), f"{size / 1e6:.0f}", f"{1e3 * seconds:.2f}", share, f"{batch * wanted / seconds:.0f}"
        print(f"| {' | '.join(map(str, cells))} |")
        if args.profile:
            with jax.profiler.trace(str(args.profile / f"{name}-{given.replace(':', '-')}")):
                run.steps(3)
        del run
    return rows


def time_prompt(args: argparse.Namespace, name: str, plain: Model) -> dict:
    """Print the row of the prompt of a model and return it."""
    config = MODELS[name]
    width = max(2 * config.mlp_size, config.hidden_size)
    shapes = (args.prompt, config.hidden_size), (width, config.hidden_size)
    x, weight = (random_floats(shape, jax.random.key(1)) for shape in shapes)
    seconds = device_seconds(lambda x, w: jnp.einsum("td,nd->tn", x, w), x, weight)
    rate = 2 * args.prompt * weight.size / seconds
    matrices = sum(x.size for x in jax.tree.leaves(plain.params["layers"], is_leaf=lambda x: isinstance(x, Quantized)))
    if isinstance(config.layers[0].ffn, Experts):
        router = config.layers[0].ffn.router
        of_layer = 3 * config.expert_size * config.hidden_size
        matrices -= config.num_layers * (router.num_experts - router.num_chosen) * of_layer
    attends = sum(isinstance(layer.mixer, Attention) for layer in config.each_layer)
    of_attention = 2 * args.prompt**2 * config.num_heads * config.head_size * attends  # half of the scores is masked
    floor = (2 * matrices * args.prompt + of_attention) / rate
    found = prefill_seconds(plain, f"1x{args.prompt}", None, None)
    print(
        f"| {name} | {args.prompt} | {rate / 1e12:.0f} | {1e3 * found:.0f} | {1e3 * floor:.0f} | {found / floor:.2f} |"
    )
    return {"model": name, "prompt": args.prompt, "rate": rate, "seconds": found, "floor_s": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["27b", "35b-a3b"])
    parser.add_argument("--rows", nargs="+", default=ROWS, help="DRAFTER:B:K, with a drafter plain, mtp or dflash2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt that is timed; 0 for none")
    parser.add_argument("--profile", type=Path, help="write profiles of some steps here")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every model")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    kind = jax.devices()[0].device_kind
    print(f"{kind}, jax {jax.__version__}, context {args.context}\n")
    print("| model | drafter | B | K | tokens a step | MB a step | ms a step | floor / measured, % | tokens/s |")
    print("|---" * 9 + "|")
    rows = []
    for name in args.models:
        plain = random_model(MODELS[name])
        rows += time_steps(args, name, plain, PEAK.get(kind))
        if args.prompt:
            print("\n| model | tokens of a prompt | TFLOP/s of a product | ms | floor, ms | measured / floor |")
            print("|---" * 6 + "|")
            rows.append(time_prompt(args, name, plain))
        if args.json:
            args.json.write_text(json.dumps({"device": kind, "jax": jax.__version__, "rows": rows}, indent=1))
        del plain


if __name__ == "__main__":
    main()
