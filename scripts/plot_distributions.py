"""Plot the distribution that verification emits against the target's, and the mean tokens of a step.

    python scripts/plot_distributions.py

The script writes the picture of concepts.md, docs/images/distributions.png. Everything that the picture calls measured
is sampled with the verifiers of the package.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specjax import Categorical, Draft, distributions, keys, theory, verifiers

GREY, BLUE, ORANGE, GREEN = (
    "#BDBDBD",
    "#0072B2",
    "#D55E00",
    "#009E73",
)  # colours that colour-blind readers can tell apart
BATCH = 16_384
NUM_BATCHES = 64

# Left part of the picture: two distributions over 30 tokens.
TOKENS = np.arange(30)
BUMPS = np.exp(-(((TOKENS[None] - [[9], [21], [12]]) / [[3.2], [2.4], [4.8]]) ** 2) / 2)
TARGET, DRAFT = (weights / weights.sum() for weights in (0.6 * BUMPS[0] + 0.45 * BUMPS[1], BUMPS[2] + 0.02))

# Right part: two distributions over 4 tokens, the same at every position. Each number of drafts has rows in one batch.
SMALL_TARGET, SMALL_DRAFT = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.4, 0.1, 0.2])
MAX_DRAFT_TOKENS = 8
METHODS = {  # label: verifier, whether drafts are sampled with the target's noise, colour, marker
    "block": (verifiers.block, False, BLUE, "o"),
    "rejection": (verifiers.rejection, False, ORANGE, "s"),
    "match, noise shared": (verifiers.match, True, GREEN, "^"),
    "match, noise independent": (verifiers.match, False, "#7F7F7F", "v"),
}


def rows(probs: np.ndarray, num_rows: int) -> Categorical:
    """Return the same distribution in every row of a batch."""
    return Categorical.from_probs(jnp.broadcast_to(jnp.asarray(probs, jnp.float32), (BATCH, num_rows, len(probs))))


def verify(verifier, key, probs, draft_probs, num_draft_tokens, is_shared=False, num_tokens=None):
    """Sample drafts for a batch and verify them, as one step of decoding does."""
    step_keys = keys.of_step(key, BATCH, num_draft_tokens)
    distribution = rows(draft_probs, num_draft_tokens)
    if is_shared:
        draft_keys = keys.stream(step_keys[:, :-1], keys.TARGET)
    else:
        draft_keys = keys.stream(step_keys[:, :1], keys.DRAFT, jnp.arange(num_draft_tokens)[None])
    draft = Draft(distributions.sample(draft_keys, distribution), distribution, num_tokens)
    return verifier(step_keys, draft, rows(probs, num_draft_tokens + 1))


@jax.jit
def count_emitted(key):
    """Count how often each token was emitted after a rejection, and as an accepted draft: [2, V] int32."""
    verified = verify(verifiers.rejection, key, TARGET, DRAFT, 1)
    return jnp.zeros((2, len(TOKENS)), jnp.int32).at[verified.num_accepted, verified.tokens[:, 0]].add(1)


def measured_lengths(verifier, is_shared: bool) -> np.ndarray:
    """Return the measured mean tokens per step with 1 to MAX_DRAFT_TOKENS drafts."""
    num_tokens = jnp.arange(BATCH, dtype=jnp.int32) % MAX_DRAFT_TOKENS + 1

    @jax.jit
    def lengths(key):
        args = key, SMALL_TARGET, SMALL_DRAFT, MAX_DRAFT_TOKENS, is_shared, num_tokens
        return verify(verifier, *args).num_accepted + 1

    runs = [lengths(key) for key in jax.random.split(jax.random.key(1), NUM_BATCHES)]
    return np.stack(runs).reshape(-1, MAX_DRAFT_TOKENS).mean(axis=0)


def expected_lengths(name: str, is_shared: bool) -> np.ndarray:
    """Return the theoretical mean tokens per step with 0 to MAX_DRAFT_TOKENS drafts."""
    num_drafts = np.arange(MAX_DRAFT_TOKENS + 1)
    if is_shared:
        return theory.expected_tokens(theory.coupled_acceptance_rate(SMALL_TARGET, SMALL_DRAFT), num_drafts)

    def at_positions(probs: np.ndarray, count: int) -> list[np.ndarray]:
        return [np.broadcast_to(probs, (len(probs),) * (i + 1)) for i in range(count)]

    pairs = [(at_positions(SMALL_TARGET, k), at_positions(SMALL_DRAFT, k)) for k in num_drafts]
    return np.array([1 + theory.expected_accepted(*pair, name) for pair in pairs])


def draw_distributions(before: Axes, after: Axes) -> None:
    """Draw the distributions that go into verification, and the distribution of emitted tokens."""
    edges = np.arange(len(TOKENS) + 1) - 0.5
    residual = np.maximum(TARGET - DRAFT, 0)
    rejected = residual.sum()
    before.stairs(TARGET, edges, fill=True, color=GREY, label="target")
    before.stairs(DRAFT, edges, color=BLUE, linewidth=2, label="draft")
    before.stairs(residual / rejected, edges, color=ORANGE, linewidth=2, linestyle=(0, (3, 1.2)), label="recovered")
    before.set_title("In: the distributions of target and draft, and their residual", loc="left", fontweight="bold")
    before.set_ylim(0, 0.2)

    counts = sum(np.asarray(count_emitted(key)) for key in jax.random.split(jax.random.key(0), NUM_BATCHES))
    recovered, accepted = counts / counts.sum()
    emitted = accepted + recovered
    after.stairs(accepted, edges, fill=True, color=BLUE, alpha=0.75, label="accepted drafts")
    after.stairs(emitted, edges, baseline=accepted, fill=True, color=ORANGE, alpha=0.75, label="recovered tokens")
    after.plot(TOKENS, TARGET, "o", color="black", markersize=3.5, label="target")
    after.set_title("Out: accepted drafts + recovered tokens = target", loc="left", fontweight="bold")
    after.set_xlabel("token id")
    after.set_ylim(0, 0.115)
    distances = f"total variation from target {np.abs(emitted - TARGET).sum() / 2:.4f} (draft: {rejected:.3f})"
    note = f"{counts.sum():,} steps of rejection: {accepted.sum():.3f} accepted, {distances}"
    after.text(0.99, 0.82, note, transform=after.transAxes, ha="right", va="top", fontsize=8.5, color="#444444")
    for axes in (before, after):
        axes.set_ylabel("probability")
        axes.set_xlim(edges[0], edges[-1])
        axes.legend(frameon=False, loc="upper right", ncols=3)


def draw_lengths(axes: Axes) -> None:
    """Draw the mean tokens per step against the number of drafts, for each method."""
    num_drafts = np.arange(MAX_DRAFT_TOKENS + 1)
    for label, (verifier, is_shared, color, marker) in METHODS.items():
        axes.plot(num_drafts, expected_lengths(verifier.__name__, is_shared), color=color, linewidth=1.8)
        measured = measured_lengths(verifier, is_shared)
        axes.plot(num_drafts[1:], measured, marker, color=color, markersize=6.5, markeredgecolor="white", label=label)
    axes.set_title("Tokens per call of the target model", loc="left", fontweight="bold")
    axes.set_xlabel("draft tokens per step, K")
    axes.set_ylabel("mean acceptance length")
    axes.set_ylim(bottom=1)
    rate = theory.acceptance_rate(SMALL_TARGET, SMALL_DRAFT)
    title = f"acceptance rate of one draft: {rate:.2f}\nlines: theory; points: measured"
    axes.legend(frameon=False, loc="upper left", title=title, title_fontsize=9, alignment="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/distributions.png"))
    args = parser.parse_args()
    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    axes = figure.subplot_mosaic([["before", "lengths"], ["after", "lengths"]], width_ratios=[1.25, 1])
    draw_distributions(axes["before"], axes["after"])
    draw_lengths(axes["lengths"])
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        each.set_axisbelow(True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
