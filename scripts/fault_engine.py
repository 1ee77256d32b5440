"""Give an engine thousands of random requests, many of them cancelled or faulty, and check that it loses nothing.

python scripts/fault_engine.py [NUMBER]

A tiny model with random weights serves requests of all kinds: greedy and sampled, with penalties, masks, grammars (some
too large, wrong or slow to compile), stop strings, log-probabilities, several samples and priorities. Some are
cancelled at a random time, some are left in the middle of a stream, and of some the text cannot be made. At the end
every request must have ended as it should, requests with equal seeds must have equal tokens, all slots and pages must
be free, nothing may have been compiled, and the memory must not have grown. It takes some minutes on a CPU.
"""

import gc
import resource
import sys
import time
from collections import Counter, deque
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax import SamplingParams, guided, models
from specjax.engine.jobs import Job
from specjax.models.decoder import DecoderConfig, decoder_model, init_params
from specjax.models.directory import Checkpoint

SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 16}
MAX_LENGTH, NUM_SLOTS, NUM_PAGES, PAGE_SIZE, CHUNK_SIZE = 128, 8, 40, 8, 32  # too few pages for all slots
NUM_LIVE = 60  # requests at a time
FAULTY = 7  # a token whose text cannot be made after a prompt
GRAMMARS = (
    guided.Regex("[0-9]{1,6}"),
    guided.Regex("(ab|cd)+e"),
    guided.Choices(("yes", "no", "perhaps")),
    guided.JsonSchema({"type": "boolean"}),
    guided.Regex("a)(b"),
    guided.Regex("[a-z]{900}"),
    guided.Regex("(a|b)*a(a|b){18}"),
)
NUM_GOOD = 4  # of these


