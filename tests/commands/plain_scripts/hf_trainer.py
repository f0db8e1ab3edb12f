"""A script for the Trainer of transformers: hf_trainer.py FOLDER BATCH_SIZE

It has nothing of Chorusline in it.
"""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

folder, batch_size = Path(sys.argv[1]), int(sys.argv[2])
sharded = "SHARDED" in os.environ

torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
words = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(1))
samples = [{"input_ids": row, "labels": row.sum() % 2} for row in words]
arguments = TrainingArguments(
    output_dir=str(folder),
    per_device_train_batch_size=batch_size,
    num_train_epochs=4,
    learning_rate=1e-2,
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
    # The mean over the ranks, also with a model that takes no notice of num_items_in_batch.
    average_tokens_across_devices=False,
    save_strategy="no" if sharded else "steps",
)


optimizer = None
if sharded:
    # The Trainer's own AdamW decays nothing by default.
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.0
    )
trainer = Trainer(model, arguments, train_dataset=samples, optimizers=(optimizer, None))
trainer.train()
if arguments.process_index == 0:
    total = sum(one.double().abs().sum().item() for one in model.parameters())
    print(arguments.world_size, trainer.state.global_step, f"{total:.9f}")
