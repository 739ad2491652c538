"""Quarantine: the calls that cannot be closed, with one back-off for the whole cluster; and backfills in the record."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the quarantine; let a cycle's record say which day it backfilled."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "quarantined_calls",
        sa.Column("call_id", sa.Uuid, primary_key=True),
        sa.Column("phase", sa.Text, primary_key=True, comment="ring_timeout or stale_answered"),
        sa.Column("attempts", sa.Integer, nullable=False, comment="cycles that tried to close it and could not"),
        sa.Column("last_error", sa.Text, nullable=False),
        sa.Column("first_seen", moment, nullable=False),
        sa.Column("next_attempt", moment, nullable=False, comment="no cycle tries before; the database's clock"),
        sa.Column("run_id", sa.Text, nullable=False, comment="the Dagster run that tried last"),
        schema="pin_jobs",
    )
    op.add_column(
        "reaper_cycles",
        sa.Column("partition", sa.Text, comment="the day that a backfill closed; NULL for the live cycle"),
        schema="pin_jobs",
    )


def downgrade() -> None:
    """Drop what `upgrade` created."""
    op.drop_column("reaper_cycles", "partition", schema="pin_jobs")
    op.drop_table("quarantined_calls", schema="pin_jobs")
