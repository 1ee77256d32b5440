"""Device time of a jitted function, without dispatch."""

import statistics
import time
from functools import partial

import jax

MIN_SECONDS, REPEATS, MAX_COPIES = 0.01, 7, 8
CACHE_BYTES = 150e6  # inputs are repeated until they are larger than the cache of the device


def device_seconds(function, *arguments) -> float:
    """Time of one `function(*arguments)` as the slope of a loop on the device.

    An iteration makes a call on each of some copies of the arguments, more where they would stay in the cache, each
    behind a barrier that keeps work from being hoisted out of the loop.
    """
    size = sum(x.nbytes for x in jax.tree.leaves(arguments))
    num_copies = int(min(MAX_COPIES, max(1, CACHE_BYTES // size)))
    copies = [arguments] + [jax.tree.map(lambda x: x.copy(), arguments) for _ in range(num_copies - 1)]

    @partial(jax.jit, static_argnames="iterations")
    def loop(iterations, copies):
        def body(_, carry):
            copies, result = carry
            for i in range(num_copies):
                copies, result = jax.lax.optimization_barrier((copies, result))
                result = function(*copies[i])
            return copies, result

        shape = jax.eval_shape(function, *copies[0])
        initial = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shape)
        return jax.lax.fori_loop(0, iterations, body, (copies, initial))[1]

    def seconds(iterations: int) -> float:
        jax.block_until_ready(loop(iterations, copies))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(loop(iterations, copies))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    short = seconds(1)
    long_iterations = 1 + max(4, int(MIN_SECONDS / short))
    return (seconds(long_iterations) - short) / (long_iterations - 1) / num_copies
