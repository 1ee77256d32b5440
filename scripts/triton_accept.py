"""The kernel `accept`, written in Triton and called by jax_triton, beside the kernel in Pallas: a trial of such a port.

    TRITON_INTERPRET=1 python scripts/triton_accept.py   # interpreted by Triton on torch's arrays, without a GPU
    python scripts/triton_accept.py --lower              # lowered and compiled for compute capability 9.0
    python scripts/triton_accept.py                      # run and timed on an NVIDIA GPU

It needs the packages triton, jax-triton and JAX's plug-in for CUDA, and torch to be interpreted. The case is modified
rejection sampling with draft distributions and a temperature for each sequence. docs/versions.md has the result.
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.accept import accept
from pallas_kernels.rows import Batch, Rows
from pallas_kernels.rules import accept_by_ratio
from pallas_kernels.statistics import Statistics

BATCH, NUM_DRAFTS, NUM_TILES, VOCAB = 64, 5, 16, 131072
CAPABILITY = 90  # of the GPU for which `--lower` compiles
LOG2_E = tl.constexpr(1.4426950408889634)
RUNS = 200  # launches in one timed program
NAMES = ("num_drafts", "num_accepted", "log_prob", "position", "target_top", "target_mass", "joint")
NAMES += ("draft_top", "draft_mass", "arrivals")


@triton.jit
def _normalizer(top, mass, first, scale, num_rows, num_tiles, lane, TILES: tl.constexpr):
    """Return the maximum and the log-mass of rows from the statistics of their tiles, one row a lane."""
    tile = tl.arange(0, TILES)
    place = (first + lane)[:, None] * num_tiles + tile[None, :]
    mask = (lane < num_rows)[:, None] & (tile < num_tiles)[None, :]
    tops = tl.load(top + place, mask=mask, other=float("-inf"))
    masses = tl.load(mass + place, mask=mask, other=0.0)
    largest = tl.max(tops, axis=1)
    largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    total = tl.sum(masses * tl.exp2((tops - largest[:, None]) * (scale * LOG2_E)), axis=1)
    return largest, tl.log(total), tl.max(masses, axis=1)


@triton.jit
def _accept_kernel(
    tokens,
    target_temperature,
    draft_temperature,
    top,
    mass,
    token,
    uniforms,
    num_drafts,
    num_accepted,
    log_probs,
    position,
    target_top,
    target_mass,
    joint,
    draft_top,
    draft_mass,
    arrivals,
    K: tl.constexpr,
    NUM_TILES: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
):
    sequence = tl.program_id(0)
    lane = tl.arange(0, LANES)
    is_draft = lane < K
    ids = tl.load(tokens + sequence * K + lane, mask=is_draft, other=-1)
    count = tl.min(tl.where(ids < 0, lane, K), axis=0)
    temperature = tl.load(target_temperature + sequence)
    of_draft = tl.load(draft_temperature + sequence)
    is_greedy = temperature == 0
    scale = 1 / tl.where(temperature > 0, temperature, 1.0)
    draft_scale = 1 / tl.where(of_draft > 0, of_draft, 1.0)
    first = sequence * 2 * K
    t_top, t_mass, beats = _normalizer(top, mass, first, scale, K, NUM_TILES, lane, TILES)
    d_top, d_mass, _ = _normalizer(top, mass, first + K, draft_scale, K, NUM_TILES, lane, TILES)
    d_mass = tl.where(d_mass == float("-inf"), 0.0, d_mass)
    logit = tl.load(token + first + lane, mask=is_draft, other=0.0)
    log_prob = tl.where(t_mass > float("-inf"), (logit - t_top) * scale - t_mass, float("-inf"))
    own = tl.load(token + first + K + lane, mask=is_draft, other=0.0)
    draft_log_prob = tl.where((of_draft == 0) | is_greedy, 0.0, (own - d_top) * draft_scale - d_mass)
    is_beaten = (beats > 0) | (logit == float("-inf"))
    log_prob = tl.where(is_greedy, tl.where(is_beaten, float("-inf"), 0.0), log_prob)
    is_possible = draft_log_prob > float("-inf")
    ratio = tl.where(is_possible, log_prob - tl.where(is_possible, draft_log_prob, 0.0), float("-inf"))
    uniform = tl.load(uniforms + sequence * (K + 2) + lane, mask=is_draft, other=0.0)
    is_accepted = uniform < tl.exp(tl.minimum(ratio, 0.0))
    accepted = tl.minimum(tl.min(tl.where(is_accepted, LANES, lane), axis=0), count)
    is_row = lane == accepted
    is_rejected = accepted < count
    tl.store(num_drafts + sequence, count)
    tl.store(num_accepted + sequence, accepted)
    tl.store(log_probs + sequence * K + lane, log_prob, mask=is_draft)
    tl.store(position + sequence, accepted)
    tl.store(target_top + sequence, tl.sum(tl.where(is_row, t_top, 0.0), axis=0))
    tl.store(target_mass + sequence, tl.where(is_rejected, tl.sum(tl.where(is_row, t_mass, 0.0), axis=0), 0.0))
    tl.store(joint + sequence, 1.0)
    tl.store(draft_top + sequence, tl.sum(tl.where(is_row, d_top, 0.0), axis=0))
    tl.store(draft_mass + sequence, tl.sum(tl.where(is_row, d_mass, 0.0), axis=0))
    tl.store(arrivals + sequence, 0)


def operands(seed: int = 0) -> tuple[Batch[jax.Array], Statistics[jax.Array]]:
    """Return drafts and the statistics of their rows, with greedy sequences and sequences of fewer drafts."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (BATCH, NUM_DRAFTS)).astype(np.int32)
    tokens[1, 2:] = tokens[2] = -1
    temperature = rng.uniform(0.5, 1.5, BATCH).astype(np.float32)
    temperature[::4] = 0
    tops = rng.normal(8, 1, (BATCH, 2 * NUM_DRAFTS, NUM_TILES)).astype(np.float32)
    mass = rng.uniform(1, 50, tops.shape).astype(np.float32)
    greedy = (rng.random((BATCH, NUM_DRAFTS, NUM_TILES)) < 0.02).astype(np.float32)
    mass[:, :NUM_DRAFTS] = np.where(temperature[:, None, None] == 0, greedy, mass[:, :NUM_DRAFTS])
    token = tops.max(-1) - rng.exponential(1.0, (BATCH, 2 * NUM_DRAFTS)).astype(np.float32)
    token[5, 1] = token[6, NUM_DRAFTS] = -np.inf
    uniforms = rng.random((BATCH, NUM_DRAFTS + 2), np.float32)
    logits = jnp.zeros((1, VOCAB))  # which no operation of this kernel reads
    target = Rows(logits, jnp.asarray(temperature), rows=jnp.zeros((BATCH, NUM_DRAFTS + 1), jnp.int32))
    draft = Rows(logits, jnp.asarray(temperature + 0.25), rows=jnp.zeros((BATCH, NUM_DRAFTS), jnp.int32))
    batch = Batch(jnp.asarray(tokens), None, None, target, draft)
    return batch, Statistics(*map(jnp.asarray, (tops, mass)), None, jnp.asarray(token), jnp.asarray(uniforms))


