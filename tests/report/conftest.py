"""What several tests of the report need."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making Vega's script takes seconds; what the page does with it is tested in a browser."""
    monkeypatch.setattr("attnbench.report.html.page.vega_script", lambda: "window.vegaEmbed = null;")
