"""Stand-ins for the tables that the messenger and the chathouse services own, for databases that have neither.

The contract is theirs; our migrations never create these tables.
"""

from pathlib import Path

from sqlalchemy import NullPool, create_engine


def create_messenger_tables(url: str) -> None:
    """Create the schema `messenger` with what the call timeout reaper touches; safe to repeat."""
    _execute(url, "messenger.sql")


def create_chathouse_tables(url: str) -> None:
    """Create the schema `chathouse` with what the post-chat mail touches; safe to repeat."""
    _execute(url, "chathouse.sql")


def _execute(url: str, name: str) -> None:
    script = (Path(__file__).parent / name).read_text(encoding="utf-8")
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.exec_driver_sql(script)
