"""Decoding from KV caches by kernels that split the keys of few queries over the whole device."""
