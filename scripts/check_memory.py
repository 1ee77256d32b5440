"""Run every kernel once in many shapes, so that NVIDIA's compute-sanitizer can watch which memory they touch.

    compute-sanitizer --tool memcheck python scripts/check_memory.py
    compute-sanitizer --tool memcheck python scripts/check_memory.py verification cut
    compute-sanitizer --tool memcheck python scripts/check_memory.py out-of-bounds

The first command must end with "0 errors". The last one runs a kernel that reads far past the end of its operand and
must find errors: it shows that the tool sees the kernels. Results are compared with XLA or NumPy, too. Each array is a
separate allocation, or the memory after one array would belong to the next. On a CPU kernels are interpreted, which
only shows that the script works.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import test_attention_kernels as attention
import test_cut
import test_kernels as verification
import test_linear as linear
from jax.experimental import pallas as pl

from pallas_kernels.triton import plgpu
from specjax.sampling.cut import min_logit

ON_CPU = jax.default_backend() == "cpu"
BY_KERNEL = "interpret" if ON_CPU else "pallas"
TREE = {"tree": True, "window": 6, "turned": True}


def attention_of(cases: dict) -> Iterator[str]:
    for options, page_size in [
        (attention.TURNED, 16),
        (attention.WINDOW, None),
        (TREE, None),
        ({}, 16),
        (attention.WINDOW, 16),
        (attention.TURNED, None),
    ]:
        for name, case in cases.items():
            if "tree" not in options or case[1] <= attention.MAX_TOKENS:
                attention.check(case, ON_CPU, page_size, **options)
                yield f"{name}, pages {page_size}, {options}"


def few_tokens() -> Iterator[str]:
    yield from attention_of(attention.CASES)


def many_tokens() -> Iterator[str]:
    yield from attention_of(attention.PROMPTS)


def verifiers() -> Iterator[str]:
    temperatures = {"target_temperature": (0.7, 0, 1.3, 0.9), "draft_temperature": (1.1, 0.8, 0, 0.9)}
    for options in [
        temperatures | {"vocab_size": 3000, "cut": True},
        {"num_drafts": 9, "batch_size": 2, "vocab_size": 700, "dtype": jnp.float16},
        {"num_drafts": 2, "batch_size": 33, "vocab_size": 5003},
    ]:
        arguments = jax.random.key(11), *verification.random_case(1, **options)
        for name in verification.VERIFIERS:
            xla, kernel = (verification.run(name, by, *arguments, log_probs=True) for by in ("xla", BY_KERNEL))
            verification.assert_same(kernel, xla, 1)  # a token of 33 rows may be decided by rounding
            yield f"{name}, {options}"


def cut() -> Iterator[str]:
    for vocab_size, dtype in ((3000, jnp.float32), (5003, jnp.bfloat16), (50272, jnp.float32)):
        logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (3, vocab_size)), dtype)
        fields = {
            "temperature": [0.7, 1.0, 1.3],
            "top_k": [5, -1, 40],
            "top_p": [0.9, 0.5, 1.0],
            "min_p": [0, 0.01, 0.1],
        }
        arrays = test_cut.as_arrays(fields)
        xla, kernel = (min_logit(logits, **arrays, implementation=by) for by in ("xla", BY_KERNEL))
        np.testing.assert_array_equal(kernel, xla)
        yield f"{vocab_size} logits, {dtype.__name__}"


def products() -> Iterator[str]:
    silu = jax.nn.silu
    for case in [(72, 9, 4, None, jnp.float32), (1024, 7, 3, silu, jnp.bfloat16), (3000, 5, 132, silu, jnp.bfloat16)]:
        linear.test_against_float64(*case, ON_CPU)
        yield f"one row, {case[:3]}"
    for case in [
        (1, 512, 64, (16, 256), None, jnp.bfloat16),
        (6, 300, 70, (16, 256), silu, jnp.bfloat16),
        (6, 300, 70, (64, 128), None, jnp.float16),
        (16, 100, 9, (64, 128), silu, jnp.bfloat16),
    ]:
        linear.test_few_rows_against_float64(*case, ON_CPU)
        yield f"few rows, {case[:4]}"


def out_of_bounds() -> Iterator[str]:
    def kernel(x_ref, start_ref, out_ref):
        out_ref[:] = x_ref[pl.ds(start_ref[0], 16)]

    out = jax.ShapeDtypeStruct((16,), jnp.float32)
    read = pl.pallas_call(kernel, out_shape=out, compiler_params=plgpu.CompilerParams(), interpret=ON_CPU)
    yield str(jax.jit(read)(jnp.zeros(16), jnp.array([1 << 22], jnp.int32)))


PARTS = {
    "few-tokens": few_tokens,
    "many-tokens": many_tokens,
    "verification": verifiers,
    "cut": cut,
    "products": products,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "out-of-bounds"], default=list(PARTS))
    for name in parser.parse_args().parts:
        for case in (PARTS | {"out-of-bounds": out_of_bounds})[name]():
            print(f"{name}: {case}", flush=True)


if __name__ == "__main__":
    main()
