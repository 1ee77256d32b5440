"""Figures of other systems on the work of the benchmarks, which print them under their own rows.

No script of this repository measures these figures. Each was measured on one NVIDIA H200, like the figures of the
README, but in another run, so it shows an order of magnitude and not a difference of a few percent. A figure is printed
only beside a row with the same vocabulary, number of drafts, dtype and batch. If a name has no version, the version was
not noted.
"""

from typing import NamedTuple


class Peer(NamedTuple):
    """Times of one system for one verifier, dtype, vocabulary and number of drafts."""

    name: str
    us: dict[int, float]  # microseconds by batch size


class Decoder(NamedTuple):
    """Speed of one system that decodes with one pair of models, batch size and number of drafts."""

    name: str
    step_ms: float  # milliseconds per step
    tokens_per_s: dict[float, float]  # tokens/s by acceptance rate


VERIFY_SOURCE = (
    "Rows of peers: one NVIDIA H200, all in one run, but not in this one; temperature 1 without a cut, medians of "
    "CUDA-graph replays."
)
V1 = "engine, its V1 sampler of April 2025"
V2 = "the same engine, its newest sampler when measured"
LIBRARY = "CUDA sampling library, two softmaxes and its chain kernel"
RENORMALIZE = "the same library, top-k and top-p renormalisation of the target rows alone"
_VERIFY = {  # (case of bench_verify, dtype): peers, at V = 128256 and K = 5
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
ENGINE = "other engine, EAGLE-3 head, CUDA graphs; context 512"
COMMON = "common PyTorch library; plain: compiled with a static cache"
_DECODE = {  # (preset of bench_decode, batch size, number of drafts): peers
    ("8b-1b", 1, 0): (Decoder(REFERENCE, 5.1, {1.0: 196}), Decoder(COMMON, 1000 / 150, {1.0: 150})),
    ("8b-1b", 1, 5): (Decoder(REFERENCE, 14.1, {1.0: 426, 0.7: 176}), Decoder(COMMON, 63, {1.0: 94, 0.7: 30})),
    ("8b-eagle3", 1, 3): (Decoder(ENGINE, 6.17, {1.0: 648, 0.7: 411}),),
    ("8b-eagle3", 1, 5): (Decoder(ENGINE, 7.1, {1.0: 845, 0.7: 414}),),
    ("8b-eagle3", 8, 5): (Decoder(ENGINE, 7.67, {1.0: 6258, 0.7: 3155}),),
    ("8b-eagle3", 64, 3): (Decoder(ENGINE, 10.74, {1.0: 23836, 0.7: 15131}),),
}

NONE = "No other system was measured on this work."


def of_verification(case: str, dtype: str, vocab: int, num_drafts: int, batches: list[int]) -> list[Peer]:
    """Return the peers of a row of `bench_verify`, with the times at its batch sizes."""
    if (vocab, num_drafts) != (128256, 5):
        return []
    measured = (
        Peer(peer.name, {batch: peer.us[batch] for batch in batches if batch in peer.us})
        for peer in _VERIFY.get((case, dtype), ())
    )
    return [peer for peer in measured if peer.us]


def of_decoding(preset: str, batch: int, num_drafts: int) -> tuple[Decoder, ...]:
    """Return the peers of a row of `bench_decode`."""
    return _DECODE.get((preset, batch, num_drafts), ())
