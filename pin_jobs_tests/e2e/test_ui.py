"""The web UI as a person sees it, in a real browser, while the sensor is at work."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, Response, expect

from pin_jobs.moments import moment
from pin_jobs_tests.deployment import JOB, SENSOR, Deployment, deployment
from pin_jobs_tests.e2e.passwords import PASSWORD, assert_no_password
from pin_jobs_tests.factories import StoredCall, a_ringing_call, an_answered_call
from pin_jobs_tests.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, server: Any, messenger_template: str) -> Iterator[Deployment]:
    """With its sensor on, and a password that the server does not ask for."""
    with deployment(request.config, server, messenger_template, password=PASSWORD) as started:
        yield started


@pytest.fixture(scope="module")
def closed_calls(host: Deployment) -> list[StoredCall]:
    """Calls that one run closed."""
    calls = list(host.messenger.add(*(a_ringing_call(f"{50 + i}s") for i in range(3)), an_answered_call("5h", "3h")))
    wait_for(lambda: host.messenger.status(calls[0]) == "Missed", 60, "the calls to be closed")
    host.dagster.wait_for_status(run_that_closed(host, calls), "SUCCESS")
    return calls


def test_the_page_of_the_job_shows_its_ops_its_options_and_what_it_is_for(page: Page) -> None:
    page.goto(f"/locations/pin_jobs/jobs/{JOB}")

    for op in ("claim", "transition", "write_outbox"):
        expect(page.locator("svg").get_by_text(op, exact=True)).to_be_visible()
    expect(page.get_by_text("Close the calls that nobody closed")).to_be_visible()
    expect(page.get_by_role("row", name="ring_timeout 45s")).to_be_visible()


def test_the_page_of_a_run_shows_per_op_how_many_calls_and_which(
    page: Page, host: Deployment, closed_calls: list[StoredCall]
) -> None:
    page.goto(f"/runs/{run_that_closed(host, closed_calls)}?logs=type:STEP_OUTPUT")

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


def test_the_pages_of_the_resources_name_the_variable_and_show_no_password(page: Page, answers: list[Response]) -> None:
    page.goto("/locations/pin_jobs/resources")
    page.get_by_role("link", name="messenger_database").click()

    expect(page.get_by_role("cell", name="MESSENGER_DATABASE_URL")).to_be_visible()
    assert_no_password(page, answers)


def test_a_run_its_tags_and_its_configuration_show_no_password(
    page: Page, host: Deployment, closed_calls: list[StoredCall], answers: list[Response]
) -> None:
    page.goto(f"/runs/{run_that_closed(host, closed_calls)}")
    expect(page.get_by_text("RUN_SUCCESS")).to_be_visible()
    page.get_by_text("View tags and config").click()

    expect(page.get_by_role("dialog")).to_contain_text("pin_jobs/due: 4 calls")
    assert_no_password(page, answers)


def run_that_closed(host: Deployment, calls: list[StoredCall]) -> str:
    """The id of the one run that closed all of these calls."""
    (moment_of_closing,) = {host.messenger.call(call)["ended_at"] for call in calls}
    (run_id,) = {cycle["run_id"] for cycle in host.messenger.cycles() if cycle["as_of"] == moment_of_closing}
    return str(run_id)
