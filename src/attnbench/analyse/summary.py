"""The table and the closing sentence of `attnbench run`, for scripts: the rank of each record, and the words."""

from attnbench.results.sentences import closing, format_ratio
from attnbench.results.standings import Row, rank

__all__ = ["Row", "closing", "format_ratio", "rank"]
