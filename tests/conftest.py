import argparse
import gc
import os
import tempfile
import threading
import zlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

# Several processes share a GPU: each takes memory as it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The processes of a run, and those that tests start, share what they compile, in a folder that goes when the run ends.
# Where a folder is given it stays, and later runs find what this one compiled.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="specjax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest
from jax._src import compilation_cache
from jax._src.interpreters import mlir

from specjax import decode
from specjax.decoding.compiling import Compiled
from specjax.engine import garbage, later_lengths, sizes
from specjax.engine.later_steps import LaterSteps
from specjax.engine.run import _Device
from specjax.engine.slots import Slots
from specjax.proposers import drawing

# Without zstandard programs are compressed by zlib before they are kept, which takes more than a hundredth of all time
# at its default level, and a third as long at the first.
if getattr(compilation_cache, "zstd", None) is None and getattr(compilation_cache, "zstandard", None) is None:
    compilation_cache.compress_executable = partial(zlib.compress, level=1)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # for tests of arrays that are spread over several devices

# No test asks which line of the source an operation comes from, and programs without lines are smaller.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tracing makes many objects that stay: by itself Python looks through all of them so often that it takes a tenth of the
# time.
gc.set_threshold(100_000, 20, 100)

# JAX 0.11 takes a context of MLIR for several programs of a thread. Before it makes one for each, in as much time as it
# traces and lowers a small program.
PROGRAMS_PER_CONTEXT = 100
make_ir_context, kept = mlir.make_ir_context, threading.local()


def kept_ir_context():
    if getattr(kept, "programs", 0) == 0:
        kept.context, kept.programs = make_ir_context(), PROGRAMS_PER_CONTEXT
    kept.programs -= 1
    return kept.context


if jax.__version_info__ < (0, 11):
    mlir.make_ir_context = kept_ir_context

MEMORY_PER_WORKER = 8 * 2**30
SIZES = dict(sizes.SIZES)  # as users have them
MOST_UNROLLED = drawing.MOST_UNROLLED


def shard(text: str) -> tuple[int, int]:
    """The part I and the number of parts N of "I/N"."""
    part, _, num_parts = text.partition("/")
    if not (part.isdecimal() and num_parts.isdecimal() and 1 <= int(part) <= int(num_parts)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, as in 1/2, got {text!r}")
    return int(part), int(num_parts)


def pytest_addoption(parser):
    parser.addoption("--shard", type=shard, metavar="I/N", help="run the I-th of N parts of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Every N-th test, after all that deselects: parts are disjoint, and together they are the whole."""
    if config.option.shard is not None:
        part, num_parts = config.option.shard
        chosen = items[part - 1 :: num_parts]
        config.hook.pytest_deselected(items=[x for k, x in enumerate(items) if k % num_parts != part - 1])
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Two on a CPU, as compiling keeps several cores busy; on a GPU as many as its memory and the cores allow."""
    if jax.default_backend() != "gpu":
        return 2
    memory = jax.devices()[0].memory_stats()["bytes_limit"]
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_PER_WORKER))


def pytest_runtest_setup(item):
    """A device is asked for when a test runs: processes that collect before one is there must find the same tests."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    if item.get_closest_marker("cpu") and jax.default_backend() != "cpu":
        pytest.skip("is about CPUs")


@pytest.fixture(scope="module", autouse=True)
def clear_caches():
    """A compiled function holds some 20 memory mappings, of the 65,530 that Linux gives a process: keep a file's."""
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # later collections need not look through what modules and libraries keep


class Ready:
    """In place of `LaterSteps`, whose programs are compiled when they are used: all count as ready."""

    def __init__(self, device, programs, *, admit, **_):
        for k in programs:
            admit(k)

    def stop(self):
        pass

    join = stop


@pytest.fixture(scope="session", autouse=True)
def programs_when_used():
    """Engines and LLMs compile a program when a request first uses it, as most tests use few of them.

    On CPUs steps compute all slots, and all calls that feed prompts have one size, unless a test names other sizes: one
    program does what several do for users. Drafts after the first are drawn in a loop there, so that a drafter is
    compiled twice and not K times.

    Returns:
        The method by which an engine compiles all of them at the start, as it is for users.
    """
    compile_all = Slots.compile
    with pytest.MonkeyPatch.context() as patch:
        for use, of_use in SIZES.items():
            few = replace(of_use["cpu"], step_sizes=(), prompts=(of_use["cpu"].chunk,))
            patch.setitem(sizes.SIZES, use, of_use | {"cpu": few})
        if jax.default_backend() == "cpu":
            patch.setattr(drawing, "MOST_UNROLLED", 1)
        patch.setattr(Slots, "compile", lambda *args: None)
        patch.setattr(later_lengths, "LaterSteps", Ready)
        patch.setattr(garbage, "leave_out", lambda: None)  # a search of all objects takes as long as most tests
        patch.setattr(garbage, "take_back", lambda: None)
        patch.setattr(_Device, "compiling_programs", lambda *args: nullcontext())
        yield compile_all


@pytest.fixture
def all_programs(programs_when_used, monkeypatch):
    """Engines and LLMs have the programs that they have for users, and compile all of them at the start."""
    monkeypatch.setattr(drawing, "MOST_UNROLLED", MOST_UNROLLED)
    for use, of_use in SIZES.items():
        monkeypatch.setitem(sizes.SIZES, use, of_use)
    monkeypatch.setattr(Slots, "compile", programs_when_used)
    monkeypatch.setattr(later_lengths, "LaterSteps", LaterSteps)
    monkeypatch.setattr(_Device, "compiling_programs", Slots.compiling_programs)


OPTIMIZED = {"xla_backend_optimization_level": 1}
optimized_generate = jax.jit(decode._until_the_end, donate_argnums=2, compiler_options=OPTIMIZED)


@pytest.fixture
def optimized_loop(monkeypatch):
    """The loop of `decode.generate` is optimized, for tests of many samples: it runs longer than it compiles."""
    monkeypatch.setattr(decode, "_generate", Compiled(optimized_generate, optimized_generate))


@pytest.fixture
def float32_products():
    """As models of float32 ask for: a GPU would multiply float32 in TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
