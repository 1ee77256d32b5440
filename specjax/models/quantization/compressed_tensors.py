"""compressed-tensors: groups of matrices, each with its format, chosen by names, patterns or the class of a module."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specjax.models.config_file import ConfigFile
from specjax.models.quantization.fp8 import block_of, read_e4m3, read_mxfp8
from specjax.models.quantization.linear_files import (
    FLOATS,
    OF_ATTENTION,
    StoredLinear,
    num_groups,
    order_of,
    shape_in,
    signed,
    unpack,
)
from specjax.models.quantization.mxfp4 import read_mxfp4
from specjax.models.quantization.nvfp4 import read_nvfp4, scalar
from specjax.models.quantized import Quantized, pack

MODULE = "Linear"  # class of every module that holds a matrix
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
CODES = ".weight", ".weight_packed"  # endings of the names of codes
STATUSES = "compressed", "frozen"  # early tools write the second for codes, too


def matches(config: ConfigFile) -> bool:
    """Return whether the table quantization_config names this format."""
    return config.fields.get("quant_method") in ("compressed-tensors", "compressed_tensors")


@dataclass(frozen=True)
class Group:
    """How some matrices are stored."""

    targets: tuple[str, ...]  # names, patterns after "re:", or the class of a module
    format: str  # a key of READERS
    bits: int
    is_symmetric: bool
    group: int | None  # inputs that share a scale; None is all
    block: tuple[int, int] | None  # outputs and inputs that share a scale
    has_order: bool  # whether groups are of inputs that lie apart
    has_one_scale: bool  # whether the files may hold one scale for the matrix


@dataclass(frozen=True)
class CompressedTensors:
    """How the files of a checkpoint store matrices."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    unneeded: tuple[str, ...] = OF_ATTENTION  # as `Scheme` has them

    @classmethod
    def of(cls, config: ConfigFile) -> "CompressedTensors":
        """Read the table quantization_config.

        Raises:
            ValueError: a field is missing, has a wrong value, or is not supported.
        """
        for name in ("sparsity_config", "transform_config"):
            value = config.fields.get(name)
            is_dense = isinstance(value, dict) and value.get("format") == "dense"  # other fields then say how dense
            if value and not is_dense:
                raise config.refused(name)
        config.choice("quantization_status", STATUSES, default=STATUSES[0])
        whole = config.get("format", str, None)
        tables = config.table("config_groups")
        if not tables.fields and not config.fields.get("kv_cache_scheme"):
            raise ValueError(f"{config.where('config_groups')} must hold a group of matrices, got none")
        groups = tuple(_group(tables.table(name), whole) for name in tables.fields)
        return cls(groups, _strings(config, "ignore"))

    def is_quantized(self, linear: StoredLinear) -> bool:
        """Return whether a group has the matrix, and the files do not hold it, or a stack of this name, as floats."""
        is_float = linear.has(".weight", *FLOATS) or linear.has("", *FLOATS)
        return not is_float and self._group_of(linear) is not None

    def shape(self, linear: StoredLinear) -> tuple[int, ...]:
        """Return the shape of a matrix."""
        if linear.has(".weight"):
            return shape_in(linear)
        if linear.has(".weight_shape"):
            return tuple(linear.array(".weight_shape", (2,), "int64", "int32").tolist())
        in_element = 32 if linear.has(".weight_packed", "int32") else 8
        return shape_in(linear, ".weight_packed", in_element // self._of(linear).bits)

    def read(self, linear: StoredLinear) -> Quantized:
        """Read a matrix.

        Raises:
            ValueError: an array is missing, or has a wrong shape, dtype or value.
        """
        group = self._of(linear)
        return READERS[group.format](group, linear)

    def _of(self, linear: StoredLinear) -> Group:
        group = self._group_of(linear)
        assert group is not None, "is_quantized says so"
        return group

    def _group_of(self, linear: StoredLinear) -> Group | None:
        """Return the group of a matrix: its name goes before patterns, and patterns before classes.

        Targets have the names of the files, where the language model may be a part of another one.
        """
        names = dict.fromkeys([linear.stored_name(*CODES), linear.name])
        if any(_rank(target, next(iter(names))) is not None for target in self.ignored):
            return None
        ranked = [
            (rank, i)
            for i, group in enumerate(self.groups)
            for target in group.targets
            for name in names
            if (rank := _rank(target, name)) is not None
        ]
        return self.groups[min(ranked)[1]] if ranked else None


def _rank(target: str, name: str) -> int | None:
    """Return 0 where a target is the name, 1 where its pattern matches, 2 where it is the class, None otherwise."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], name) else None
    return 0 if target == name else 2 if target == MODULE else None


def _strings(table: ConfigFile, name: str) -> tuple[str, ...]:
    values = table.get(name, list, [])
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{table.where(name)} must be a list of strings, got {values!r}")
        if value.startswith("re:"):
            try:
                re.compile(value[3:])
            except re.error as error:
                raise ValueError(
                    f"{table.where(name)} must have patterns after 're:', got {value!r}: {error}"
                ) from error
    return tuple(values)


def _group(table: ConfigFile, whole: str | None) -> Group:
    """Return a group from its table; `whole` is the format that the checkpoint has where a group names none."""
    weights = table.table("weights")
    if not weights.fields:
        raise ValueError(f"{table.where('weights')} must say how the weights are stored, got none")
    if table.fields.get("output_activations"):
        raise table.refused("output_activations")
    table.table("input_activations").only("actorder", False)
    weights.only("dynamic", False)
    kind, bits = weights.choice("type", ("int", "float"), default="int"), weights.get("num_bits", int, 8)
    layout = table.get("format", str, None) or (None if whole == "mixed-precision" else whole)
    if layout == "naive-quantized":
        layout = f"{kind}-quantized"
    if layout not in READERS:
        known = " or ".join(repr(name) for name in READERS)
        raise ValueError(f"{table.where('format')} must be {known}, got {layout!r}")
    supported = BITS[layout]
    if (kind, bits) not in supported:
        expected = " or ".join(f"{b} bits of {k}" for k, b in supported)
        raise ValueError(f"{weights.where('num_bits')} must be {expected} for {layout!r}, got {bits} of {kind}")
    strategy = weights.choice(
        "strategy", STRATEGIES, default="tensor" if weights.get("group_size", int, None) is None else "group"
    )
    group = weights.get("group_size", int, None) if strategy in ("group", "tensor_group") else None
    if strategy == "group" and (group is None or (group < 1 and group != -1)):
        raise ValueError(f"{weights.where('group_size')} must be -1 or a number of inputs, got {group}")
    block = block_of(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and (block is None or layout != "float-quantized"):
        raise ValueError(f"{weights.where('strategy')} must have block_structure and 'float-quantized', got {layout!r}")
    order = weights.fields.get("actorder")
    if order not in (None, False, "group", "weight", "static", "dynamic"):
        raise ValueError(f"{weights.where('actorder')} must be 'group' or 'weight', got {order!r}")
    targets = _strings(table, "targets")
    if not targets:
        raise ValueError(f"{table.where('targets')} must name matrices, patterns or 'Linear', got none")
    return Group(
        targets,
        layout,
        bits,
        weights.get("symmetric", bool, True),
        None if group == -1 else group,
        block,
        order in ("group", "dynamic"),
        strategy == "tensor",
    )


def _scale_of(group: Group, linear: StoredLinear, ending: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
    """Read scales or zeros of this shape; one for the matrix stands for all, if its group says that there is one."""
    return (linear.scale if group.has_one_scale else linear.array)(ending, shape, *dtypes)


def _has_zeros(group: Group, linear: StoredLinear) -> bool:
    return not group.is_symmetric or linear.has(".weight_zero_point")


def _checked_zeros(group: Group, linear: StoredLinear, zero: np.ndarray, middle: int) -> np.ndarray | None:
    """Return the stored zeros of a matrix; None for a symmetric one, of which tools may store that they are 0.

    Raises:
        ValueError: a symmetric matrix has other zeros.
    """
    if not group.is_symmetric:
        return zero
    if (zero != middle).any():
        raise ValueError(
            f"tensor {linear.name}.weight_zero_point must be of zeros where `symmetric` is true, got others"
        )
    return None


def _read_pack(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight_packed` [N, K bits / 32] int32, whose zeros are packed along the outputs."""
    outputs, inputs = linear.shape
    if linear.has(".weight_shape"):
        stored = tuple(linear.array(".weight_shape", (2,), "int64", "int32").tolist())
        if stored != linear.shape:
            raise ValueError(f"tensor {linear.name}.weight_shape must be {linear.shape}, got {stored}")
    in_word, groups = 32 // group.bits, num_groups(inputs, group.group)
    words = linear.array(".weight_packed", (outputs, -(-inputs // in_word)), "int32")
    codes = unpack(words, group.bits, inputs)
    scale = _scale_of(group, linear, ".weight_scale", (outputs, groups), *FLOATS)
    zero = order = None
    if _has_zeros(group, linear):
        stored = linear.array(".weight_zero_point", (-(-outputs // in_word), groups), "int32")
        zero = _checked_zeros(group, linear, unpack(stored, group.bits, outputs, axis=0), 2 ** (group.bits - 1))
    if group.group is not None and (group.has_order or linear.has(".weight_g_idx")):
        order = order_of(linear, ".weight_g_idx", group.group)
        codes = codes if order is None else np.ascontiguousarray(codes[:, order])
    if group.bits == 8:
        codes, zero = signed(codes), None if zero is None else zero.astype(np.int16) - np.int16(128)
    return pack(codes, scale, bits=group.bits, group=group.group, zero=zero, order=order, dtype=linear.dtype)


def _read_int8(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight` [N, K] int8, in which codes of 4 bits have a byte each, too."""
    shape = linear.shape[0], num_groups(linear.shape[1], group.group)
    codes = linear.array(".weight", linear.shape, "int8")
    scale = _scale_of(group, linear, ".weight_scale", shape, *FLOATS)
    zero = None
    if _has_zeros(group, linear):
        zero = _checked_zeros(group, linear, _scale_of(group, linear, ".weight_zero_point", shape, "int8"), 0)
        zero = None if zero is None else zero.astype(np.int16)
    if group.bits == 4:
        if codes.min() < -8 or codes.max() > 7:
            raise ValueError(f"tensor {linear.name}.weight must be of codes in [-8, 7], got others")
        codes, zero = (codes + np.int8(8)).view(np.uint8), None if zero is None else zero + np.int16(8)
    return pack(codes, scale, bits=group.bits, group=group.group, zero=zero, dtype=linear.dtype)


def _read_float(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight` [N, K] of e4m3."""
    if group.group is None:
        return read_e4m3(linear, ".weight_scale", group.block)
    return read_e4m3(linear, ".weight_scale", (1, group.group))


def _read_mxfp8(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight` [N, K] of e4m3 with exponents."""
    return read_mxfp8(linear)


def _read_nvfp4(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight_packed` [N, K / 2] bytes with scales of e4m3, which one scale of the matrix divides."""
    return read_nvfp4(linear, ".weight_packed", scalar(linear, ".weight_global_scale"), divides=True)


def _read_mxfp4(group: Group, linear: StoredLinear) -> Quantized:
    """Read `weight_packed` [N, K / 2] bytes with exponents."""
    return read_mxfp4(linear, ".weight_packed")


READERS: dict[str, Callable[[Group, StoredLinear], Quantized]] = {  # by the name of the format
    "pack-quantized": _read_pack,
    "int-quantized": _read_int8,
    "float-quantized": _read_float,
    "nvfp4-pack-quantized": _read_nvfp4,
    "mxfp4-pack-quantized": _read_mxfp4,
    "mxfp8-quantized": _read_mxfp8,
}
BITS = {  # type and number of bits of the codes of each format
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 4), ("int", 8)),
    "float-quantized": (("float", 8),),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
    "mxfp8-quantized": (("float", 8),),
}
