"""Sampling parameters of requests, the arrays that hold them for a batch, and their effect on logits."""

from specjax.sampling.arrays import Sampling, batch
from specjax.sampling.logits import num_generated, process
from specjax.sampling.params import LogitsProcessor, SamplingParams
from specjax.sampling.processors import ExactTopK

__all__ = ["ExactTopK", "LogitsProcessor", "Sampling", "SamplingParams", "batch", "num_generated", "process"]
