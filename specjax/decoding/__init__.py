"""The parts of the decoding loop in `specjax.decode`."""
