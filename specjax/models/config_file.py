"""Read the fields of a checkpoint's config.json with checks of type and range; errors name the field and the file."""

import fnmatch
import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.models.diagnosis import check_not_pointer, lacks

_REQUIRED = object()
DTYPES = ("float32", "bfloat16", "float16")  # of parameters
MAX_INT = 2**31 - 1
MAX_NUMBER = 1e30  # beyond it, float32 overflows

# Patterns of field names that change the computation of some model, each with its neutral values. Null and False are
# always neutral. A family that implements a field reads it; a checkpoint of any other family is refused if it has that
# field with a value that is not neutral. All other unread fields are ignored, as transformers ignores them: tools for
# training, conversion and serving leave many, and a different architecture also shows in the names and shapes of the
# tensors, which are checked.
COMPUTATION: dict[str, tuple] = {
    "*expert*": (0,),
    "*lora_rank": (0,),  # rank in multi-head latent attention
    "*mup*": (),
    "*parallel_residual": (),
    "*qk*norm*": (),
    "*sliding_window_pattern": (),
    "*soft*cap*": (),
    "alibi": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_output_gate": (),
    "attn_temperature_tuning": (0,),
    "clip_qkv": (),
    "compression_config": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "embedding_scale": (1,),
    "interleaved_sliding_window": (),
    "key_multiplier": (1,),
    "layer_rope_theta": (),
    "layer_types": ("full_attention",),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_multipliers": (1,),
    "moe_*": (0,),
    "n_group": (1,),
    "norm_topk_prob": (),
    "no_rope_layer*": (1,),  # list with 1 for each layer with rotary positions
    "parallel_attn": (),
    "per_layer_config": (),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope", "rotary"),
    "quant*": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave*": (),
    "rope_local_base_freq": (),
    "rope_parameters": (),
    "rope_ratio": (1,),
    "rope_scaling": (),
    "rotary_dim": (),
    "routed_scaling_factor": (1,),
    "router_*": (),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "scale_embedding": (),
    "scoring_func": (),
    "sliding_window": (),
    "sparse_attention_config": (),
    "swiglu_*": (),
    "topk_group": (1,),
    "topk_method": (),
    "use_alibi": (),
    "use_bidirectional_attention": (),
    "use_logn_attn": (),
}


