import os

os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # of processes too: nothing goes to the user's folders

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def clear_caches():
    """A compiled function holds some 20 memory mappings, of the 65,530 that Linux gives a process: keep a file's."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
