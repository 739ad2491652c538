"""What the ops of both contexts show in the UI, and the runs that they work in."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from dagster import DagsterRun, MetadataValue, TableColumn, TableMetadataValue, TableRecord, TableSchema

PARTITION_TAG: Final = "dagster/partition"
# A table is one row of Dagster's event log: enough to look at, not enough to hurt.
LONGEST_TABLE: Final = 500


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> TableMetadataValue:
    """The first rows as a table of the UI; the counts beside it tell how many there are in all.

    Columns whose name ends in `_seconds` hold floats, all others text.
    """
    records = [
        TableRecord(
            {name: value if isinstance(value, float) else str(value) for name, value in zip(columns, row, strict=True)}
        )
        for row in islice(rows, LONGEST_TABLE)
    ]
    schema = TableSchema(
        columns=[TableColumn(name, "float" if name.endswith("_seconds") else "string") for name in columns]
    )
    return MetadataValue.table(records, schema)


def is_whole(run: DagsterRun, ops: Collection[str]) -> bool:
    """Whether a run is for all of its job's ops: neither a subset, nor one again "from failure"."""
    chosen = run.step_keys_to_execute or run.resolved_op_selection
    return not chosen or set(chosen) == set(ops)
