"""What a person does by hand in the web UI, in a real browser, while the sensor is off and leaves the calls alone."""

import re
from collections.abc import Iterator
from datetime import UTC
from typing import Any

import pytest
from playwright.sync_api import Page, Response, expect

from pin_jobs_tests.deployment import BACKFILL_JOB, JOB, Deployment, deployment
from pin_jobs_tests.e2e.passwords import PASSWORD, assert_no_password
from pin_jobs_tests.factories import a_ringing_call
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow

# A backfill takes no more calls a phase than this.
ROOM = 2


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """With its sensor off, and a password that the server does not ask for."""
    variables = {"PIN_JOBS_SENSORS": "stopped", "CALL_TIMEOUT_REAPER_BACKFILL_BATCH_SIZE": str(ROOM)}
    with deployment(request.config, server, messenger_template, password=PASSWORD, **variables) as started:
        yield started


@pytest.fixture(autouse=True)
def no_calls(host: Deployment) -> None:
    host.empty()


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
    (call,) = host.messenger.add(a_ringing_call("3d"))
    day = host.messenger.call(call)["started_at"].astimezone(UTC).date().isoformat()
    page.goto(f"/locations/pin_jobs/jobs/{BACKFILL_JOB}/partitions")
    page.get_by_role("button", name="Launch backfill").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_placeholder("ex: 20").fill(day)
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Submit 1 run").click()

    wait_for(lambda: host.messenger.status(call) == "Missed", 120, "the call to be closed")
    (run, *_) = host.dagster.run_ids(job=BACKFILL_JOB)
    host.dagster.wait_for_status(run, "SUCCESS")
    page.goto(f"/runs/{run}")
    expect(page.get_by_text(f"partition: {day}")).to_be_visible()
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()


def test_the_page_of_a_backfill_that_leaves_calls_of_its_day_says_how_many(page: Page, host: Deployment) -> None:
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
    assert_no_password(page, answers)


def _write_run_config(page: Page, *lines: str) -> None:
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.insert_text("\n".join(lines))
