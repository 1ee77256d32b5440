"""The fields of config.json that say how heads turn with the position, as transformers 4 or 5 writes them."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from specjax.models.config_file import ConfigFile
from specjax.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

FIXED = "default", "linear", "llama3", "yarn"  # kinds that are the same for rows of every length
BY_LENGTH = "dynamic", "longrope"  # kinds that depend on the number of positions that a row has room for
KINDS = *FIXED, *BY_LENGTH
TYPES = "full_attention", "sliding_attention"  # of layers, with a table each


def read(
    config: ConfigFile,
    head_size: int,
    *,
    theta: float = 10000.0,
    rotary_factor: float | None = None,
    kinds: tuple[str, ...] = KINDS,
    ignored: tuple[str, ...] = (),
) -> Rope:
    """Return how the heads of all layers turn.

    Args:
        config: config.json.
        head_size: D.
        theta: default of the field rope_theta.
        rotary_factor: default of the field partial_rotary_factor; None supports whole heads alone.
        kinds: the values of rope_type that the network has.
        ignored: fields of the table that do not say how heads turn.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    table = _table(config)
    table.ignore(*ignored)
    base = _base(config, table, "rope_theta", theta)
    # Beside the table this length goes first.
    trained = config if "original_max_position_embeddings" in config.fields else table
    return _of_table(config, table, head_size, base, rotary_factor, kinds, trained)


