"""What produces the numbers in docs/figures.md."""
