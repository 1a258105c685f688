/* published.h -- config.json of models that people extend, written down after what their makers published: what is
 * the same in each is in PUBLISHED_ALL
 *
 *   ignored  the keys that --ignore-key has to name, with a blank between them; NULL: the model is refused
 */
#ifndef TESTS_PUBLISHED_H
#define TESTS_PUBLISHED_H

#define PUBLISHED_ALL                                                                                     \
    "{\"bos_token_id\":1,\"eos_token_id\":[1,2],\"initializer_range\":0.02,\"torch_dtype\":\"bfloat16\"," \
    "\"transformers_version\":\"4.51.3\",\"use_cache\":true,"

static const struct {
    const char *name, *ignored, *text;
} published[] = {
    {"Llama-2-7b", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":32,\"vocab_size\":32000,"
     "\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"_name_or_path\":\"meta-llama/Llama-2-7b-hf\",\"pretraining_tp\":1,\"rope_scaling\":null,"
     "\"tie_word_embeddings\":false}"},
    {"huggyllama/llama-7b", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"vocab_size\":32000,\"max_position_embeddings\":2048,"
     "\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\",\"max_sequence_length\":2048,\"pad_token_id\":0,"
     "\"tie_word_embeddings\":false}"},
    {"Llama-3.1-8B, Llama-3.3-70B-Instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":128256,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"mlp_bias\":false,\"pretraining_tp\":1,\"head_dim\":128,"
     "\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":8.0,\"low_freq_factor\":1.0,"
     "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"
     "\"tie_word_embeddings\":false}"},
    {"Llama-3.2-1B, Llama-3.2-3B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":2048,\"intermediate_size\":8192,\"num_hidden_layers\":16,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"vocab_size\":128256,\"max_position_embeddings\":131072,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"attention_bias\":false,\"mlp_bias\":false,"
     "\"pretraining_tp\":1,\"head_dim\":64,\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":32.0,"
     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192,"
     "\"rope_type\":\"llama3\"},\"tie_word_embeddings\":true}"},
    {"unsloth/Llama-3.2-1B-Instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":2048,\"intermediate_size\":8192,\"num_hidden_layers\":16,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"vocab_size\":128256,\"max_position_embeddings\":131072,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"attention_bias\":false,\"mlp_bias\":false,"
     "\"pretraining_tp\":1,\"head_dim\":64,\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":8.0,"
     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192,"
     "\"rope_type\":\"llama3\"},\"tie_word_embeddings\":true,\"pad_token_id\":128004,"
     "\"unsloth_fixed\":true}"},
    {"TinyLlama-1.1B-Chat-v1.0", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":2048,\"intermediate_size\":5632,\"num_hidden_layers\":22,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":4,\"vocab_size\":32000,\"max_position_embeddings\":2048,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"attention_bias\":false,\"pretraining_tp\":1,"
     "\"rope_scaling\":null,\"rope_theta\":10000.0,\"tie_word_embeddings\":false}"},
    {"CodeLlama-7b-hf", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":32,\"vocab_size\":32016,"
     "\"max_position_embeddings\":16384,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"pretraining_tp\":1,\"rope_scaling\":null,\"rope_theta\":1000000,\"tie_word_embeddings\":false}"},
    {"Yi-1.5-9B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":48,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":4,\"vocab_size\":64000,"
     "\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"pad_token_id\":0,\"pretraining_tp\":1,\"rope_scaling\":null,"
     "\"rope_theta\":5000000.0,\"tie_word_embeddings\":false}"},
    {"deepseek-coder-6.7b-base", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":32,\"vocab_size\":32256,"
     "\"max_position_embeddings\":16384,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"pretraining_tp\":1,\"rope_scaling\":{\"factor\":4.0,\"type\":\"linear\"},\"rope_theta\":100000,"
     "\"tie_word_embeddings\":false}"},
    {"Falcon3-7B-Base", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":3072,\"intermediate_size\":23040,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":12,\"num_key_value_heads\":4,\"vocab_size\":131072,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"head_dim\":256,\"mlp_bias\":false,\"pretraining_tp\":1,"
     "\"rope_scaling\":null,\"rope_theta\":1000042,\"tie_word_embeddings\":false}"},
    {"SmolLM2-135M, SmolLM2-360M, SmolLM2-1.7B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":576,\"intermediate_size\":1536,\"num_hidden_layers\":30,\"num_attention_heads\":9,"
     "\"num_key_value_heads\":3,\"vocab_size\":49152,\"max_position_embeddings\":8192,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"attention_bias\":false,\"is_llama_config\":true,"
     "\"mlp_bias\":false,\"pad_token_id\":2,\"pretraining_tp\":1,\"rope_interleaved\":false,"
     "\"rope_scaling\":null,\"rope_theta\":100000,\"tie_word_embeddings\":true,"
     "\"transformers.js_config\":{\"kv_cache_dtype\":{\"q4f16\":\"float16\",\"fp16\":\"float16\"}}}"},
    {"DeepSeek-R1-Distill-Llama-8B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":128256,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"mlp_bias\":false,\"pretraining_tp\":1,\"head_dim\":128,"
     "\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":8.0,\"low_freq_factor\":1.0,"
     "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"
     "\"tie_word_embeddings\":false}"},
    {"NousResearch/Yarn-Llama-2-7b-64k", "auto_map rope_scaling.finetuned",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":32,\"vocab_size\":32000,"
     "\"max_position_embeddings\":65536,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"auto_map\":{\"AutoModelForCausalLM\":\"modeling_llama_together_yarn.LlamaForCausalLM\"},"
     "\"pretraining_tp\":1,\"rope_scaling\":{\"factor\":16.0,\"finetuned\":true,"
     "\"original_max_position_embeddings\":4096,\"type\":\"yarn\"},\"tie_word_embeddings\":false}"},
    {"Qwen2-7B, Qwen2.5-7B-Instruct, Qwen2.5-Coder-7B-Instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":3584,\"intermediate_size\":18944,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":28,\"num_key_value_heads\":4,\"vocab_size\":152064,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"tie_word_embeddings\":false,\"sliding_window\":131072,\"max_window_layers\":28,"
     "\"use_sliding_window\":false,\"rope_theta\":1000000.0}"},
    {"Qwen2.5-7B, Qwen2.5-0.5B, Qwen2.5-Math-7B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":3584,\"intermediate_size\":18944,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":28,\"num_key_value_heads\":4,\"vocab_size\":152064,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"tie_word_embeddings\":false,\"sliding_window\":131072,\"max_window_layers\":28,"
     "\"use_sliding_window\":false,\"rope_theta\":1000000.0,\"use_mrope\":false}"},
    {"Qwen2.5-7B-Instruct-1M", "dual_chunk_attention_config",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":3584,\"intermediate_size\":18944,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":28,\"num_key_value_heads\":4,\"vocab_size\":152064,"
     "\"max_position_embeddings\":1010000,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"tie_word_embeddings\":false,\"sliding_window\":null,\"max_window_layers\":28,"
     "\"use_sliding_window\":false,\"rope_theta\":10000000.0,"
     "\"dual_chunk_attention_config\":{\"chunk_size\":262144,\"local_size\":8192,"
     "\"original_max_position_embeddings\":262144}}"},
    {"QwQ-32B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":5120,\"intermediate_size\":27648,\"num_hidden_layers\":64,"
     "\"num_attention_heads\":40,\"num_key_value_heads\":8,\"vocab_size\":152064,"
     "\"max_position_embeddings\":40960,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"tie_word_embeddings\":false,\"sliding_window\":32768,\"max_window_layers\":64,"
     "\"use_sliding_window\":false,\"rope_theta\":1000000.0}"},
    {"DeepSeek-R1-Distill-Qwen-1.5B, -7B, -14B, -32B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":3584,\"intermediate_size\":18944,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":28,\"num_key_value_heads\":4,\"vocab_size\":152064,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"tie_word_embeddings\":false,\"sliding_window\":4096,\"max_window_layers\":28,\"use_mrope\":false,"
     "\"use_sliding_window\":false,\"rope_theta\":10000}"},
    {"Qwen3-0.6B to Qwen3-32B, Qwen3-4B-Instruct-2507", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\","
     "\"hidden_size\":4096,\"intermediate_size\":12288,\"num_hidden_layers\":36,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":151936,"
     "\"max_position_embeddings\":40960,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"head_dim\":128,\"max_window_layers\":36,\"rope_theta\":1000000,"
     "\"sliding_window\":null,\"tie_word_embeddings\":false,\"use_sliding_window\":false,"
     "\"rope_scaling\":null}"},
    {"DeepSeek-R1-0528-Qwen3-8B", "rope_scaling.attn_factor",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\","
     "\"hidden_size\":4096,\"intermediate_size\":12288,\"num_hidden_layers\":36,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":151936,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"head_dim\":128,\"max_window_layers\":36,\"rope_theta\":1000000,"
     "\"sliding_window\":null,\"tie_word_embeddings\":false,\"use_sliding_window\":false,"
     "\"rope_scaling\":{\"attn_factor\":0.8782488562869419,\"factor\":4.0,"
     "\"original_max_position_embeddings\":32768,\"rope_type\":\"yarn\"}}"},
    {"Mistral-7B-v0.1", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\","
     "\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":32000,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"rope_theta\":10000.0,\"sliding_window\":4096,\"tie_word_embeddings\":false}"},
    {"Mistral-7B-v0.3, Mistral-7B-Instruct-v0.3", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\","
     "\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":32768,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"rope_theta\":1000000.0,\"sliding_window\":null,\"tie_word_embeddings\":false}"},
    {"Mistral-Nemo-Base-2407, Mistral-Small-24B-Base-2501", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\","
     "\"hidden_size\":5120,\"intermediate_size\":14336,\"num_hidden_layers\":40,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":131072,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"head_dim\":128,"
     "\"rope_theta\":1000000.0,\"sliding_window\":null,\"tie_word_embeddings\":false}"},
    {"Ministral-8B-Instruct-2410", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\","
     "\"hidden_size\":4096,\"intermediate_size\":12288,\"num_hidden_layers\":36,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":131072,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"head_dim\":128,"
     "\"rope_theta\":100000000.0,\"sliding_window\":32768,\"tie_word_embeddings\":false}"},
    {"Phi-3-mini-4k-instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Phi3ForCausalLM\"],\"model_type\":\"phi3\","
     "\"hidden_size\":3072,\"intermediate_size\":8192,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":32,\"vocab_size\":32064,\"max_position_embeddings\":4096,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"auto_map\":{\"AutoConfig\":\"configuration_phi3.Phi3Config\","
     "\"AutoModelForCausalLM\":\"modeling_phi3.Phi3ForCausalLM\"},\"attention_bias\":false,"
     "\"embd_pdrop\":0.0,\"resid_pdrop\":0.0,\"rope_theta\":10000.0,"
     "\"original_max_position_embeddings\":4096,\"pad_token_id\":32000,\"rope_scaling\":null,"
     "\"sliding_window\":2047,\"tie_word_embeddings\":false}"},
    {"Phi-3-mini-128k-instruct, Phi-3.5-mini-instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Phi3ForCausalLM\"],\"model_type\":\"phi3\","
     "\"hidden_size\":3072,\"intermediate_size\":8192,\"num_hidden_layers\":32,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":32,\"vocab_size\":32064,\"max_position_embeddings\":131072,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"auto_map\":{\"AutoConfig\":\"configuration_phi3.Phi3Config\","
     "\"AutoModelForCausalLM\":\"modeling_phi3.Phi3ForCausalLM\"},\"attention_bias\":false,"
     "\"embd_pdrop\":0.0,\"resid_pdrop\":0.0,\"rope_theta\":10000.0,"
     "\"original_max_position_embeddings\":4096,\"pad_token_id\":32000,"
     "\"rope_scaling\":{\"long_factor\":[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0],\"short_factor\":[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0],\"type\":\"longrope\"},\"sliding_window\":262144,"
     "\"tie_word_embeddings\":false}"},
    {"phi-4", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Phi3ForCausalLM\"],\"model_type\":\"phi3\","
     "\"hidden_size\":5120,\"intermediate_size\":17920,\"num_hidden_layers\":40,"
     "\"num_attention_heads\":40,\"num_key_value_heads\":10,\"vocab_size\":100352,"
     "\"max_position_embeddings\":16384,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"embd_pdrop\":0.0,\"resid_pdrop\":0.0,\"rope_theta\":250000,"
     "\"original_max_position_embeddings\":16384,\"pad_token_id\":100349,\"rope_scaling\":null,"
     "\"sliding_window\":null,\"tie_word_embeddings\":false}"},
    {"Phi-4-mini-instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Phi3ForCausalLM\"],\"model_type\":\"phi3\","
     "\"hidden_size\":3072,\"intermediate_size\":8192,\"num_hidden_layers\":32,\"num_attention_heads\":24,"
     "\"num_key_value_heads\":8,\"vocab_size\":200064,\"max_position_embeddings\":131072,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"auto_map\":{\"AutoConfig\":\"configuration_phi3.Phi3Config\","
     "\"AutoModelForCausalLM\":\"modeling_phi3.Phi3ForCausalLM\"},\"attention_bias\":false,"
     "\"embd_pdrop\":0.0,\"resid_pdrop\":0.0,\"rope_theta\":10000.0,\"full_attn_mod\":1,"
     "\"interpolate_factor\":1,\"lm_head_bias\":false,\"mlp_bias\":false,"
     "\"original_max_position_embeddings\":4096,\"pad_token_id\":199999,\"partial_rotary_factor\":0.75,"
     "\"rope_scaling\":{\"long_factor\":[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0],\"short_factor\":[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,"
     "1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0],\"type\":\"longrope\"},\"sliding_window\":262144,"
     "\"tie_word_embeddings\":true}"},
    {"SmolLM3-3B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"SmolLM3ForCausalLM\"],\"model_type\":\"smollm3\","
     "\"hidden_size\":2048,\"intermediate_size\":11008,\"num_hidden_layers\":36,"
     "\"num_attention_heads\":16,\"num_key_value_heads\":4,\"vocab_size\":128256,"
     "\"max_position_embeddings\":65536,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"layer_types\":[\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\"],\"max_window_layers\":28,"
     "\"mlp_bias\":false,\"no_rope_layer_interval\":4,\"no_rope_layers\":[1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,"
     "1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0,1,1,1,0],\"pad_token_id\":128004,\"pretraining_tp\":2,"
     "\"rope_scaling\":null,\"rope_theta\":5000000.0,\"sliding_window\":null,"
     "\"use_sliding_window\":false}"},
    {"gemma-2-2b", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Gemma2ForCausalLM\"],\"model_type\":\"gemma2\","
     "\"hidden_size\":2304,\"intermediate_size\":9216,\"num_hidden_layers\":26,\"num_attention_heads\":8,"
     "\"num_key_value_heads\":4,\"vocab_size\":256000,\"max_position_embeddings\":8192,"
     "\"rms_norm_eps\":1e-06,\"hidden_act\":\"gelu_pytorch_tanh\",\"attention_bias\":false,"
     "\"attn_logit_softcapping\":50.0,\"cache_implementation\":\"hybrid\","
     "\"final_logit_softcapping\":30.0,\"head_dim\":256,\"hidden_activation\":\"gelu_pytorch_tanh\","
     "\"pad_token_id\":0,\"query_pre_attn_scalar\":256,\"rope_theta\":10000.0,\"sliding_window\":4096}"},
    {"gemma-3-1b-it", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Gemma3ForCausalLM\"],\"model_type\":\"gemma3_text\","
     "\"hidden_size\":1152,\"intermediate_size\":6912,\"num_hidden_layers\":26,\"num_attention_heads\":4,"
     "\"num_key_value_heads\":1,\"vocab_size\":262144,\"max_position_embeddings\":32768,"
     "\"rms_norm_eps\":1e-06,\"hidden_activation\":\"gelu_pytorch_tanh\",\"attention_bias\":false,"
     "\"attn_logit_softcapping\":null,\"final_logit_softcapping\":null,\"head_dim\":256,"
     "\"pad_token_id\":0,\"query_pre_attn_scalar\":256,\"rope_local_base_freq\":10000,"
     "\"rope_scaling\":null,\"rope_theta\":1000000,\"sliding_window\":512,"
     "\"cache_implementation\":\"hybrid\",\"sliding_window_pattern\":6}"},
    {"gemma-3-270m", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Gemma3ForCausalLM\"],\"model_type\":\"gemma3_text\","
     "\"hidden_size\":640,\"intermediate_size\":2048,\"num_hidden_layers\":18,\"num_attention_heads\":4,"
     "\"num_key_value_heads\":1,\"vocab_size\":262144,\"max_position_embeddings\":32768,"
     "\"rms_norm_eps\":1e-06,\"hidden_activation\":\"gelu_pytorch_tanh\",\"attention_bias\":false,"
     "\"attn_logit_softcapping\":null,\"final_logit_softcapping\":null,\"head_dim\":256,"
     "\"pad_token_id\":0,\"query_pre_attn_scalar\":256,\"rope_local_base_freq\":10000,"
     "\"rope_scaling\":null,\"rope_theta\":1000000,\"sliding_window\":512,\"_sliding_window_pattern\":6,"
     "\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
     "\"sliding_attention\",\"sliding_attention\",\"full_attention\",\"sliding_attention\","
     "\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
     "\"full_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
     "\"sliding_attention\",\"sliding_attention\",\"full_attention\"],"
     "\"use_bidirectional_attention\":false}"},
    {"granite-3.3-8b-instruct", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"GraniteForCausalLM\"],\"model_type\":\"granite\","
     "\"hidden_size\":4096,\"intermediate_size\":12800,\"num_hidden_layers\":40,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":49159,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"attention_multiplier\":0.0078125,\"embedding_multiplier\":12.0,"
     "\"logits_scaling\":16.0,\"mlp_bias\":false,\"pad_token_id\":0,\"residual_multiplier\":0.22,"
     "\"rope_scaling\":null,\"rope_theta\":10000000.0,\"tie_word_embeddings\":true}"},
    {"GLM-4-9B-0414", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Glm4ForCausalLM\"],\"model_type\":\"glm4\","
     "\"hidden_size\":4096,\"intermediate_size\":13696,\"num_hidden_layers\":40,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":2,\"vocab_size\":151552,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"head_dim\":128,\"pad_token_id\":151329,\"partial_rotary_factor\":0.5,"
     "\"rope_theta\":10000.0,\"tie_word_embeddings\":false}"},
    {"EXAONE-4.0-1.2B", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Exaone4ForCausalLM\"],\"model_type\":\"exaone4\","
     "\"hidden_size\":2048,\"intermediate_size\":4096,\"num_hidden_layers\":30,\"num_attention_heads\":32,"
     "\"num_key_value_heads\":8,\"vocab_size\":102400,\"max_position_embeddings\":65536,"
     "\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\",\"head_dim\":64,\"layer_types\":[\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","
     "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\"],\"pad_token_id\":0,"
     "\"rope_scaling\":{\"factor\":16.0,\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"
     "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},\"rope_theta\":1000000,"
     "\"sliding_window\":null,\"sliding_window_pattern\":null,\"tie_word_embeddings\":true}"},
    {"Seed-OSS-36B-Base", "attention_dropout residual_dropout",
     PUBLISHED_ALL
     "\"architectures\":[\"SeedOssForCausalLM\"],\"model_type\":\"seed_oss\",\"hidden_size\":5120,"
     "\"intermediate_size\":27648,\"num_hidden_layers\":64,\"num_attention_heads\":80,"
     "\"num_key_value_heads\":8,\"vocab_size\":155136,\"max_position_embeddings\":524288,"
     "\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\",\"attention_bias\":true,\"attention_dropout\":0.1,"
     "\"attention_out_bias\":false,\"head_dim\":128,\"mlp_bias\":false,\"pad_token_id\":1,"
     "\"residual_dropout\":0.1,\"rope_scaling\":{\"rope_type\":\"default\"},\"rope_theta\":10000000.0,"
     "\"tie_word_embeddings\":false}"},
    {"a Qwen2.5 that was saved again, by transformers 4.51 and unsloth", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\","
     "\"hidden_size\":3584,\"intermediate_size\":18944,\"num_hidden_layers\":28,"
     "\"num_attention_heads\":28,\"num_key_value_heads\":4,\"vocab_size\":152064,"
     "\"max_position_embeddings\":32768,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"dtype\":\"bfloat16\",\"_attn_implementation_autoset\":true,\"_name_or_path\":\"x\","
     "\"unsloth_version\":\"2025.6.8\",\"tie_word_embeddings\":false,\"sliding_window\":131072,"
     "\"max_window_layers\":28,\"use_sliding_window\":false,\"rope_theta\":1000000.0}"},
    {"a Llama 3.1 that was saved again, by transformers 5", "",
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\","
     "\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":128256,"
     "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"dtype\":\"bfloat16\",\"head_dim\":128,\"mlp_bias\":false,"
     "\"pretraining_tp\":1,\"rope_parameters\":{\"factor\":8.0,\"high_freq_factor\":4.0,"
     "\"low_freq_factor\":1.0,\"original_max_position_embeddings\":8192,\"rope_theta\":500000.0,"
     "\"rope_type\":\"llama3\"},\"tie_word_embeddings\":false}"},
    {"OLMo-2-1124-7B", NULL,
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Olmo2ForCausalLM\"],\"model_type\":\"olmo2\","
     "\"hidden_size\":4096,\"intermediate_size\":11008,\"num_hidden_layers\":32,"
     "\"num_attention_heads\":32,\"num_key_value_heads\":32,\"vocab_size\":100352,"
     "\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-06,\"hidden_act\":\"silu\","
     "\"attention_bias\":false,\"pad_token_id\":100277,\"rope_scaling\":null,\"rope_theta\":500000,"
     "\"tie_word_embeddings\":false}"},
    {"gemma-2b", NULL,
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"GemmaForCausalLM\"],\"model_type\":\"gemma\","
     "\"hidden_size\":2048,\"intermediate_size\":16384,\"num_hidden_layers\":18,\"num_attention_heads\":8,"
     "\"num_key_value_heads\":1,\"vocab_size\":256000,\"max_position_embeddings\":8192,"
     "\"rms_norm_eps\":1e-06,\"hidden_act\":\"gelu\",\"attention_bias\":false,\"head_dim\":256,"
     "\"pad_token_id\":0,\"rope_theta\":10000.0}"},
    {"gemma-3-4b-it", NULL,
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Gemma3ForConditionalGeneration\"],"
     "\"model_type\":\"gemma3\",\"text_config\":{\"hidden_size\":2560,\"model_type\":\"gemma3_text\"}}"},
    {"Mistral-Small-3.1-24B-Base-2503", NULL,
     PUBLISHED_ALL
     "\"attention_dropout\":0.0,\"architectures\":[\"Mistral3ForConditionalGeneration\"],"
     "\"model_type\":\"mistral3\",\"text_config\":{\"hidden_size\":5120,\"model_type\":\"mistral\"}}"},
    {"granite-4.0-micro", NULL,
     PUBLISHED_ALL "\"attention_dropout\":0.0,\"architectures\":[\"GraniteMoeHybridForCausalLM\"],"
                   "\"model_type\":\"granitemoehybrid\",\"hidden_size\":2560}"},
};

enum { PUBLISHED = sizeof published / sizeof *published };

#endif
