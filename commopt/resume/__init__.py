"""States of a run: in host memory, to roll back to, and beside a checkpoint, to resume from."""
