"""Measure the device time of a function without the time of its dispatch."""

import statistics
import time

import jax
import jax.numpy as jnp

MIN_SECONDS, REPEATS, MAX_COPIES = 0.01, 7, 8  # time of one loop, timed runs of it, copies of the arguments
SHORTEST, BANDWIDTH = 1e-5, {"gpu": 3e12, "cpu": 5e9}  # rough seconds and bytes/s that set the length of the loop
CACHE_BYTES = 150e6  # arguments are copied until together they exceed the cache of the device


def device_seconds(function, *arguments, copies_bytes: float | None = None) -> float:
    """Return the seconds of one `function(*arguments)` on the device.

    The time is the difference between a loop with the calls and the same loop without them. Each iteration calls the
    function on several copies of the arguments, on more copies if they would otherwise stay in the cache. The smallest
    argument of a call depends on the result of the previous call, so that calls do not overlap, and a barrier keeps XLA
    from hoisting work out of the loop. The loop without the calls has the same dependences.

    Args:
        function: of arrays, or of pytrees of arrays.
        arguments: of the function.
        copies_bytes: bytes that the copies of the arguments exceed together, if `MAX_COPIES` are enough. A cache holds
            a part even of arguments that exceed it a little. None makes as many copies as fit in `CACHE_BYTES`, but at
            least one.
    """
    size = sum(x.nbytes for x in jax.tree.leaves(arguments))
    most = CACHE_BYTES // size if copies_bytes is None else copies_bytes // size + 1
    num_copies = int(min(MAX_COPIES, max(1, most)))
    num_iterations = max(5, int(MIN_SECONDS / num_copies / max(SHORTEST, size / BANDWIDTH[jax.default_backend()])))
    copies = [arguments] + [jax.tree.map(lambda x: x.copy(), arguments) for _ in range(num_copies - 1)]
    seconds = _loop_seconds(function, copies, num_iterations) - _loop_seconds(None, copies, num_iterations)
    return seconds / num_iterations / num_copies


def _loop_seconds(function, copies, num_iterations: int) -> float:
    """Return the median seconds of the loop; with `function` None, of the loop without the calls."""

    @jax.jit
    def loop(copies):
        def body(_, carry):
            copies, result = jax.lax.optimization_barrier(carry)
            for copy in copies:
                chained, link = _after(copy, result)
                result = link if function is None else _first(function(*chained))
            return copies, result

        shape = jax.eval_shape(
            lambda a: _after(a, jnp.zeros(1))[1] if function is None else _first(function(*a)), copies[0]
        )
        return jax.lax.fori_loop(0, num_iterations, body, (copies, jnp.zeros(shape.shape, shape.dtype)))[1]

    jax.block_until_ready(loop(copies))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(loop(copies))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _first(result):
    return jax.tree.leaves(result)[0]


def _smallest(arguments) -> int:
    """Return the index of the smallest leaf that is not an array of keys."""
    leaves = jax.tree.leaves(arguments)
    numbers = [i for i, x in enumerate(leaves) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return min(numbers, key=lambda i: leaves[i].size)


def _after(arguments, result):
    """Return the arguments with their smallest leaf made dependent on `result`, and that leaf."""
    leaves, structure = jax.tree.flatten(arguments)
    index = _smallest(arguments)
    link = leaves[index]
    never = result.ravel()[:1] == jnp.asarray(123, result.dtype)
    leaves[index] = jax.lax.optimization_barrier(jnp.where(never.reshape((1,) * link.ndim), link + 1, link))
    return jax.tree.unflatten(structure, leaves), leaves[index]
