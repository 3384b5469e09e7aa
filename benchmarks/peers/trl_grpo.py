"""TRL's GRPO trainer, with `transformers` generating, each iteration when it is its turn.

Run by `iteration_vs_peers.py` and `real_model.py` with the Python of an environment of its own:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 trl==1.16.0
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
import trl
import turns_reward
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns


class InTurns(TrainerCallback):
    def __init__(self, turns: Turns):
        self.turns = turns

    def on_step_begin(self, args, state, control, **kwargs):
        self.turns.wait()

    def on_train_end(self, args, state, control, **kwargs):
        self.turns.end()


def main() -> None:
    asked = json.loads(sys.argv[1])
    turns = Turns(
        trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__
    )
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_steps=asked.get("steps", 10**6),
        seed=asked.get("seed", 0),
        logging_steps=1,
        per_device_train_batch_size=asked["prompts"] * asked["generations"],
        gradient_accumulation_steps=1,
        num_generations=asked["generations"],
        max_completion_length=asked["response"],
        generation_kwargs=asked.get("generation_kwargs"),
        beta=asked["beta"],
        learning_rate=asked["learning_rate"],
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        cache_implementation=asked.get("cache_implementation"),
    )
    trainer = GRPOTrainer(
        model=asked["model"],
        args=options,
        reward_funcs=getattr(turns_reward, asked["reward"]),
        train_dataset=load_dataset("json", data_files=asked["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        callbacks=[InTurns(turns)],
    )
    trainer.train()
    trainer.save_model(asked["save"])
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    Path(asked["save"], "rewards.json").write_text(json.dumps(rewards))


if __name__ == "__main__":
    main()
