"""Facts that must be the same in all processes, by name, so that an error can say which one differs."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version
import numpy as np

from specjax.parallel import of_one_device
from specjax.types import Model, Proposer, PyTree, Verifier

MAX_BYTES = 2**20  # of a parameter whose values are compared
OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def of_start(version: str, num_processes: int, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that are known before there are devices: versions, settings of JAX and the arguments."""
    found = {"num_processes": str(num_processes)}
    found |= {
        "version of specjax": version,
        "version of jax": jax.__version__,
        "version of jaxlib": jaxlib.version.__version__,
    }
    found |= {name: repr(value) for name, value in arguments.items()}
    found |= {name: repr(getattr(jax.config, name)) for name in OPTIONS}
    return found | {f"the variable {name}": repr(os.environ.get(name, "")) for name in VARIABLES}


def of_model(model: Model, verifier: Verifier) -> dict[str, str]:
    """Return the facts that are known once the target is loaded."""
    name = f"{getattr(verifier, '__module__', '')}.{getattr(verifier, '__qualname__', type(verifier).__name__)}"
    found = {"the kind of device": jax.local_devices()[0].device_kind, "the verifier": name}
    config = getattr(of_one_device(model), "config", None)
    if dataclasses.is_dataclass(config):
        fields = dataclasses.fields(config)
        found |= {f"{field.name} of the model": repr(getattr(config, field.name)) for field in fields}
    return found | _of_arrays("model", model.params)


def of_proposer(proposer: Proposer) -> dict[str, str]:
    """Return the facts that are known once the proposer is loaded."""
    found = {"the proposer": type(proposer).__name__, "num_draft_tokens": str(proposer.num_draft_tokens)}
    found |= {name: str(getattr(proposer, name, None)) for name in ("tree", "drafts_per_row")}
    return found | _of_arrays("proposer", proposer)


def _of_arrays(name: str, tree: PyTree) -> dict[str, str]:
    """Return the sizes of all arrays, and the values of arrays that are small and whole on every device.

    Small are the parameters of norms, which are others in another checkpoint.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = f"{jax.tree_util.keystr(path)} of the {name}"
        found[where] = f"{leaf.dtype.name}{list(leaf.shape)}"
        if leaf.size * leaf.dtype.itemsize <= MAX_BYTES and leaf.sharding.is_fully_replicated:
            content = np.asarray(leaf).tobytes()
            found[f"the values of {where}"] = hashlib.blake2b(content, digest_size=6).hexdigest()
    return found


def check_same(own: Mapping[str, str], other: Mapping[str, str], number: int) -> None:
    """Raise ValueError for the first of the own names whose value differs in the process with a number."""
    for name in [*own, *(name for name in other if name not in own)]:
        if own.get(name) != other.get(name):
            here, there = own.get(name, "nothing"), other.get(name, "nothing")
            raise ValueError(
                f"{name} must be the same in every process, got {here} in process 0 and {there} in process {number}"
            )
