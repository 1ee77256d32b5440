"""Compare the loss of the embedded target before and after its weights or its cache are rounded, on unseen modules.

    python scripts/rounding_loss.py
    python scripts/rounding_loss.py --modules queue --length 256

Rows of tokens are fed in one call each and attend to the cache, so that keys and values are rounded as in decoding.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from python_corpus import HELD_OUT

from specjax import Model, ModelInput, models
from specjax.models.quantized import FORMATS


def rows_of(modules: Sequence[str], length: int) -> np.ndarray:
    """Return the tokens of modules of the standard library as rows [N, length]; the last tokens are left out."""
    tokenizer = models.Checkpoint(models.EMBEDDED / "target").tokenizer()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    ids = np.concatenate([tokenizer.encode((stdlib / f"{name}.py").read_text("utf-8")).ids for name in modules])
    return ids[: len(ids) // length * length].reshape(-1, length).astype(np.int32)


def mean_loss(model: Model, rows: np.ndarray) -> float:
    """Return the mean negative log-probability of the tokens of rows [N, L], given those before."""

    @jax.jit
    def losses(model: Model, row: jax.Array) -> jax.Array:
        inputs = ModelInput(row[None], jnp.arange(row.size)[None])
        output, _ = model.apply(model.params, inputs, model.init_cache(1, row.size))
        log_probs = jax.nn.log_softmax(output.logits[0, :-1])
        return -jnp.take_along_axis(log_probs, row[1:, None], axis=1).mean()

    return float(np.mean([losses(model, jnp.asarray(row)) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=sorted(HELD_OUT), help="of the standard library")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    args = parser.parse_args()

    model, rows = models.load(models.EMBEDDED / "target"), rows_of(args.modules, args.length)
    plain = mean_loss(models.with_cache_dtype(model, None), rows)
    print(f"{rows.size} tokens: loss {plain:.4f}", flush=True)

    def compare(name: str, rounded: Model) -> None:
        loss = mean_loss(rounded, rows)
        print(f"{name}: {loss:.4f}, {loss / plain - 1:+.3%}", flush=True)

    compare("cache in float8", models.with_cache_dtype(model, "fp8"))
    for form in FORMATS:
        checkpoint = models.Checkpoint(models.EMBEDDED / "target", form, keep_codes=False)  # as floats, which is faster
        compare(f"weights in {form}", models.load(checkpoint))


if __name__ == "__main__":
    main()
