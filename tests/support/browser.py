"""A headless Chromium, for tests of pages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


def browser_is_installed() -> bool:
    return CHROMIUM is not None and DRIVER is not None and find_spec("selenium") is not None


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, width: int = 1400, height: int = 1000) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = CHROMIUM
        for word in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--window-size={width},{height}",
        ):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.quit()

    def open(self, address: str) -> None:
        self.driver.get("about:blank")  # a change of what follows # alone would not load the page
        self.driver.get(address)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], object], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s; the page shows:\n{self.text('body')}")
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def click(self, selector: str) -> None:
        self.wait(lambda: self.run("return document.querySelector(arguments[0])?.checkVisibility()", selector))
        self.driver.find_element("css selector", selector).click()

    def console(self) -> list[str]:
        """Messages of the browser since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def origins(self) -> set[str]:
        """From where the page and all of its files were loaded."""
        names = self.run("return performance.getEntries().map((e) => e.name).filter((n) => n.includes('://'))")
        return {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, names)}

    @contextmanager
    def phone(self, *, dark: bool) -> Iterator[None]:
        """The window of a phone, 390 by 844 pixels."""
        size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    # ---- the table of runs

    def rows(self) -> list[str]:
        """Names of the runs in the table."""
        return self.run("return [...document.querySelectorAll('#table .name button')].map((b) => b.title)")

    def text_of_row(self, name: str) -> str:
        return self.run(f"return {_ROW}?.innerText ?? ''", name)

    def click_row(self, name: str) -> None:
        self.run(f"{_ROW}.querySelector('.name button').click()", name)

    def select(self, name: str, wanted: bool) -> None:
        self.wait(lambda: self.text_of_row(name))
        self.run(
            f"const box = {_ROW}.querySelector('input'); if (box.checked !== arguments[1]) box.click()", name, wanted
        )


_ROW = "[...document.querySelectorAll('#table tbody tr')].find((r) => r.querySelector('.name button')?.title === arguments[0])"
