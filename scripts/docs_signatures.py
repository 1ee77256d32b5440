"""An extension of the API reference: verifiers are shown with the signature of their callers, not of their cores."""

import importlib
import inspect
import re

import griffe


class PublicSignatures(griffe.Extension):
    """Give every function that `from_core` decorates the parameters that `help` shows."""

    def on_function(self, *, func: griffe.Function, **_) -> None:
        if not any("from_core" in str(decorator.value) for decorator in func.decorators):
            return
        module, _, name = func.path.rpartition(".")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
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
