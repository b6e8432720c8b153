"""Compressed gradient exchange for Accelerate and the Hugging Face Trainer.

    accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
    attach(accelerator)                                               # before prepare: that is all
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    trainer = Trainer(model, TrainingArguments("runs"), train_dataset=data)
    attach(trainer, compressor="int8")                                # before train: that is all
    trainer.train()

What `attach` returns has the switch and the counters:

    attachment = attach(accelerator, compressor="powersgd", rank=4)
    attachment.disable()                     # uncompressed, on all ranks from the same step on
    attachment.enable()
    attachment.stats().bytes_sent
"""

from accelerate_commopt.attach import Attachment, attach
from accelerate_commopt.plugin import CommOptPlugin

__all__ = ["Attachment", "CommOptPlugin", "attach"]
