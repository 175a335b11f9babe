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
