"""The fields of transformers configurations that decide sizes, by name, and the way that `small_twin` shrinks each.

The tables hold field names only, so that a new model type is covered by the names that it shares with others. The
tables of exceptions at the end hold the few relations that names do not express.
"""

from __future__ import annotations

from typing import Any, Final

VOCABULARY: Final = 128
MAX_LAYERS: Final = 8
FEW_PARAMETERS: Final = 500_000  # a configuration with no more of them keeps its sizes
MAX_POSITIONS: Final = 512  # positions, if they only limit; with an original length, the ratio to it is kept
MAX_EXTENDED_POSITIONS: Final = 4096

HIDDEN: Final = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")
"""Names of the width of the residual stream; the first one that a configuration has counts."""

WIDTHS: Final = frozenset(
    """
    hidden_size d_model n_embd emb_dim embedding_dim intermediate_size moe_intermediate_size decoder_ffn_dim
    encoder_ffn_dim shared_expert_intermediate_size shared_experts_intermediate_size ffn_dim shared_intermediate_size
    ffn_hidden_size out_hidden_size hidden_size_global adapter_out_dim embedding_size mamba_d_ssm dim_ff dff d_ff
    n_inner intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size moe_shared_expert_intermediate_size
    word_embed_proj_dim lru_width feed_forward_size input_embedding_size output_embedding_size d_inner
    attention_hidden_size vision_output_dim projector_input_dim projector_output_dim mlp_dim adapter_in_dim
    backbone_hidden_size router_hidden_size ple_embed_dim hidden_size_per_layer_input cross_attention_hidden_size
    q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank laurel_rank adapter_rank hc_lowrank moe_latent_size
    pronunciation_embed_dim shape_embed_dim prompt_mid_dim mamba_dt_rank time_step_rank classifier_proj_size input_size
    linear_q_lora_rank mamba_intermediate_size linear_gate_rank
    """.split()
)
"""Scaled like the hidden size, so that equal and doubled widths stay equal and doubled."""

HEAD_DIMS: Final = frozenset(
    """
    head_dim swa_head_dim global_head_dim qk_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim
    indexer_head_dim rotary_dim kv_channels attention_head_dim d_head dim_head d_kv attention_head_size v_channels
    swa_v_head_dim query_pre_attn_scalar d_rel
    """.split()
)
"""Scaled all alike, so that the smallest becomes 8 (or 16) and different ones stay different."""

KV_HEADS: Final = frozenset(
    """
    num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_global_key_value_heads indexer_kv_heads
    num_query_groups
    """.split()
)
QUERY_HEADS: Final = frozenset(
    """
    num_attention_heads n_head n_heads num_heads swa_num_attention_heads decoder_attention_heads attention_heads
    encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_attention_heads_per_layer
    conf_num_attention_heads
    """.split()
)

LAYER_COUNTS: Final = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
"""Names of the number of layers of a decoder; the first one that a configuration has counts."""

NOT_PER_LAYER: Final = frozenset(
    """
    ssm_multipliers mlp_multipliers upsampling_ratios channel_multiplier attn_resolutions target_bandwidths
    eos_token_id suppress_tokens begin_suppress_tokens time_step_limit axial_pos_shape axial_pos_embds_dim
    axial_pos_embds_dim languages encoder_hash_byte_group_size L_bp_cycles block_types architectures
    mtp_layers_block_type attention_types supported_aspect_ratios
    """.split()
)
"""Lists that may be as long as there are layers, and say nothing of each."""

LAYER_INDICES: Final = frozenset(
    """
    attn_layer_indices hybrid_layer_ids cross_attention_layers full_attn_idxs moe_layers mlp_only_layers
    local_layer_ids ple_layer_ids
    """.split()
)
FIRST_LAYERS: Final = frozenset(["first_k_dense_replace", "num_dense_layers", "max_window_layers", "dense_mlp_idx"])
"""How many layers at the start are of another kind."""

LAST_LAYERS: Final = frozenset(["num_kv_shared_layers"])
"""How many layers at the end are of another kind."""

