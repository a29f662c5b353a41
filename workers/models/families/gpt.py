"""Sequential layers with layer norms and a plain MLP: GPT-2, OPT, StarCoder 2."""

from __future__ import annotations

from quire.engine.errors import ConfigError

from ..spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec, PositionSpec
from .family import Family, HFConfig, Place, name_map
from .llama import ATTENTION, NORMS, TOP
from .reading import activation, attention_spec, decoder_spec, layer_norm, mlp_spec


def gpt2(config: HFConfig, max_model_len: int) -> DecoderSpec:  # noqa: ARG001
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        raise ConfigError("model: scale_attn_by_inverse_layer_idx and unscaled attention of GPT-2 are not supported.")
    hidden_size, num_heads = config["n_embd"], config["n_head"]
    head_dim = hidden_size // num_heads
    norm = layer_norm(config, "layer_norm_epsilon")
    layer = LayerSpec(
        attention=AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, qkv_bias=True, output_bias=True),
        mlp=MLPSpec(
            config.get("n_inner") or 4 * hidden_size, activation(config, "activation_function"), gated=False, bias=True
        ),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(
        {**config, "hidden_size": hidden_size},
        (layer,) * config["n_layer"],
        norm,
        positions=PositionSpec(config["n_positions"]),
    )


def opt(config: HFConfig, max_model_len: int) -> DecoderSpec:  # noqa: ARG001
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    wanted = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": hidden_size,
    }
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ConfigError(f"model: {key} {config[key]} is not supported for OPT; {value} is.")
    bias, norm, head_dim = (
        bool(config.get("enable_bias", True)),
        NormSpec("layer", 1e-5, bias=True),
        hidden_size // num_heads,
    )
    layer = LayerSpec(
        attention=AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, qkv_bias=bias, output_bias=bias),
        mlp=MLPSpec(config["ffn_dim"], activation(config, "activation_function"), gated=False, bias=bias),
        attention_norm=norm,
        mlp_norm=norm,
    )
    positions = PositionSpec(config["max_position_embeddings"] + 2, offset=2)
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm, positions=positions)


def starcoder2(config: HFConfig, max_model_len: int) -> DecoderSpec:
    norm, bias = layer_norm(config, "norm_epsilon"), bool(config.get("use_bias", True))
    layer = LayerSpec(
        attention=attention_spec(
            config,
            max_model_len,
            qkv_bias=bias,
            output_bias=bias,
            sliding_window=config.get("sliding_window"),
        ),
        mlp=mlp_spec(config, gated=False, bias=bias),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm)


FAMILIES = {
    "GPT2LMHeadModel": Family(
        gpt2,
        name_map(
            {
                "transformer.wte": "embedding",
                "transformer.wpe": "positions",
                "transformer.ln_f": "norm",
                "lm_head": "head",
            },
            "transformer.h",
            {
                "attn.c_attn": Place("attention.qkv", ("q", "k", "v"), transposed=True),
                "attn.c_proj": Place("attention.output", transposed=True),
                "mlp.c_fc": Place("mlp.up", transposed=True),
                "mlp.c_proj": Place("mlp.down", transposed=True),
                "ln_1": Place("attention_norm"),
                "ln_2": Place("mlp_norm"),
            },
        ),
        prefix="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$",),
        defaults={
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "OPTForCausalLM": Family(
        opt,
        name_map(
            {
                "model.decoder.embed_tokens": "embedding",
                "model.decoder.embed_positions": "positions",
                "model.decoder.final_layer_norm": "norm",
                "lm_head": "head",
            },
            "model.decoder.layers",
            {
                "self_attn.q_proj": Place("attention.qkv", ("q",)),
                "self_attn.k_proj": Place("attention.qkv", ("k",)),
                "self_attn.v_proj": Place("attention.qkv", ("v",)),
                "self_attn.out_proj": Place("attention.output"),
                "fc1": Place("mlp.up"),
                "fc2": Place("mlp.down"),
                "self_attn_layer_norm": Place("attention_norm"),
                "final_layer_norm": Place("mlp_norm"),
            },
        ),
        defaults={"activation_function": "relu", "tie_word_embeddings": True},
    ),
    "Starcoder2ForCausalLM": Family(
        starcoder2,
        name_map(
            TOP,
            "model.layers",
            {**ATTENTION, "mlp.c_fc": Place("mlp.up"), "mlp.c_proj": Place("mlp.down"), **NORMS},
        ),
        defaults={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "norm_epsilon": 1e-5},
    ),
}
