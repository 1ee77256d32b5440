"""GPU kernels of speculative decoding: one operation a file, arrays in and arrays out. They import jax only."""
