"""What the lightning adapters share: a module, and a step that lets a lightning Trainer make one update."""

import logging
import warnings

import lightning
import torch

from tiny import K, Plain, cross_entropy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    """The usual: training_step returns the mean over its microbatch."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.net = Plain().to(dtype)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)  # stays from window to window
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def forward(self, tokens):
        """Logits."""
        return self.net(tokens)

    def training_step(self, batch, _):
        """The loss of a microbatch."""
        return cross_entropy(self(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self):
        """Optimizer and schedule, once an update."""
        return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step"}]


def fitted(model, **options):
    """A step that lets a lightning Trainer make one update."""

    def step(microbatches):
        lightning.Trainer(
            accelerator="cpu",
            accumulate_grad_batches=K,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        ).fit(model, torch.utils.data.DataLoader(microbatches, batch_size=None))

    return step
