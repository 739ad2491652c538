"""A host whose database fails in a way that is no fault of any call."""

from collections.abc import Iterator
from contextlib import contextmanager

from pin_jobs_tests.factories import Messenger


@contextmanager
def broken(
    messenger: Messenger, table: str, *, how: str = "RAISE EXCEPTION 'the host is broken' USING ERRCODE = 'XX001'"
) -> Iterator[None]:
    """Whoever writes to this table meets an error that fails the whole batch."""
    messenger.run(
        f"""
        CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {how}; RETURN NEW; END $$;
        CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION public.fail();
        """
    )
    try:
        yield
    finally:
        messenger.run("DROP FUNCTION public.fail() CASCADE")