def inputs_of(batch: Batch[jax.Array], statistics: Statistics[jax.Array]) -> list[jax.Array]:
    assert batch.tokens is not None and batch.draft is not None, "`operands` gives both"
    temperatures = batch.target.temperature, batch.draft.temperature
    return [batch.tokens, *temperatures, statistics.top, statistics.mass, statistics.token, statistics.uniforms]


def shapes() -> list[jax.ShapeDtypeStruct]:
    """Return the outputs in the order of NAMES."""
    whole, wide = (BATCH,), (BATCH, NUM_DRAFTS)
    kinds = {"num_drafts": jnp.int32, "num_accepted": jnp.int32, "position": jnp.int32, "arrivals": jnp.int32}
    return [jax.ShapeDtypeStruct(wide if n == "log_prob" else whole, kinds.get(n, jnp.float32)) for n in NAMES]


STATIC = {
    "K": NUM_DRAFTS,
    "NUM_TILES": NUM_TILES,
    "LANES": triton.next_power_of_2(NUM_DRAFTS),
    "TILES": triton.next_power_of_2(NUM_TILES),
}


def by_jax_triton(batch: Batch[jax.Array], statistics: Statistics[jax.Array]) -> list[jax.Array]:
    import jax_triton

    options = {"kernel": _accept_kernel, "out_shape": shapes(), "grid": (BATCH,), "num_warps": 1, "num_stages": 1}
    capability = None if jax.default_backend() == "gpu" else CAPABILITY
    return jax_triton.triton_call(*inputs_of(batch, statistics), **options, compute_capability=capability, **STATIC)


