"""Evaluate the embedded family: how well its target writes, and how much of each drafter's tokens it accepts.

    python scripts/evaluate_embedded.py
    python scripts/evaluate_embedded.py --family DIR --num-prompts 8 --max-tokens 64

All text comes from the modules that no model of the family has seen. The target is judged by its loss on them, and by
the text that it writes at temperature 0.8 after beginnings of their functions and classes: the share that parses up to
the last complete statement, and the share that repeats itself. Drafters are the checkpoint draft/ and every directory
beside it with a drafter on the target's features; their mean acceptance length is measured after held-out text, one
step from each of many places, and on text that the target itself writes. The target drafts for itself, too, by copies
of 4 and 8 bits, of integers and of e4m3.
"""

import argparse
import ast
import codeop
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from bench_embedded import drafters
from python_corpus import HELD_OUT, read, stdlib_files
from tokenizers import Tokenizer
from train_embedded import CROP, mean_loss

import specjax
from specjax import SamplingParams, models, proposers, training

PROMPT = 48  # tokens of a beginning
PLACES = 256  # places of held-out text from which one step is taken
CONTEXT = 128  # tokens before each
RUN, TIMES = 8, 4  # a repetition is a run of RUN tokens that stands TIMES times
NUM_DRAFTS = 4


def parses(text: str) -> bool:
    """Return whether the lines of a text, without the last, unfinished one, are the beginning of a Python module."""
    lines = text[: text.rfind("\n") + 1]
    try:
        compile(lines, "text", "exec", flags=ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except ValueError:  # a null byte
        return False
    return True


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether some run of RUN tokens stands at TIMES places or more that do not overlap."""
    counts, ends = Counter(), {}
    for i in range(len(tokens) - RUN + 1):
        run = tuple(tokens[i : i + RUN])
        if ends.get(run, 0) <= i:
            counts[run] += 1
            ends[run] = i + RUN
    return max(counts.values(), default=0) >= TIMES


def loops(tokens: Sequence[int]) -> bool:
    """Return whether some run of at most RUN tokens stands at TIMES places or more, one right after the other."""
    ids = np.asarray(tokens)
    for size in range(1, RUN + 1):
        length = (TIMES - 1) * size  # so many tokens equal those `size` places before
        if (
            len(ids) >= length + size
            and (np.convolve(ids[size:] == ids[:-size], np.ones(length), "valid") == length).any()
        ):
            return True
    return False


def beginnings(stdlib: Path, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the first tokens of functions and classes of the held-out modules, spread evenly over all of them."""
    texts = []
    for name in HELD_OUT:
        source = (stdlib / f"{name}.py").read_text()
        nodes = [x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        texts += ["\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) for node in nodes]
    ids = [encoding.ids[:PROMPT] for encoding in tokenizer.encode_batch(texts) if len(encoding.ids) > PROMPT]
    return [ids[i] for i in np.linspace(0, len(ids) - 1, count).astype(int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=Path, default=models.EMBEDDED, help="directory with target/ and drafters")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens to generate after each prompt")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)

    tokenizer = Tokenizer.from_file(str(args.family / "tokenizer.json"))
    texts = [text for path in stdlib_files(args.stdlib)[1] if (text := read(path)) is not None]
    stream = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    target = models.load(args.family / "target")
    numbers = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "drafters": []}
    numbers["held_out_loss"] = mean_loss(target, stream)
    print(f"{numbers['device']}, jax {jax.__version__}, float32")
    print(f"loss on held-out modules: {numbers['held_out_loss']:.3f} nats a token, in rows of {CROP}")

    prompts = beginnings(args.stdlib, tokenizer, args.num_prompts)
    llm = specjax.LLM(args.family / "target", args.family / "draft", num_draft_tokens=NUM_DRAFTS)
    params = [SamplingParams(temperature=0.8, max_tokens=args.max_tokens, seed=i) for i in range(len(prompts))]
    results = llm.generate(prompts, params)
    whole = [tokenizer.decode([*prompt, *r.token_ids]) for prompt, r in zip(prompts, results, strict=True)]
    numbers["parse_rate"] = float(np.mean([parses(text) for text in whole]))
    numbers["repeat_rate"] = float(np.mean([repeats(r.token_ids) for r in results]))
    numbers["loop_rate"] = float(np.mean([loops(r.token_ids) for r in results]))
    size = args.max_tokens
    pieces = [stream[i : i + size].tolist() for i in range(0, len(stream) - size, max(size, len(stream) // 256))]
    usual, usual_loops = (np.mean([test(piece) for piece in pieces]) for test in (repeats, loops))
    print(f"continuations of {len(prompts)} held-out beginnings at temperature 0.8, {size} tokens each:")
    print(f"  {numbers['parse_rate']:.0%} parse up to their last complete statement")
    print(
        f"  {numbers['repeat_rate']:.0%} repeat a run of {RUN} tokens {TIMES} times ({usual:.0%} of held-out text does)"
    )
    print(
        f"  {numbers['loop_rate']:.0%} repeat a run of at most {RUN} tokens {TIMES} times in a row "
        f"({usual_loops:.0%} of held-out text does)"
    )

    starts = np.linspace(0, len(stream) - CONTEXT, PLACES).astype(int)
    places = [stream[start : start + CONTEXT].tolist() for start in starts]
    print("\n| drafter | temperature | drafts after | accepted by position | mean acceptance length |")
    print("|---|---|---|---|---|")
    copies = {
        f"self, {form}": proposers.self_draft(target, NUM_DRAFTS, quantization=form) for form in ("int4", "int8", "fp8")
    }
    found = drafters(args.family, target, NUM_DRAFTS) | {name: (target, copy) for name, copy in copies.items()}
    for name, (model, proposer) in found.items():
        for temperature in (0.0, 0.8):
            for source, given, steps in (("held-out text", places, 1), ("the target's own text", prompts, None)):
                one = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True)
                run = training.replay(model, proposer, given, one, key=jax.random.key(0), max_steps=steps)
                rates = " ".join(f"{rate:.2f}" for rate in run.by_position)
                print(f"| {name} | {temperature} | {source} | {rates} | {run.tokens_per_step:.2f} |")
                row = {"drafter": name, "temperature": temperature, "after": source}
                row |= {"by_position": run.by_position.tolist(), "mean_acceptance_length": run.tokens_per_step}
                numbers["drafters"].append(row)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
