"""LightningCLI says which key of a strategy it does not know. Here it says which one is meant, too."""

import functools
import inspect
import re
from importlib.util import find_spec
from typing import Any

from commopt.errors import unknown
from lightning_commopt import CommOptDDPStrategy

REFUSED = re.compile(r"\b(?:Option|Key) '(\w+)' is not (?:accepted|expected)")  # as old and new jsonargparse say it


def explain() -> None:
    """From now on, the nearest valid key stands in this process in the errors of a LightningCLI about ours."""
    if find_spec("jsonargparse") is None:
        return
    from jsonargparse import ArgumentParser

    error = ArgumentParser.error

    @functools.wraps(error)
    def explained(self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        refused = REFUSED.search(message) if CommOptDDPStrategy.__name__ in message else None
        if refused:
            keys = inspect.signature(CommOptDDPStrategy).parameters
            message = f"{message}\n{unknown('argument of the strategy:', refused[1], keys)}"
        return error(self, message, *args, **kwargs)

    ArgumentParser.error = explained  # type: ignore[method-assign]
