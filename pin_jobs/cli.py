"""The command line: `pin-jobs dev` and `pin-jobs migrate`."""

import os
from pathlib import Path

import click

from pin_jobs.errors import PinJobsError
from pin_jobs.migrations import migrate_messenger
from pin_jobs.settings import CHATHOUSE_DATABASE_URL, MESSENGER_DATABASE_URL, NothingConfigured


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
    urls = {name: os.environ.get(name, "").strip() for name in (MESSENGER_DATABASE_URL, CHATHOUSE_DATABASE_URL)}
    if not any(urls.values()):
        raise NothingConfigured
    if url := urls[MESSENGER_DATABASE_URL]:
        before, after = migrate_messenger(url)
        done = f"at {after}, nothing to do" if before == after else f"{before or 'no schema'} -> {after}"
        click.echo(f"messenger: {done}")
    else:
        click.echo(f"messenger: left out, {MESSENGER_DATABASE_URL} is not set")
    if urls[CHATHOUSE_DATABASE_URL]:
        click.echo("chathouse: nothing to do, pin_jobs keeps nothing there yet")
