"""The command line: `pin-jobs dev`, `migrate`, `check` and `quarantine`."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import click
from sqlalchemy import Engine

from pin_jobs.chathouse.check import check_chathouse
from pin_jobs.chathouse.check_services import check_adapter, check_dialog_api, check_redis
from pin_jobs.contract import Finding, Severity
from pin_jobs.database import connect_to, parse_database_url
from pin_jobs.errors import PinJobsError
from pin_jobs.messenger.check import check_messenger
from pin_jobs.messenger.quarantine import list_quarantine, release_from_quarantine
from pin_jobs.migrations import known_revisions, migrate_chathouse, migrate_messenger
from pin_jobs.moments import moment
from pin_jobs.settings import (
    CHATHOUSE_DATABASE_URL,
    DIALOG_API_ADAPTER,
    DIALOG_API_TOKEN,
    DIALOG_API_URL,
    MESSENGER_DATABASE_URL,
    REDIS_URL,
    NothingConfigured,
    Settings,
)


class _OneLineErrors(click.Group):
    """Shows our errors as one line; anything else is a fault of ours and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PinJobsError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pin-jobs")
def main() -> None:
    """Back-office jobs for Dagster: close calls nobody closed, ask for a mail after a paid chat."""


@main.command()
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port of the web UI.")
@click.option(
    "--data-dir",
    default=".pin_jobs",
    show_default=True,
    envvar="PIN_JOBS_DEV_DATA",
    type=click.Path(path_type=Path),
    help="Where the embedded servers keep their data between starts.",
)
def dev(port: int, data_dir: Path) -> None:
    """Run everything on this machine: embedded servers, call traffic, jobs and the web UI."""
    try:
        from pin_jobs.sandbox.dev import run_dev  # noqa: PLC0415  # the sandbox is an extra that production lacks
    except ImportError as error:
        if (error.name or "").startswith("pin_jobs"):
            raise
        raise click.ClickException(
            f"pin-jobs dev needs the sandbox extra ({error.name} is missing): pip install 'pin-jobs[sandbox]'"
        ) from None
    raise SystemExit(run_dev(data_dir, port))


@main.command()
def migrate() -> None:
    """Create or upgrade the schema pin_jobs in each configured database; safe to repeat, and to run twice at once."""
    urls = {name: _variable(name) for name in (MESSENGER_DATABASE_URL, CHATHOUSE_DATABASE_URL)}
    if not any(urls.values()):
        raise NothingConfigured
    for name, variable, upgrade in (
        ("messenger", MESSENGER_DATABASE_URL, migrate_messenger),
        ("chathouse", CHATHOUSE_DATABASE_URL, migrate_chathouse),
    ):
        if url := urls[variable]:
            before, after = upgrade(url)
            done = f"at {after}, nothing to do" if before == after else f"{before or 'no schema'} -> {after}"
            click.echo(f"{name}: {done}")
        else:
            click.echo(f"{name}: left out, {variable} is not set")


@main.command()
def check() -> None:
    """Compare what is configured with what the jobs need, a line each; exit 1 when something would break."""
    settings = Settings.from_environment(os.environ)
    is_well = True
    for name, variable, is_configured, checks in (
        ("messenger", MESSENGER_DATABASE_URL, settings.has_messenger, _messenger_checks(settings)),
        ("chathouse", CHATHOUSE_DATABASE_URL, settings.has_chathouse, _chathouse_checks(settings)),
    ):
        if not is_configured:
            click.echo(f"{name}: left out, {variable} is not set")
            continue
        for well, look in checks:
            is_well = _report(name, well, look) and is_well
    if not is_well:
        raise SystemExit(1)


# What there is to say when nothing was found, and what finds it.
_Check = tuple[str, Callable[[], Sequence[Finding]]]


def _messenger_checks(settings: Settings) -> Sequence[_Check]:
    def database() -> Sequence[Finding]:
        engine = _database(MESSENGER_DATABASE_URL, "check")
        return check_messenger(engine, settings.call_timeout_reaper, known_revisions("messenger"))

    return [("the database has all that call_timeout_reaper needs", database)]


def _chathouse_checks(settings: Settings) -> Sequence[_Check]:
    def database() -> Sequence[Finding]:
        engine = _database(CHATHOUSE_DATABASE_URL, "check")
        return check_chathouse(engine, settings.post_chat_mail, known_revisions("chathouse"))

    def dialog_api() -> Sequence[Finding]:
        timeout = settings.post_chat_mail.dialog_api_timeout
        return check_dialog_api(_variable(DIALOG_API_URL), _variable(DIALOG_API_TOKEN), timeout=timeout)

    def adapter() -> Sequence[Finding]:
        # As Dagster does, for an adapter in the working directory.
        sys.path.append(str(Path.cwd()))
        return check_adapter(_variable(DIALOG_API_ADAPTER))

    return [
        ("the database has all that post_chat_mail needs", database),
        ("Redis can be read and written", lambda: check_redis(_variable(REDIS_URL))),
        ("the adapter of the dialog API can be made; it was not asked anything", adapter)
        if settings.has_own_dialog_api
        else ("the dialog API answers", dialog_api),
    ]


def _report(context: str, well: str, look: Callable[[], Sequence[Finding]]) -> bool:
    """Show what is found, or that all is well; whether nothing would break."""
    try:
        findings = look()
    except PinJobsError as error:
        findings = [Finding(Severity.ERROR, str(error))]
    for finding in findings:
        click.echo(f"{finding.severity}: {context}: {finding.line}")
    if not findings:
        click.echo(f"ok: {context}: {well}")
    return not any(finding.severity is Severity.ERROR for finding in findings)


@main.group()
def quarantine() -> None:
    """Calls that could not be closed: what is wrong with them, and another try."""


@quarantine.command("list")
def show_quarantine() -> None:
    """Show the calls in quarantine, those that are there longest first; moments are UTC."""
    calls = list_quarantine(_messenger_database("quarantine"))
    if not calls:
        click.echo("No call is in quarantine.")
        return
    heading = ("call", "phase", "attempts", "first seen", "next attempt", "last error")
    rows = [
        (
            str(call.call_id),
            str(call.phase),
            str(call.attempts),
            moment(call.first_seen),
            moment(call.next_attempt),
            " ".join(call.last_error.split()),
        )
        for call in calls
    ]
    click.echo("\n".join(_aligned([heading, *rows])))


@quarantine.command("release")
@click.argument("call_ids", metavar="CALL_ID...", nargs=-1, type=click.UUID)
@click.option("--all", "everything", is_flag=True, help="Release every call in quarantine.")
def release(call_ids: tuple[UUID, ...], everything: bool) -> None:
    """Let the next cycle take these calls like any other: once what ailed them is mended."""
    if everything == bool(call_ids):
        raise click.UsageError("name the calls to release, or say --all")
    released = set(release_from_quarantine(_messenger_database("quarantine"), None if everything else call_ids))
    click.echo(
        f"{len(released)} released; the next cycle takes {'it' if len(released) == 1 else 'them'} like any other."
    )
    if unknown := [str(call_id) for call_id in call_ids if call_id not in released]:
        raise click.ClickException(f"not in quarantine: {', '.join(unknown)}")


def _messenger_database(command: str) -> Engine:
    if not _variable(MESSENGER_DATABASE_URL):
        raise click.ClickException(f"{MESSENGER_DATABASE_URL} is not set")
    return _database(MESSENGER_DATABASE_URL, command)


def _database(variable: str, command: str) -> Engine:
    url = parse_database_url(_variable(variable), variable=variable)
    return connect_to(url, application_name=f"pin-jobs {command}")


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
