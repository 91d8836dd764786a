"""What several tests of the report need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import BROWSER, Opened


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making Vega's script takes seconds; what the page does with it is tested in a browser."""
    monkeypatch.setattr("attnbench.report.html.page.vega_script", lambda: "window.vegaEmbed = null;")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium's own sandbox needs rights that a container does not give; the page is ours.
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def shared(browser: Any, report: Path) -> Iterator[Opened]:
    """The module's own `report`, opened once."""
    opened = Opened(browser, report, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


@pytest.fixture
def opened(shared: Opened) -> Opened:
    """The same with nothing filtered."""
    shared.page.locator("button[type=reset]").click()
    return shared
