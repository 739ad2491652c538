"""Connections and options from the environment, validated in one go. Errors name the variable and show no secret."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

from pin_jobs.chathouse.options import PostChatMailOptions
from pin_jobs.database import parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.options import CallTimeoutReaperOptions

MESSENGER_DATABASE_URL: Final = "MESSENGER_DATABASE_URL"
CHATHOUSE_DATABASE_URL: Final = "CHATHOUSE_DATABASE_URL"
REDIS_URL: Final = "REDIS_URL"
DIALOG_API_URL: Final = "DIALOG_API_URL"
DIALOG_API_TOKEN: Final = "DIALOG_API_TOKEN"  # noqa: S105  # the name of a variable
DIALOG_API_ADAPTER: Final = "DIALOG_API_ADAPTER"
SENSORS: Final = "PIN_JOBS_SENSORS"


class InvalidSetting(PinJobsError):
    """A variable of the environment is malformed."""


class NothingConfigured(PinJobsError):
    """Neither database is configured, so there is nothing to do."""

    def __init__(self) -> None:
        super().__init__(
            f"no database is configured: set {MESSENGER_DATABASE_URL} (the call timeout reaper), "
            f"{CHATHOUSE_DATABASE_URL} (post-chat mail), or both"
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment says, checked. Of connections only whether they are configured: runs read them anew."""

    has_messenger: bool
    has_chathouse: bool
    sensors_run: bool
    call_timeout_reaper: CallTimeoutReaperOptions
    post_chat_mail: PostChatMailOptions
    has_own_dialog_api: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read and check every variable of pin_jobs; an empty one counts as not set.

        Raises:
            NothingConfigured: neither database URL is set.
            InvalidDatabaseUrl, InvalidSetting, InvalidOption: a value is malformed or out of its range.
        """
        configured = {name: value for name, value in environ.items() if value.strip()}
        for name in (MESSENGER_DATABASE_URL, CHATHOUSE_DATABASE_URL):
            if name in configured:
                parse_database_url(configured[name], variable=name)
        _check_url(configured, REDIS_URL, {"redis", "rediss", "unix"})
        _check_url(configured, DIALOG_API_URL, {"http", "https"})
        _check_dialog_api(configured)
        if CHATHOUSE_DATABASE_URL in configured:
            dialog_api = () if DIALOG_API_ADAPTER in configured else (DIALOG_API_URL, DIALOG_API_TOKEN)
            _require(configured, (REDIS_URL, *dialog_api))
        if not {MESSENGER_DATABASE_URL, CHATHOUSE_DATABASE_URL} & configured.keys():
            raise NothingConfigured
        return cls(
            has_messenger=MESSENGER_DATABASE_URL in configured,
            has_chathouse=CHATHOUSE_DATABASE_URL in configured,
            sensors_run=_sensors_run(configured),
            call_timeout_reaper=CallTimeoutReaperOptions.from_environment(environ),
            post_chat_mail=PostChatMailOptions.from_environment(environ),
            has_own_dialog_api=DIALOG_API_ADAPTER in configured,
        )


def _require(configured: Mapping[str, str], variables: Sequence[str]) -> None:
    if missing := [variable for variable in variables if variable not in configured]:
        raise InvalidSetting(f"{CHATHOUSE_DATABASE_URL} is set, and post_chat_mail needs {', '.join(missing)} too")


def _sensors_run(configured: Mapping[str, str]) -> bool:
    value = configured.get(SENSORS, "running").strip().lower()
    if value not in {"running", "stopped"}:
        raise InvalidSetting(f"{SENSORS} is {value[:40]!r}; allowed is running or stopped")
    return value == "running"


def _check_dialog_api(configured: Mapping[str, str]) -> None:
    url = urlsplit(configured.get(DIALOG_API_URL, "").strip())
    if "@" in url.netloc or url.query or url.fragment:
        raise InvalidSetting(
            f"{DIALOG_API_URL} holds more than host, port and path; the token belongs in {DIALOG_API_TOKEN}"
        )
    adapter = configured.get(DIALOG_API_ADAPTER, "").strip()
    if adapter and not re.fullmatch(r"[\w.]+:\w+", adapter):
        raise InvalidSetting(f"{DIALOG_API_ADAPTER} is {adapter[:80]!r}; its form is package.module:name")


def _check_url(configured: Mapping[str, str], variable: str, schemes: set[str]) -> None:
    if variable not in configured:
        return
    try:
        url = urlsplit(configured[variable].strip())
        usable = url.scheme in schemes and bool(url.netloc or url.path) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise InvalidSetting(
            f"{variable} is not a URL of the form {' or '.join(f'{s}://...' for s in sorted(schemes))}"
        )
