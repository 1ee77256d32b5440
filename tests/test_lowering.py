"""Every verifier lowers to Triton kernels that compile for an H200 without spilling registers."""

import jax
import jax.numpy as jnp
import pytest
from lowering import compile_for_sm90, triton_kernels

from specjax import Categorical, Draft, verifiers

NUM_DRAFTS = 5
BY_RESIDUAL = ["_statistics_kernel", "_accept_kernel", "_residual_kernel", "_pick_kernel"]
KERNELS = dict.fromkeys(("rejection", "block", "typical", "synthetic"), BY_RESIDUAL)
KERNELS |= {"match": ["_block_mass_kernel", "_draw_kernel", "_match_kernel"]}
OPTIONS = {"synthetic": {"acceptance_length": 3.0}}


def inputs(batch_size: int, vocab_size: int, dtype, *, shaped: bool, drafts: str = "sampled"):
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    temperature = array() if shaped else None
    cut = array(NUM_DRAFTS + 1) if shaped else None
    target = Categorical(array(NUM_DRAFTS + 1, vocab_size, dtype=dtype), temperature, cut)
    logits = array(NUM_DRAFTS, vocab_size, dtype=dtype)
    known = array(NUM_DRAFTS) if not shaped else None
    distribution = Categorical(logits, temperature, None, known) if drafts == "sampled" else None
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch_size))
    return keys, Draft(array(NUM_DRAFTS, dtype=jnp.int32), distribution, array(dtype=jnp.int32)), target


@pytest.mark.parametrize("vocab_size", [32000, 128256, 151936])
@pytest.mark.parametrize("verifier", KERNELS)
def test_verifiers_lower_to_triton(verifier, vocab_size):
    for batch_size, dtype, shaped in ((1, jnp.bfloat16, False), (16, jnp.float32, True)):
        kernels = triton_kernels(
            lambda *args: getattr(verifiers, verifier)(*args, **OPTIONS.get(verifier, {})),
            *inputs(batch_size, vocab_size, dtype, shaped=shaped),
        )
        assert [kernel.name for kernel in kernels] == KERNELS[verifier]


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("verifier", KERNELS)
def test_kernels_compile_without_spilling(verifier, shaped, tmp_path):
    pytest.importorskip("triton")
    for batch_size, dtype in ((1, jnp.bfloat16), (256, jnp.float32)):
        kernels = triton_kernels(
            lambda *args: getattr(verifiers, verifier)(*args, log_probs=True, **OPTIONS.get(verifier, {})),
            *inputs(batch_size, 128256, dtype, shaped=shaped),
        )
        for kernel in kernels:
            resources = compile_for_sm90(kernel, tmp_path)
            assert resources.spilled_bytes == 0 and resources.stack_bytes == 0, (kernel.name, kernel.grid, resources)
