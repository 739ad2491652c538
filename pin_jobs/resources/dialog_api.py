"""The dialog API as a Dagster resource."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from dagster import ConfigurableResource
from pydantic import Field

from pin_jobs.chathouse.dialog_api import DialogApi, StageBounds, close, load_adapter


class DialogApiResource(ConfigurableResource[None]):
    """The API that says whether a lady may still write mails to a man; or a host's own adapter for another one.

    Give `token` as an `EnvVar`: Dagster shows a plain value in the launchpad.
    """

    url: str = Field(default="", description="Base URL, as an EnvVar: https://host:port/path.")
    token: str = Field(default="", description="Bearer token, as an EnvVar.")
    adapter: str = Field(
        default="",
        description="package.module:name of what makes a DialogApi when it is called, in place of url and token.",
    )
    timeout_seconds: float = Field(default=10.0, description="For one request in all, a second attempt included.")
    concurrency: int = Field(default=16, description="Requests of one run at a time.")

    @contextmanager
    def connect(self) -> Iterator[DialogApi]:
        """The API; what is under way at the end is broken off.

        Raises:
            InvalidDialogApi, InvalidAdapter: the message shows neither URL nor token.
        """
        if self.adapter.strip():
            api = load_adapter(self.adapter.strip())
        else:
            # Here because it costs time, which runs that ask for nothing need not spend.
            from pin_jobs.chathouse.http_dialog_api import HttpDialogApi  # noqa: PLC0415  # see above

            api = HttpDialogApi(self.url, self.token, timeout=timedelta(seconds=self.timeout_seconds))
        try:
            yield api
        finally:
            close(api)

    def bounds(self, deadline: timedelta) -> StageBounds:
        """What `ask_all` may take, with all requests of the run done within `deadline`."""
        return StageBounds(concurrency=self.concurrency, deadline=deadline)
