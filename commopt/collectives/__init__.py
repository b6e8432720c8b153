"""Compressed collectives, in the manner of torch.distributed."""

from commopt.collectives.functional import all_gather, all_reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]
