"""The fields of a GGUF file that belong to its architecture."""

from dataclasses import dataclass
from typing import Any

from specjax.models.gguf.header import Header

_REQUIRED = object()
MAX_SIZE = 1 << 20  # of recurrent heads, and of their numbers


@dataclass(frozen=True)
class RecurrentSizes:
    """The sizes of layers that recur."""

    num_groups: int  # of heads
    num_heads: int
    state_size: int
    head_size: int
    conv_size: int


class Fields:
    """Give access to the fields of a file, by their names after the name of the architecture."""

    def __init__(self, header: Header):
        self.header, self.architecture = header, header.fields.get("general.architecture")

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return a field of a type, or its default; without a default the field is required."""
        full = f"{self.architecture}.{name}"
        value = self.header.fields.get(full)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not kind:
            got = "no such field" if value is None else repr(value)
            raise ValueError(f"{full} in {self.header.path} must be {kind.__name__}, got {got}")
        return value

    def of_layers(self, name: str, number: int, default: Any = _REQUIRED) -> list[int]:
        """Return a number for each layer, from a field with one for all of them or with a list."""
        found = self.header.fields.get(f"{self.architecture}.{name}")
        if not isinstance(found, list):
            return [self.get(name, int, default)] * number
        if len(found) != number or not all(type(n) is int for n in found):
            full = f"{self.architecture}.{name}"
            raise ValueError(f"{full} in {self.header.path} must be an integer, or {number} of them, got {found!r}")
        return found

    def numbers(self, name: str, number: int) -> list[float]:
        """Return a number for each layer, from a field whose name is not after the architecture's."""
        found = self.header.fields.get(name)
        if not isinstance(found, list) or len(found) != number or not all(type(x) is float for x in found):
            raise ValueError(f"{name} in {self.header.path} must be {number} numbers, got {found!r}")
        return found

    def slides(self, number: int, default: list[bool] | None = None) -> list[bool]:
        """Return for each layer whether it attends inside a window; without a default the field is required."""
        name = f"{self.architecture}.attention.sliding_window_pattern"
        found = self.header.fields.get(name, default)
        if not isinstance(found, list) or len(found) != number or not all(type(one) is bool for one in found):
            raise ValueError(f"{name} in {self.header.path} must be {number} times true or false, got {found!r}")
        return found

    def recurrent_sizes(self) -> RecurrentSizes:
        """Return the sizes of layers that recur, as files of all such architectures have them."""
        heads, inner = self.get("ssm.time_step_rank", int), self.get("ssm.inner_size", int)
        groups, state_size = self.get("ssm.group_count", int), self.get("ssm.state_size", int)
        for name, size, of in (
            ("group_count", groups, 1),
            ("state_size", state_size, 1),
            ("time_step_rank", heads, groups),
            ("inner_size", inner, heads),
        ):
            if not 1 <= size <= MAX_SIZE or size % of:
                place = f"{self.architecture}.ssm.{name} in {self.header.path}"
                raise ValueError(f"{place} must be a multiple of {of} in [1, {MAX_SIZE}], got {size}")
        return RecurrentSizes(groups, heads, state_size, inner // heads, self.get("ssm.conv_kernel", int))

    def yarn(self) -> dict[str, Any] | None:
        """Return the field rope_scaling of config.json where the file scales as YaRN does, else None."""
        if self.get("rope.scaling.type", str, "none") != "yarn":
            return None
        magnitude = self.get("rope.scaling.yarn_attn_factor", float, None)  # which the factor gives in most files
        return ({} if magnitude is None else {"attention_factor": magnitude}) | {
            "rope_type": "yarn",
            "factor": self.get("rope.scaling.factor", float),
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length", int),
            "beta_fast": self.get("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": self.get("rope.scaling.yarn_beta_slow", float, 1.0),
        }

    def only(self, name: str, *supported: Any) -> None:
        """Raise ValueError unless a field is absent or has a supported value."""
        value = self.header.fields.get(f"{self.architecture}.{name}")
        if value is not None and value not in supported:
            expected = " or ".join(map(repr, supported))
            raise ValueError(
                f"{self.architecture}.{name} in {self.header.path} must be {expected} or absent, got {value!r}"
            )
