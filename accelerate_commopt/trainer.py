"""The part that is for the Hugging Face Trainer: a callback, and where a training resumes from."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from accelerate_commopt.attach import Attachment

if TYPE_CHECKING:
    TrainerCallback = object
else:
    from transformers import TrainerCallback

PATIENCE = 1800.0  # seconds that a save waits for the main process, which writes the weights before


class CommOptCallback(TrainerCallback):
    """Loads, logs, saves and ends what watches a Trainer's model. `adopt` adds it."""

    def __init__(self, trainer: Any, attachment: Attachment) -> None:
        self.attachment = attachment
        self.resumes_from: str | None = None
        self.trial: Any = None
        self._trainer = trainer
        self._values: dict[str, float] = {}
        supervision = attachment.supervision
        if supervision.watching.directory is None:
            supervision.watching = replace(supervision.watching, directory=trainer.args.output_dir)
        supervision.log = self._keep
        # Older Trainers do not prepare the optimizer again when they train again, and none prepares the scheduler.
        supervision.optimizers = lambda: [trainer.optimizer]
        supervision.schedulers = lambda: [trainer.lr_scheduler]
        supervision.parts = lambda: float(getattr(trainer, "current_gradient_accumulation_steps", 1))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped now, and weights and optimizer are loaded."""
        model, plugin = self._trainer.model_wrapped, self.attachment.plugin
        wrapped = isinstance(model, DistributedDataParallel)
        if wrapped and all(module is not model.module for module, _ in plugin.models):
            plugin.register_comm_hook(model)  # older Trainers make Accelerate's handler of DDP anew before they wrap
        self.attachment.supervision.end()  # of a training that an error ended
        if self.resumes_from is not None:
            self.attachment.load(self.resumes_from)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What lies between epochs is no part of a step."""
        self.attachment.supervision.restart_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logs the windows that are complete, beside what the Trainer logs."""
        values, self._values = self._values, {}
        if values:
            due = control.should_log
            self._trainer.log(values)
            control.should_log = due  # the Trainer's own log of this step, which it thinks is done

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any) -> None:
        """Judges the validation loss."""
        if "eval_loss" in metrics:
            self.attachment.validation(metrics["eval_loss"])
        self.attachment.supervision.restart_clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves beside what the Trainer has saved, on all ranks."""
        if not args.save_only_model:
            folder = Path(self._trainer._get_output_dir(self.trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self.attachment.save(str(folder), PATIENCE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the watch. The exchange stays: the Trainer trains the same wrapped model when it is called again."""
        self.attachment.supervision.end()

    def _keep(self, values: Mapping[str, float], step: int) -> None:
        self._values |= values


def adopt(trainer: Any, attachment: Attachment) -> Attachment:
    """Lets ``trainer`` load, log, save and end what ``attachment`` watches."""
    callback = CommOptCallback(trainer, attachment)
    trainer.add_callback(callback)
    original = trainer.train

    @functools.wraps(original)
    def train(resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)  # type: ignore[no-untyped-call]
        callback.resumes_from, callback.trial = folder or None, trial  # no callback is told of them
        return original(resume_from_checkpoint, trial, *args, **kwargs)

    trainer.train = train
    return attachment


def adopt_all() -> None:
    """Makes every Trainer whose Accelerator has commopt adopt it when it begins to train."""
    if hasattr(Trainer.train, "_by_commopt"):
        return
    original = Trainer.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        attachment = getattr(self.accelerator, "_commopt", None)
        callbacks = self.callback_handler.callbacks
        if attachment is None or any(isinstance(each, CommOptCallback) for each in callbacks):
            return original(self, *args, **kwargs)
        adopt(self, attachment)
        return self.train(*args, **kwargs)

    train._by_commopt = True  # type: ignore[attr-defined]
    Trainer.train = train  # type: ignore[method-assign]
