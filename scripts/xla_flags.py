"""Print the flags of XLA that halve the time of compiling the tests, which is most of all their time.

Tests of many samples run slower with them and ask for `compiler_options` of their own. XLA ends the process at a flag
that it does not know, so each flag is given only to the versions that know it.
"""

from importlib.metadata import version


def xla_flags() -> str:
    """Return the flags for the installed version of jaxlib."""
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    major, minor = map(int, version("jaxlib").split(".")[:2])
    if (major, minor) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


if __name__ == "__main__":
    print(xla_flags())
