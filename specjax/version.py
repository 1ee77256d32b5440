"""The version of the distribution, for modules that `specjax/__init__.py` imports."""

__version__ = "0.1.0"
