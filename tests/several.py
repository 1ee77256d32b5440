"""One of two processes that share a model: `python several.py HOST:PORT PROCESS TARGET DRAFT`.

Process 0 prints what `requests` returns. Without an address and a number, the only process, with two devices, does.
"""

import json
import sys
from dataclasses import replace

import specjax
from specjax import SamplingParams, guided
from specjax.engine import sizes
from specjax.processes import join
from specjax.proposers import drawing

PROMPTS = [[5, 6, 7], list(range(4, 50)), [9, 8], [30, 31]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_k=40, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=9),
    SamplingParams(temperature=1.0, seed=5, max_tokens=8, guided_decoding=guided.Regex("[abc]{5}")),
]


def load(target, draft):
    """An LLM of few programs: its steps compute all slots, and drafts are drawn in a loop, as in other tests."""
    drawing.MOST_UNROLLED = 1
    sizes.SIZES["call"]["cpu"] = replace(sizes.SIZES["call"]["cpu"], step_sizes=(), prompts=(32,))
    return specjax.LLM(target, draft, 2, tree=5, tensor_parallel=2, max_length=128, num_slots=3)


def requests(llm):
    """Token ids, and the most likely tokens of a prompt and of what follows."""
    results = llm.generate(PROMPTS, PARAMS)
    tokens = [[completion.token_ids for completion in result.completions] for result in results]
    listed = results[0].prompt_logprobs[1:], results[0].completions[0].logprobs
    return {"tokens": tokens, "listed": [[list(entry) for entry in entries] for entries in listed]}


if __name__ == "__main__":
    *place, target, draft = sys.argv[1:]
    if not place:
        print(json.dumps(requests(load(target, draft))))
    else:
        address, number = place
        with join(address, 2, int(number), timeout=60) as group:
            llm = load(target, draft)
            if group.is_leader:
                print(json.dumps(requests(llm)))
            else:
                group.follow(llm.model, llm.proposer, llm.verifier)
