"""An extension of the API reference: verifiers are shown with the signature of their callers, not of their cores."""

import importlib
import inspect
import re

import griffe

from specjax.verifiers.core import CoreVerifier


class PublicSignatures(griffe.Extension):
    """Give every verifier that is made of a core the parameters that `help` shows."""

    def on_function(self, *, func: griffe.Function, **_) -> None:
        module, _, name = func.path.rpartition(".")
        if not module.startswith("specjax.verifiers.") or func.parent is None or not func.parent.is_module:
            return
        verifier = getattr(importlib.import_module(module), name, None)
        if not isinstance(verifier, CoreVerifier):
            return
        signature = inspect.signature(verifier)
        func.parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    is_annotated, has_default = (x is not parameter.empty for x in (parameter.annotation, parameter.default))
    annotation = re.sub(r"[\w.]+\.", "", inspect.formatannotation(parameter.annotation))  # names without their modules
    return griffe.Parameter(
        parameter.name,
        annotation=annotation if is_annotated else None,
        kind=griffe.ParameterKind(parameter.kind.description),
        default=repr(parameter.default) if has_default else None,
    )
