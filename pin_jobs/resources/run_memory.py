"""The memory of a run, by which its ops hand each other values that live no longer than the run."""

from dagster import InMemoryIOManager, io_manager


@io_manager(description="Hands values from op to op, within the run.")
def run_memory() -> InMemoryIOManager:
    """For a job all of whose ops run in one process.

    As Dagster's own `mem_io_manager`. That one makes Dagster refuse a run "from failure" before ours can, with the
    advice to configure another IO manager, which is wrong for ops that share a transaction.
    """
    return InMemoryIOManager()  # type: ignore[no-untyped-call]  # Dagster has no types here
