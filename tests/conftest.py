"""What all tests share: the living worker processes."""

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.workers import Workers

torch.set_num_threads(1)  # the other cores belong to the workers


@pytest.fixture
def handlers() -> Iterator[None]:
    """Some commands take over signals, as a process of its own may."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in signals]
    yield
    for signum, handler in zip(signals, before, strict=True):
        signal.signal(signum, handler)


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Processes that run a function on every rank of a fresh group: ``workers.run(fn, world=2, **kwargs)``."""
    living = Workers(tmp_path_factory.mktemp("workers"))
    yield living
    living.close()