class Tokenizer:
    """The embedded tokenizer, which fails at the first token after a prompt that ends with FAULTY."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        if len(ids) == 6 and ids[4] == FAULTY:
            raise UnicodeError("a fault that was asked for")
        return self._tokenizer.decode(ids, **options)


def some_request(rng, common):
    """Return a prompt and parameters."""
    prompt = rng.integers(8, 200, int(rng.integers(1, 100))).tolist()
    if rng.random() < 0.4:
        prompt = common[: int(rng.integers(40, 90))] + prompt[:10]
    temperature = float(rng.choice([0, 0.7, 1.2]))
    params = SamplingParams(temperature=temperature, max_tokens=int(rng.integers(1, 24)), seed=int(rng.integers(2**40)))
    changes = {
        "top_k": 20,
        "top_p": 0.9,
        "min_tokens": params.max_tokens // 2,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {40: 2.0},
        "bad_words": [(50,), (60, 61)],
        "allowed_token_ids": range(40, 240),
        "stop": ["e", "\n"],
        "stop_token_ids": [90, 91],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    }
    chosen = {name: value for name, value in changes.items() if rng.random() < 0.12}
    if temperature and rng.random() < 0.15:
        chosen["n"] = int(rng.integers(2, 5))
    if rng.random() < 0.2:
        odds = [8] * NUM_GOOD + [1] * (len(GRAMMARS) - NUM_GOOD)
        chosen["guided_decoding"] = GRAMMARS[rng.choice(len(GRAMMARS), p=np.array(odds) / sum(odds))]
    if rng.random() < 0.03:
        prompt = [*prompt[:20], 8, 8, 8, 8, FAULTY]
    return prompt, replace(params, **chosen)


def check(prompt, params, request, cancelled, seen):
    """Return how a request has ended; raise where that is not as it should."""
    fault = params.detokenize and len(prompt) >= 5 and prompt[-1] == FAULTY
    grammar = params.guided_decoding
    try:
        result = request.result(timeout=0)
    except CancelledError:
        assert cancelled, "a request was cancelled that nobody cancelled"
        return "cancelled"
    except UnicodeError:
        assert fault, "a fault that was not asked for"
        return "faulty"
    except ValueError as error:
        assert grammar in GRAMMARS[NUM_GOOD:], error
        return "refused grammar"
    assert grammar not in GRAMMARS[NUM_GOOD:] and not fault
    assert len(result.completions) == params.n
    for each in result.completions:
        assert 1 <= len(each.token_ids) <= params.max_tokens or params.stop, each
        assert each.finish_reason in ("stop", "length") and (each.logprobs is None) == (params.logprobs is None)
        if each.logprobs is not None:
            assert len(each.logprobs) == len(each.token_ids)
        if isinstance(grammar, guided.Choices) and each.finish_reason == "stop" and not params.stop:
            assert each.text in grammar.texts, each.text
    if params.prompt_logprobs is not None:
        assert len(result.prompt_logprobs) == len(prompt)
    key = str((prompt, params))
    tokens = [each.token_ids for each in result.completions]
    assert seen.setdefault(key, tokens) == tokens, "equal requests have other tokens"
    return "finished"


def memory():
    gc.collect()
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return rss / 2**20, len(jax.live_arrays())


def run(engine, number, rng):
    """Submit the requests, and return how they ended and the memory after each tenth of them."""
    common = rng.integers(8, 200, 100).tolist()
    live, ends, sizes, seen, again = deque(), Counter(), [], {}, deque(maxlen=50)
    for i in range(number):
        prompt, params = again[int(rng.integers(len(again)))] if i % 10 == 9 else some_request(rng, common)
        again.append((prompt, params))
        request = engine.submit(prompt, params, priority=int(rng.integers(3)))
        if rng.random() < 0.05 and params.guided_decoding is None and prompt[-1] != FAULTY:
            next(iter(request), None)
        live.append([prompt, params, request, False])
        for entry in live:
            if rng.random() < 0.003:
                entry[2].cancel()
                entry[3] = True
        while len(live) >= NUM_LIVE or (i == number - 1 and live):
            wait([entry[2]._future for entry in live], timeout=120, return_when="FIRST_COMPLETED")
            done = [entry for entry in live if entry[2].is_done]
            assert done, "nothing ends"
            for entry in done:
                ends[check(*entry, seen)] += 1
                live.remove(entry)
        seen = seen if len(seen) < 200 else {}
        if i % (number // 10) == 0:
            sizes.append(memory())
    return ends, sizes


def main(number: int) -> None:
    directory = models.EMBEDDED / "target"
    checkpoint = Checkpoint(directory)
    tokenizer = checkpoint.tokenizer()
    config = DecoderConfig(vocab_size=tokenizer.get_vocab_size(), max_length=MAX_LENGTH, **SIZES)
    model = decoder_model(config, jax.tree.map(lambda x: 4 * x, init_params(config, 0)))
    draft = decoder_model(config, jax.tree.map(lambda x: 4 * x, init_params(config, 1)))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    engine = specjax.Engine(
        model,
        specjax.proposers.draft_model(draft, 3),
        num_slots=NUM_SLOTS,
        max_length=MAX_LENGTH,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        chunk_size=CHUNK_SIZE,
        tokenizer=Tokenizer(tokenizer),
        eos_token_ids=checkpoint.eos_token_ids(model.vocab_size),
        capacities=specjax.Capacities(grammars=2, grammar_states=300, grammar_classes=200),
        grammar_seconds=2,
    )
    with engine:
        num_at_start = len(compiled)
        start = time.perf_counter()
        ends, sizes = run(engine, number, np.random.default_rng(0))
        seconds = time.perf_counter() - start
        for _ in range(100):  # what was cancelled last leaves its slot before the next step
            stats = engine.stats()
            if not (stats.num_running or stats.num_waiting or stats.pages.num_used):
                break
            time.sleep(0.1)
        engine._tables.check()
        gc.collect()
        rest = sum(isinstance(each, Job) for each in gc.get_objects())
    print(f"{number} requests in {seconds:.0f} s: {dict(ends)}")
    print(f"{stats.num_tokens} tokens, {stats.num_preempted} preemptions, {stats.num_accepted} accepted drafts")
    print(f"pages: {stats.pages}")
    print(f"compilations at the start {num_at_start}, later {len(compiled) - num_at_start}; jobs left in memory {rest}")
    print("MiB of memory and arrays on the device:", ", ".join(f"{mib:.0f} and {arrays}" for mib, arrays in sizes))
    assert sum(ends.values()) == number and stats.num_finished == number
    assert (stats.num_running, stats.num_waiting, stats.pages.num_used) == (0, 0, 0)
    assert len(compiled) == num_at_start and min(ends.values()) > 0 and len(ends) == 4


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
