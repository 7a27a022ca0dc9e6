"""Make a small chat model from nothing: for trying engines where no model hub is in reach.

    python examples/small_chat_model.py small-chat
    python examples/small_chat_model.py small-chat --hidden-size 256 --layers 6    # its prefill takes longer

A BPE tokenizer with 512 entries learns from this repository's guides. The folder also gets a Llama of random weights.
Its answers are noise, but they are text: every id that it chooses without sampling has some. The weights are so large
that the answers depend on all KV before them; wrong KV gives other answers.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
HEAD_DIM = 32  # the smallest that vLLM computes on CPUs
ROOT = Path(__file__).resolve().parents[1]
PAD, UNKNOWN, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|pad|>",
    "<|unknown|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer():
    """Return a tokenizer of the guides' text.

    Its alphabet is ASCII in place of bytes, so that each entry is text by itself, and an engine can stream every token
    immediately. A character outside of the alphabet becomes `<|unknown|>`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    alphabet = ["\n", *map(chr, range(33, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet) + 1,  # and that of a space
        show_progress=False,
    )
    guides = [each for each in sorted((ROOT / "examples").glob("*.md")) if each.name != "models.md"]  # a long table
    tokenizer.train_from_iterator((path.read_text() for path in [ROOT / "README.md", *guides]), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=SPECIAL[3:],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(tokenizer, *, hidden_size, num_layers, seed):
    """Return a Llama of random weights, with an output for each entry of the tokenizer; none chooses a special one."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=max(1, hidden_size // HEAD_DIM // 2),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 1:
                weights.normal_(1.0, 0.1)
            else:
                weights.normal_(0.0, 1.0 if "embed_tokens" in name else 1.6 / hidden_size**0.5)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(list(SPECIAL))] = 0.0  # the best of the others is above 0
    return model


def main(
    folder: Path,
    hidden_size: Annotated[int, typer.Option(min=HEAD_DIM, help=f"a multiple of {2 * HEAD_DIM}")] = 2 * HEAD_DIM,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    seed: int = 0,
):
    """Save a tokenizer with a chat template and a model into FOLDER."""
    if hidden_size % (2 * HEAD_DIM):
        raise typer.BadParameter(f"--hidden-size must be a multiple of {2 * HEAD_DIM}, not {hidden_size}")
    tokenizer = train_tokenizer()
    model = make_model(tokenizer, hidden_size=hidden_size, num_layers=layers, seed=seed)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {len(tokenizer)} tokens, {model.num_parameters() / 1e6:.1f}M parameters")


if __name__ == "__main__":
    typer.run(main)
