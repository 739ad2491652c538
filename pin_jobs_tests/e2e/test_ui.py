"""The web UI as a person sees it, in a real browser."""

import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from pin_jobs.messenger.batch import moment
from pin_jobs_tests.deployment import BACKFILL_JOB, JOB, SENSOR, UNFINISHED, Deployment, deployment
from pin_jobs_tests.factories import StoredCall, a_ringing_call, an_answered_call
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

PASSWORD = "s3cret-Pw"
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
# A backfill takes no more calls a phase than this.
ROOM = 2


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """With its sensor on, and a password that the server does not ask for."""
    variables = {"CALL_TIMEOUT_REAPER_BACKFILL_BATCH_SIZE": str(ROOM)}
    with deployment(request.config, server, messenger_template, password=PASSWORD, **variables) as started:
        yield started


@pytest.fixture(scope="module")
def closed_calls(host: Deployment) -> list[StoredCall]:
    """Calls that the first run closed."""
    calls = list(host.messenger.add(*(a_ringing_call(f"{50 + i}s") for i in range(3)), an_answered_call("5h", "3h")))
    wait_for(lambda: host.dagster.run_ids("SUCCESS"), 30, "the first run to succeed")
    return calls


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


def test_the_page_of_the_job_shows_its_ops_its_options_and_what_it_is_for(page: Page) -> None:
    page.goto(f"/locations/pin_jobs/jobs/{JOB}")

    for op in ("claim", "transition", "write_outbox"):
        expect(page.locator("svg").get_by_text(op, exact=True)).to_be_visible()
    expect(page.get_by_text("Close the calls that nobody closed")).to_be_visible()
    expect(page.get_by_role("row", name="ring_timeout 45s")).to_be_visible()


def test_the_page_of_a_run_shows_per_op_how_many_calls_and_which(
    page: Page, host: Deployment, closed_calls: list[StoredCall]
) -> None:
    page.goto(f"/runs/{_run_that_closed(host, closed_calls)}?logs=type:STEP_OUTPUT")

    counts = {
        "claim": {"ring_timeout_claimed": 3, "stale_answered_claimed": 1},
        "transition": {"missed": 3, "failed": 1, "poisoned": 0},
        "write_outbox": {"missed": 3, "failed": 1, "committed": "true"},
    }
    buttons = page.get_by_text("View full message")
    expect(buttons).to_have_count(len(counts))
    for position, (op, counted) in enumerate(counts.items()):
        buttons.nth(position).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(op)
        for name, count in counted.items():
            expect(dialog.get_by_role("row", name=f"{name} {count}", exact=True)).to_be_visible()
        for call in closed_calls:
            expect(dialog.get_by_role("cell", name=str(call.id), exact=True)).to_be_visible()
        if op != "write_outbox":
            dialog.get_by_text("Done").click()
            expect(dialog).to_have_count(0)


@pytest.mark.usefixtures("closed_calls")
def test_the_page_of_the_sensor_says_why_a_tick_asked_for_no_run(page: Page, host: Deployment) -> None:
    (call,) = host.messenger.add(a_ringing_call("-1h"))
    deadline = moment(host.messenger.call(call)["started_at"] + timedelta(seconds=45))
    reason = f"No call is due; the next deadline is {deadline}."
    wait_for(lambda: host.dagster.ticks()[0]["skipReason"] == reason, 20, "a tick after that call")
    page.goto(f"/locations/pin_jobs/sensors/{SENSOR}")

    page.get_by_role("button", name="0 runs requested").first.click()

    expect(page.get_by_role("dialog")).to_contain_text(f"Skip reason: {reason}")


def test_the_launchpad_explains_what_can_be_said_in_two_lines(page: Page) -> None:
    page.goto(f"/locations/pin_jobs/jobs/{JOB}/playground")

    expect(page.locator(".CodeMirror-code")).to_have_text(re.compile("dry_run: false"))
    for words in (
        "batch_size?: Int",
        "Calls per phase, 1 to 10000. When left out: 200",
        "dry_run?: Bool",
        "roll it back",
    ):
        expect(page.locator("main, #root").first).to_contain_text(words)
    expect(page.get_by_role("button", name="Launch Run")).to_be_enabled()


def test_the_launchpad_refuses_a_size_out_of_range_in_one_line(page: Page, host: Deployment) -> None:
    before = host.dagster.run_ids()
    page.goto(f"/locations/pin_jobs/jobs/{JOB}/playground")
    _write_run_config(page, "batch_size: 0")
    page.get_by_role("button", name="Launch Run").click()

    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("InvalidRunConfig: batch_size is 0; allowed is 1 to 10000")
    expect(dialog).not_to_contain_text("The above exception")
    assert [run for run in host.dagster.run_ids() if run not in before] == []


