"""A training by one of the frameworks with an adapter. Each rank writes which samples it trained on in each
step, and their losses; rank 0 the weights of the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import jurymast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("framework", choices=["trainer", "tokens", "lightning", "manual", "accelerate"])
parser.add_argument("--out", type=Path, required=True, help="folder")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=31, help="of an epoch")
parser.add_argument("--batch", type=int, default=3, help="a rank's")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dispatch", action="store_true", help="rank 0 reads all batches, with Accelerate")
parser.add_argument("--save-every", default="1 steps")
parser.add_argument("--stop-at", type=int, default=-1, help="ends without a word once this step is saved")
parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")

WIDTH = 8
RATE = 0.2


class Points(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        labels = inputs.roll(1).tanh()
        labels[: index % 3] = -100  # tokens that do not count, of some samples more than of others
        return {"inputs": inputs, "labels": labels, "number": torch.tensor(index)}


class Model(torch.nn.Module):
    """Its loss is the mean over samples, or over all tokens of a step where their number is given."""

    main_input_name = "inputs"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.GELU(), torch.nn.Linear(16, WIDTH)
        )
        self.record: Callable[[Any, Any], None] = lambda number, loss: None

    def forward(self, inputs: Any, labels: Any, number: Any) -> dict[str, Any]:
        return {"loss": self.squares(inputs, labels, number).mean()}

    def squares(self, inputs: Any, labels: Any, number: Any) -> Any:
        """The loss of each sample."""
        found = ((self.layers(inputs) - labels).square() * (labels != -100)).sum(dim=1)
        self.record(number, found.detach())
        return found


class OfTokens(Model):
    def forward(
        self, inputs: Any, labels: Any, number: Any, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Any]:
        return {"loss": self.squares(inputs, labels, number).sum() / num_items_in_batch}


class Recorder:
    def __init__(self, asked: argparse.Namespace, step: Callable[[], int]) -> None:
        self._step = step
        self._file = (asked.out / f"{os.environ['RANK']}.samples").open("a")
        self._step_time, self._began = asked.step_time, time.monotonic()

    def __call__(self, number: Any, loss: Any) -> None:
        attempt = int(os.environ.get("JURYMAST_ATTEMPT", "0"))
        line = [self._step(), attempt, dist.get_world_size(), number.tolist(), loss.tolist()]
        print(json.dumps(line), file=self._file, flush=True)
        time.sleep(max(0.0, self._began + self._step_time - time.monotonic()))
        self._began = time.monotonic()


def stopping_at(step: int) -> None:
    """Have this process end once the state of the step is saved."""
    does = jurymast.Checkpointer.step

    def then_ends(self: Any, number: int, **counts: float) -> None:
        does(self, number, **counts)
        if number == step:
            dist.barrier()
            os._exit(0)

    jurymast.Checkpointer.step = then_ends  # type: ignore[assignment,method-assign]


def by_trainer(asked: argparse.Namespace) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    import jurymast_transformers

    model = (OfTokens if asked.framework == "tokens" else Model)()
    arguments = TrainingArguments(
        output_dir=str(asked.out / "trainer"), per_device_train_batch_size=asked.batch, report_to=[],
        use_cpu=True, seed=5, disable_tqdm=True, save_strategy="no", learning_rate=RATE, logging_steps=1,
        num_train_epochs=asked.epochs, gradient_accumulation_steps=asked.accumulate, optim="sgd",
        lr_scheduler_type="cosine", max_grad_norm=1e9, remove_unused_columns=False,
        include_num_input_tokens_seen="all", ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Points(asked.samples))
    model.record = Recorder(asked, lambda: int(trainer.state.global_step))
    jurymast_transformers.train(trainer, every=asked.save_every)
    log = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "weights": model.state_dict(),
        "curve": {line["step"]: [line["loss"], line["learning_rate"], line["epoch"]] for line in log},
        "tokens": trainer.state.num_input_tokens_seen,
    }


def by_lightning(asked: argparse.Namespace) -> dict[str, Any]:
    import lightning
    from torchdata.stateful_dataloader import StatefulDataLoader

    import jurymast_lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.automatic_optimization = asked.framework != "manual"
            self.curve: dict[int, Any] = {}

        def training_step(self, batch: Any, number: int) -> Any:
            self.curve[self.global_step + 1] = [self.optimizers().param_groups[0]["lr"], self.current_epoch]
            loss = self.model(**batch)["loss"]
            if not self.automatic_optimization:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
                self.lr_schedulers().step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE / 10, momentum=0.9)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=local, num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        max_epochs=asked.epochs, callbacks=[jurymast_lightning.Checkpoints(every=asked.save_every)],
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        accumulate_grad_batches=asked.accumulate,
    )  # fmt: skip
    module.model.record = Recorder(asked, lambda: int(trainer.global_step))
    trainer.fit(module, StatefulDataLoader(Points(asked.samples), batch_size=asked.batch, shuffle=True))
    return {"weights": module.model.state_dict(), "curve": module.curve}


def by_accelerate(asked: argparse.Namespace) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torchdata.stateful_dataloader import StatefulDataLoader

    import jurymast_accelerate

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=asked.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, dispatch_batches=asked.dispatch
        ),
    )  # fmt: skip
    loader: Any = StatefulDataLoader(
        Points(asked.samples), batch_size=asked.batch, shuffle=True,
        generator=torch.Generator().manual_seed(7),
    )  # fmt: skip
    inner = Model()
    model: Any = inner
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE / 10, momentum=0.9)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done = 0
    inner.record = Recorder(asked, lambda: done)
    checkpoint = jurymast_accelerate.checkpointer(accelerator, every=asked.save_every)
    done = checkpoint.restore()
    curve: dict[int, Any] = {}
    while loader.iteration < asked.epochs:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            curve[done] = [schedule.get_last_lr()[0]]
            checkpoint.step(done)
    return {"weights": inner.state_dict(), "curve": curve}


TRAININGS = {"trainer": by_trainer, "tokens": by_trainer, "lightning": by_lightning, "manual": by_lightning,
             "accelerate": by_accelerate}  # fmt: skip


def main() -> None:
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    stopping_at(asked.stop_at)
    found = TRAININGS[asked.framework](asked)
    if dist.get_rank() == 0:
        torch.save(found, asked.out / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
