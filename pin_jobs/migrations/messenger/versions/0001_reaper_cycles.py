"""The cycles of the call timeout reaper: what was committed, written with the work itself."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table of cycles; one row per committed cycle."""
    op.create_table(
        "reaper_cycles",
        sa.Column("run_id", sa.Text, primary_key=True, comment="the Dagster run; a run commits at most once"),
        sa.Column("as_of", sa.DateTime(timezone=True), nullable=False, comment="the database's clock under the lock"),
        sa.Column(
            "finished_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("clock_timestamp()"),
            comment="just before the commit",
        ),
        sa.Column("missed", sa.Integer, nullable=False, comment="calls closed in the phase ring_timeout"),
        sa.Column("failed", sa.Integer, nullable=False, comment="calls closed in the phase stale_answered"),
        sa.Column("skipped_locked_ring_timeout", sa.Integer, nullable=False),
        sa.Column("skipped_locked_stale_answered", sa.Integer, nullable=False),
        sa.Column(
            "poisoned", sa.Integer, nullable=False, comment="calls left as they are because of a fault of theirs"
        ),
        schema="pin_jobs",
    )
    op.create_index("ix_reaper_cycles_as_of", "reaper_cycles", ["as_of"], schema="pin_jobs")


def downgrade() -> None:
    """Drop what `upgrade` created."""
    op.drop_table("reaper_cycles", schema="pin_jobs")
