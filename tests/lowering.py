"""Lowering for CUDA on a machine without a GPU, and compilation of the Triton kernels in the result."""

import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
from jax._src.lib.mlir import ir
from jax._src.pallas.triton.lowering import _new_ir_context
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
ONE_DEVICE = AbstractMesh((), (), abstract_device=H200)


class Kernel(NamedTuple):
    name: str
    triton_ir: str
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]


class Resources(NamedTuple):
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


def triton_kernels(function: Callable, *arguments, mesh: AbstractMesh = ONE_DEVICE, **keywords) -> list[Kernel]:
    """The Triton kernels that `function` lowers to for an H200."""
    return list(_kernels_in(_lowered(function, *arguments, mesh=mesh, **keywords)))


def decisions_of_the_host(function: Callable, *arguments, mesh: AbstractMesh = ONE_DEVICE, **keywords) -> list[str]:
    """The branches and loops of `function` whose condition a GPU computes: the host waits for each of them."""
    return list(_decisions_in(_lowered(function, *arguments, mesh=mesh, **keywords)))


def _lowered(function: Callable, *arguments, mesh: AbstractMesh, **keywords):
    with use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments, **keywords).lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir("stablehlo").operation


def _decisions_in(operation) -> Iterator[str]:
    is_branch = operation.name in ("stablehlo.case", "stablehlo.if") and not _is_constant(operation.operands[0])
    if is_branch or operation.name == "stablehlo.while":
        yield str(operation.location)
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _decisions_in(inner.operation)


def _is_constant(value) -> bool:
    """Whether a value is computed from constants alone, as the index of the platform is."""
    if isinstance(value.owner, ir.Block):
        return False
    made_by = value.owner
    return made_by.name == "stablehlo.constant" or (
        len(made_by.operands) > 0 and all(map(_is_constant, made_by.operands))
    )


def _kernels_in(operation) -> Iterator[Kernel]:
    if operation.name == "stablehlo.custom_call" and _target(operation) == "__gpu$xla.gpu.triton":
        config = operation.attributes["mhlo.backend_config"]
        with _new_ir_context():
            text = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))
        names = ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z")
        warps, stages, *grid = (ir.IntegerAttr(config[name]).value for name in names)
        yield Kernel(ir.StringAttr(config["name"]).value, text, warps, stages, tuple(grid))
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _kernels_in(inner.operation)


def _target(operation) -> str:
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def compile_for_sm90(kernel: Kernel, directory: Path) -> Resources:
    """Compile a kernel with the `triton` package, then its PTX with the assembler that comes with it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend, get_ptxas

    source = directory / "kernel.ttir"
    source.write_text(kernel.triton_ir)
    source.write_text(_simplified(source))
    # The assembler runs below, with a report.
    with warnings.catch_warnings(), mock.patch.object(CUDABackend, "make_cubin", lambda *args: b""):
        warnings.simplefilter("ignore")
        options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        compiled = triton.compile(str(source), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = directory / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(directory / "kernel.cubin")]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    words = report.replace(",", "").split()
    spilled = int(words[words.index("spill") - 2])
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    stack = int(words[words.index("stack") - 2])
    return Resources(registers, spilled, stack, compiled.metadata.shared)


def _simplified(source: Path) -> str:
    """The Triton IR of a file after the passes that `triton.compile` applies to functions in Python, and XLA to all."""
    from triton._C.libtriton import ir, passes
    from triton.backends.nvidia.compiler import nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    module = ir.parse_mlir_module(str(source), context)
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    manager.run(module, "simplify")
    return str(module)
