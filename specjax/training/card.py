"""The card of a trained drafter: a README.md that says for which target it drafts, how it was trained, and how well."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.training.data import Acceptance

CARD = """\
---
base_model: {target}
library_name: specjax
tags: [speculative-decoding, {kind}]
---

# A drafter of kind {kind} for {target}

It has {num_parameters:,} trained parameters and proposes {num_draft_tokens} tokens in each step of speculative
decoding. The output keeps the target's distribution, whatever the drafter proposes.

```bash
specjax generate "PROMPT" --model {target} --draft {directory} --num-draft-tokens {num_draft_tokens}
```

## Acceptance

Measured on {num_prompts} pieces of text that were held out, which the target continued:

{table}

The mean number of tokens of a step counts the accepted drafts and one more token of the target.

## Training

{training}
"""


def write_card(
    directory: Path,
    *,
    target: str,
    kind: str,
    num_draft_tokens: int,
    num_parameters: int,
    num_prompts: int,
    acceptance: Mapping[float, Acceptance],
    training: Mapping[str, Any],
) -> None:
    """Write the card into the directory of a drafter.

    Args:
        directory: the directory.
        target: name or directory of the target.
        kind: kind of the drafter, such as "eagle3".
        num_draft_tokens: K of the measurement.
        num_parameters: how many parameters were trained.
        num_prompts: how many pieces of text the acceptance is measured on.
        acceptance: the acceptance by temperature.
        training: numbers and names about the run.
    """
    (directory / "README.md").write_text(
        CARD.format(
            target=target,
            kind=kind,
            num_parameters=num_parameters,
            num_draft_tokens=num_draft_tokens,
            directory=directory,
            num_prompts=num_prompts,
            table=_table(num_draft_tokens, acceptance),
            training="\n".join(f"* {name}: {value}" for name, value in training.items()),
        ),
        encoding="utf-8",
    )


def _table(num_draft_tokens: int, acceptance: Mapping[float, Acceptance]) -> str:
    positions = [f"draft {i}" for i in range(1, num_draft_tokens + 1)]
    lines = [f"| temperature | tokens a step | {' | '.join(positions)} |", "|---" * (2 + num_draft_tokens) + "|"]
    for temperature, found in acceptance.items():
        rates = " | ".join(f"{rate:.2f}" for rate in found.by_position)
        lines.append(f"| {temperature} | {found.tokens_per_step:.2f} | {rates} |")
    return "\n".join(lines)
