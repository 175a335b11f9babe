"""A model and a tokenizer for packed sets that are trained as they are."""

VOCABULARY = 260


def tiny_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,  # sharp enough that the documents before would be noticed
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=257,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).float()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {f"<{n}>": n for n in range(256)} | {"<eos>": 256, "<pad>": 257, "<a>": 258, "<b>": 259}
    made = Tokenizer(models.WordLevel(names, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def losses_of_training(folder, data, rows, steps, **settings):
    """The losses that TRL's trainer logs of rows as they are, so many a step; nothing is learnt."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(folder / "run"),
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=rows,
        max_steps=steps,
        learning_rate=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
        **{"padding_free": True, "max_length": None, **settings},
    )
    trainer = SFTTrainer(
        model=tiny_model(), args=arguments, train_dataset=data, processing_class=tiny_tokenizer()
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
