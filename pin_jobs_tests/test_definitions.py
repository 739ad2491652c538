import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DefaultSensorStatus
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import serialize_value
from sqlalchemy import make_url

from pin_jobs.errors import PinJobsError
from pin_jobs_tests.conftest import PREFIXES

SECRET = "s3cr3t-of-the-url"


@pytest.fixture
def environment(pin_jobs_environment, monkeypatch):
    """What a host sets, with a password in it; the embedded server asks for none."""
    url = make_url(pin_jobs_environment["MESSENGER_DATABASE_URL"])
    if not url.password:
        url = url.set(password=SECRET)
    environment = {"MESSENGER_DATABASE_URL": url.render_as_string(hide_password=False)}
    monkeypatch.setenv("MESSENGER_DATABASE_URL", environment["MESSENGER_DATABASE_URL"])
    return environment


CHATHOUSE = {
    "CHATHOUSE_DATABASE_URL": "postgresql://h/d",
    "REDIS_URL": "redis://h",
    "DIALOG_API_URL": "https://h",
    "DIALOG_API_TOKEN": "t",
}


@pytest.fixture
def build_definitions(environment):
    assert environment
    return importlib.import_module("pin_jobs.definitions").build_definitions


def test_with_the_messenger_database_the_reaper_is_there(build_definitions, environment):
    repository = build_definitions(environment).get_repository_def()
    assert {job.name for job in repository.get_all_jobs()} == {"call_timeout_reaper", "call_timeout_reaper_backfill"}
    (sensor,) = repository.sensor_defs
    assert sensor.name == "call_timeout_reaper_sensor"
    assert sensor.default_status is DefaultSensorStatus.RUNNING
    assert sensor.minimum_interval_seconds == 4


def test_without_it_the_reaper_is_left_out_with_a_word(build_definitions, caplog):
    logging.getLogger("dagster").addHandler(caplog.handler)
    try:
        repository = build_definitions(CHATHOUSE).get_repository_def()
    finally:
        logging.getLogger("dagster").removeHandler(caplog.handler)
    assert not repository.has_job("call_timeout_reaper")
    assert {job.name for job in repository.get_all_jobs()} >= {"post_chat_mail", "post_chat_mail_backfill"}
    assert [sensor.name for sensor in repository.sensor_defs] == ["post_chat_mail_sensor"]
    assert "call_timeout_reaper is left out: MESSENGER_DATABASE_URL is not set" in caplog.text


def test_with_both_databases_all_four_jobs_are_there(build_definitions, environment):
    repository = build_definitions({**environment, **CHATHOUSE}).get_repository_def()
    assert {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")} == {
        "call_timeout_reaper",
        "call_timeout_reaper_backfill",
        "post_chat_mail",
        "post_chat_mail_backfill",
    }
    assert len(repository.sensor_defs) == 2


def test_sensors_may_start_stopped(build_definitions, environment):
    repository = build_definitions({**environment, "PIN_JOBS_SENSORS": "stopped"}).get_repository_def()
    assert [sensor.default_status for sensor in repository.sensor_defs] == [DefaultSensorStatus.STOPPED]


def test_options_reach_the_job_and_its_sensor(build_definitions, environment):
    variables = {"CALL_TIMEOUT_REAPER_RING_TIMEOUT": "50", "CALL_TIMEOUT_REAPER_POLLING_INTERVAL": "PT1M"}
    repository = build_definitions({**environment, **variables}).get_repository_def()
    assert repository.get_job("call_timeout_reaper").metadata["ring_timeout"].value == "50s"
    assert repository.sensor_defs[0].minimum_interval_seconds == 19


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no database is configured: set MESSENGER_DATABASE_URL"),
        ({"MESSENGER_DATABASE_URL": "mysql://u:p@h/d"}, "MESSENGER_DATABASE_URL is not a PostgreSQL URL"),
        (
            {"MESSENGER_DATABASE_URL": "postgresql://h/d", "CALL_TIMEOUT_REAPER_BATCH_SIZE": "0"},
            "CALL_TIMEOUT_REAPER_BATCH_SIZE is 0; allowed is 1 to 10000",
        ),
    ],
    ids=["nothing", "bad-url", "bad-option"],
)
def test_a_bad_environment_fails_the_load_in_one_line(build_definitions, variables, words):
    with pytest.raises(PinJobsError) as error:
        build_definitions(variables)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_dagster_shows_of_the_location_holds_no_password_and_no_address(build_definitions, environment):
    url = make_url(environment["MESSENGER_DATABASE_URL"])
    shown = serialize_value(RepositorySnap.from_def(build_definitions(environment).get_repository_def()))
    assert "call_timeout_reaper" in shown
    # The launchpad's defaults: the name of the variable, not its value.
    assert "MESSENGER_DATABASE_URL" in shown
    assert url.password not in shown
    assert url.database not in shown


def test_the_launchpad_shows_no_password(build_definitions, environment):
    # Of the other one the launchpad shows dry_run and batch_size only.
    job = build_definitions(environment).get_repository_def().get_job("call_timeout_reaper_backfill")
    schema = job.get_job_snapshot()
    shown = serialize_value(schema)
    assert make_url(environment["MESSENGER_DATABASE_URL"]).password not in shown
    defaults = [
        field.default_value_as_json_str
        for snap in schema.config_schema_snapshot.all_config_snaps_by_key.values()
        for field in snap.fields or []
        if field.default_value_as_json_str
    ]
    assert any('{"env": "MESSENGER_DATABASE_URL"}' in default for default in defaults)


def spawn(*command, cwd=None, **variables):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*PREFIXES, "DAGSTER_"))}
    return subprocess.run(
        command, cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


def test_dagster_accepts_the_definitions(environment, tmp_path):
    program = Path(sys.executable).with_name("dagster")
    done = spawn(program, "definitions", "validate", "-m", "pin_jobs.definitions", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_dagster_shows_one_line_of_ours_when_nothing_is_configured(tmp_path):
    program = Path(sys.executable).with_name("dagster")
    done = spawn(program, "definitions", "validate", "-m", "pin_jobs.definitions", cwd=tmp_path)
    assert done.returncode != 0
    assert "no database is configured: set MESSENGER_DATABASE_URL" in done.stdout + done.stderr


def test_loading_the_location_imports_neither_the_sandbox_nor_what_only_migrations_need(environment):
    code = (
        "import sys, pin_jobs.definitions; "
        "unwanted = ('pin_jobs.sandbox', 'pin_jobs.migrations', 'psycopg2'); "
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = spawn(sys.executable, "-c", code, **environment)
    assert done.stdout.strip() == "[]", done.stderr
