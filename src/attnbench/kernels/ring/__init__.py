"""Ring attention: queries stay where their tokens are, keys and values travel, partial results merge by their LSE.

layouts, tiles and schedule are pure: who holds which tokens, what meets what, in which order. engine computes with any
kernel that has a partial form, transport carries, and the rest makes one cell of several ranks.
"""
