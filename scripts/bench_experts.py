"""Time mixtures of experts: the products of chosen experts, and steps of whole models with random weights.

    python scripts/bench_experts.py
    python scripts/bench_experts.py --parts products --mixtures qwen3-bf16 --rows 1 64 --tune
    python scripts/bench_experts.py --parts steps --mixtures gpt-oss-mxfp4 --batches 1
    python scripts/bench_experts.py --parts prompts --mixtures qwen3-fp8 --layers 4 --prompt 8192

Each row is printed as soon as it is measured.

* A row of products is one mixture of a layer, from chosen experts to the weighted sum: gate, up, function and down.
  Every row chooses experts at random. The time is of the device, on enough copies that the cache does not help.
* The floor is the time to read the experts that were chosen, each once, at the bandwidth of a copy in this run.
* A step is one of `specjax.generate`, as in bench_decode.py, with an EAGLE-3 head where K > 0. Its floor counts the
  experts that the router chooses for as many random tokens, counted in each layer, and everything else once: the head
  of the drafter for each draft.
* A prompt is fed by `specjax.prompts.feed`, without its head. Its floor is the time of the products of each call at
  PRODUCTS, or of reading the matrices where that takes longer, and of attention at ATTENTION. The last layer writes its
  keys and values alone. With --layers the mixture has only so many layers.
* Before a product is timed, it is compared with XLA's product of the floats for which the codes stand.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import bench_decode
import jax
import jax.numpy as jnp
import numpy as np
from bench_prefill import prefill_seconds
from bench_quantized import copy_bandwidth, random_weight
from timing import device_seconds

from pallas_kernels import experts as kernels
from specjax import models, prompts, proposers, theory, verifiers
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.models.experts import ClippedGated, Experts, SoftmaxTopK, TopKSoftmax
from specjax.models.layer import Attention, LayerConfig
from specjax.models.quantized import Quantized, dequantize
from specjax.proposers import trunk
from specjax.proposers.drawing import reduced_vocabulary
from specjax.types import Model, ModelInput

PARTS = "products", "steps", "prompts"
ROWS, MAX_ERROR, RATE = (1, 4, 16, 64, 2048), 2e-2, 0.7
PRODUCTS, ATTENTION = 790e12, 436e12  # FLOP/s that large products, and attention of prompts, reach on an H100
_GPT = Attention(has_bias=True, has_out_bias=True, has_sinks=True)
_CLIPPED = {"gate": ClippedGated(), "has_bias": True, "is_interleaved": True}
GPT_OSS = DecoderConfig(
    vocab_size=201088,
    hidden_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_size=64,
    mlp_size=2880,
    expert_size=2880,
    max_length=131072,
    rope_theta=1.5e5,
    tie_embeddings=False,
    transposed=True,
    layers=tuple(
        LayerConfig(replace(_GPT, window=None if i % 2 else 128), Experts(TopKSoftmax(32, 4), **_CLIPPED))
        for i in range(24)
    ),
)
GPT_OSS_120B = replace(
    GPT_OSS,
    num_layers=36,
    layers=tuple(replace(GPT_OSS.layers[i % 2], ffn=Experts(TopKSoftmax(128, 4), **_CLIPPED)) for i in range(36)),
)
QWEN3 = DecoderConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    mlp_size=6144,
    expert_size=768,
    max_length=40960,
    rope_theta=1e6,
    tie_embeddings=False,
    transposed=True,
    layers=(LayerConfig(Attention(has_head_norms=True), Experts(SoftmaxTopK(128, 8))),),
)
MIXTURES = {  # config, format of the experts, format of the matrices of attention
    "gpt-oss-mxfp4": (GPT_OSS, "mxfp4", "bf16"),
    "gpt-oss-bf16": (GPT_OSS, "bf16", "bf16"),
    "gpt-oss-120b-mxfp4": (GPT_OSS_120B, "mxfp4", "bf16"),
    "qwen3-bf16": (QWEN3, "bf16", "bf16"),
    "qwen3-fp8": (QWEN3, "fp8-blocks", "fp8-blocks"),
    "qwen3-int4": (QWEN3, "int4", "bf16"),
}
TILINGS = tuple(
    kernels.Tiling(outputs, width, num_warps, num_stages)
    for outputs, width, num_warps in ((16, 1, 2), (32, 1, 2), (32, 1, 4), (64, 1, 4), (64, 1, 8), (128, 1, 8))
    for num_stages in (3, 5)
)


def random_matrix(format: str, shape: tuple[int, ...]) -> jax.Array | Quantized:
    """Return a random matrix, or stacked matrices, made on the device."""
    flat = random_weight(format, (int(np.prod(shape[:-1])), shape[-1]))
    return jax.tree.map(lambda x: x.reshape(*shape[:-2], -1, x.shape[-1]), flat) if len(shape) > 2 else flat


def ffn_of(config: DecoderConfig) -> Experts:
    """Return the mixture of the first layer."""
    return config.layers[0].ffn


def matrices(config: DecoderConfig, format: str) -> dict:
    """Return the parameters of the experts of one layer."""
    shapes = ffn_of(config).shapes(config)
    params = {}
    for name, shape in shapes.items():
        if name.startswith("experts_"):
            is_bias = name.endswith("bias")
            params[name] = jnp.zeros(shape, jnp.bfloat16) if is_bias else random_matrix(format, shape)
    return params


def bytes_of(leaf: jax.Array | Quantized) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(leaf))


def choices(number: int, chosen: int, rows: int) -> np.ndarray:
    """Return random experts [rows, chosen] int32, each row's different."""
    rng = np.random.default_rng(rows)
    return np.stack([rng.permutation(number)[:chosen] for _ in range(rows)]).astype(np.int32)