PERIODS: Final = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": None,
    "moe_layer_interval": None,
    "interleave_moe_layer_step": None,
    "n_layers_per_attn_res_block": None,
}
"""Fields that models compute a layer's kind from by its index, and the fields of the offset."""

PATTERNS: Final = ("block_types",)
"""Lists of kinds that the layers repeat."""

WINDOWS: Final = frozenset(
    """
    sliding_window attention_chunk_size keep_window_size sliding_window_size attention_window_size local_attention
    window_size local_attention_window_len index_topk mem_len floor_scale log_scaling_n_floor rel_extent
    original_max_position_embeddings indexer_budget
    """.split()
)
"""Numbers of tokens beyond which a model does something else."""

POSITIONS: Final = frozenset(
    """
    max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_target_positions
    max_source_positions num_position_embeddings
    """.split()
)

VOCABULARIES: Final = frozenset(
    ["vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"]
)

TOKEN_NAMES: Final = (
    "_token_id",
    "_token_ids",
    "_token_index",
    "_token_indices",
    "suppress_tokens",
    "pad_index",
    "bos_index",
    "eos_index",
    "unk_index",
    "mask_index",
)
"""Ends of the names of fields that hold token ids."""

LIMITS: Final[dict[str, int]] = {
    # layers that no other table counts
    "encoder_layers": 2,
    "num_encoder_layers": 2,
    "depth": 2,
    "num_global_layers": 1,
    "conf_num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_mtp_layers": 1,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    # recurrent states
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_ngroups": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    # tokens that are computed together
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "index_block_size": 8,
    "index_topk_blocks": 4,
    "index_n_heads": 16,  # fewer heads score many tokens 0, and the choice among equals differs with the length
    "indexer_n_heads": 16,
    "local_attn_chunk_length": 16,
    "lsh_attn_chunk_length": 16,
    # parts besides the language model
    "image_size": 64,
    "encoder_hash_byte_group_vocab": 256,
    "ngram_vocab_size_base": 128,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "pronunciation_vocab_size": 64,
    "shape_vocab_size": 64,
    "block_multiple_of": 8,
    "ffn_round_up_to_multiple_of": 8,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 2,
    "max_num_tiles": 2,
    "audio_vocab_size": 64,
    "codebook_size": 64,
    "base_channels": 32,
    "num_channels": 8,
}
"""The largest value of each; smaller ones stay."""

SPREADS: Final = (
    "initializer_range",
    "init_std",
    "initializer_factor",
    "embed_init_std",
    "embedding_initializer_range",
)
SPREAD: Final = 0.2
"""Random weights are spread at least this far, so that a wrong KV shows in the logits."""

PRODUCTS: Final[tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = (
    ("mamba_n_heads", ("mamba_expand", "hidden_size"), ("mamba_d_head",)),
    ("mamba_n_heads", ("mamba_d_ssm",), ("mamba_d_head",)),
    ("num_heads", ("expand", "hidden_size"), ("head_dim",)),
    ("n_mamba_heads", ("mamba_expand", "hidden_size"), ("mamba_headdim",)),
    ("intermediate_size", ("expand", "hidden_size"), ()),
)
"""A field is the product of others, divided by another. Kept where it holds before."""

SUM: Final = "qk_head_dim"
SUM_OF: Final = ("qk_nope_head_dim", "qk_rope_head_dim")

SAME_AS_HIDDEN: Final = frozenset(
    """
    out_hidden_size hidden_size_global adapter_out_dim vision_output_dim projector_output_dim backbone_hidden_size
    output_dim projection_dim text_hidden_size cross_attention_hidden_size
    """.split()
)
"""Widths of one part of a model that follow its language model, where they are equal before."""

ONE_SCALE: Final = frozenset(["blt"])
"""Types whose parts pass their hidden states on to each other, so that all head sizes are scaled alike."""

EXCEPTIONS: Final[dict[str, dict[str, Any]]] = {
    # 1 layer in each of 2 stacks; each pass through one has a cache layer of its own
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 3, "num_hidden_layers": 8},
}
"""Of one model type: fields that are set to a value whatever they were."""
