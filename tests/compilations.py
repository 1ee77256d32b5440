"""Counts of what JAX compiles."""

import threading

import jax
from jax._src import monitoring


class Compilations:
    """Counts programs that XLA compiles or loads from the cache, eager operations included; and traced functions."""

    def __enter__(self):
        self.number = self.number_in_threads = self.number_traced = 0
        jax.monitoring.register_event_duration_secs_listener(self.count)
        return self

    def count(self, event, duration, **kwargs):
        is_compilation = event == "/jax/core/compile/backend_compile_duration"
        self.number += is_compilation
        self.number_in_threads += is_compilation and threading.current_thread() is not threading.main_thread()
        self.number_traced += event == "/jax/core/compile/jaxpr_trace_duration"

    def __exit__(self, *error):
        monitoring.unregister_event_duration_listener(self.count)