def by_ragged_dot(ffn: Experts, params: dict, x, experts, weights):
    """Return the same sum by `jax.lax.ragged_dot`, the baseline."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(ffn.router.num_experts, jnp.int32).at[flat].add(1)
    rows = x[order // experts.shape[1]]
    gate_up = jax.lax.ragged_dot(rows, params["experts_gate_up"].swapaxes(1, 2), sizes)
    inner = ffn.gate(*ffn.split(gate_up.astype(jnp.float32))).astype(x.dtype)
    y = jax.lax.ragged_dot(inner, params["experts_out"].swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    each = jnp.zeros_like(y).at[order].set(y).reshape(*experts.shape, -1)
    return jnp.sum(each * weights[..., None], axis=1)


def measure(ffn: Experts, params: dict, x: jax.Array, experts: jax.Array, weights: jax.Array) -> tuple[float, float]:
    """Return the seconds of a mixture and its largest error, in units of the root mean square of the results."""
    few = slice(0, min(len(x), 64))
    floats = {
        key: dequantize(one).astype(jnp.bfloat16) if isinstance(one, Quantized) else one for key, one in params.items()
    }
    operands = x[few], experts[few], weights[few]
    expected = jax.jit(partial(ffn.mix, implementation="xla"))(floats, *operands)
    got = jax.jit(ffn.mix)(params, x, experts, weights)[few]
    error = float(jnp.max(jnp.abs(got - expected)) / jnp.sqrt(jnp.mean(expected**2)))
    del floats, expected, got
    return device_seconds(ffn.mix, params, x, experts, weights), error


def time_products(args: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Print the table of products and return its rows."""
    print(
        "| mixture | rows | experts | us | floor, us | floor / measured, % | ragged_dot, us | error |\n"
        + "|---" * 8
        + "|"
    )
    rows = []
    for name in args.mixtures:
        config, format, _ = MIXTURES[name]
        ffn, params = ffn_of(config), matrices(config, format)
        size = sum(bytes_of(x) for x in params.values()) / ffn.router.num_experts
        for num_rows in args.rows:
            experts = choices(ffn.router.num_experts, ffn.router.num_chosen, num_rows)
            x = jax.random.normal(jax.random.key(1), (num_rows, config.hidden_size), jnp.bfloat16)
            operands = params, x, jnp.asarray(experts), jnp.full(experts.shape, 1 / experts.shape[1])
            seconds, error = measure(ffn, *operands)
            baseline = "-"
            if format == "bf16" and args.baseline:
                baseline = f"{1e6 * device_seconds(partial(by_ragged_dot, ffn), *operands):.0f}"
            distinct = len(np.unique(experts))
            floor = distinct * size / bandwidth
            row = {"mixture": name, "num_rows": num_rows, "experts": distinct, "us": 1e6 * seconds}
            rows.append(row | {"floor_us": 1e6 * floor, "error": error})
            cells = *row.values(), 1e6 * floor, 100 * floor / seconds
            cells = [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in cells]
            print(
                f"| {' | '.join(map(str, cells))} | {baseline} | {error:.1e} |{'' if error <= MAX_ERROR else ' WRONG'}"
            )
            if args.tune:
                tune(ffn, params, x, operands[2])
    return rows


