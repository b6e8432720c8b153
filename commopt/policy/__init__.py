"""The choice of a plan, from what was measured."""
