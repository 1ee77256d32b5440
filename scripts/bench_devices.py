"""Time devices of this machine that share a model: verification, decoding steps and the feeding of a prompt.

    python scripts/bench_devices.py
    python scripts/bench_devices.py --preset 8b-1b --one --json 8b.json
    python scripts/bench_devices.py --preset 8b --one --batches 64 --tables engine
    python scripts/bench_devices.py --preset 70b-1b --batches 1 8 --tables steps prompt
    python scripts/bench_devices.py --preset 70b --quantization fp8 --batches 1 --tables steps
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/bench_devices.py --preset embedded \\
        --batches 1 --num-drafts 2 --vocab 4096 --context 16 --prompt 64

The script prints each row as soon as it is measured; the last command is the quickest run, on a machine without GPUs.

* Verification is `verifiers.rejection` of sampled drafts in bfloat16, on one device and with parts of the vocabulary on
  all of them. On a GPU it runs by the kernels and, on all devices, also by XLA.
* It times the steps and prompts of `bench_decode.py` and `bench_prefill.py`, with weights that the devices share. The
  random weights are made where they stay, so that a model may be larger than one device. The draft is whole on each.
* The table "engine" has the tokens/s of an engine while all of its slots are active, without drafts.
* With --one, steps, prompts and engines of one device are measured too; the model must fit it.
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
import numpy as np
from bench_decode import EAGLE, EAGLE_LAYERS, SHAPES, Drafter, measure, quantized, random_head, random_model
from bench_prefill import prefill_seconds
from bench_verify import CASES, inputs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import device_seconds

import specjax
from specjax import SamplingParams, models, verifiers
from specjax.models.checkpoint import Checkpoint
from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
from specjax.parallel import put, shards
from specjax.parallel.links import links_of
from specjax.types import Categorical, Draft, Model, PyTree

AXIS = "tensor"
OUTPUTS = 32, 160  # tokens of the requests of an engine
PRESETS = ("8b", "8b-1b", "8b-eagle3", "70b", "70b-1b", "70b-eagle3", "embedded")
SIZES = SHAPES | {
    "70b": replace(SHAPES["8b"], hidden_size=8192, num_layers=80, num_heads=64, mlp_size=28672),
}


def shape_on(mesh: Mesh, config: DecoderConfig) -> Model:
    """Return a model of bfloat16 weights on a mesh, with their shapes in place of them."""

    def zeros() -> Model:
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), param_shapes(config))
        return models.tensor_parallel(decoder_model(config, params), mesh, AXIS)

    return jax.eval_shape(zeros)


def shared_model(config: DecoderConfig, mesh: Mesh) -> Model:
    """Return a model of random bfloat16 weights on a mesh, of which each device makes its part."""

    @partial(jax.jit, static_argnums=(1, 2))
    def weights(key: jax.Array, shape: tuple[int, ...], spec: P) -> jax.Array:
        made = 0.02 * jax.random.normal(key, shape, jnp.bfloat16) if len(shape) > 1 else jnp.ones(shape, jnp.bfloat16)
        return jax.lax.with_sharding_constraint(made, NamedSharding(mesh, spec))

    model = shape_on(mesh, config)
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(config.hidden_size), len(leaves))
    made = zip(keys, leaves, model.apply.param_specs, strict=True)
    model = tree.unflatten([weights(key, leaf.shape, spec) for key, leaf, spec in made])
    links = links_of(mesh, AXIS)
    return model if links is None else replace(model, params=model.params | {"links": links})


def shared_quantized(config: DecoderConfig, mesh: Mesh, quantization: str) -> Model:
    """Return a model on a mesh whose layers are matrices of few bits: copies of a first layer, made where they stay."""
    single = models.tensor_parallel(
        quantized(random_model(replace(config, num_layers=1)), quantization, False), mesh, AXIS
    )
    specs = jax.tree.unflatten(jax.tree.structure(single.params), single.apply.param_specs)
    first = single.params["layers"][0]
    copied = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=jax.tree.map(lambda x: x.sharding, first))

    def with_layers(tree: PyTree, of_layer: Callable[[], PyTree]) -> PyTree:
        return tree | {"layers": {i: of_layer() for i in range(config.num_layers)}}

    model = shape_on(mesh, config)
    specs = jax.tree.leaves(with_layers(specs, lambda: specs["layers"][0]))
    apply = replace(model.apply, param_specs=tuple(specs))
    return replace(model, apply=apply, params=with_layers(single.params, lambda: copied(first)))


def load(preset: str, mesh: Mesh | None, quantization: str | None) -> tuple[Model, Drafter | None]:
    """Return the target and, where the preset has one, the draft, which each device has whole; None is one device."""
    if preset == "embedded":
        target, draft = models.load(models.EMBEDDED / "target", mesh=mesh), models.load(models.EMBEDDED / "draft")
    else:
        name, _, kind = preset.partition("-")
        if quantization is not None and mesh is not None:
            target = shared_quantized(SIZES[name], mesh, quantization)
        else:
            target = random_model(SIZES[name]) if mesh is None else shared_model(SIZES[name], mesh)
            target = target if quantization is None else quantized(target, quantization, False)
        draft = random_model(SIZES[kind]) if kind in SIZES else None
        if kind == "eagle3":
            target = models.with_feature_layers(target, EAGLE_LAYERS)
            draft = random_head(target, replace(SIZES[name], num_layers=1, vocab_size=EAGLE.vocab_size))
    return target, draft if mesh is None else put(draft, NamedSharding(mesh, P()))


def verify_seconds(mesh: Mesh | None, implementation: str, batch: int, num_drafts: int, vocab: int) -> float:
    """Return the seconds of one verification, on one device where the mesh is None."""
    make_inputs = jax.jit(inputs, static_argnums=(0, 1, 2, 3, 4))
    draft, target = make_inputs(batch, num_drafts, vocab, "bfloat16", CASES["rejection"])
    operands = jax.random.split(jax.random.key(1), batch), draft, target
    verify = partial(verifiers.rejection, implementation=implementation)
    if mesh is None:
        return device_seconds(lambda *args: verify(*args).tokens, *operands)

    def has_vocab(leaf: jax.Array) -> bool:
        return leaf.ndim == 3

    size = mesh.size * shards.part_size(vocab, mesh.size)
    specs = jax.tree.map(lambda leaf: P(None, None, AXIS) if has_vocab(leaf) else P(), operands)

    def spread(leaf: jax.Array, spec: P) -> jax.Array:
        if has_vocab(leaf):
            leaf = jnp.pad(leaf, ((0, 0), (0, 0), (0, size - vocab)), constant_values=-jnp.inf)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    def of_parts(keys: jax.Array, draft: Draft, target: Categorical, links: jax.Array | None) -> jax.Array:
        return verify(keys, draft, target._replace(links=links), axis_name=AXIS).tokens

    operands, specs = (*jax.tree.map(spread, operands, specs), links_of(mesh, AXIS)), (*specs, P(AXIS))
    return device_seconds(jax.shard_map(of_parts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False), *operands)


def time_verification(args: argparse.Namespace, mesh: Mesh) -> Iterator[dict]:
    """Print the table of verification and yield its rows."""
    by_kernels = "pallas" if jax.default_backend() == "gpu" else "xla"
    print(f"\nV = {args.vocab}, K = {args.num_drafts}, bfloat16\n")
    print("| devices | by | B | us | of one device |\n|---|---|---|---|---|")
    for batch in args.batches:
        alone = None
        for where, implementation in dict.fromkeys([(None, by_kernels), (mesh, by_kernels), (mesh, "xla")]):
            seconds = verify_seconds(where, implementation, batch, args.num_drafts, args.vocab)
            alone = alone or seconds
            row = {"table": "verify", "devices": 1 if where is None else mesh.size, "by": implementation}
            print(f"| {row['devices']} | {implementation} | {batch} | {1e6 * seconds:.1f} | {seconds / alone:.2f} |")
            yield row | {"batch": batch, "num_drafts": args.num_drafts, "vocab": args.vocab, "seconds": seconds}


def time_steps(args: argparse.Namespace, devices: int, target: Model, draft: Drafter | None) -> Iterator[dict]:
    """Print rows of steps without drafts and, where there is a draft, with them; yield the rows."""
    print(f"\n| devices | B | K | ms a step after {args.context} tokens | compile, s |\n|---|---|---|---|---|")
    for batch in args.batches:
        for num_drafts in (0,) if draft is None else (0, args.num_drafts):
            row = measure(target, draft, batch, args.context, num_drafts, False)
            print(f"| {devices} | {batch} | {num_drafts} | {1e3 * row['step_s']:.3f} | {row['compile_s']:.0f} |")
            yield {"table": "steps", "devices": devices} | row


def time_prompt(args: argparse.Namespace, devices: int, target: Model) -> Iterator[dict]:
    """Print a row of the feeding of a prompt and yield it."""
    seconds = prefill_seconds(target, f"1x{args.prompt}", None, None)
    print(
        f"\n| devices | tokens of a prompt | ms |\n|---|---|---|\n| {devices} | {args.prompt} | {1e3 * seconds:.1f} |"
    )
    yield {"table": "prompt", "devices": devices, "tokens": args.prompt, "seconds": seconds}


def time_engine(args: argparse.Namespace, devices: int, target: Model) -> Iterator[dict]:
    """Print rows with the speed of a full engine without drafts and yield them: a slope over lengths of the output."""
    print("\n| devices | streams of an engine | tokens/s | start, s |\n|---|---|---|---|")
    tokenizer = Checkpoint(models.EMBEDDED / "target").tokenizer()
    capacities = specjax.Capacities(0, 0, 0, 0, 0, logprobs=0)
    for batch in args.batches:
        sizes = {"num_slots": batch, "max_length": args.context + max(OUTPUTS), "step_sizes": []}
        start = time.perf_counter()
        with specjax.Engine(target, tokenizer=tokenizer, capacities=capacities, **sizes) as engine:

            def seconds(length: int) -> float:
                params = SamplingParams(temperature=1.0, max_tokens=length)
                start = time.perf_counter()
                requests = [engine.submit([1 + i] * args.context, params) for i in range(batch)]  # noqa: B023
                for request in requests:
                    assert len(request.result().token_ids) == length, "there are no stop tokens"
                return time.perf_counter() - start

            seconds(min(OUTPUTS))
            started = time.perf_counter() - start
            short, long = (statistics.median(seconds(length) for _ in range(3)) for length in OUTPUTS)
        speed = batch * (OUTPUTS[1] - OUTPUTS[0]) / (long - short)
        print(f"| {devices} | {batch} | {speed:.0f} | {started:.0f} |")
        yield {"table": "engine", "devices": devices, "batch": batch, "tokens_per_s": speed}


def time_model(args: argparse.Namespace, mesh: Mesh | None) -> Iterator[dict]:
    """Print the tables of steps and of the prompt and yield their rows; a mesh of None is one device."""
    devices = 1 if mesh is None else mesh.size
    target, draft = load(args.preset, mesh, args.quantization)
    if "steps" in args.tables:
        yield from time_steps(args, devices, target, draft)
    if "prompt" in args.tables:
        yield from time_prompt(args, devices, target)
    if "engine" in args.tables:
        yield from time_engine(args, devices, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="the models of steps and prompts, which need one")
    parser.add_argument(
        "--tables", nargs="+", choices=("verify", "steps", "prompt", "engine"), default=["verify", "steps", "prompt"]
    )
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"), help="of the layers of the target")
    parser.add_argument("--devices", type=int, help="how many devices share a model; the default is all")
    parser.add_argument("--one", action="store_true", help="also time the model on one device")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=128256, help="of verification")
    parser.add_argument("--context", type=int, default=512, help="tokens before the steps")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every row")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    devices = jax.local_devices()
    size = len(devices) if args.devices is None else args.devices
    if not 1 <= size <= len(devices):
        parser.error(f"--devices must be in [1, {len(devices)}], the number of devices of this machine, got {size}")
    device, mesh = devices[0].device_kind, Mesh(np.array(devices[:size]), (AXIS,))
    print(f"{mesh.size} of device {device}, jax {jax.__version__}, {args.preset}")
    tables: list[Callable[[], Iterator[dict]]] = []
    if "verify" in args.tables:
        tables.append(partial(time_verification, args, mesh))
    if args.preset:
        tables += [partial(time_model, args, where) for where in ((mesh, None) if args.one else (mesh,))]
    rows = []
    for table in tables:
        for row in table():
            rows.append(row)
            if args.json:
                about = {"device": device, "jax": jax.__version__, "preset": args.preset}
                args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
