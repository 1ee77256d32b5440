"""config.json of a checkpoint: fields of checked kinds and ranges, errors that name them."""

import fnmatch
import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_REQUIRED = object()
MAX_INT = 2**31 - 1
MAX_NUMBER = 1e30  # beyond it, float32 overflows

# Fields that change what some model computes, with their values that change nothing; null and False never do. A family
# that computes what a field asks for reads it, and in a checkpoint of any other family the field is refused. Fields of
# all other names are ignored: tools for training, conversion and serving leave many of them, transformers ignores them
# too, and what they may say of the architecture shows in the tensors, whose names and shapes must be those expected.
COMPUTATION: dict[str, tuple] = {
    "*expert*": (0,),
    "*lora_rank": (0,),  # of multi-head latent attention
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
    "layer_types": ("full_attention",),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_multipliers": (1,),
    "moe_*": (0,),
    "no_rope_layer*": (1,),  # a list with 1 for each layer that has rotary positions
    "parallel_attn": (),
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
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "scale_embedding": (),
    "sliding_window": (),
    "sparse_attention_config": (),
    "swiglu_limit": (),
    "use_alibi": (),
    "use_bidirectional_attention": (),
    "use_logn_attn": (),
}


class ConfigFile:
    """The fields of a JSON file. A field that is null takes its default, as an absent one does."""

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = ""):
        self.path = path
        self.fields = read_json(path) if fields is None else fields
        self._prefix = prefix
        self._known: set[str] = set()  # fields that have been read

    def where(self, name: str) -> str:
        """The name of a field and its file, for messages."""
        return f"{self._prefix}{name} in {self.path}"

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def _read(self, name: str) -> Any:
        self._known.add(name)
        return self.fields.get(name)

    def ignore(self, *names: str) -> None:
        """Count fields as read whose values change nothing in this checkpoint."""
        self._known.update(names)

    def check_computation(self) -> None:
        """Raise ValueError for a field of COMPUTATION that asks for something and that nothing has read."""
        for name, value in self._unread().items():
            for pattern, neutral in COMPUTATION.items():
                values = value if isinstance(value, list) else [value]
                if fnmatch.fnmatchcase(name, pattern) and not all(v in neutral for v in values):
                    raise self._refused(name, neutral)

    def check_all_read(self) -> None:
        """Raise ValueError for a field of any name that asks for something and that nothing has read."""
        for name in self._unread():
            raise self._refused(name, ())

    def _unread(self) -> dict[str, Any]:
        asks = {name: value for name, value in self.fields.items() if value is not None and value is not False}
        return {name: value for name, value in asks.items() if name not in self._known}

    def _refused(self, name: str, neutral: tuple) -> ValueError:
        expected = " or ".join(["absent", *map(repr, neutral)])
        return ValueError(
            f"{self.where(name)} must be {expected}: specjax does not compute what it asks for in this family, "
            f"got {reprlib.repr(self.fields[name])}"
        )

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A field of this type."""
        value = self._read(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.path} must have the field {self._prefix}{name}")
            return default
        if type(value) is not kind:
            raise ValueError(f"{self.where(name)} must be {kind.__name__}, got {value!r}")
        return value

    def size(self, name: str, default: Any = _REQUIRED, *, most: int = MAX_INT) -> int:
        """A field that is an integer in [1, most]."""
        value = self.get(name, int, default)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{self.where(name)} must be in [1, {most}], got {value}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A field that is a positive, finite number."""
        value = self._read(name)
        if type(value) is not int:
            value = self.get(name, float, default)
        if value is not None and not 0 < value < MAX_NUMBER:
            raise ValueError(f"{self.where(name)} must be positive and finite, got {value}")
        return None if value is None else float(value)

    def unless_null(self, name: str, default: Any) -> Any:
        """The default of a field in which null means none: None where it is null."""
        return None if name in self.fields and self.fields[name] is None else default

    def only(self, name: str, supported: bool | float | str) -> None:
        """Refuse a field that is neither absent nor the value that is supported."""
        value = self._read(name)
        if value is not None and (value != supported or isinstance(value, bool) != isinstance(supported, bool)):
            raise ValueError(f"{self.where(name)} must be {supported!r}, all that specjax supports, got {value!r}")

    def choice(self, name: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        """A field that is one of some words."""
        value = self.get(name, str, default)
        if value not in choices:
            supported = " or ".join(repr(choice) for choice in choices)
            raise ValueError(f"{self.where(name)} must be {supported}, all that specjax supports, got {value!r}")
        return value

    def table(self, name: str) -> "ConfigFile":
        """A field that is an object itself; an absent one is empty."""
        return ConfigFile(self.path, self.get(name, dict, {}), f"{self._prefix}{name}.")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"directory must hold {path.name}, got {path.parent}, which does not")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
