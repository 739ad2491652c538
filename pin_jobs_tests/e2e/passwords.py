"""A password that no page and no answer of the web server may show."""

from playwright.sync_api import Page, Response

PASSWORD = "s3cret-Pw"


def assert_no_password(page: Page, answers: list[Response]) -> None:
    """Neither the page as it stands nor what the server answered for it."""
    bodies = [answer.text() for answer in answers]
    assert any("call_timeout_reaper" in body for body in bodies), "the answers of the server were not looked at"
    assert [body for body in [*bodies, page.content()] if PASSWORD in body] == []
