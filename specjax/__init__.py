"""Speculative decoding for JAX: verifiers, proposers, scorers and decoding loops as pure functions."""

from specjax import (
    checks,
    decode,
    keys,
    metrics,
    pages,
    prompts,
    proposers,
    ragged,
    sampling,
    scorers,
    serialization,
    testing,
    theory,
    trees,
    verifiers,
)
from specjax.decode import generate, prefill, step, stream
from specjax.decoding.log_probs import logprobs
from specjax.engine.engine import Engine
from specjax.engine.llm import LLM
from specjax.pages import Pages
from specjax.sampling import Sampling, SamplingParams, guided
from specjax.sampling.capacities import Capacities
from specjax.types import (
    Categorical,
    Chunk,
    Context,
    Draft,
    DraftTree,
    Features,
    Memory,
    Model,
    ModelInput,
    ModelOutput,
    Verified,
)
from specjax.version import __version__ as __version__

__all__ = [
    "LLM",
    "Capacities",
    "Categorical",
    "Chunk",
    "Context",
    "Draft",
    "DraftTree",
    "Engine",
    "Features",
    "Memory",
    "Model",
    "ModelInput",
    "ModelOutput",
    "Pages",
    "Sampling",
    "SamplingParams",
    "Verified",
    "checks",
    "decode",
    "generate",
    "guided",
    "keys",
    "logprobs",
    "metrics",
    "pages",
    "prefill",
    "prompts",
    "proposers",
    "ragged",
    "sampling",
    "scorers",
    "serialization",
    "step",
    "stream",
    "testing",
    "theory",
    "trees",
    "verifiers",
]
