"""Adapters as hosts write them, for the tests of the resource."""

from pin_jobs.chathouse.dialog_api import MailLimit, MailLimitAnswer


class Crm:
    """Says of every dialog that mails are left; `closed` counts how often one was closed."""

    closed = 0

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        return MailLimitAnswer(MailLimit.ALLOWED, f"{lady_api_id}, {man_ulid}")

    def close(self) -> None:
        Crm.closed += 1


class Plain:
    """Needs no closing."""

    def mail_limit(self, lady_api_id: str, man_ulid: str) -> MailLimitAnswer:
        raise NotImplementedError


class NoAdapter:
    """Something else."""


def fails() -> None:
    raise ValueError("s3cr3t")


def lacks_a_variable() -> None:
    raise KeyError("CRM_URL")
