"""Compare the losses of fine-tuning with those of trl, on the same conversations from the same weights.

    python -m scripts.bench.learning.chat_losses FOLDER          # here
    python -m scripts.bench.learning.chat_losses FOLDER --trl    # there, where trl is installed

Both use the CPU in fp32, one batch of all conversations, and AdamW without decay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

STEPS, CONVERSATIONS, MICRO_BATCH = 4, 24, 2
LR = 1e-3


def llmscale(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "llmscale", *words], check=True)


def train_here(folder: Path) -> None:
    """Train one step of a base model, then fine-tune it, and print the losses."""
    draw = random.Random(0)
    records = []
    for number in range(CONVERSATIONS):
        turns = [{"role": "user", "content": f"count to {number}"}]
        turns.append({"role": "assistant", "content": " ".join(map(str, range(draw.choice((1, 2, 30)))))})
        records.append({"messages": turns})
    folder.mkdir(parents=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = ("--input", str(folder / "chats.jsonl"), "--tokenizer", "bytes", "--seq-len", "256", "--val-fraction", "0")
    llmscale("data", "prepare", "--chat", *data, "--packing", "pad", "--out", str(folder / "chats"))
    batch = ("--global-batch-size", str(CONVERSATIONS), "--micro-batch-size", str(MICRO_BATCH))
    flags = (*batch, "--data", str(folder / "chats"), "--model", "tiny-1m", "--precision", "fp32", "--ds", "zero1")
    flags += ("--schedule", "constant", "--warmup-steps", "0", "--weight-decay", "0", "--log-every", "1")
    flags += ("--val-every", "0", "--lr", str(LR))
    llmscale("train", "--run", str(folder / "base"), "--steps", "1", *flags)
    llmscale("export", str(folder / "base"), "--to", str(folder / "exported"))
    llmscale("train", "--run", str(folder / "run"), "--init-from", str(folder / "base"), "--steps", str(STEPS), *flags)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    print("llmscale", [record["loss"] for record in records if record["kind"] == "train"])


def train_there(folder: Path) -> None:
    """Fine-tune the exported base model with trl, as similarly as it can be and with its defaults; print the losses."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # installed for this alone

    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    records = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    alike = {"assistant_only_loss": True, "gradient_accumulation_steps": CONVERSATIONS // MICRO_BATCH // ranks}
    cases: dict[str, dict[str, object]] = {
        "trl": alike,
        "trl's default targets": alike | {"assistant_only_loss": False},
    }
    for name, settings in cases.items():
        config = SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=MICRO_BATCH,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=LR,
            adam_beta2=0.95,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.eos_token,
            **settings,
        )
        model = AutoModelForCausalLM.from_pretrained(folder / "exported")
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer
        )
        trainer.train()
        print(name, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", action="store_true")
    chosen = parser.parse_args()
    (train_there if chosen.trl else train_here)(chosen.folder)
