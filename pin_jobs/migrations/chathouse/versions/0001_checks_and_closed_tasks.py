"""Which operator was checked when and by whom, and which activities were dealt with."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables of the post-chat mail."""
    op.create_table(
        "operator_checks",
        sa.Column("operator_id", sa.Text, primary_key=True),
        sa.Column("runner_started_at", _MOMENT, comment="the start of the runner that was checked last"),
        sa.Column("restored_since", _MOMENT, comment="the start of the runner whose history is in closed_tasks"),
        sa.Column("next_check", _MOMENT),
        sa.Column("last_completed", _MOMENT),
        sa.Column("requested_until", _MOMENT, comment="a run was asked for; after this, another one is"),
        sa.Column("lease_token", sa.Uuid, comment="whoever has it checks the operator"),
        sa.Column("lease_until", _MOMENT),
        schema="pin_jobs",
    )
    op.create_table(
        "closed_tasks",
        sa.Column("key", sa.Text, primary_key=True, comment="lady_db_id, man_ulid, and a moment or an event trigger"),
        sa.Column("event_at", _MOMENT, nullable=False, comment="of the activity; keys are pruned by it"),
        sa.Column("reason", sa.Text, nullable=False, comment="created, answered, or task for what history said"),
        sa.Column("remembered_at", _MOMENT, nullable=False, server_default=sa.text("clock_timestamp()")),
        schema="pin_jobs",
    )
    op.create_index("ix_closed_tasks_event_at", "closed_tasks", ["event_at"], schema="pin_jobs")
    op.create_table(
        "dialog_api_pause",
        sa.Column("singleton", sa.Boolean, sa.CheckConstraint("singleton"), primary_key=True),
        sa.Column("until", _MOMENT, nullable=False, comment="the dialog API asked not to be asked before"),
        schema="pin_jobs",
    )


def downgrade() -> None:
    """Drop what `upgrade` created."""
    for table in ("dialog_api_pause", "closed_tasks", "operator_checks"):
        op.drop_table(table, schema="pin_jobs")
