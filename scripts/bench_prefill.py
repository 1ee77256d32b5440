"""Time the feeding of prompts on this machine's accelerator, with a model of random weights or the embedded target.

    python scripts/bench_prefill.py --preset 8b
    python scripts/bench_prefill.py --preset 8b --rows 1x2048 1x2048@32768 --pages 64 --peers
    python scripts/bench_prefill.py --preset 8b --rows 1x512 1x2048 --quantization int4
    python scripts/bench_prefill.py --preset embedded --rows 1x64 8x64

A row is BxP or BxP@S: B prompts of P tokens, in a cache of S slots a row (P where it is left out). The script prints
each row as soon as it is measured.

* It times `specjax.prompts.feed` into a cache that exists: the median of REPEATS times RUNS runs in a row,
  each of which feeds the same slots. Long rows run once.
* With --pages, the same prompts also go through pools of pages of these sizes, with a table in random order.
* With --peers, transformers with its SDPA attention feeds a model of the same shape, in the same run, where it fits.
* The floor is the time of the matrix products at PEAK FLOP/s.
* With --llm, the time to the first token of `specjax.LLM`, of the embedded family, is measured for prompts so long,
  compilation not counted.
* With --decode, steps of plain decoding after a prompt are timed, dense and through the pages.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from bench_decode import SHAPES, loop_slope, quantized, random_model

import specjax
from specjax import Context, Draft, Memory, Model, models, prompts, proposers, scorers

PEAK = 7.9e14  # FLOP/s that a large matrix product reaches on an H200
REPEATS, RUNS, LONG = 3, 4, 30_000  # repeats, runs in each, and the tokens from which on one run is enough
ROWS = ("1x512", "1x2048", "1x2048@32768", "1x8192", "8x2048", "64x512", "1x32768")
STEPS = ("1x512", "8x512", "64x512", "1x4096", "8x4096", "64x4096")


def parse(row: str) -> tuple[int, int, int]:
    """Return B, P and S of a row BxP or BxP@S."""
    size, _, slots = row.partition("@")
    batch, width = map(int, size.split("x"))
    return batch, width, int(slots or width)


def how_often(row: str) -> tuple[int, int]:
    """Return how many times to repeat how many runs of a row."""
    batch, width, _ = parse(row)
    return (REPEATS, RUNS) if batch * width < LONG else (1, 1)


def prompts_of(model: Model, batch: int, width: int, slots: int, page_size: int | None) -> tuple[Context, Memory]:
    """Return random prompts and an empty cache for them, dense or in pages."""
    tokens = jax.random.randint(jax.random.key(0), (batch, width), 0, model.vocab_size)
    context = Context(tokens, jnp.full(batch, width, jnp.int32), jnp.ones(batch, bool))
    if page_size is None:
        return context, model.init_memory(batch, batch, slots)
    width = -(-slots // page_size)
    table = jax.random.permutation(jax.random.key(1), batch * width).reshape(batch, width).astype(jnp.int32)
    return context._replace(pages=table), model.init_memory(batch, batch * width, page_size)


@partial(jax.jit, static_argnames="chunk_size", donate_argnums=2)
def feed(model: Model, context: Context, cache: Memory, chunk_size: int | None) -> Memory:
    return prompts.feed(model, proposers.none(), context, cache, Memory(), chunk_size=chunk_size).cache


def prefill_seconds(model: Model, row: str, page_size: int | None, chunk_size: int | None) -> float:
    """Return the seconds that feeding the prompts of a row takes."""
    context, cache = prompts_of(model, *parse(row), page_size)
    times = []
    repeats, runs = how_often(row)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(runs):
            cache = feed(model, context, cache, chunk_size)
        jax.block_until_ready(cache)
        times.append((time.perf_counter() - start) / runs)
    return statistics.median(times[1:])


def decode_seconds(model: Model, row: str, page_size: int | None) -> float:
    """Return the seconds of one call with one token a row, after the prompts of a row."""
    batch, width, _ = parse(row)
    context, cache = prompts_of(model, batch, width, width + 64, page_size)
    cache = feed(model, context, cache, None)

    @partial(jax.jit, donate_argnums=1)
    def loop(n, cache, model):
        def body(i, carry):
            tokens, cache = carry
            changed = context._replace(tokens=context.tokens.at[:, -1].set(tokens))
            output, cache = scorers.mqa(model, changed, Draft(jnp.zeros((batch, 0), jnp.int32)), cache)
            return jnp.argmax(output.logits[:, -1], axis=-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, n, body, (jnp.zeros(batch, jnp.int32), cache))

    return loop_slope(loop, cache, model)


def first_token_seconds(llm: specjax.LLM, width: int) -> float:
    """Return the seconds from a call of `LLM.generate` with a prompt of random tokens to its first token."""
    prompt = jax.random.randint(jax.random.key(0), (width,), 0, 256).tolist()
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        llm.generate([prompt], specjax.SamplingParams(max_tokens=1))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def floor_seconds(model: Model, batch: int, width: int) -> float:
    """Return the seconds of the matrix products of the layers at PEAK, without attention and head."""
    weights = sum(x.size for name, part in model.params.items() if name == "layers" for x in jax.tree.leaves(part))
    return 2 * weights * batch * width / PEAK


def peer_model(preset: str):
    """Return transformers' model of a preset's shape with random weights, on the GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[preset]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_length,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        return LlamaForCausalLM(config).eval()


