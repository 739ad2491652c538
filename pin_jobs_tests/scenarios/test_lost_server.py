"""PostgreSQL restarts or crashes in the middle of a batch: one clear line, nothing half-done, the next cycle closes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from pin_jobs.database import DatabaseUnavailable
from pin_jobs.messenger.batch import Claim, CycleResult, ReapBatch
from pin_jobs.messenger.options import CallTimeoutReaperOptions
from pin_jobs_tests.conftest import Server
from pin_jobs_tests.factories import Messenger, a_ringing_call, an_answered_call
from pin_jobs_tests.scenarios.own_postgres import OwnPostgres, own_postgres

Lose = Callable[[OwnPostgres], None]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[OwnPostgres, Server, str]]:
    with own_postgres() as started:
        yield started


@pytest.fixture
def postgres(running: tuple[OwnPostgres, Server, str]) -> OwnPostgres:
    return running[0]


@pytest.fixture
def messenger(running: tuple[OwnPostgres, Server, str]) -> Iterator[Messenger]:
    _, server, template = running
    name = server.create(template)
    yield server.messenger(name)
    server.drop(name)


def restart(postgres: OwnPostgres) -> None:
    postgres.stop()
    postgres.start()


def crash(postgres: OwnPostgres) -> None:
    """Somebody else's session dies, and takes all others with it."""
    postgres.crash()


@pytest.mark.parametrize("lose", [restart, crash], ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("after", ["claim", "transition"])
def test_a_server_lost_in_the_middle_of_a_batch_fails_it_in_one_line_and_the_next_cycle_closes(
    postgres: OwnPostgres, messenger: Messenger, lose: Lose, after: str
) -> None:
    calls = messenger.add(a_ringing_call("46s"), an_answered_call("5h", "3h"))
    with closing(new_batch(messenger, "lost")) as batch:
        claim = batch.claim()
        assert isinstance(claim, Claim)
        if after == "claim":
            lose(postgres)
            with pytest.raises(DatabaseUnavailable) as error:
                batch.transition(claim)
        else:
            transitioned = batch.transition(claim)
            lose(postgres)
            with pytest.raises(DatabaseUnavailable) as error:
                batch.write_outbox(transitioned)
    assert str(error.value).startswith("the messenger database ")
    assert "\n" not in str(error.value)
    assert [messenger.status(call) for call in calls] == ["Ringing", "Answered"]
    assert messenger.outbox() == messenger.cycles() == messenger.locks() == []

    with closing(new_batch(messenger, "next")) as batch:
        claim = batch.claim()
        assert isinstance(claim, Claim)
        result = batch.write_outbox(batch.transition(claim))
    assert isinstance(result, CycleResult)
    assert [messenger.status(call) for call in calls] == ["Missed", "Failed"]
    assert len(messenger.outbox()) == 2


def new_batch(messenger: Messenger, run_id: str) -> ReapBatch:
    log = logging.getLogger("pin_jobs_tests")
    return ReapBatch(
        messenger.jobs_engine, CallTimeoutReaperOptions(), run_id=run_id, job_name="call_timeout_reaper", log=log
    )
