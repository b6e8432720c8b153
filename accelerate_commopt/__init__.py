"""The place of the adapter for Accelerate, which is not written yet."""
