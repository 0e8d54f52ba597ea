"""Tiny models with random weights, one for each family: the real architectures, and nothing that was learned."""

from __future__ import annotations

from typing import Any

import torch
import transformers

HIDDEN, LAYERS, VOCABULARY, CONTEXT = 32, 3, 64, 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_SHAPE, "num_key_value_heads": 2}
_EVEN = {**_SHAPE, "num_key_value_heads": 4}
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS = {**_LLAMA, "head_dim": 8}
_MOE = {**_HEADS, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_LATENT = {
    **_EVEN, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_MIXED_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

TEXT: dict[str, dict[str, Any]] = {
    "apertus": _LLAMA,
    "bamba": {**_LLAMA, **_MAMBA2, "attn_layer_indices": [1]},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": _LLAMA,
    "cohere2": {**_HEADS, **_MIXED_WINDOWS},
    "dbrx": {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": CONTEXT,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_shared_experts": 1},
    "ernie4_5": _HEADS,
    "exaone4": {**_HEADS, **_MIXED_WINDOWS},
    "falcon": {**_SHAPE, "alibi": False},
    "falcon_h1": {**_HEADS, **_MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "falcon_mamba": {**_SHAPE, **_MAMBA},
    "gemma": _HEADS,
    "gemma2": {**_HEADS, **_MIXED_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_HEADS, **_MIXED_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **_HEADS, **_MIXED_WINDOWS, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": {**_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_layers": 4, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 2]], "max_position_embeddings": CONTEXT,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt_neox": _SHAPE,
    "gpt_oss": {**_HEADS, **_MIXED_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {**_LLAMA, "residual_multiplier": 0.2, "embedding_multiplier": 3.0},
    "granitemoe": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.2},
    "granitemoehybrid": {
        **_LLAMA, **_MAMBA2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "jamba": {
        **_LLAMA, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "llama": _LLAMA,
    "llama4_text": {
        **_HEADS, "intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "mamba": {**_SHAPE, **_MAMBA},
    "mamba2": {**_SHAPE, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {
        **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "ministral3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": 8},
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "mpt": {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": CONTEXT},
    "nemotron": _HEADS,
    "nemotron_h": {
        **_HEADS, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": {**_LLAMA, **_MIXED_WINDOWS},
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": CONTEXT, "word_embed_proj_dim": 16, "do_layer_norm_before": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "persimmon": _SHAPE,
    "phi": _SHAPE,
    "phi3": _LLAMA,
    "phimoe": {**_LLAMA, "num_local_experts": 4},
    "qwen2": _LLAMA,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3": _HEADS,
    "qwen3_moe": _MOE,
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**_HEADS, **_DELTA},
    "recurrent_gemma": {
        **_SHAPE, "lru_width": HIDDEN, "attention_window_size": 8,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "seed_oss": _HEADS,
    "smollm3": _LLAMA,
    "stablelm": _EVEN,
    "starcoder2": _LLAMA,
    "xglm": {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 64,
        "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "zamba2": {
        **_EVEN, "mamba_d_state": 8, "mamba_ngroups": 1, "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True,
        "adapter_rank": 8,
    },
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-alibi": ("falcon", {**_SHAPE, "alibi": True, "parallel_attn": False}),
    "falcon-new": ("falcon", {**_SHAPE, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_neox-sequential": ("gpt_neox", {**_SHAPE, "use_parallel_residual": False}),
    "granitemoehybrid-attention": (
        "granitemoehybrid", {**TEXT["granitemoehybrid"], "layer_types": ["attention"] * LAYERS},
    ),
    "nemotron_h-moe": (
        "nemotron_h",
        {
            **TEXT["nemotron_h"], "layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
            "n_group": 1, "topk_group": 1,
        },
    ),
    "opt-norm-before": ("opt", {**TEXT["opt"], "word_embed_proj_dim": HIDDEN, "do_layer_norm_before": True}),
    "qwen2-window": ("qwen2", {**_LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "stablelm-parallel": ("stablelm", {**_EVEN, "use_parallel_residual": True, "qk_layernorm": True}),
}  # fmt: skip
"""Other kinds of a family, which its config decides: name -> model_type and shape."""

_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_PATCHES = {
    "depth": 2, "hidden_size": 16, "out_hidden_size": HIDDEN, "intermediate_size": 32, "num_heads": 2,
    "patch_size": 4,
}  # fmt: skip
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION}
_IMAGE = {"image_token_id": 60}
_IMAGE_INDEX = {"image_token_index": 60}
_FRAMES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def _sections(*counts: int) -> dict[str, Any]:
    """Rotary positions in three parts: time, height and width of a picture."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(counts)}}


WRAPPERS: dict[str, dict[str, Any]] = {
    "cohere2_vision": {"text_config": {**TEXT["cohere2"], "model_type": "cohere2"}, "vision_config": _SIGLIP, **_IMAGE},
    "gemma3": {
        "text_config": {**TEXT["gemma3_text"], "model_type": "gemma3_text"}, "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4, **_IMAGE_INDEX,
    },
    "gemma4": {
        "text_config": {**TEXT["gemma4_text"], "model_type": "gemma4_text"}, "vision_config": None,
        "audio_config": None,
    },
    "glm4v": {
        "text_config": {**_HEADS, **_sections(1, 1, 2), "model_type": "glm4v_text"},
        "vision_config": {**_PATCHES, "image_size": 8}, "image_token_id": 60, "video_token_id": 61,
        "image_start_token_id": 62, "image_end_token_id": 63, "video_start_token_id": 62, "video_end_token_id": 63,
    },
    "idefics3": {"text_config": {**_LLAMA, "model_type": "llama"}, "vision_config": _VISION, **_IMAGE},
    "internvl": {
        "text_config": {**_LLAMA, "model_type": "qwen2"}, **_IMAGE,
        "vision_config": {**_VISION, "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
    },
    "llama4": {
        "text_config": {**TEXT["llama4_text"], "model_type": "llama4_text"}, **_IMAGE_INDEX,
        "vision_config": {
            **_VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
        },
    },
    "llava": {
        "text_config": {**_LLAMA, "model_type": "llama"}, **_IMAGE_INDEX,
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": {**_HEADS, "model_type": "mistral"}, **_IMAGE_INDEX,
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "paligemma": {
        "text_config": {**_HEADS, "model_type": "gemma"}, "vision_config": _SIGLIP, "projection_dim": HIDDEN,
        **_IMAGE_INDEX,
    },
    "qwen2_vl": {
        "text_config": {**_LLAMA, **_sections(2, 1, 1), "model_type": "qwen2_vl_text"}, **_FRAMES,
        "vision_config": {
            "depth": 2, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        },
    },
    "qwen2_5_vl": {
        "text_config": {**_LLAMA, **_sections(2, 1, 1), "model_type": "qwen2_5_vl_text"}, **_FRAMES,
        "vision_config": _PATCHES,
    },
    "qwen3_vl": {
        "text_config": {**_HEADS, **_sections(2, 1, 1), "model_type": "qwen3_vl_text"}, **_FRAMES,
        "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "text_config": {**TEXT["qwen3_5_text"], "model_type": "qwen3_5_text"}, **_FRAMES,
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
    },
    "smolvlm": {"text_config": {**_LLAMA, "model_type": "llama"}, "vision_config": _VISION, **_IMAGE},
}  # fmt: skip
"""Models that see pictures around a text model, with picture towers of two blocks of their own."""


class IdTokenizer:
    """As much of a tokenizer as prompts of token ids need; it stands for none that exists."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    chat_template = None

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: Any, **_: Any) -> str:
        """A letter for each id."""
        return "".join(chr(65 + int(i) % 26) for i in ids)


def tiny_model(name: str) -> Any:
    """A model of a family or a variant in float32, with weights large enough that every block matters."""
    torch.manual_seed(0)
    model_type, shape = VARIANTS[name] if name in VARIANTS else (name, {**TEXT, **WRAPPERS}[name])
    config = transformers.AutoConfig.for_model(model_type, **shape)
    wrapped = model_type in WRAPPERS
    auto = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    return _enlivened(auto.from_config(config, dtype=torch.float32))


def _enlivened(model: Any) -> Any:
    """Biases too: one before a recurrent state would let padding in."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (parameter.dim() >= 2 and "A_log" not in name) or name.endswith(".bias"):
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()
