"""Time the parts of a speculative step at batch 1, drafts, the target's call and the rest, against a plain step.

    python scripts/profile_step.py --num-draft-tokens 1 2 3 4

Each part runs in a separate loop on the device, from the same state, a greedy answer to a short question. The fastest
of the turns counts, in which all parts take their place.
"""

import argparse
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import LLM, SamplingParams, decode, sampling, scorers
from specjax.decoding.drafters import in_memory, propose, with_num_draft_tokens
from specjax.keys import positions
from specjax.types import Array, Model, PyTree

LENGTH = 512  # slots of the cache
QUESTION = "Explain how a hash table works."
STEPS = 12  # of a loop


def steps(model: Model, proposer: Any, state: decode.State) -> decode.State:
    """Take whole steps."""
    return jax.lax.fori_loop(0, STEPS, lambda _, state: decode.step(model, proposer, state)[0], state)


def drafts(model: Model, proposer: Any, state: decode.State) -> PyTree:
    """Draft, again and again after the same context."""
    proposer = in_memory(proposer)
    keys = positions(state.keys, state.context.length, proposer.num_draft_tokens)

    def body(_: Array, carry: tuple) -> tuple:
        own, memory, total = carry
        draft, own, memory = propose(model, proposer, keys, state.context, state.sampling, own, memory=memory)
        return own, memory, total + draft.tokens.sum()

    return jax.lax.fori_loop(0, STEPS, body, (state.proposer, state.cache, jnp.int32(0)))


def calls(model: Model, proposer: Any, state: decode.State) -> PyTree:
    """Call the target with the same drafts."""
    proposer = in_memory(proposer)
    keys = positions(state.keys, state.context.length, proposer.num_draft_tokens)
    draft, _, cache = propose(model, proposer, keys, state.context, state.sampling, state.proposer, memory=state.cache)

    def body(_: Array, carry: tuple) -> tuple:
        cache, total = carry
        output, cache = scorers.mqa(model, state.context, draft, cache)
        return cache, total + sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(output))

    return jax.lax.fori_loop(0, STEPS, body, (cache, jnp.float32(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="checkpoint or name of the target")
    parser.add_argument("--draft", help="directory or name of the drafter; default: the target's own")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()

    llm = LLM(args.target, args.draft, num_draft_tokens=max(args.num_draft_tokens))
    prompt = np.asarray(llm.encode_chat([{"role": "user", "content": QUESTION}]), np.int32)[None]
    params = sampling.batch([SamplingParams(temperature=0, max_tokens=LENGTH - prompt.shape[1])])

    def after_prompt(model: Model, proposer: Any) -> tuple[Model, Any, decode.State]:
        lengths = jnp.array([prompt.shape[1]])
        state = decode.prefill(model, proposer, prompt, lengths, params, jax.random.key(0), max_length=LENGTH)
        return model, proposer, state

    plain = after_prompt(llm.plain().model, None)
    operands = {k: after_prompt(llm.model, with_num_draft_tokens(llm.proposer, k)) for k in args.num_draft_tokens}
    given = {("steps", 0): (steps, plain)}
    given |= {(part.__name__, k): (part, each) for k, each in operands.items() for part in (steps, drafts, calls)}
    programs = {name: (jax.jit(part).lower(*each).compile(), each) for name, (part, each) in given.items()}
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(args.turns):
        for name, (program, each) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*each))
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began) / STEPS)
    where = f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} processors"
    print(f"{where}, jax {jax.__version__}; a plain step takes {best['steps', 0]:.1f} ms\n")
    print("| K | step, ms | of plain | drafts | target's call | of plain | the rest |\n|---|---|---|---|---|---|---|")
    for k in args.num_draft_tokens:
        step, draft, call = (best[name, k] for name in ("steps", "drafts", "calls"))
        ratios = step / best["steps", 0], call / best["steps", 0]
        print(f"| {k} | {step:.1f} | {ratios[0]:.2f} | {draft:.1f} | {call:.1f} | {ratios[1]:.2f} | ", end="")
        print(f"{step - draft - call:.1f} |")


if __name__ == "__main__":
    main()