def read_types(
    config: ConfigFile,
    head_sizes: dict[str, int],
    thetas: dict[str, float],
    *,
    local: str | None = None,
    rotary_factor: float | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> dict[str, Rope]:
    """Return how the heads of the layers of each of the two `TYPES` turn.

    transformers 5 writes a table for each type. Older files have the base of full attention in rope_theta and its
    scaling in rope_scaling, which sliding layers do not have. Both ways, a base that a table lacks stands beside it.

    Args:
        config: config.json.
        head_sizes: D of each type.
        thetas: default base of each type.
        local: the field of older files with the base of sliding layers; None: these have the default base.
        rotary_factor: as `read` takes it.
        kinds: as `read` takes it.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    full, sliding = TYPES
    both = config.table("rope_parameters")
    tables = {name: both.table(name) for name in TYPES}
    both.check_all_read()
    if "rope_parameters" not in config:
        tables[full] = config.table("rope_scaling")
    bases = {full: _base(config, tables[full], "rope_theta", thetas[full]), sliding: thetas[sliding]}
    if local is not None:
        bases[sliding] = _base(config, tables[sliding], local, thetas[sliding])
    for table in tables.values():
        table.only("truncate", True)  # transformers does not read it in these tables
        table.fields = table.fields | {"truncate": True}
    return {
        name: _of_table(config, table, head_sizes[name], bases[name], rotary_factor, kinds, table)
        for name, table in tables.items()
    }


read_fixed = partial(read, kinds=FIXED)


def read_side_by_side(config: ConfigFile, head_size: int, **options: Any) -> Rope:
    """Return how heads turn whose numbers that turn together stand side by side; the arguments are as in `read`."""
    return replace(read(config, head_size, **options), is_interleaved=True)


def _table(config: ConfigFile) -> ConfigFile:
    """Return the table that transformers 5 or, without it, transformers 4 reads; a file for both has them alike."""
    old, new = config.table("rope_scaling"), config.table("rope_parameters")
    if not new.fields:
        return old
    renamed = {"rope_type" if name == "type" else name: value for name, value in old.fields.items()}
    if any(name not in new.fields or new.fields[name] != value for name, value in renamed.items()):
        raise ValueError(
            f"{config.where('rope_scaling')} must be absent or say what rope_parameters says, got {old.fields} beside "
            f"{new.fields}"
        )
    return new


def _base(config: ConfigFile, table: ConfigFile, name: str, default: float) -> float:
    """Return the base of the frequencies that stands beside a table, in the field `name`, or its default."""
    if "rope_theta" not in table.fields:
        config.refuse_null(name)
    return config.number(name, default)


def _of_table(
    config: ConfigFile,
    rope: ConfigFile,
    head_size: int,
    theta: float,
    rotary_factor: float | None,
    kinds: tuple[str, ...],
    trained: ConfigFile,
) -> Rope:
    """Return how heads turn by the fields of a table, and those beside it.

    A field that is null has the same meaning as in transformers. Where that fails, it is an error here, too.

    Args:
        config: config.json.
        rope: the table.
        head_size: as `read` takes it.
        theta: base of the frequencies where the table has none.
        rotary_factor: as `read` takes it.
        kinds: as `read` takes it.
        trained: what has the field original_max_position_embeddings, `config` or `rope`.
    """
    rope.refuse_null("rope_type" if "rope_type" in rope.fields else "type", "rope_theta")
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", kinds, default="default")
    rope.only("type", kind)  # some checkpoints have both fields
    if kind != "default" or rotary_factor is not None:
        rope.refuse_null("partial_rotary_factor")
    factor = 1.0
    if rotary_factor is None:
        for place in (config, rope):
            place.only("partial_rotary_factor", 1.0)
    else:
        beside = config.unless_null("partial_rotary_factor", rotary_factor) or 1.0
        factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", beside))
        if factor > 1:
            raise ValueError(f"{rope.where('partial_rotary_factor')} must be at most 1, got {factor}")
        rope.ignore("mrope_section", "mrope_interleaved")  # of text, all three positions are equal
    theta = rope.number("rope_theta", theta)
    if kind == "proportional":
        pairs = int(factor * head_size // 2)
        found = Rope(theta, ProportionalScaling(pairs, rope.number("factor", 1.0)))
    else:
        size = int(head_size * factor)
        if factor != 1 and size % 2:
            raise ValueError(
                f"{rope.where('partial_rotary_factor')} must turn an even number of the {head_size} numbers of a head, "
                f"got {size}"
            )
        found = Rope(theta, _scaling(config, rope, kind, theta, size, trained), size if factor != 1 else None)
    rope.ignore("original_max_position_embeddings")  # not all kinds use it
    rope.check_all_read()
    return found


def _scaling(
    config: ConfigFile, rope: ConfigFile, kind: str, theta: float, size: int, trained: ConfigFile
) -> RopeScaling | None:
    """Return the scaling of this kind with its fields in `rope`, for heads of which `size` numbers turn."""
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "dynamic":
        if size <= 2:
            raise ValueError(f"{rope.path}: heads with dynamic rotation must turn more than 2 numbers, got {size}")
        return DynamicScaling(rope.number("factor"), config.size("max_position_embeddings"), theta)
    trained.refuse_null("original_max_position_embeddings")
    length = trained.size("original_max_position_embeddings", config.size("max_position_embeddings"))
    if kind == "yarn":
        return _yarn(config, rope, theta, length)
    if kind == "longrope":
        return _longrope(config, rope, size // 2, length)
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low > high:
        raise ValueError(f"{rope.where('low_freq_factor')} must be at most high_freq_factor = {high}, got {low}")
    return Llama3Scaling(factor, low, high, length)


def _factor(config: ConfigFile, rope: ConfigFile, length: int) -> float:
    """Return the factor by which the scaling lengthens rows."""
    found = rope.number("factor", None)
    return config.size("max_position_embeddings") / length if found is None else found


def _yarn(config: ConfigFile, rope: ConfigFile, theta: float, length: int) -> YarnScaling:
    """Return the scaling of YaRN with its fields in `rope`, given the positions of the training."""
    factor = _factor(config, rope, length)

    def gain(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    scale, of_all = (rope.number(name, None, may_be_zero=True) for name in ("mscale", "mscale_all_dim"))
    given = rope.number("attention_factor", None)
    if given is None:
        given = gain(scale) / gain(of_all) if scale and of_all else gain(1.0)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    truncate = rope.get("truncate", bool, "truncate" not in rope.fields)  # transformers takes null for false
    return YarnScaling(factor, length, theta, fast, slow, truncate, given)


def _longrope(config: ConfigFile, rope: ConfigFile, num_pairs: int, length: int) -> LongRopeScaling:
    """Return the scaling of LongRoPE with its fields in `rope`, given the positions of the training."""
    short, long = (rope.numbers(name, num_pairs) for name in ("short_factor", "long_factor"))
    factor, magnitude = _factor(config, rope, length), rope.number("attention_factor", None)
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return LongRopeScaling(short, long, length, magnitude)
