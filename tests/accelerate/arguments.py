"""Arguments of a Hugging Face Trainer. Apart, since transformers takes long to import."""

import torch
from transformers import TrainingArguments


class OnCpu(TrainingArguments):
    """Without the index of the CPU, with which Trainers of transformers 4 cannot resume."""

    @property
    def device(self) -> torch.device:
        return torch.device(super().device.type)
