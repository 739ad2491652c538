"""The code location of a host beside ours: a sensor that never has anything to do, and a job that always fails."""

from dagster import DefaultSensorStatus, Definitions, SkipReason, in_process_executor, job, op, sensor


@op
def fail() -> None:
    raise RuntimeError("as always")


@job(executor_def=in_process_executor)
def failing_job_of_the_host() -> None:
    fail()


# Each time that the daemon looks at its sensors.
@sensor(job=failing_job_of_the_host, minimum_interval_seconds=1, default_status=DefaultSensorStatus.RUNNING)
def sensor_of_the_host() -> SkipReason:
    return SkipReason("nothing to do")


defs = Definitions(jobs=[failing_job_of_the_host], sensors=[sensor_of_the_host])
