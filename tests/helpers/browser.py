"""A real browser for the tests of pages: Debian's Chromium, driven by selenium.

selenium is not among the dependencies of the tests: `make browser` installs it in an environment of
its own and names that in CKPTCONV_SELENIUM. Where something is missing, the tests skip and say
what; with CKPTCONV_REQUIRE_BROWSER=1 they fail.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--force-prefers-reduced-motion",
)  # fmt: skip


def _chromium() -> str | None:
    """Chromium, or the Chrome that is made of it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def missing() -> str | None:
    """What a browser lacks here; None where there is one."""
    if _chromium() is None:
        return "chromium is not installed (make browser)"
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed (make browser)"
    if _selenium() is None:
        return "selenium is not installed (make browser)"
    return None


def _selenium() -> Any:
    place = os.environ.get("CKPTCONV_SELENIUM")
    if place and place not in sys.path:
        sys.path.append(place)
    try:
        return importlib.import_module("selenium.webdriver")
    except ImportError:
        return None


def require() -> None:
    """Skip without a browser, or fail where one is asked for."""
    if (what := missing()) is not None:
        if os.environ.get("CKPTCONV_REQUIRE_BROWSER"):
            pytest.fail(what)
        pytest.skip(what)


class Browser:
    """A browser with one page open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns, that is run in the page."""
        return self.driver.execute_script(script, *arguments)

    def open(self, page: Path, *, wide: int = 1280, high: int = 900, dark: bool = False) -> None:
        """Open a page in a window of so many pixels, and wait until it is drawn."""
        size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": wide < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.as_uri())
        # the data are inflated by the browser, which may go on after it has loaded the page
        with contextlib.suppress(AssertionError):
            self.wait("document.documentElement.dataset.ready === 'yes'", 20)
        assert self.run("return document.documentElement.dataset.ready") == "yes", self.console()

    def console(self) -> list[str]:
        """What the console says since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def click(self, selector: str, at: int = 0) -> None:
        self.driver.find_elements("css selector", selector)[at].click()

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def press(self, *keys: str) -> None:
        """Press keys by their names (ENTER, ARROW_DOWN), in what has the focus."""
        names = importlib.import_module("selenium.webdriver.common.keys").Keys
        chain = importlib.import_module("selenium.webdriver.common.action_chains").ActionChains
        chain(self.driver).send_keys(*(getattr(names, key, key) for key in keys)).perform()

    def wait(self, condition: str, seconds: float = 10) -> Any:
        """Wait until an expression of the page is true; its value."""
        script = """
            const [text, limit, done] = arguments;
            const asked = new Function("return " + text), start = performance.now();
            const look = () => {
                const found = asked();
                if (found || performance.now() - start > limit) done(found);
                else setTimeout(look, 10);
            };
            look();
        """
        self.driver.set_script_timeout(seconds + 5)
        found = self.driver.execute_async_script(script, condition, 1000 * seconds)
        assert found, f"{condition} is not so after {seconds} s"
        return found

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that a selector finds."""
        return list(
            self.run(
                "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)",
                selector,
            )
        )

    def picture(self) -> bytes:
        """The window as PNG."""
        return bytes(self.driver.get_screenshot_as_png())


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A new browser without a past, which goes with the block."""
    require()
    webdriver = _selenium()
    options = webdriver.ChromeOptions()
    options.binary_location = _chromium()
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = importlib.import_module("selenium.webdriver.chrome.service").Service(
        shutil.which("chromedriver")
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(driver)
        finally:
            driver.quit()
