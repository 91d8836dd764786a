"""Public names for scripts that rank records themselves: see `attnbench.analyse.summary`."""