def test_a_dry_run_from_the_launchpad_shows_what_it_would_have_done(page: Page, host: Deployment) -> None:
    with host.dagster.sensor_switched(on=False):
        wait_for(lambda: not host.dagster.run_ids(*UNFINISHED), 20, "runs to end")
        calls = host.messenger.add(*(a_ringing_call(f"{50 + i}s") for i in range(3)))
        page.goto(f"/locations/pin_jobs/jobs/{JOB}/playground")
        _write_run_config(page, "dry_run: true", "batch_size: 2")
        page.get_by_role("button", name="Launch Run").click()

        page.wait_for_url("**/runs/*")
        expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()
        page.goto(f"{page.url.partition('?')[0]}?logs=type:STEP_OUTPUT")
        page.get_by_text("View full message").last.click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("row", name="dry_run all of this was rolled back")).to_be_visible()
        expect(dialog.get_by_role("row", name="missed 2", exact=True)).to_be_visible()
        assert [host.messenger.status(call) for call in calls] == ["Ringing"] * 3


def test_a_day_can_be_backfilled_from_the_dialog(page: Page, host: Deployment) -> None:
    with host.dagster.sensor_switched(on=False):
        (call,) = host.messenger.add(a_ringing_call("3d"))
        day = host.messenger.call(call)["started_at"].astimezone(UTC).date().isoformat()
        page.goto(f"/locations/pin_jobs/jobs/{BACKFILL_JOB}/partitions")
        page.get_by_role("button", name="Launch backfill").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_placeholder("ex: 20").fill(day)
        page.keyboard.press("Enter")
        dialog.get_by_role("button", name="Submit 1 run").click()

        wait_for(lambda: host.messenger.status(call) == "Missed", 60, "the call to be closed")
    (run,) = host.dagster.run_ids(job=BACKFILL_JOB)[:1]
    host.dagster.wait_for_status(run, "SUCCESS")
    page.goto(f"/runs/{run}")
    expect(page.get_by_text(f"partition: {day}")).to_be_visible()
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()


def test_the_page_of_a_backfill_that_leaves_calls_of_its_day_says_how_many(page: Page, host: Deployment) -> None:
    with host.dagster.sensor_switched(on=False):
        calls = host.messenger.add(*(a_ringing_call("6d") for _ in range(ROOM + 3)))
        day = host.messenger.call(calls[0])["started_at"].astimezone(UTC).date().isoformat()
        run = host.dagster.launch(BACKFILL_JOB, partition=day)
        host.dagster.wait_for_status(run, "FAILURE")
    page.goto(f"/runs/{run}?logs=type:STEP_FAILURE")

    left = f"committed: {ROOM} missed, 0 failed. Calls of {day} still due: 3. Launch the day again"
    expect(page.get_by_text(left)).to_be_visible()
    page.get_by_text("View full message").click()
    expect(page.get_by_role("dialog").get_by_role("row", name="remaining 3", exact=True)).to_be_visible()


def test_the_launchpad_names_the_variable_and_shows_no_password(page: Page, answers: list[Response]) -> None:
    # That of the other job shows no connection at all.
    page.goto(f"/locations/pin_jobs/jobs/{BACKFILL_JOB}/playground")

    expect(page.locator(".CodeMirror-lines").get_by_text("MESSENGER_DATABASE_URL")).to_be_visible()
    expect(page.get_by_role("button", name="Launch Run")).to_be_enabled()
    _assert_no_password(page, answers)


def test_the_pages_of_the_resources_name_the_variable_and_show_no_password(page: Page, answers: list[Response]) -> None:
    page.goto("/locations/pin_jobs/resources")
    page.get_by_role("link", name="messenger_database").click()

    expect(page.get_by_role("cell", name="MESSENGER_DATABASE_URL")).to_be_visible()
    _assert_no_password(page, answers)


def test_a_run_its_tags_and_its_configuration_show_no_password(
    page: Page, host: Deployment, closed_calls: list[StoredCall], answers: list[Response]
) -> None:
    page.goto(f"/runs/{_run_that_closed(host, closed_calls)}")
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()
    page.get_by_text("View tags and config").click()

    expect(page.get_by_role("dialog")).to_contain_text("pin_jobs/due: 4 calls")
    _assert_no_password(page, answers)


def _write_run_config(page: Page, *lines: str) -> None:
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.insert_text("\n".join(lines))


def _run_that_closed(host: Deployment, calls: list[StoredCall]) -> str:
    live = [cycle for cycle in host.messenger.cycles() if cycle["partition"] is None]
    (cycle,) = [cycle for cycle in live if cycle["missed"] + cycle["failed"] == len(calls)]
    return str(cycle["run_id"])


def _assert_no_password(page: Page, answers: list[Response]) -> None:
    bodies = [answer.text() for answer in answers]
    assert any("call_timeout_reaper" in body for body in bodies), "the answers of the server were not looked at"
    assert [body for body in [*bodies, page.content()] if PASSWORD in body] == []
