"""A small GPT that learns the Python standard library's sources, byte by byte, on CPUs.

This is an ordinary data-parallel training. The three lines with `checkpoint` make it survive failures, and
have the ranks that live go on in their processes. It ends with the same weights, bit for bit, however often
it was interrupted, and prints their hash. Run it with `jurymast submit`, with torchrun, or with python alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import jurymast

VOCABULARY = 256  # bytes
CORPUS_BYTES = 4_000_000
SEED = 20_250_101


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=64, metavar="N", help="bytes a sequence")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--save-every", metavar="CADENCE", help='"20 steps", "10m" or "auto"')
    parser.add_argument(
        "--step-time", type=float, default=0.0, metavar="S", help="least time a step takes, as big models do"
    )
    parser.add_argument("--print-every", type=int, default=10, metavar="N", help="steps between lines")
    return parser.parse_args()


class TransformerBlock(nn.Module):  # type: ignore[misc]  # torch's types are not followed
    """Attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):  # type: ignore[misc]
    """A decoder-only transformer over bytes; 0.8 million parameters at the default size."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats per byte, of `targets` given `tokens`; both are (batch,
        context)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.token.weight.T
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def read_corpus() -> torch.Tensor:
    """Return the first modules of the standard library, by name, as one tensor of bytes. Every Python has
    this text."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batch_at(
    corpus: torch.Tensor, step: int, rank: int, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, each (batch, context). They depend only on step and rank."""
    generator = torch.Generator().manual_seed(SEED + step * 65_536 + rank)
    starts = torch.randint(len(corpus) - context - 1, (batch,), generator=generator)
    rows = torch.stack([corpus[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def sha256_of(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes(tensor.detach().cpu().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def main() -> None:
    args = parse_arguments()
    # As use_deterministic_algorithms(True), but without its second of importing torch's compiler.
    torch.set_deterministic_debug_mode("error")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    torch.manual_seed(SEED)
    gpt = GPT(args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    corpus = read_corpus()
    checkpoint = jurymast.Checkpointer(
        {"model": gpt, "optimizer": optimizer, "schedule": schedule}, every=args.save_every
    )

    def train(start: int) -> None:
        model: nn.Module = gpt
        if distributed:
            # DDP would rebuild its buckets after its first step, and then sum the gradients of more than two
            # ranks in another order; a restart would show in the last bits. Looking for unused parameters
            # prevents that.
            model = nn.parallel.DistributedDataParallel(gpt, find_unused_parameters=True)
        if rank == 0:
            size = sum(parameter.numel() for parameter in gpt.parameters())
            print(f"{size / 1e6:.2f} million parameters, {world_size} ranks, from step {start}", flush=True)
        printed_at, printed_step = time.monotonic(), start
        due = 0.0
        for step in range(start, args.steps):
            # Not after the update: if a rank is lost between that and `checkpoint.step`, all go back to the
            # last save.
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + args.step_time
            tokens, targets = batch_at(corpus, step, rank, args.batch, args.context)
            loss = model(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if rank == 0 and ((step + 1) % args.print_every == 0 or step + 1 == args.steps):
                now = time.monotonic()
                count = (step + 1 - printed_step) * args.batch * args.context * world_size
                rate = count / max(now - printed_at, 1e-9)
                print(f"step {step + 1} loss {loss.item():.4f} {rate:.0f} tokens/s", flush=True)
                printed_at, printed_step = now, step + 1
            checkpoint.step(step + 1)

    checkpoint.run(train)
    if rank == 0:
        print(f"weights sha256 {sha256_of(gpt.state_dict())}", flush=True)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
