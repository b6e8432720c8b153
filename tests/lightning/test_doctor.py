"""A fit that the doctor looks at."""

from pathlib import Path

import pytest

from commopt.doctor import VARIABLE, Diagnosis, Request
from tests.flights import made_up
from tests.lightning.fits import fit
from tests.workers import Workers

STEPS = 5


def examined(rank: int, world: int, file: str) -> object:
    """The exit status of a fit that the doctor ends."""
    with made_up(bandwidth=1e4), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, Request(STEPS, "safe", file).to_environment()[VARIABLE])
        try:
            fit(rank, world, "commopt_ddp_int8", count=20)
        except SystemExit as end:
            return end.code
    return "the fit went on"


def test_a_fit_ends_on_all_ranks_without_an_error(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    assert workers.run(examined, 2, file=str(file)) == [0, 0]
    assert Diagnosis.read(file).steps == STEPS
