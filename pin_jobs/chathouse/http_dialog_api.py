"""The dialog API over HTTP, as docs/dialog-api.openapi.yaml describes it.

In a module of its own because httpx takes a tenth of a second to import: loaded only when something is to be asked.
"""

import asyncio
import os
import random
import re
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Annotated, Final, Literal, Self
from urllib.parse import quote, urlsplit

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer
from pin_jobs.chathouse.loop_thread import LoopClosed, LoopThread
from pin_jobs.errors import PinJobsError

MAX_BYTES: Final = 4 * 1024 * 1024
"""What is read of an answer: tens of thousands of messages."""

# Of a proxy, or of the API about our token or our pace: they concern every dialog.
_OUTAGE_STATUSES: Final = frozenset({401, 403, 407, 429, 502, 503, 504})
_RETRY_AFTER_STATUSES: Final = frozenset({429, 503})
_WORDS: Final = {
    401: "the token is not accepted",
    403: "the token is not accepted",
    404: "no such dialog",
    429: "too many requests",
    503: "out of service",
}
_LONGEST_PAUSE: Final = timedelta(days=365)
_RETRY_DELAY_SECONDS: Final = (0.05, 0.3)
# The next request of a stage follows at once; an idle connection is closed before the server thinks of it.
_KEEP_ALIVE_SECONDS: Final = 2.0


class InvalidDialogApi(PinJobsError):
    """The base URL or the token of the dialog API cannot be used; the message shows nothing of either."""


class HttpDialogApi:
    """Asks the API at `url`; thread-safe. A context manager, or to be closed with `close`.

    `timeout` bounds a request in all, from looking up the host's name to the last byte; `max_bytes` what is read of an
    answer. Redirects are not followed and proxies of the environment not used: the token goes to `url` alone.

    Raises:
        InvalidDialogApi: on construction.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: timedelta = timedelta(seconds=10),
        max_bytes: int = MAX_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._base = _checked_url(url)
        self._headers = {
            "Accept": "application/json",
            # What is small on the wire may be large in memory.
            "Accept-Encoding": "identity",
            "Authorization": f"Bearer {_checked_token(token)}",
            "User-Agent": "pin-jobs",
        }
        self._seconds = timeout.total_seconds()
        self._max_bytes = max_bytes
        # Below httpx's client, which follows netrc and the environment and logs every URL. Loading the certificates of
        # authorities takes time that http:// does not need.
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls or self._base.scheme == "https",
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_SECONDS),
        )
        self._loop = LoopThread()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Break off what is under way, which becomes `UNKNOWN`, and close the connections; within two seconds."""
        self._loop.close(self._transport.aclose())

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        """Ask for one dialog: one request, or two where the first could not even connect."""
        return self.ask(lady_api_id, man_ulid)[1]

    def ask(self, lady_api_id: str, man_ulid: str) -> tuple[int | None, MailLimitAnswer]:
        """The same, with the HTTP status before it: `None` where no answer came."""
        try:
            target = f"/dialogs/{_segment(lady_api_id)}/{_segment(man_ulid)}/messages"
            # httpx's own timeouts are for each read, and a server that sends a byte now and then would be waited for
            # for ever; this one is for all of it.
            received = self._loop.run(self._get(target), patience=self._seconds)
        except _NoSegment:
            return None, _unknown("an id that cannot stand in a URL")
        except (TimeoutError, httpx.TimeoutException):
            return None, _unknown(f"no answer within {self._seconds:g} s", is_outage=True)
        except httpx.HTTPError as error:
            return None, _unknown(_words_of(error), is_outage=True)
        except LoopClosed:
            return None, _unknown("broken off")
        except Exception as error:  # noqa: BLE001  # the libraries do not translate everything that a server can do
            return None, _unknown(f"the request failed ({type(error).__name__})", is_outage=True)
        return received.status, _read(received, self._max_bytes)

    async def _get(self, target: str) -> "_Received":
        try:
            return await self._send(target)
        except httpx.ConnectError as error:
            # It never reached the server, so once more is safe; a certificate does not get better.
            if _tls_error(error):
                raise
            await asyncio.sleep(random.uniform(*_RETRY_DELAY_SECONDS))  # noqa: S311  # jitter needs no secrecy
            return await self._send(target)

    async def _send(self, target: str) -> "_Received":
        raw_path = self._base.raw_path.rstrip(b"/") + target.encode()
        request = httpx.Request("GET", self._base.copy_with(raw_path=raw_path), headers=self._headers)
        request.extensions["timeout"] = httpx.Timeout(self._seconds).as_dict()
        response = await self._transport.handle_async_request(request)
        try:
            body = bytearray()
            if response.status_code == httpx.codes.OK:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self._max_bytes:
                        break
            return _Received(response.status_code, response.headers, bytes(body))
        finally:
            # What was not read of the answer goes with its connection.
            await response.aclose()


