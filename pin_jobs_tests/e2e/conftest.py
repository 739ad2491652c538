"""A real browser on the web UI of a deployment, the fixture `host` of the module; and `pin-jobs dev`."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from pin_jobs_tests.deployment import Deployment
from pin_jobs_tests.e2e.dev_process import Dev

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing that a browser does on its own account, and no sandbox, which containers do not allow.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, host: Deployment, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Page]:
    """A page; what it shows at the end is kept as a screenshot, in PIN_JOBS_TEST_SCREENSHOTS if that is set."""
    folder = Path(os.environ.get("PIN_JOBS_TEST_SCREENSHOTS") or tmp_path)
    page = browser.new_page(base_url=host.dagster.url, viewport={"width": 1440, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    yield page
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{request.node.name}.png")
    page.close()


@pytest.fixture
def answers(page: Page) -> list[Response]:
    """Every answer of the web server's API to this page."""
    kept: list[Response] = []
    page.on("response", lambda response: kept.append(response) if "/graphql" in response.url else None)
    return kept


@pytest.fixture
def dev() -> Iterator[Dev]:
    with tempfile.TemporaryDirectory(prefix="pj_", ignore_cleanup_errors=True) as folder:
        dev = Dev(Path(folder) / "data")
        yield dev
        dev.clean_up()