def tune(ffn: Experts, params: dict, x: jax.Array, experts: jax.Array) -> None:
    """Print the times of the tilings of both matrices, the default one first."""
    tiles = jax.jit(
        lambda one: models.experts.tiles_of(one, ffn.router.num_experts, kernels.MIN_TILE, kernels.MAX_TILE)
    )(experts)
    inner = jnp.zeros((tiles.row.shape[0], params["experts_out"].shape[-1]), x.dtype)
    calls = {
        "experts_gate_up": (x, {"is_gathered": True, "gate": ffn.gate, "is_interleaved": ffn.is_interleaved}),
        "experts_out": (inner, {"is_gathered": False, "dtype": jnp.float32}),
    }
    for name, (rows, options) in calls.items():
        weight, found = params[name], []
        inputs = 128 if isinstance(weight, Quantized) else 64
        unit = inputs // weight.places if isinstance(weight, Quantized) else inputs
        widths = (unit, 2 * unit) if isinstance(weight, Quantized) else (unit, 2 * unit, 4 * unit)
        default = kernels.default_tiling(weight, 2 if "gate" in options else 1, tiles.num_rows)
        for tiling in (default, *(one._replace(width=width) for one, width in product(TILINGS, widths))):
            call = partial(kernels.product, tiling=tiling, **options)
            try:
                seconds = device_seconds(lambda x, w, t, call=call: call(x, w, t), rows, weight, tiles)
            except Exception as failure:  # a tiling that takes too much shared memory ends as an error of the compiler
                print(f"  {name} {tuple(tiling)} failed: {str(failure).splitlines()[0][:80]}")
                continue
            found.append((seconds, tiling))
        print(f"  {name} {tuple(default)} {1e6 * found[0][0]:.1f} us, the default")
        for seconds, tiling in sorted(found)[:4]:
            print(f"  {name} {tuple(tiling)} {1e6 * seconds:.1f} us")


def random_model(config: DecoderConfig, format: str, attention_format: str) -> Model:
    """Return a model with random weights, whose experts and matrices of attention have these formats."""

    def leaf(name: str, shape) -> jax.Array | Quantized:
        if name.startswith("experts_") and not name.endswith("bias"):
            return random_matrix(format, shape.shape)
        if len(shape.shape) < 2 or name.endswith("bias"):
            return jnp.ones(shape.shape, jnp.bfloat16) * ("bias" not in name and name != "sinks")
        is_attention = name in ("qkv", "attention_out")
        return random_matrix(attention_format if is_attention else "bf16", shape.shape)

    shapes = param_shapes(config)
    layers = {i: {name: leaf(name, one) for name, one in layer.items()} for i, layer in shapes["layers"].items()}
    rest = {name: leaf(name, one) for name, one in shapes.items() if name != "layers"}
    return decoder_model(config, rest | {"layers": layers})