@dataclass(frozen=True, slots=True)
class _Received:
    """Status and headers, and as much of the body as was read: none but of a 200."""

    status: int
    headers: httpx.Headers
    body: bytes


def _read(received: _Received, max_bytes: int) -> MailLimitAnswer:
    if received.status != httpx.codes.OK:
        return _refusal(received.status, received.headers)
    if fault := _fault_of_body(received, max_bytes):
        return _unknown(fault)
    try:
        available = _Answer.model_validate_json(received.body).mail_limit.available
    except ValidationError as error:
        return _unknown(_fault_of(error))
    return MailLimitAnswer(*((MailLimit.ALLOWED, "mails left") if available else (MailLimit.LIMITED, "no mails left")))


def _refusal(status: int, headers: httpx.Headers) -> MailLimitAnswer:
    words = _WORDS.get(status) or ("redirects are not followed" if 300 <= status < 400 else None)
    return MailLimitAnswer(
        MailLimit.UNKNOWN,
        f"HTTP {status}" + (f", {words}" if words else ""),
        paused_for=retry_after(headers) if status in _RETRY_AFTER_STATUSES else None,
        is_outage=status in _OUTAGE_STATUSES,
    )


def _fault_of_body(received: _Received, max_bytes: int) -> str | None:
    if received.headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
        return "a compressed answer, which was not asked for"
    if len(received.body) > max_bytes:
        return f"an answer of more than {max_bytes} bytes"
    return None if received.body.strip() else "an empty answer"


def retry_after(headers: httpx.Headers, now: datetime | None = None) -> timedelta | None:
    """How long `Retry-After` asks to wait: seconds, or a date, which is held against the answer's own `Date`.

    `now` stands in for a `Date` that is missing; this machine's clock unless given. `None` without a usable header.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]+", value):
        return min(timedelta(seconds=int(value[-10:])), _LONGEST_PAUSE) if len(value) <= 10 else _LONGEST_PAUSE
    until = _http_date(value)
    if until is None:
        return None
    answered = _http_date(headers.get("date", "")) or now or datetime.now(UTC)
    return min(max(until - answered, timedelta(0)), _LONGEST_PAUSE)


def _http_date(text: str) -> datetime | None:
    with suppress(ValueError, TypeError, IndexError, OverflowError):
        moment = parsedate_to_datetime(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None


def _iso_8601(text: str) -> str:
    if "T" not in text:
        raise ValueError("a moment has a date and a time")
    datetime.fromisoformat(text)
    return text


class _Part(BaseModel):
    # Strict: "1", 1.0 and true are no integers. Fields that we do not know are ignored.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Message(_Part):
    id: str
    sender: Literal["man", "lady"]
    sent_at: Annotated[str, AfterValidator(_iso_8601)]


class _MailLimit(_Part):
    available: Annotated[int, Field(ge=0)]


class _Answer(_Part):
    messages: list[_Message]
    mail_limit: _MailLimit


def _fault_of(error: ValidationError) -> str:
    # Where and of which kind, never what was there: an answer may hold anything.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return "an answer that is no JSON"
    where = ".".join(map(str, first["loc"])) or "the whole"
    return f"an answer against the contract: {where} ({first['type']})"


def _unknown(reason: str, *, is_outage: bool = False) -> MailLimitAnswer:
    return MailLimitAnswer(MailLimit.UNKNOWN, reason, is_outage=is_outage)


class _NoSegment(Exception):
    """The id would change the path rather than stand in it."""


def _segment(text: str) -> str:
    if text in {"", ".", ".."}:
        raise _NoSegment
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise _NoSegment from None


def _checked_url(text: str) -> httpx.URL:
    form = "the URL of the dialog API is not of the form https://host:port/path"
    try:
        # Stricter than httpx about ports and brackets.
        port = urlsplit(text.strip()).port
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, ValueError):
        raise InvalidDialogApi(form) from None
    if url.scheme not in {"http", "https"} or not url.host or port == 0:
        raise InvalidDialogApi(form)
    if url.userinfo or url.query or url.fragment:
        raise InvalidDialogApi("the URL of the dialog API holds more than host, port and path; the token goes apart")
    return url


def _checked_token(text: str) -> str:
    token = text.strip()
    # Said here, since the HTTP library would quote it.
    if not re.fullmatch(r"[!-~]+", token):
        raise InvalidDialogApi("the token of the dialog API is empty or holds what no header can")
    return token


def _words_of(error: httpx.HTTPError) -> str:
    if tls := _tls_error(error):
        return f"TLS failed ({tls.reason or type(tls).__name__})"
    if isinstance(error, httpx.ConnectError):
        # The system's words for its number only: those of the error itself may hold an address.
        causes = [cause for cause in _causes(error) if isinstance(cause, OSError) and cause.errno]
        number = causes[-1].errno if causes else None
        return f"cannot be reached ({os.strerror(number)})" if number and number > 0 else "cannot be reached"
    return f"the connection broke off ({type(error).__name__})"


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    return next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # One error for each of a host's addresses: any of them will do.
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
