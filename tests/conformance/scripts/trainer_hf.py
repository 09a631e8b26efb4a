"""A Hugging Face Trainer with a tiny Llama made of nothing, which goes on from its newest checkpoint."""

import argparse
import hashlib
import os
import threading

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Counting(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 32
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


class Stopping(TrainerCallback):
    """One rank stops at a step, once, and waits for its end."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            threading.Event().wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--jurymast", action="store_true", help="checkpoints by jurymast, not by the library")
    options = parser.parse_args()
    set_seed(11)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir="out", max_steps=8, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=2,
        save_strategy="no" if options.jurymast else "steps", save_steps=3, dataloader_num_workers=2, report_to=[], use_cpu=True, seed=11,
        eval_strategy="no", disable_tqdm=True, save_total_limit=2,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting(), callbacks=[Stopping(options.stop_at)])
    if options.jurymast:
        import jurymast_transformers

        jurymast_transformers.train(trainer, every=2)
    else:
        last = get_last_checkpoint("out") if os.path.isdir("out") else None
        trainer.train(resume_from_checkpoint=last)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("step", trainer.state.global_step, hashlib.sha256(weights).hexdigest())
    if trainer.is_world_process_zero():
        with open("weights.txt", "w") as file:
            file.write(f"{trainer.state.global_step} {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