@dataclass(frozen=True)
class Counting:
    """A router that tells `seen` how many experts each call chose."""

    router: SoftmaxTopK | TopKSoftmax
    seen: list
    has_kernel = False

    def __hash__(self) -> int:
        return id(self.seen)

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def num_chosen(self) -> int:
        return self.router.num_chosen

    def shapes(self):
        return self.router.shapes()

    def __call__(self, params, logits):
        experts, weights = self.router(params, logits)
        number = jnp.sum(jnp.zeros(self.num_experts, jnp.int32).at[experts.reshape(-1)].set(1))
        jax.debug.callback(lambda n: self.seen.append(int(n)), number)
        return experts, weights


def experts_of_step(config: DecoderConfig, model: Model, num_tokens: int) -> int:
    """Return the number of experts, of all layers, that random tokens choose."""
    seen: list[int] = []
    layers = tuple(replace(one, ffn=replace(one.ffn, router=Counting(one.ffn.router, seen))) for one in config.layers)
    counting = decoder_model(replace(config, layers=layers), model.params)
    tokens = jax.random.randint(jax.random.key(3), (num_tokens, 1), 0, config.vocab_size)
    jax.block_until_ready(
        jax.jit(counting.apply)(model.params, ModelInput(tokens, jnp.zeros_like(tokens)), None)[0].logits
    )
    jax.effects_barrier()
    return sum(seen)


def random_head(config: DecoderConfig, target: Model):
    """Return an EAGLE-3 head of random bfloat16 weights with 32,000 tokens."""
    sizes = {"num_layers": 1, "vocab_size": 32000, "mlp_size": 6 * config.hidden_size}
    own = replace(config, layers=(LayerConfig(),), **sizes)
    head = proposers.Eagle3Head(own, config.hidden_size, 3)
    shapes = head.shapes() | {"lm_head": (own.vocab_size, own.hidden_size)}
    params = trunk.random_params(shapes, jax.random.key(1), jnp.bfloat16) | {"embedding": target.params["embedding"]}
    reduced = reduced_vocabulary(np.arange(own.vocab_size) * 4, target.vocab_size)
    return proposers.eagle3(head, params, 1, reduced=reduced)