def peer_seconds(model, row: str) -> float | None:
    """Return the seconds that transformers takes for the prompts of a row, None where they do not fit."""
    import torch

    batch, width, _ = parse(row)
    tokens = torch.randint(0, model.config.vocab_size, (batch, width), device="cuda")
    times = []
    repeats, runs = how_often(row)
    for _ in range(repeats + 1):
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                for _ in range(runs):
                    model(tokens, use_cache=True, logits_to_keep=1)
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / runs)
    return statistics.median(times[1:])


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=(*SHAPES, "embedded"), default="embedded")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8", "mxfp4"), help="of the layers")
    parser.add_argument("--pages", type=int, nargs="*", default=[])
    parser.add_argument("--chunk-size", type=int, help="the most tokens of a prompt in a call")
    parser.add_argument("--peers", action="store_true", help="also time transformers")
    parser.add_argument("--llm", type=int, nargs="*", default=[], help="lengths of prompts for LLM")
    parser.add_argument("--decode", action="store_true", help="also time decoding, dense and through the pages")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    is_embedded = args.preset == "embedded"
    model = models.load(models.EMBEDDED / "target") if is_embedded else random_model(SHAPES[args.preset])
    if args.quantization is not None:
        model = quantized(model, args.quantization, with_head=False)
    peer = peer_model(args.preset) if args.peers else None
    device = jax.devices()[0]
    kind = args.quantization or model.params["embedding"].dtype
    print(f"device {device.device_kind}, jax {jax.__version__}, {args.preset}, {kind}.")
    layouts = [None, *args.pages]
    names = ["dense", *(f"pages of {size}" for size in args.pages)]
    print(f"\n| prompts | {', ms | '.join(names)}, ms | transformers, ms | floor, ms | peak GiB |")
    print("|---" * (len(names) + 4) + "|")
    rows = []
    for row in args.rows:
        batch, width, _ = parse(row)
        times = [prefill_seconds(model, row, layout, args.chunk_size) for layout in layouts]
        theirs = None if peer is None else peer_seconds(peer, row)
        floor = floor_seconds(model, batch, width)
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        cells = [*map(milliseconds, [*times, theirs, floor]), f"{peak / 2**30:.1f}"]
        print(f"| {row} | {' | '.join(cells)} |")
        rows.append({"row": row, "seconds": dict(zip(names, times, strict=True)), "peer_s": theirs, "floor_s": floor})
    steps = []
    if args.decode:
        print(f"\n| one token after | {', ms | '.join(names)}, ms |")
        print("|---" * (len(names) + 1) + "|")
        for row in STEPS:
            times = [decode_seconds(model, row, layout) for layout in layouts]
            print(f"| {row} | {' | '.join(f'{1e3 * seconds:.3f}' for seconds in times)} |")
            steps.append({"row": row, "seconds": dict(zip(names, times, strict=True))})
    llm = specjax.LLM() if args.llm else None
    first_tokens = {width: first_token_seconds(llm, width) for width in args.llm}
    for width, seconds in first_tokens.items():
        print(f"time to first token of LLM, prompt of {width} tokens: {milliseconds(seconds)} ms")
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "preset": args.preset}
        args.json.write_text(
            json.dumps(about | {"rows": rows, "steps": steps, "first_token_s": first_tokens}, indent=1)
        )


if __name__ == "__main__":
    main()
