"""A page in a real Chromium without a network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

BROWSER = os.environ.get("ATTNBENCH_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
NO_CHROMIUM = "no Chromium here: `make chromium` installs Debian's package"


class Opened:
    """A page with everything that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(offline=True, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]", timeout=60_000)

    def column(self, view: str, place: int) -> list[str]:
        return self.page.locator(f"[data-view={view}] tbody tr td:nth-child({place})").all_inner_texts()

    def headings(self, view: str) -> list[str]:
        return self.page.locator(f"[data-view={view}] thead th").all_inner_texts()

    def overflow(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
