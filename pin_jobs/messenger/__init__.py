"""The messenger context: the call timeout reaper."""
