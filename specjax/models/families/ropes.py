"""The fields of config.json that say how heads turn with the position, as transformers 4 or 5 writes them."""

import math
from functools import partial

from specjax.models.config_file import MAX_NUMBER, ConfigFile
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
    table = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    table.ignore(*ignored)
    return _of_table(config, table, head_size, theta, rotary_factor, kinds)


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
    scaling in rope_scaling, which sliding layers do not have.

    Args:
        config: config.json.
        head_sizes: D of each type.
        thetas: default base of each type.
        local: the field of older files with the base of sliding layers; None: it is rope_theta, too.
        rotary_factor: as `read` takes it.
        kinds: as `read` takes it.

    Raises:
        ValueError: a field is missing, has a wrong value, or is not supported.
    """
    if "rope_parameters" in config:
        both = config.table("rope_parameters")
        tables = {name: both.table(name) for name in TYPES}
        both.check_all_read()
        return {
            name: _of_table(config, table, head_sizes[name], thetas[name], rotary_factor, kinds)
            for name, table in tables.items()
        }
    full, sliding = TYPES
    table = config.table("rope_scaling")
    found = _of_table(config, table, head_sizes[full], thetas[full], rotary_factor, kinds)
    theta = config.number("rope_theta" if local is None else local, thetas[sliding])
    return {full: found, sliding: Rope(theta)}


read_fixed = partial(read, kinds=FIXED)


def _of_table(
    config: ConfigFile,
    rope: ConfigFile,
    head_size: int,
    theta: float,
    rotary_factor: float | None,
    kinds: tuple[str, ...],
) -> Rope:
    """Return how heads turn by the fields of a table, and those beside it; the arguments are as `read` takes them."""
    factor = 1.0
    if rotary_factor is None:
        for place in (config, rope):
            place.only("partial_rotary_factor", 1.0)
    else:
        factor = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", rotary_factor))
        if factor > 1:
            raise ValueError(f"{rope.where('partial_rotary_factor')} must be at most 1, got {factor}")
        rope.ignore("mrope_section", "mrope_interleaved")  # of text, all three positions are equal
    theta = (rope if "rope_theta" in rope else config).number("rope_theta", theta)
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", kinds, default="default")
    rope.only("type", kind)  # some checkpoints have both fields
    if kind == "proportional":
        pairs = int(factor * head_size // 2)
        found = Rope(theta, ProportionalScaling(pairs, rope.number("factor", 1.0)))
    else:
        size = int(head_size * factor)
        found = Rope(theta, _scaling(config, rope, kind, theta, size), size if factor != 1 else None)
    rope.ignore("original_max_position_embeddings")  # not all kinds use it
    rope.check_all_read()
    return found


def _scaling(config: ConfigFile, rope: ConfigFile, kind: str, theta: float, size: int) -> RopeScaling | None:
    """Return the scaling of this kind with its fields in `rope`, for heads of which `size` numbers turn."""
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "dynamic":
        if size <= 2:
            raise ValueError(f"{rope.path}: heads with dynamic rotation must turn more than 2 numbers, got {size}")
        return DynamicScaling(rope.number("factor"), config.size("max_position_embeddings"), theta)
    if kind == "yarn":
        return _yarn(config, rope, theta)
    if kind == "longrope":
        return _longrope(config, rope, size // 2)
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ValueError(f"{rope.where('low_freq_factor')} must be below high_freq_factor = {high}, got {low}")
    return Llama3Scaling(factor, low, high, _original_length(config, rope))


def _original_length(config: ConfigFile, rope: ConfigFile) -> int:
    """Return the number of positions of the training before the frequencies were scaled."""
    length = rope.size("original_max_position_embeddings", config.size("max_position_embeddings"))
    return config.size("original_max_position_embeddings", length)  # beside the table it goes first


def _factor(config: ConfigFile, rope: ConfigFile, length: int) -> float:
    """Return the factor by which the scaling lengthens rows."""
    found = rope.number("factor", None)
    return config.size("max_position_embeddings") / length if found is None else found


def _yarn(config: ConfigFile, rope: ConfigFile, theta: float) -> YarnScaling:
    """Return the scaling of YaRN with its fields in `rope`."""
    length = _original_length(config, rope)
    factor = _factor(config, rope, length)

    def gain(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1

    scale, of_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    given = rope.number("attention_factor", None)
    if given is None:
        given = gain(1.0) if scale is None or of_all is None else gain(scale) / gain(of_all)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return YarnScaling(factor, length, theta, fast, slow, rope.get("truncate", bool, True), given)


def _longrope(config: ConfigFile, rope: ConfigFile, num_pairs: int) -> LongRopeScaling:
    """Return the scaling of LongRoPE with its fields in `rope`."""

    def divisors(name: str) -> tuple[float, ...]:
        found = rope.get(name, list)
        if len(found) != num_pairs or not all(type(x) in (int, float) and 0 < x < MAX_NUMBER for x in found):
            raise ValueError(f"{rope.where(name)} must be {num_pairs} positive numbers, got {found!r}")
        return tuple(map(float, found))

    short, long = divisors("short_factor"), divisors("long_factor")
    length = _original_length(config, rope)
    factor, magnitude = _factor(config, rope, length), rope.number("attention_factor", None)
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return LongRopeScaling(short, long, length, magnitude)
