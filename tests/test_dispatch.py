"""The choice between XLA and the kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import export

from specjax.operations.dispatch import dispatch


def run(x, implementation=None, reason=None, is_worthwhile=True):
    """By XLA x + 1, by the kernels 2 x, and 3 x interpreted."""
    return dispatch(
        (x,),
        xla=lambda x: x + 1,
        pallas=lambda x, interpret: x * (3 if interpret else 2),
        reason=lambda x: reason,
        is_worthwhile=lambda x: is_worthwhile,
        implementation=implementation,
    )


def has_kernel(function, *arguments) -> bool:
    """Whether the function multiplies on an NVIDIA GPU."""
    return "stablehlo.multiply" in jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_named_implementations():
    x = jnp.array([5])
    results = {name: run(x, name).item() for name in ("xla", "pallas", "interpret")}
    assert results == {"xla": 6, "pallas": 10, "interpret": 15}
    assert run(x, "pallas", is_worthwhile=False) == 10
    assert run(x, "xla", reason="none") == 6


def test_the_default_takes_kernels_on_nvidia_gpus_where_they_pay():
    x = jnp.array([5])
    assert has_kernel(run, x)
    assert "stablehlo.multiply" not in jax.jit(run).trace(x).lower(lowering_platforms=("cpu",)).as_text()
    assert not has_kernel(partial(run, is_worthwhile=False), x)
    assert not has_kernel(partial(run, reason="the kernels take no fives"), x)


@pytest.mark.parametrize("implementation", ["pallas", "interpret"])
def test_a_named_implementation_never_falls_back(implementation):
    message = f"implementation='{implementation}' cannot run this case: the kernels take no fives"
    with pytest.raises(NotImplementedError, match=message):
        run(jnp.array([5]), implementation, reason="the kernels take no fives")


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match="None, 'xla', 'pallas' or 'interpret', got 'triton'"):
        run(jnp.array([5]), "triton")


def test_symbolic_shapes_take_xla():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b"), jnp.int32)

    def never(x):
        raise AssertionError("a symbolic size was compared with a number")

    function = partial(dispatch, xla=lambda x: x + 1, pallas=None, reason=never, is_worthwhile=never)
    exported = export.export(jax.jit(lambda x: function((x,))), platforms=["cuda", "cpu"])(x)
    assert exported.call(jnp.array([5, 6])).tolist() == [6, 7]
    with pytest.raises(NotImplementedError, match="take static shapes"):
        export.export(jax.jit(lambda x: function((x,), implementation="pallas")))(x)


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_derivatives_are_of_xla(implementation):
    """Kernels have none. Only some operands have a direction, and integers and absent ones have no derivative."""

    def product(x, weight, times):
        return dispatch(
            ({"x": x, "none": None}, weight, times),
            xla=lambda rows, weight, times: rows["x"] * weight * times,
            pallas=lambda rows, weight, times, interpret: jax.lax.stop_gradient(rows["x"] * weight * times),
            reason=lambda *operands: None,
            implementation=implementation,
        ).sum()

    x, weight, times = jnp.array([1.0, 2.0]), jnp.array([5.0, 7.0]), jnp.array([1, 3])
    value, slopes = jax.jit(jax.value_and_grad(product, argnums=(0, 1)))(x, weight, times)
    assert value == 47
    assert slopes[0].tolist() == [5, 21] and slopes[1].tolist() == [1, 6]
    assert jax.grad(product)(x, weight, times).tolist() == [5, 21]
