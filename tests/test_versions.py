"""Behaviour on other versions of JAX than the version of the tests."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_without_the_triton_backend_xla_does_the_work():
    """JAX deprecates that backend. Every branch for a GPU is traced on a CPU too, so tracing shows what would run."""
    code = """
        import sys

        sys.modules["jax.experimental.pallas.triton"] = None  # the import system then finds no such module
        import jax
        import jax.numpy as jnp
        from specjax import Categorical, Draft, ModelInput, distributions, verifiers
        from specjax.models.decoder import DecoderConfig, decoder_model, param_shapes
        from specjax.sampling.cut import min_logit

        key, logits = jax.random.key(0), jnp.zeros((1, 3, 4096))
        draft = Draft(jnp.zeros((1, 2), jnp.int32), Categorical(logits[:, :2]))
        top_k = jnp.array(5)
        for verify in (verifiers.rejection, verifiers.block, verifiers.match, verifiers.typical):
            jax.eval_shape(verify, key, draft, logits)
        jax.eval_shape(lambda: min_logit(logits, top_k=top_k))
        jax.eval_shape(lambda: distributions.sample(jnp.broadcast_to(key, (1, 3)), Categorical(logits)))

        config = DecoderConfig(128256, 512, 1, 8, 4, 64, 256, 256, transposed=True)  # the head is a large matrix
        model = decoder_model(config, jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), param_shapes(config)))
        cache = jax.eval_shape(lambda: model.init_cache(1, 64))
        for num_tokens in (1, 3):
            tokens = jnp.zeros((1, num_tokens), jnp.int32)
            jax.eval_shape(model.apply, model.params, ModelInput(tokens, tokens), cache)

        for implementation in ("pallas", "interpret"):
            for call in (
                lambda: verifiers.rejection(key, draft, logits, implementation=implementation),
                lambda: min_logit(logits, top_k=top_k, implementation=implementation),
            ):
                try:
                    call()
                except NotImplementedError as error:
                    print(error)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 4
    assert all("need the Triton backend of Pallas, which jax" in message for message in messages)
