"""Let a target answer prompts in large batches, for text to train a drafter on.

    python scripts/answer_prompts.py --target TARGET --prompts prompts/train.jsonl --out answers.npz --minutes 2

`--prompts` is a file of JSONL with "prompt", a question to which the chat template of the target is applied. The target
answers the prompts in their order, at each of `--temperatures` in turn, and when it has answered all of them it begins
again at the next temperature, until the time is over. `specjax train --data answers.npz` reads the file.

With `--own N` the target first writes N questions: it continues its chat template where the user would begin. They join
the prompts in random order.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax import SamplingParams, decode, models, proposers, sampling
from specjax.engine import chat
from specjax.models import Checkpoint
from specjax.models.hub import find_checkpoint
from specjax.training import Document
from specjax.training.corpus import write_documents
from specjax.types import Model

PLACE = "\ufffc"  # stands for the question in the rendered template
QUESTION = SamplingParams(temperature=1.0, max_tokens=64)  # of the target's own questions; longer ones are left out


def around(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the chat template before a question, and after it up to where the answer begins."""
    before, after = chat.render(checkpoint, [{"role": "user", "content": PLACE}]).split(PLACE)
    return before, after


def encode(checkpoint: Checkpoint, questions: Sequence[str]) -> list[list[int]]:
    """Return the token ids of questions in the chat template, up to where the answer begins."""
    before, after = around(checkpoint)
    tokenizer = checkpoint.tokenizer()
    texts = [before + question.strip() + after for question in questions]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def answer(
    target: Model,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    key: jax.Array,
    *,
    width: int,
    eos_token_ids: Sequence[int],
) -> list[Document]:
    """Return prompts of at most `width` tokens with their answers, which the device writes in one loop."""
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    rows = sampling.batch(params, eos_token_ids)
    size = width + params[0].max_tokens
    state = _prefill(target, proposers.none(), tokens, lengths, rows, key, max_length=size)
    context = decode.generate(target, proposers.none(), state).context
    written, ends = np.asarray(context.tokens), np.asarray(context.length)
    return [Document(written[i, : ends[i]], int(lengths[i])) for i in range(len(prompts))]


_prefill = jax.jit(decode.prefill, static_argnames="max_length")


def ask(target: Model, checkpoint: Checkpoint, count: int, key: jax.Array, batch: int) -> list[str]:
    """Return about `count` different questions that the target wrote where its template has the user's text."""
    tokenizer = checkpoint.tokenizer()
    start = tokenizer.encode(around(checkpoint)[0], add_special_tokens=False).ids
    eos, asked = checkpoint.eos_token_ids(target.vocab_size), {}
    for number in range(-(-count // batch)):
        given = {"width": len(start), "eos_token_ids": eos}
        some = answer(target, [start] * batch, [QUESTION] * batch, jax.random.fold_in(key, number), **given)
        written = [[int(token) for token in document.tokens[document.learn_from :]] for document in some]
        ended = [ids[:-1] for ids in written if ids[-1] in eos]
        asked |= dict.fromkeys(text.strip() for text in tokenizer.decode_batch(ended) if text.strip())
    return list(asked)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="checkpoint or name of the target, which has a chat template")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=int, default=0, metavar="N", help="questions that the target writes itself")
    parser.add_argument("--minutes", type=float, default=2.0, help="after which no new batch begins")
    parser.add_argument("--batch", type=int, default=512, help="prompts that are answered at a time")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    checkpoint = Checkpoint(find_checkpoint("target", args.target), keep_codes=False)
    target = models.load(checkpoint, dtype=jnp.dtype(args.dtype))
    eos = checkpoint.eos_token_ids(target.vocab_size)
    questions = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    key, began = jax.random.key(args.seed), time.monotonic()
    if args.own:
        own = ask(target, checkpoint, args.own, jax.random.fold_in(key, 2**31), args.batch)
        questions += own
        random.Random(args.seed).shuffle(questions)
        print(f"{len(own)} own questions in {time.monotonic() - began:.0f} s, such as {own[:3]}", flush=True)
    prompts = [ids for ids in encode(checkpoint, questions) if len(ids) <= args.prompt_length]
    if len(prompts) < args.batch:
        raise ValueError(f"--prompts must hold at least {args.batch} prompts of at most {args.prompt_length} tokens")
    print(
        f"{len(prompts)} of {len(questions)} prompts, {sum(map(len, prompts)) / len(prompts):.0f} tokens each",
        flush=True,
    )

    made, number, began = [], 0, time.monotonic()
    per_round = len(prompts) // args.batch
    while time.monotonic() - began < 60 * args.minutes:
        turn, place = divmod(number, per_round)
        some = prompts[place * args.batch :][: args.batch]
        params = [
            SamplingParams(
                temperature=args.temperatures[(i + turn) % len(args.temperatures)], max_tokens=args.max_tokens
            )
            for i in range(args.batch)
        ]
        given = {"width": args.prompt_length, "eos_token_ids": eos}
        made += answer(target, some, params, jax.random.fold_in(key, number), **given)
        number += 1
        if number == 1:
            began, compiling = time.monotonic(), time.monotonic() - began
            print(f"the first batch took {compiling:.0f} s, with the compilation", flush=True)
    seconds = time.monotonic() - began
    count = sum(len(document.tokens) - document.learn_from for document in made)
    write_documents(args.out, made)
    print(
        f"{len(made)} answers, {count:,} tokens, {count / seconds:,.0f} tokens/s; {count / len(made):.0f} tokens each"
    )


if __name__ == "__main__":
    main()
