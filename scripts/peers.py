"""What other systems took for the work of the benchmarks, which print these figures under their own rows.

Nothing here is measured by running a script of this repository. Each figure comes from one NVIDIA H200, as those of the
README do, but from another run: it shows an order of magnitude, not a difference of a few percent. A figure is printed
only beside a row of the same vocabulary, number of drafts, dtype and batch. Where a name has no version, none was
noted.
"""

from typing import NamedTuple


class Peer(NamedTuple):
    """One system at one shape of work."""

    name: str
    us: dict[int, float]  # batch: microseconds


class Decoder(NamedTuple):
    """One system decoding with one pair of models, at one batch and number of drafts."""

    name: str
    step_ms: float
    tokens_per_s: dict[float, float]  # acceptance rate: tokens/s


VERIFY_SOURCE = (
    "Rows of peers: one NVIDIA H200, all in one run, but not in this one; temperature 1 without a cut, medians of "
    "CUDA-graph replays."
)
V1 = "engine, its V1 sampler of April 2025"
V2 = "the same engine, its newest sampler when measured"
LIBRARY = "CUDA sampling library, two softmaxes and its chain kernel"
RENORMALIZE = "the same library, top-k and top-p renormalisation of the target rows alone"
_VERIFY = {  # case of bench_verify, dtype; V = 128256, K = 5
    ("rejection", "float32"): (
        Peer(V1, {1: 155, 8: 222, 64: 640, 256: 2112}),
        Peer(V2, {1: 19.6, 8: 28.9, 64: 129, 256: 444}),
        Peer(LIBRARY, {1: 95, 8: 132, 64: 438, 256: 1330}),
    ),
    ("rejection", "bfloat16"): (Peer(V2, {1: 19.7, 8: 27.6, 64: 98.7, 256: 327}),),
    ("rejection, temperature 0.8, top-k 50, top-p 0.9", "float32"): (
        Peer(RENORMALIZE, {1: 38 + 87, 8: 84 + 143, 64: 388 + 691, 256: 1503 + 2406}),
    ),
    ("block", "bfloat16"): (Peer(V2, {1: 27.3, 8: 40.2, 64: 141, 256: 469}),),
    ("match, or deterministic drafts", "bfloat16"): (Peer(V2, {1: 13.9, 8: 19.0, 64: 61, 256: 197}),),
}

DECODE_SOURCE = (
    "Rows of peers: one NVIDIA H200, not in this run; models of the same shapes, random bfloat16 weights; the context "
    "was not noted."
)
REFERENCE = "compiled PyTorch reference, CUDA graphs"
COMMON = "common PyTorch library; plain: compiled with a static cache"
_DECODE = {  # preset of bench_decode, batch, number of drafts
    ("8b-1b", 1, 0): (Decoder(REFERENCE, 5.1, {1.0: 196}), Decoder(COMMON, 1000 / 150, {1.0: 150})),
    ("8b-1b", 1, 5): (Decoder(REFERENCE, 14.1, {1.0: 426, 0.7: 176}), Decoder(COMMON, 63, {1.0: 94, 0.7: 30})),
}

NONE = "No other system was measured at this."


def of_verification(case: str, dtype: str, vocab: int, num_drafts: int, batches: list[int]) -> list[Peer]:
    """The peers of a row of `bench_verify`, at its batches."""
    if (vocab, num_drafts) != (128256, 5):
        return []
    measured = (
        Peer(peer.name, {batch: peer.us[batch] for batch in batches if batch in peer.us})
        for peer in _VERIFY.get((case, dtype), ())
    )
    return [peer for peer in measured if peer.us]


def of_decoding(preset: str, batch: int, num_drafts: int) -> tuple[Decoder, ...]:
    """The peers of a row of `bench_decode`."""
    return _DECODE.get((preset, batch, num_drafts), ())
