"""Post-chat mail: after a paid chat to which no mail was sent since, a task to write one."""
