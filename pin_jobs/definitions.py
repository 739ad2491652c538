"""What Dagster loads: jobs, sensors and resources, put together from the environment."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from dagster import AssetSpec, ConfigurableResource, Definitions, EnvVar, JobDefinition, SensorDefinition

from pin_jobs.chathouse.jobs import OPERATOR_CHECKS, build_post_chat_mail, build_post_chat_mail_backfill
from pin_jobs.chathouse.sensors import build_post_chat_mail_sensors
from pin_jobs.messenger.jobs import build_call_timeout_reaper, build_call_timeout_reaper_backfill
from pin_jobs.messenger.sensors import build_call_timeout_reaper_sensor
from pin_jobs.resources.dialog_api import DialogApiResource
from pin_jobs.resources.postgres import PostgresResource
from pin_jobs.resources.redis import RedisResource
from pin_jobs.settings import (
    CHATHOUSE_DATABASE_URL,
    DIALOG_API_ADAPTER,
    DIALOG_API_TOKEN,
    DIALOG_API_URL,
    MESSENGER_DATABASE_URL,
    REDIS_URL,
    Settings,
)

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
    assets: list[AssetSpec] = []
    resources: dict[str, Any] = {}
    if settings.has_messenger:
        reaper_options = settings.call_timeout_reaper
        database = PostgresResource(url=EnvVar(MESSENGER_DATABASE_URL))
        resources["messenger_database"] = database
        reaper = build_call_timeout_reaper(reaper_options, database)
        jobs += [reaper, build_call_timeout_reaper_backfill(reaper_options, database)]
        sensors.append(build_call_timeout_reaper_sensor(reaper, reaper_options, running=settings.sensors_run))
    else:
        _log.warning("call_timeout_reaper is left out: %s is not set", MESSENGER_DATABASE_URL)
    if settings.has_chathouse:
        mail_options = settings.post_chat_mail
        of_chathouse: dict[str, ConfigurableResource[None]] = {
            "chathouse_database": PostgresResource(url=EnvVar(CHATHOUSE_DATABASE_URL)),
            "redis": RedisResource(url=EnvVar(REDIS_URL)),
            "dialog_api": _dialog_api(settings),
        }
        resources |= of_chathouse
        mail = build_post_chat_mail(mail_options, of_chathouse)
        jobs += [mail, build_post_chat_mail_backfill(mail_options, of_chathouse)]
        sensors += build_post_chat_mail_sensors(mail, mail_options, running=settings.sensors_run)
        assets.append(OPERATOR_CHECKS)
    else:
        _log.warning("post_chat_mail is left out: %s is not set", CHATHOUSE_DATABASE_URL)
    return Definitions(jobs=jobs, sensors=sensors, assets=assets, resources=resources)


def _dialog_api(settings: Settings) -> DialogApiResource:
    options = settings.post_chat_mail
    is_own = settings.has_own_dialog_api
    return DialogApiResource(
        url="" if is_own else EnvVar(DIALOG_API_URL),
        token="" if is_own else EnvVar(DIALOG_API_TOKEN),
        adapter=EnvVar(DIALOG_API_ADAPTER) if is_own else "",
        timeout_seconds=options.dialog_api_timeout.total_seconds(),
        concurrency=options.dialog_api_concurrency,
    )


defs = build_definitions(os.environ)
