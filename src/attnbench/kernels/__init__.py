"""Attention that attnbench computes itself: dilated, block-sparse, over KV caches, ring and chunked.

The lab reaches these kernels by name, through the registry, as it reaches every other library.
"""
