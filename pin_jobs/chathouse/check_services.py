"""`pin-jobs check` for what the post-chat mail asks besides its database: Redis and the dialog API.

Neither passwords, tokens nor addresses are in a finding.
"""

from datetime import timedelta
from typing import Final

from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer, close, load_adapter
from pin_jobs.chathouse.redis_client import connect_to_redis
from pin_jobs.chathouse.redis_store import find_fault
from pin_jobs.contract import Finding, error, warning

# A dialog that cannot exist: the ULID is of 1970.
NOBODY: Final = ("pin-jobs-check", "0" * 26)
_REFUSED: Final = frozenset({401, 403})
_OK: Final = 200
# Of a proxy, or of an API in trouble: an answer all the same, but one that comes for every dialog.
_TROUBLE: Final = frozenset({407, 429})


def check_redis(url: str) -> list[Finding]:
    """Whether marks and stores can be read and written there.

    Raises:
        InvalidRedisUrl: the message shows nothing of it.
    """
    with connect_to_redis(url) as client:
        fault = find_fault(client)
    if fault is None:
        return []
    if fault.is_lasting:
        return [error(f"Redis {fault.words}, so no task is ever shown in an operator's store: correct REDIS_URL")]
    return [
        warning(
            f"Redis {fault.words}: checks go on without it; until it is back, dialogs without mail limits are asked "
            "for at every check, and new tasks are not shown in the operators' stores"
        )
    ]


def check_dialog_api(url: str, token: str, *, timeout: timedelta) -> list[Finding]:
    """Whether the API answers and takes the token: asks for the messages of a dialog that cannot exist.

    Raises:
        InvalidDialogApi: the message shows neither URL nor token.
    """
    # httpx takes a tenth of a second to import.
    from pin_jobs.chathouse.http_dialog_api import HttpDialogApi  # noqa: PLC0415  # see above

    with HttpDialogApi(url, token, timeout=timeout) as api:
        return _judged(*api.ask(*NOBODY))


def _judged(status: int | None, answer: MailLimitAnswer) -> list[Finding]:
    if status in _REFUSED:
        return [
            error(
                f"the token is refused by the dialog API (HTTP {status}), so every answer is unknown and no task is "
                "ever created: correct DIALOG_API_TOKEN"
            )
        ]
    if status is None:
        return [
            warning(
                f"the dialog API gives no answer ({answer.reason}): every answer is unknown, and no task is created, "
                "until it is back"
            )
        ]
    is_odd = status == _OK and answer.limit is MailLimit.UNKNOWN
    if is_odd or 300 <= status < 400 or status >= 500 or status in _TROUBLE:
        return [
            warning(
                f"the dialog API answers, but what it says counts as unknown ({answer.reason}): while that is so for "
                "every dialog, no task is created"
            )
        ]
    return []


def check_adapter(name: str) -> list[Finding]:
    """Whether the host's own adapter can be made. It is not asked: what that would do is its own affair.

    Raises:
        InvalidAdapter: it cannot.
    """
    close(load_adapter(name))
    return []
