"""What Dagster loads: jobs, sensors and resources, put together from the environment."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from dagster import Definitions, EnvVar, JobDefinition, SensorDefinition

from pin_jobs.messenger.jobs import build_call_timeout_reaper, build_call_timeout_reaper_backfill
from pin_jobs.messenger.sensors import build_call_timeout_reaper_sensor
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.settings import CHATHOUSE_DATABASE_URL, MESSENGER_DATABASE_URL, Settings

# Below Dagster's own logger, so that the code server prints it.
_log = logging.getLogger("dagster.pin_jobs")


def build_definitions(environ: Mapping[str, str]) -> Definitions:
    """Put together the contexts whose database is configured.

    Raises:
        PinJobsError: nothing is configured, or a variable is malformed or out of its range.
    """
    settings = Settings.from_environment(environ)
    jobs: list[JobDefinition] = []
    sensors: list[SensorDefinition] = []
    resources: dict[str, Any] = {}
    if settings.has_messenger:
        options = settings.call_timeout_reaper
        database = PostgresResource(url=EnvVar(MESSENGER_DATABASE_URL))
        resources["messenger_database"] = database
        reaper = build_call_timeout_reaper(options, database)
        jobs += [reaper, build_call_timeout_reaper_backfill(options, database)]
        sensors.append(build_call_timeout_reaper_sensor(reaper, options, running=settings.sensors_run))
    else:
        _log.warning("call_timeout_reaper is left out: %s is not set", MESSENGER_DATABASE_URL)
    if settings.has_chathouse:
        _log.warning("nothing is loaded for %s: post_chat_mail is to come", CHATHOUSE_DATABASE_URL)
    return Definitions(jobs=jobs, sensors=sensors, resources=resources)


defs = build_definitions(os.environ)
