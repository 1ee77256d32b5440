"""Time gated delta nets of the sizes of released hybrids on this machine's accelerator, by kernels and by XLA.

    python scripts/bench_delta_net.py
    python scripts/bench_delta_net.py --batches 64 --num-drafts 3 --tune
    python scripts/bench_delta_net.py --batches 1 --num-drafts 1 --prompt 64 --heads 2

The script prints each row as soon as it is measured; the last command is the quickest run, on a machine without GPUs.

* A step replays as many inputs as it has new tokens, K + 1, and keeps the state in place. Its floor is one read and one
  write of the states at PEAK bytes/s.
* A prompt is one sequence that begins. XLA is timed for prompts of at most MAX_XLA tokens, as it takes long for more.
* With --tune, all tilings of the kernels are timed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import device_seconds

from pallas_kernels import delta_net as kernels
from specjax.models.delta_net import DeltaNet, delta_rule
from specjax.models.recurrent import NUM_SLOTS, RowMemory

PEAK = {"NVIDIA H100 80GB HBM3": 3.0e12, "NVIDIA H200": 4.3e12}  # bytes/s that a copy reaches
MAX_XLA = 64  # tokens
STEPS, REPEATS = 20, 5  # steps of a timed run, and timed runs
STEP_TILINGS = [
    kernels.StepTiling(*sizes)
    for sizes in ((16, 1, 128), (16, 2, 128), (32, 4, 128), (64, 1, 4), (64, 1, 8), (128, 1, 8))
]
CHUNK_TILINGS = [kernels.ChunkTiling(*pair) for pair in ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8))]


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    """Return numbers of a normal distribution."""
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def rates(*shape: int) -> tuple[jax.Array, jax.Array]:
    """Return beta and g."""
    return jax.nn.sigmoid(normal(*shape)), -jnp.exp(normal(*shape) - 2)


def step_seconds(net: DeltaNet, batch: int, num_tokens: int, tiling: kernels.StepTiling | None) -> float:
    """Return the seconds of a step by the kernel, or by XLA without a tiling."""
    heads = net.num_value_heads
    held = {
        "state": normal(batch, heads, net.key_size, net.value_size),
        "inputs": normal(batch, net.num_input_slots, net.channels, dtype="bfloat16"),
        "keys": normal(batch, NUM_SLOTS, net.num_key_heads, net.key_size) * net.key_size**-0.5,
        "changes": normal(batch, NUM_SLOTS, heads, net.value_size),
        "decays": rates(batch, NUM_SLOTS, heads)[1],
    }
    count = jnp.full(batch, num_tokens, jnp.int32)
    inputs = normal(batch, num_tokens, net.channels, dtype="bfloat16")
    new_rates = normal(batch, num_tokens, 2, heads, dtype="bfloat16")
    names = "delta_conv", "delta_decay", "delta_decay_bias"
    shapes = (net.channels, 1, net.conv_size), (heads,), (heads,)
    params = {name: normal(*shape, dtype="bfloat16") for name, shape in zip(names, shapes, strict=True)}

    def step(held: dict, start: jax.Array) -> tuple[jax.Array, dict]:
        if tiling is None:
            memory = RowMemory(held, start, count, count, is_step=True)
            return net.step(params, memory, inputs, new_rates, implementation="xla")
        new = kernels.Tokens(inputs, new_rates, *params.values(), start, count)
        output, after = kernels.step(kernels.Held(**held), new, net.heads, tiling=tiling)
        return output, after._asdict()

    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def run(held: dict, steps: int) -> tuple[dict, jax.Array]:
        def body(index: jax.Array, carry: tuple[dict, jax.Array]) -> tuple[dict, jax.Array]:
            output, held = step(carry[0], jnp.full(batch, 100 + index * num_tokens, jnp.int32))
            return held, carry[1] + jnp.sum(output)

        return jax.lax.fori_loop(0, steps, body, (held, jnp.float32(0)))

    return slope(lambda held, steps: run(held, steps)[0], held)


def slope(run: Callable[[dict, int], dict], state: dict) -> float:
    """Return the seconds of a step from runs of one step and of more, each of which continues a state."""
    seconds = []
    for steps in (1, 1 + STEPS):
        state = jax.block_until_ready(run(state, steps))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            state = jax.block_until_ready(run(state, steps))
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times))
    return (seconds[1] - seconds[0]) / STEPS


def prompt_seconds(net: DeltaNet, num_tokens: int, tiling: kernels.ChunkTiling | None) -> float:
    """Return the seconds of the delta rule on a prompt by the kernels, or by XLA without a tiling."""
    query, key = (normal(1, num_tokens, net.num_key_heads, net.key_size) for _ in range(2))
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    value = normal(1, num_tokens, net.num_value_heads, net.value_size)
    operands = query, key, value, *rates(1, num_tokens, net.num_value_heads)
    state = jnp.zeros((1, net.num_value_heads, net.key_size, net.value_size))
    if tiling is None:
        return device_seconds(partial(delta_rule, implementation="xla"), state, *operands)
    return device_seconds(
        lambda state, *tokens: kernels.chunks(state, kernels.Prompt(*tokens), net.heads, tiling=tiling),
        state,
        *operands,
    )


def time_steps(args: argparse.Namespace, net: DeltaNet, peak: float | None) -> Iterator[dict]:
    """Print the table of steps and yield its rows."""
    print("| B | K | by | us | TB/s of one read and one write of the states | % of peak |\n|---|---|---|---|---|---|")
    size = net.num_value_heads * net.key_size * net.value_size * 4
    for batch in args.batches:
        tilings = [tiling for tiling in STEP_TILINGS if args.num_drafts < 4 or tiling.entries == net.key_size]
        for tiling in tilings_of(args, tilings, kernels.step_tiling(net.heads, batch, args.num_drafts + 1)):
            seconds = step_seconds(net, batch, args.num_drafts + 1, tiling)
            rate = 2 * batch * size / seconds
            share = f"{100 * rate / peak:.0f}" if peak else "-"
            name = name_of(tiling)
            print(f"| {batch} | {args.num_drafts} | {name} | {1e6 * seconds:.1f} | {rate / 1e12:.2f} | {share} |")
            yield {"table": "steps", "batch": batch, "num_drafts": args.num_drafts, "by": name, "seconds": seconds}


def time_prompts(args: argparse.Namespace, net: DeltaNet) -> Iterator[dict]:
    """Print the table of prompts and yield its rows."""
    print("\n| tokens of a prompt | by | us |\n|---|---|---|")
    for num_tokens in args.prompt:
        for tiling in tilings_of(args, CHUNK_TILINGS, kernels.ChunkTiling()):
            if tiling is None and num_tokens > MAX_XLA:
                continue
            seconds = prompt_seconds(net, num_tokens, tiling)
            print(f"| {num_tokens} | {name_of(tiling)} | {1e6 * seconds:.1f} |")
            yield {"table": "prompts", "tokens": num_tokens, "by": name_of(tiling), "seconds": seconds}


def tilings_of(args: argparse.Namespace, all_of_them: list, default: tuple) -> list:
    """Return None, for XLA, and the tilings of the kernels that are timed here."""
    if jax.default_backend() != "gpu":
        return [None]
    return [None, *(all_of_them if args.tune else [default])]


def name_of(tiling: tuple | None) -> str:
    """Return the name of XLA or of a kernel with its tiling."""
    return "xla" if tiling is None else f"kernel {tuple(tiling)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--heads", type=int, default=16, help="key heads; there are twice as many value heads")
    parser.add_argument("--tune", action="store_true", help="time all tilings")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every row")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    kind = jax.devices()[0].device_kind
    net = replace(DeltaNet(16, 32, 128, 128), num_key_heads=args.heads, num_value_heads=2 * args.heads)
    print(f"{kind}, jax {jax.__version__}, {net.num_value_heads} heads of {net.key_size} x {net.value_size}\n")
    rows = []
    for table in (time_steps(args, net, PEAK.get(kind)), time_prompts(args, net)):
        for row in table:
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps({"device": kind, "jax": jax.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
