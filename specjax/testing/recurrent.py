"""A verdict on a model with `commit`: whether its state follows the tokens that stay, and no others."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.calls import run
from specjax.types import NO_PAGE, Memory, Model, ModelInput

BATCH_SIZE, NUM_TOKENS, MIN_TOKENS = 4, 64, 24  # rows, and the most and fewest tokens of a sequence
CHUNK, WIDTH = 6, 4  # tokens of a row in a call for prompts, and the most in a step, with 3 drafts
NUM_STEPS = 40


def check_states(model: Model, tolerance: float) -> None:
    """Raise AssertionError unless the state after each call is the state of plain decoding.

    One call over whole sequences gives the expected logits. Then rows run through chunks of prompts with padding, steps
    that keep any number of their tokens, steps in which a row does not run, and sequences that begin in used rows.
    After each call the next token of every row must have the expected logits.

    Args:
        model: a model with `commit`, whose `max_length` is None or at least 24. Steps have its `max_step` at most.
        tolerance: the largest difference of two logits that counts as rounding, relative to the largest logit.
    """
    limit = NUM_TOKENS if model.max_length is None else min(NUM_TOKENS, model.max_length)
    if limit < MIN_TOKENS:
        raise ValueError(f"max_length of the model must be None or at least {MIN_TOKENS}, got {model.max_length}")
    trial, most = _Trial.of(model, limit, tolerance), min(WIDTH, model.max_step or WIDTH)
    trial.prompt("a chunk of prompts with padding", [5, 3, 0, 1])
    trial.prompt("a chunk of prompts in some rows", [0, 2, 4, 0], rows=[2, BATCH_SIZE, 1])
    for _ in range(2):
        trial.step("a step without drafts", [1, 1, 1, 1], 1)
    for count in range(most + 1):
        trial.step(f"a step with {most - 1} drafts", [(count + b) % (most + 1) for b in range(BATCH_SIZE)], most)
    trial.begin(1)
    trial.step("a step in which a row has not begun", [2, 0, 0, 3], most)
    trial.prompt("a chunk of a prompt in a used row", [0, 4, 0, 0])
    trial.begin(3)
    trial.step("a step that begins in a used row", [1, 1, 0, 2], most)
    rng = np.random.default_rng(1)
    for _ in range(NUM_STEPS):
        for row in np.flatnonzero(trial.fed > limit - 2 * most):
            trial.begin(int(row))
        width = most if rng.random() < 0.8 else 1
        trial.step(f"a step with {width - 1} drafts", rng.integers(0, width + 1, BATCH_SIZE), width)


@jax.jit
def _call(model: Model, inputs: ModelInput, memory: Memory, count: jax.Array | None = None) -> tuple[jax.Array, Memory]:
    """Run a call, and commit `count` tokens of it, if it is given."""
    output, memory = run(model, inputs, memory)
    if count is not None:
        assert model.commit is not None, "assert_model has looked"
        path = jnp.broadcast_to(jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32), inputs.tokens.shape)
        memory = model.commit(memory, inputs, path, count)
    return output.logits.astype(jnp.float32), memory


@dataclass
class _Trial:
    """The rows of a model, each with a sequence, and the logits that each token of the sequences must have."""

    model: Model
    tolerance: float
    tokens: np.ndarray  # [2 B, N] int32, sequences; row b has b or B + b
    expected: np.ndarray  # [2 B, N, V]
    memory: Memory
    fed: np.ndarray  # [B], tokens that each row has kept
    sequence: np.ndarray  # [B], the sequence of each row
    calls: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: Model, num_tokens: int, tolerance: float) -> "_Trial":
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2 * BATCH_SIZE, num_tokens), dtype=np.int32)
        positions = np.broadcast_to(np.arange(num_tokens, dtype=np.int32), tokens.shape)
        count = np.full(2 * BATCH_SIZE, num_tokens, np.int32)
        memory = model.init_memory(2 * BATCH_SIZE, 2 * BATCH_SIZE, num_tokens)
        inputs = ModelInput(jnp.asarray(tokens), jnp.asarray(positions), num_tokens=jnp.asarray(count))
        logits, _ = _call(model, inputs, memory)
        if not np.isfinite(logits).all():
            raise AssertionError(f"logits must be finite in one call over {num_tokens} tokens of new sequences")
        return cls(
            model,
            tolerance,
            tokens,
            np.asarray(logits),
            model.init_memory(BATCH_SIZE, BATCH_SIZE, num_tokens),
            fed=np.zeros(BATCH_SIZE, np.int32),
            sequence=np.arange(BATCH_SIZE),
        )

    def begin(self, row: int) -> None:
        """Let another sequence begin in a row."""
        self.fed[row] = 0
        self.sequence[row] = (self.sequence[row] + BATCH_SIZE) % (2 * BATCH_SIZE)

    def prompt(self, name: str, counts: list[int], rows: list[int] | None = None) -> None:
        """Feed `counts` [B] tokens of prompts; with `rows`, a call of these rows alone."""
        inputs, given = self._inputs(np.asarray(counts), CHUNK), np.asarray(counts)
        if rows is not None:
            index, is_row = np.minimum(rows, BATCH_SIZE - 1), np.asarray(rows) < BATCH_SIZE
            pages = np.where(is_row, rows, NO_PAGE).astype(np.int32)[:, None]
            inputs = ModelInput(
                inputs.tokens[index],
                inputs.positions[index],
                pages=jnp.asarray(pages) if self.model.takes_pages else None,
                rows=jnp.array(rows, jnp.int32),
            )
            given = np.where(is_row, given[index], 0)
        inputs = inputs._replace(num_tokens=jnp.asarray(given, jnp.int32))
        self._run(name, inputs, None, np.asarray(counts), rows)

    def step(self, name: str, counts: list[int] | np.ndarray, width: int = WIDTH) -> None:
        """Take a step of `width` tokens that keeps `counts` [B] of them, or all; a row with 0 does not run."""
        kept = np.minimum(np.asarray(counts), width)
        self._run(name, self._inputs(kept, width), kept, kept, None)

    def _inputs(self, counts: np.ndarray, width: int) -> ModelInput:
        """Return the next tokens of each row: `counts` right ones, the first at least, then wrong ones."""
        positions = self.fed[:, None] + np.arange(width, dtype=np.int32)[None]
        tokens = self.tokens[self.sequence[:, None], np.minimum(positions, self.tokens.shape[1] - 1)]
        is_wrong = np.arange(width)[None] >= np.maximum(counts, 1)[:, None]
        tokens = np.where(is_wrong, (tokens + 1) % self.model.vocab_size, tokens)
        return ModelInput(jnp.asarray(tokens), jnp.asarray(positions))

    def _run(
        self, name: str, inputs: ModelInput, kept: np.ndarray | None, counts: np.ndarray, rows: list[int] | None
    ) -> None:
        count = None if kept is None else jnp.asarray(kept, jnp.int32)
        logits, self.memory = _call(self.model, inputs, self.memory, count)
        self.calls.append(f"call {len(self.calls) + 1}, {name}, which keeps {counts.tolist()} tokens of its rows")
        for place, row in enumerate(range(BATCH_SIZE) if rows is None else rows):
            for t in range(counts[row] if row < BATCH_SIZE else 0):
                self._compare(logits[place, t], row, t, f"the logits of {self.calls[-1]}, must be those of one call")
        self.fed = (self.fed + counts).astype(np.int32)
        probe = self._inputs(np.ones(BATCH_SIZE, int), 1)
        logits, _ = _call(self.model, probe, self.memory)
        for row in range(BATCH_SIZE):
            self._compare(logits[row, 0], row, 0, f"after {self.calls[-1]}, the state must be that of plain decoding")

    def _compare(self, logits: jax.Array, row: int, offset: int, promise: str) -> None:
        position = self.fed[row] + offset
        if position >= self.tokens.shape[1]:
            return
        expected = self.expected[self.sequence[row], position]
        difference = np.abs(np.asarray(logits) - expected).max() / (np.abs(self.expected).max() or 1.0)
        if not difference <= self.tolerance:
            raise AssertionError(
                f"{promise}: at row {row}, position {position} a logit is off by {difference:.2g} of the largest "
                f"logit, where rounding may be {self.tolerance:g}. Keep the first count[b] tokens of a step and no "
                "others, all num_tokens of a call for prompts, nothing of padding or of a row with 0, and begin at "
                "position 0 with an empty state (docs/own-models.md)."
            )
