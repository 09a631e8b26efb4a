"""A Lightning Trainer over all ranks, which goes on from its last checkpoint."""

import argparse
import hashlib
import os
import threading

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([index / 64]), torch.tensor([(index / 64) ** 2])


class Model(lightning.LightningModule):
    """One rank stops at a step, once, and waits for its end."""

    def __init__(self, stop_at):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.stop_at = stop_at

    def training_step(self, batch, index):
        if self.global_step == self.stop_at and self.global_rank == 1 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            threading.Event().wait()
        x, y = batch
        loss = (self.layers(x) - y).square().mean()
        print(self.trainer.current_epoch, self.global_step, f"{loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--jurymast", action="store_true", help="checkpoints by jurymast, not by the library")
    options = parser.parse_args()
    lightning.seed_everything(5, workers=True)
    if options.jurymast:
        import jurymast_lightning
        from torchdata.stateful_dataloader import StatefulDataLoader

        saving, kind = jurymast_lightning.Checkpoints(every=3), StatefulDataLoader
    else:
        saving, kind = ModelCheckpoint("out", save_last=True, save_top_k=1, save_on_train_epoch_end=True), DataLoader
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_epochs=3,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)), callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_checkpointing=not options.jurymast, use_distributed_sampler=False, limit_train_batches=4,
    )  # fmt: skip
    model = Model(options.stop_at)
    # Lightning's own sampler shuffles otherwise when a run goes on from a checkpoint.
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = DistributedSampler(Points(), world, rank, shuffle=False)
    loader = kind(Points(), batch_size=8, num_workers=2, sampler=sampler)
    last = "out/last.ckpt" if os.path.exists("out/last.ckpt") else None
    trainer.fit(model, loader, ckpt_path=last)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("step", trainer.global_step, hashlib.sha256(weights).hexdigest())
    if trainer.is_global_zero:
        with open("weights.txt", "w") as file:
            file.write(f"{trainer.global_step} {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
