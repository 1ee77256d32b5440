"""Kernels of speculative decoding: one operation a file, arrays in, arrays out."""