def by_pallas(batch: Batch[jax.Array], statistics: Statistics[jax.Array], interpret: bool = False) -> list[jax.Array]:
    found = accept(batch, statistics, None, rule=accept_by_ratio, interpret=interpret)
    assert found.draft is not None, "the batch has draft rows"
    arrays = [found.num_drafts, found.num_accepted, found.log_prob, found.position[:, 0], *found.target, found.joint]
    return [x[:, 0] if x.shape[1:] == (1,) else x for x in (*arrays, *found.draft, found.arrivals)]


def by_interpreter(batch: Batch[jax.Array], statistics: Statistics[jax.Array]) -> list[np.ndarray]:
    import torch

    given = [torch.from_numpy(np.array(x)) for x in inputs_of(batch, statistics)]
    outputs = [torch.from_numpy(np.zeros(x.shape, x.dtype)) for x in shapes()]
    _accept_kernel[(BATCH,)](*given, *outputs, **STATIC)
    return [x.numpy() for x in outputs]


def compare(found, expected) -> None:
    """Print how far the outputs of two kernels lie apart."""
    for name, one, other in zip(NAMES, found, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        difference = np.abs(np.where(same, 0, one) - np.where(same, 0, other)).max()
        print(f"{name}: {same.mean():.1%} equal, largest difference {difference:.2g}")


def microseconds(function, batch, statistics) -> float:
    """Return the time of a launch, from programs of RUNS launches, each of which depends on the one before."""
    import time

    @jax.jit
    def many(batch, statistics):
        def step(_, uniforms):
            outputs = function(batch, statistics._replace(uniforms=uniforms))
            return uniforms.at[:, 0].add(outputs[6] * 1e-9)

        return jax.lax.fori_loop(0, RUNS, step, statistics.uniforms)

    jax.block_until_ready(many(batch, statistics))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(many(batch, statistics))
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times)) / RUNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="lower and compile, without running")
    args = parser.parse_args()
    given = operands()
    print(f"jax {jax.__version__}, triton {triton.__version__}, {jax.devices()[0].device_kind}", flush=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        compare(by_interpreter(*given), by_pallas(*given, interpret=True))
    elif args.lower:
        lowered = jax.jit(by_jax_triton).trace(*given).lower(lowering_platforms=("cuda",))
        print(f"{lowered.as_text().count('triton_kernel_call')} launch, {len(lowered.as_text())} characters of program")
    else:
        compare(jax.jit(by_jax_triton)(*given), jax.jit(by_pallas)(*given))
        for _ in range(2):
            for name, function in (("Pallas", by_pallas), ("jax_triton", by_jax_triton)):
                print(f"{name}: {microseconds(function, *given):.2f} us a launch, with the sum beside it", flush=True)


if __name__ == "__main__":
    main()