def time_steps(args: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Print the table of steps and return its rows."""
    rows = []
    print("| mixture | B | K | experts | MB a step | ms a step | floor / measured, % | tokens/s at 1.0 | at 0.7 |")
    print("|---" * 9 + "|")
    for name in args.mixtures:
        config, format, attention_format = mixture(args, name)
        plain = random_model(config, format, attention_format)
        number, last = ffn_of(config).router.num_experts, config.num_layers
        reading = models.with_feature_layers(plain, (2, last // 2, last - 3))
        draft = random_head(config, plain)
        layer = plain.params["layers"][0]
        of_expert = sum(bytes_of(x) for key, x in layer.items() if key.startswith("experts_")) / number
        of_rest = bytes_of(plain.params) - config.num_layers * number * of_expert - bytes_of(plain.params["embedding"])
        for batch, num_drafts in product(args.batches, args.num_drafts):
            target = reading if num_drafts else plain
            run = bench_decode.Run(target, draft if num_drafts else None, batch, args.context, num_drafts)
            run.steps(0, verifiers.rejection)
            seconds = bench_decode.slope(lambda n, run=run: run.steps(n, verifiers.rejection))
            distinct = experts_of_step(config, plain, batch * (num_drafts + 1))
            size = of_rest + distinct * of_expert
            size += bench_decode.bytes_of_drafts(draft, batch, args.context, num_drafts)
            rates = [batch * float(theory.expected_tokens(rate, num_drafts)) / seconds for rate in (1.0, RATE)]
            share = 100 * size / bandwidth / seconds
            cells = name, batch, num_drafts, distinct, f"{size / 1e6:.0f}", f"{1e3 * seconds:.2f}", f"{share:.0f}"
            print(f"| {' | '.join(map(str, cells))} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")
            if args.profile:
                with jax.profiler.trace(str(args.profile / f"{name}-{batch}-{num_drafts}")):
                    run.steps(3, verifiers.rejection)
            row = {"mixture": name, "batch": batch, "num_drafts": num_drafts, "experts": distinct, "bytes": size}
            rows.append(row | {"step_s": seconds})
            del run
        del plain, reading, draft, layer
    return rows


def mixture(args: argparse.Namespace, name: str) -> tuple[DecoderConfig, str, str]:
    """Return a mixture with as many layers as were asked for, and the formats of its matrices."""
    config, *formats = MIXTURES[name]
    if args.layers is None:
        return config, *formats
    layers = config.layers if len(config.layers) == 1 else config.layers[: args.layers]
    return replace(config, num_layers=args.layers, layers=layers), *formats


def prompt_floor(config: DecoderConfig, model: Model, num_tokens: int, bandwidth: float) -> tuple[int, float]:
    """Return the tokens of a call that feeds a prompt, and the least seconds of all calls."""
    num_calls = -(-num_tokens // prompts.LONG)
    size, router = -(-num_tokens // num_calls), ffn_of(config).router
    layer = model.params["layers"][0]
    of_experts = sum(x.size for name, x in layer.items() if name in ("experts_gate_up", "experts_out"))
    active = layer["qkv"].size + layer["attention_out"].size + of_experts * router.num_chosen / router.num_experts
    of_call = max(2 * size * active / PRODUCTS, sum(map(bytes_of, layer.values())) / bandwidth)
    attends = [one.mixer.window or num_tokens for one in config.each_layer[:-1]]
    pairs = sum(num_tokens * window - window**2 / 2 for window in attends)
    attention = 4 * pairs * config.num_heads * config.head_size / ATTENTION
    return size, (config.num_layers - 1) * num_calls * of_call + attention


def time_prompts(args: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Print the table of prompts and return its rows."""
    rows = []
    print("\n| mixture | layers | tokens of a prompt | of a call | ms | floor, ms | floor / measured, % |")
    print("|---" * 7 + "|")
    for name in args.mixtures:
        config, format, attention_format = mixture(args, name)
        model = random_model(config, format, attention_format)
        for number in args.prompt:
            size, floor = prompt_floor(config, model, number, bandwidth)
            seconds = prefill_seconds(model, f"1x{number}", None, None)
            cells = name, config.num_layers, number, size, f"{1e3 * seconds:.1f}", f"{1e3 * floor:.1f}"
            print(f"| {' | '.join(map(str, cells))} | {100 * floor / seconds:.0f} |")
            rows.append({"mixture": name, "layers": config.num_layers, "prompt": number, "seconds": seconds})
            rows[-1] |= {"call": size, "floor_s": floor}
        del model
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mixtures", nargs="+", choices=MIXTURES, default=tuple(MIXTURES))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of a product")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 64))
    parser.add_argument("--num-drafts", type=int, nargs="+", default=(0, 3))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, nargs="+", default=(8192,), help="tokens of a prompt")
    parser.add_argument("--layers", type=int, help="layers of steps and prompts; default: all")
    parser.add_argument("--tune", action="store_true", help="try the tilings of the kernels")
    parser.add_argument("--baseline", action="store_true", help="also time jax.lax.ragged_dot")
    parser.add_argument("--profile", type=Path, help="write profiles of some steps here")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "bandwidth": copy_bandwidth()}
    print(f"device {about['device']}, jax {about['jax']}, a copy reaches {about['bandwidth'] / 1e12:.2f} TB/s\n")
    products = time_products(args, about["bandwidth"]) if "products" in args.parts else []
    steps = time_steps(args, about["bandwidth"]) if "steps" in args.parts else []
    fed = time_prompts(args, about["bandwidth"]) if "prompts" in args.parts else []
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": [*products, *steps, *fed]}, indent=1))
    num_wrong = sum(not row["error"] <= MAX_ERROR for row in products)
    print(f"{num_wrong} wrong")
    if num_wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
