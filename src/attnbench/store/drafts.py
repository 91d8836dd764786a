"""`attnbench.drafts` under its older name; policies and suites, which lie below the store, write files too."""

from __future__ import annotations

from attnbench.drafts import draft_of, write_texts

__all__ = ["draft_of", "write_texts"]
