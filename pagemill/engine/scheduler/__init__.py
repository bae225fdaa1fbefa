"""What runs in the next step, and what became of the last one."""
