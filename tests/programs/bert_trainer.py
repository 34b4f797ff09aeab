"""A tiny BERT, trained with the Trainer of Hugging Face, as in the examples of transformers."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)


class Sentences(torch.utils.data.Dataset):
    """Sentences of random words; the label of a sentence says whether the first word is rare."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(5, 100, (240, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": (words[0] > 50).long(),
        }


class Steps(TrainerCallback):
    """Prints the first step of the training."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **other_arguments: object,
    ) -> None:
        rank = f"rank {args.process_index} of {args.world_size}"
        print(f"{rank} starts at step {state.global_step}", flush=True)


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)

    config = BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Sentences(),
        callbacks=[Steps()],
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(f"{arguments.output_dir}/final")
    if trainer.is_world_process_zero():
        print(f"finished at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
