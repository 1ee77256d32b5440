"""Decode one long sequence by a small hybrid with drafts, and compare its last state with the state of plain decoding.

    python scripts/check_long_sequence.py
    python scripts/check_long_sequence.py --tokens 2000

The drafts are accepted at set rates, so that every step replays another number of tokens. A state that rounding or a
wrong count changes would change the logits after the last token. One pass over the sequence in chunks must give the
same logits. The script prints the share of accepted drafts of every tenth of the sequence.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from specjax import decode, sampling, testing, verifiers
from specjax.decoding.calls import run
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.delta_net import DeltaNet
from specjax.models.layer import Attention, LayerConfig
from specjax.sampling import SamplingParams
from specjax.types import Model, ModelInput

RATES = (0.8, 0.7, 0.6)  # of a draft that comes after accepted ones
CHUNK, TOLERANCE = 2048, 1e-4  # tokens of a chunk; difference of a logit, of the largest one
PROMPT = (1, 2, 3)


def small_hybrid(max_length: int) -> Model:
    """Return a gated delta net and a layer that attends, with large random weights in float32."""
    net = DeltaNet(num_key_heads=1, num_value_heads=2, key_size=4, value_size=4)
    layers = LayerConfig(net), LayerConfig(Attention(has_head_norms=True, has_gate=True))
    config = DecoderConfig(29, 16, 2, 2, 1, 8, 16, max_length, layers=layers)
    params = jax.tree.map(lambda x: 12 * x if x.ndim > 1 else x, init_params(config, 0))
    return decoder_model(config, params)


def plain_logits(target: Model, tokens: np.ndarray, max_length: int) -> np.ndarray:
    """Return the logits [V] after tokens [N], which are fed in chunks."""

    @jax.jit
    def feed(memory, part, positions, count):
        output, memory = run(target, ModelInput(part, positions, num_tokens=count), memory)
        return output.logits[0, count[0] - 1], memory

    logits, memory = None, target.init_memory(1, 1, max_length)
    for start in range(0, len(tokens), CHUNK):
        part = np.zeros((1, CHUNK), np.int32)
        count = min(CHUNK, len(tokens) - start)
        part[0, :count] = tokens[start : start + count]
        positions = np.arange(start, start + CHUNK, dtype=np.int32)[None]
        logits, memory = feed(memory, part, positions, np.array([count], np.int32))
    return np.asarray(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens that the sequence has at least")
    number = parser.parse_args().tokens
    steps = max(number // (10 * (len(RATES) + 1)), 1)  # of a call
    max_length = CHUNK * -(-(number + (len(RATES) + 1) * (steps + 1)) // CHUNK)
    target = small_hybrid(max_length)
    proposer = testing.BigramProposer(jnp.zeros((target.vocab_size, target.vocab_size)), len(RATES))
    requests = sampling.batch([SamplingParams(temperature=1, max_tokens=max_length)])
    given = target, proposer, jnp.array([PROMPT]), jnp.array([len(PROMPT)]), requests, jax.random.key(0)
    state = decode.prefill(*given, max_length=max_length)
    verifier, before = Partial(verifiers.synthetic, acceptance_rates=list(RATES)), (0, 0)
    while (length := int(state.context.length[0])) < number:
        state = decode.generate(target, proposer, state, max_steps=steps, verifier=verifier)
        after = int(state.totals.accepted.sum()), int(state.totals.drafted.sum())
        share = (after[0] - before[0]) / (after[1] - before[1])
        print(
            f"{int(state.context.length[0])} tokens, {share:.3f} of the drafts since {length} were accepted", flush=True
        )
        before = after
    length = int(state.context.length[0])
    tokens = np.asarray(state.context.tokens)[0, :length]
    pending = ModelInput(jnp.asarray(tokens[None, -1:]), jnp.array([[length - 1]], jnp.int32))
    found = np.asarray(jax.jit(lambda memory: run(target, pending, memory)[0].logits)(state.cache))[0, 0]
    expected = plain_logits(target, tokens, max_length)
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"after {length} tokens a logit differs by {difference:.1e} of the largest one")
    if not difference <= TOLERANCE:
        sys.exit(f"the difference must be at most {TOLERANCE}, got {difference}")


if __name__ == "__main__":
    main()