class ConfigFile:
    """Give access to the fields of a JSON file. Unless a method says otherwise, a null field counts as absent.

    Args:
        path: path of the file, for reading and for messages.
        fields: the fields; None reads them from the file.
        prefix: text before the names of fields in messages, for an object inside the file.
    """

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = ""):
        self.path = path
        self.fields = read_json(path) if fields is None else fields
        self._prefix = prefix
        self._read_names: set[str] = set()

    def where(self, name: str) -> str:
        """Return the name of a field together with its file, for messages."""
        return f"{self._prefix}{name} in {self.path}"

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def _read(self, name: str) -> Any:
        self._read_names.add(name)
        return self.fields.get(name)

    def ignore(self, *names: str) -> None:
        """Count fields as read because their values change nothing in this checkpoint."""
        self._read_names.update(names)

    def check_computation(self) -> None:
        """Raise ValueError if an unread field matches COMPUTATION and its value is not neutral."""
        for name, value in self.unread().items():
            for pattern, neutral in COMPUTATION.items():
                values = value if isinstance(value, list) else [value]
                if fnmatch.fnmatchcase(name, pattern) and not all(v in neutral for v in values):
                    raise self.refused(name, neutral)

    def check_all_read(self) -> None:
        """Raise ValueError if any unread field is neither null nor False."""
        for name in self.unread():
            raise self.refused(name, ())

    def unread(self) -> dict[str, Any]:
        """Return the fields that no method has read and that are neither null nor False."""
        unread = {name: value for name, value in self.fields.items() if name not in self._read_names}
        return {name: value for name, value in unread.items() if value is not None and value is not False}

    def refused(self, name: str, neutral: tuple = ()) -> ValueError:
        """Return the error for a field that nothing implements, unless it has a neutral value."""
        expected = " or ".join(["absent", *map(repr, neutral)])
        return ValueError(
            f"{self.where(name)} must be {expected}, because specjax does not implement it for this family, "
            f"got {reprlib.repr(self.fields[name])}"
        )

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return a field of type `kind`, or its default; without a default the field is required."""
        value = self._read(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.path} must have the field {self._prefix}{name}")
            return default
        if type(value) is not kind:
            raise ValueError(f"{self.where(name)} must be {kind.__name__}, got {value!r}")
        return value

    def size(self, name: str, default: Any = _REQUIRED, *, least: int = 1, most: int = MAX_INT) -> Any:
        """Return a field that must be an integer in [least, most], or its default, which may be None."""
        value = self.get(name, int, default)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{self.where(name)} must be in [{least}, {most}], got {value}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, may_be_zero: bool = False) -> Any:
        """Return a field that must be a positive, finite number, as a float; or its default, which may be None.

        With `may_be_zero` it may be zero, too.
        """
        value = self._read(name)
        if type(value) is not int:
            value = self.get(name, float, default)
        if value is not None and not 0 < value < MAX_NUMBER and not (may_be_zero and value == 0):
            raise ValueError(f"{self.where(name)} must be positive and finite, got {value}")
        return None if value is None else float(value)

    def numbers(self, name: str, number: int, default: Any = _REQUIRED) -> tuple[float, ...]:
        """Return a field that must be a list of `number` positive, finite numbers, as floats; or its default."""
        values = self.get(name, list, default)
        if len(values) != number or not all(type(x) in (int, float) and 0 < x < MAX_NUMBER for x in values):
            raise ValueError(f"{self.where(name)} must be {number} positive numbers, got {values!r}")
        return tuple(map(float, values))

    def replaced(self, **fields: Any) -> "ConfigFile":
        """Return these fields with other values of some, which count as not read."""
        other = ConfigFile(self.path, self.fields | fields, self._prefix)
        other._read_names = self._read_names - fields.keys()
        return other

    def with_defaults(self, **defaults: Any) -> "ConfigFile":
        """Return these fields with defaults for fields that are absent."""
        return self.replaced(**{name: value for name, value in defaults.items() if name not in self})

    def unless_null(self, name: str, default: Any) -> Any:
        """Return None if the field is null, else `default`: for a field whose null differs from its absence."""
        return None if name in self.fields and self.fields[name] is None else default

    def refuse_null(self, *names: str) -> None:
        """Raise ValueError for a field that is null, where that is not the absence of the field."""
        for name in names:
            if name in self.fields and self.fields[name] is None:
                raise ValueError(f"{self.where(name)} must be absent or have a value, got null")

    def only(self, name: str, supported: bool | float | str) -> None:
        """Raise ValueError unless the field is absent or has the supported value."""
        value = self._read(name)
        if value is not None and (value != supported or isinstance(value, bool) != isinstance(supported, bool)):
            raise ValueError(
                f"{self.where(name)} must be {supported!r}, the only value that specjax supports, got {value!r}"
            )

    def choice(self, name: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        """Return a field that must be one of some strings."""
        value = self.get(name, str, default)
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{self.where(name)} must be {supported}, the only values supported, got {value!r}")
        return value

    def strings(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field that must be a list of strings, or its default."""
        values = self.get(name, list, default)
        if name in self and not all(isinstance(value, str) for value in values):
            raise ValueError(f"{self.where(name)} must be a list of strings, got {values!r}")
        return values

    def table(self, name: str) -> "ConfigFile":
        """Return a field that is an object itself, as its own `ConfigFile`; it is empty if the field is absent."""
        return ConfigFile(self.path, self.get(name, dict, {}), f"{self._prefix}{name}.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, or its content is not an object.
    """
    if not path.is_file():
        raise lacks(path.parent, path.name)
    check_not_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
