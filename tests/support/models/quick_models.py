"""The models that the quick surveys ask: some of each kind."""

__all__ = ["QUICK"]

QUICK = (
    # full attention: rotary, ALiBi, learned, relative positions; grouped, latent and shared KV
    "llama, YaRN",
    "phi3, longrope and windows",
    "bloom",
    "deepseek_v3",
    "bert",
    # windows and chunks
    "gpt_oss",
    "llama4_text",
    "gemma4_text, shared KV",
    # states, some without attention
    "falcon_h1",
    "qwen3_next",
    "nemotron_h, M-*E",
    "lfm3",
    "zaya, windows",
    # index keys, with windows and with states
    "glm_moe_dsa, shared indexers",
    "dots3_note_text",
    "qwen4_exp_text",
    # served without a cache
    "mamba",
    "xlstm",
    "blt",
    # refused
    "bart",
    "bert, encoder",
    "xlnet",
)
