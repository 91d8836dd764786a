"""Ring attention: queries stay where their tokens are, keys and values travel, partial results merge by their LSE.

`schedule` is pure arithmetic: which rank holds which tokens, and what it computes in each step. `work` computes one
step with any kernel that has a partial form; `engine` runs both passes of a rank and moves keys and values. `function`
is the user's call over a process group. `pool`, `rank` and `messages` start rank processes and drive them;
`torch_calls` makes one measured cell of several ranks, which `torch_ring` offers by name. `jax_*` are the same over a
mesh.
"""
