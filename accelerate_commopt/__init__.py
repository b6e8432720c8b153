"""Compressed gradient exchange for Accelerate."""
