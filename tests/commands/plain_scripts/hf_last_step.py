"""A script for the Trainer of transformers: hf_last_step.py FOLDER STEPS PACE_S

It has nothing of Chorusline in it. It goes on from its last checkpoint in FOLDER/out. Each rank
writes its process and the steps that it has taken, for whoever kills it from outside, and takes
PACE_S for each.
"""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

folder, num_steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
size = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(**size, intermediate_size=32))
words = torch.randint(0, 64, (48, 12), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": row, "labels": row.sum() % 2} for row in words]
arguments = TrainingArguments(
    output_dir=str(folder / "out"),
    per_device_train_batch_size=2,
    max_steps=num_steps,
    learning_rate=1e-2,
    save_steps=20,
    report_to=[],
    disable_tqdm=True,
    average_tokens_across_devices=False,
)
rank = arguments.process_index


class Writes(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        with (folder / f"steps-{rank}").open("a") as file:
            print(state.global_step, time.time(), file=file)
        time.sleep(pace_s)


trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[Writes()])
begun = get_last_checkpoint(folder / "out") if (folder / "out").is_dir() else None
(folder / f"pid-{rank}").write_text(str(os.getpid()))
trainer.train(resume_from_checkpoint=begun)
if rank == 0:
    total = sum(one.double().abs().sum().item() for one in model.parameters())
    print("begun", Path(begun).name.removeprefix("checkpoint-") if begun else 0)
    print(arguments.world_size, trainer.state.global_step, f"{total:.9f}")
