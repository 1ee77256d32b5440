"""The models, the tokenizer and the limits that `LLM`, its calls and an `Engine` share."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from specjax.decoding.drafters import in_memory
from specjax.parallel import OnMesh
from specjax.theory import StepTimes
from specjax.types import Model, Proposer, Verifier

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Setup:
    """A target with its tokenizer, a proposer and a verifier, loaded and checked."""

    model: Model
    proposer: Proposer
    verifier: Verifier
    tokenizer: "Tokenizer"
    eos_token_ids: tuple[int, ...]
    max_length: int  # the most tokens of a prompt and its output
    num_slots: int | None  # number of samples that are decoded at a time; None chooses it for each use
    draft_lengths: tuple[int, ...] | None = None  # the K that are chosen from before each step; None: the proposer's
    step_times: StepTimes | None = None  # by which K is chosen; None measures them
    # Positions by which the heads turn where that depends on the room of a row; None: as a call's longest request asks.
    room: int | None = None

    @cached_property
    def takes_pages(self) -> bool:
        """Whether the caches of target and proposer are pools of pages."""
        return self.model.takes_pages and in_memory(self.proposer).takes_pages

    @property
    def num_row_groups(self) -> int:
        """The number of devices that share the rows of a batch."""
        return self.model.apply.num_row_groups if isinstance(self.model.apply, OnMesh) else 1
