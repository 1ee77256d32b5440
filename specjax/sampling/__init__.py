"""Sampling parameters: of one request, as arrays of a batch, and how they shape logits."""

from specjax.sampling.arrays import Sampling, batch
from specjax.sampling.logits import num_generated, process
from specjax.sampling.params import LogitsProcessor, SamplingParams
from specjax.sampling.processors import ExactTopK

__all__ = ["ExactTopK", "LogitsProcessor", "Sampling", "SamplingParams", "batch", "num_generated", "process"]
