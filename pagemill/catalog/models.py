"""Architectures: name in config.json -> model class, and who implements those that are not here. Heads for other uses
(ForSequenceClassification and the like) are no architectures of their own: artifacts/pooling_heads.py tells them from
the rest of the name."""

from typing import Any

from pagemill.catalog.registry import Registry

MODELS: Registry[Any] = Registry(
    "architecture",
    {
        "BambaForCausalLM": "pagemill.model.models.bamba:BambaForCausalLM",
        "BloomForCausalLM": "pagemill.model.models.bloom:BloomForCausalLM",
        "Cohere2ForCausalLM": "pagemill.model.models.cohere:Cohere2ForCausalLM",
        "CohereForCausalLM": "pagemill.model.models.cohere:CohereForCausalLM",
        "DeepseekV2ForCausalLM": "pagemill.model.models.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "pagemill.model.models.deepseek_v2:DeepseekV3ForCausalLM",
        "Exaone4ForCausalLM": "pagemill.model.models.exaone4:Exaone4ForCausalLM",
        "FalconForCausalLM": "pagemill.model.models.falcon:FalconForCausalLM",
        "FalconH1ForCausalLM": "pagemill.model.models.falcon_h1:FalconH1ForCausalLM",
        "Gemma2ForCausalLM": "pagemill.model.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "pagemill.model.models.gemma3:Gemma3ForCausalLM",
        "Gemma3nForCausalLM": "pagemill.model.models.gemma3n:Gemma3nForCausalLM",
        "Gemma4ForCausalLM": "pagemill.model.models.gemma4:Gemma4ForCausalLM",
        "GemmaForCausalLM": "pagemill.model.models.gemma:GemmaForCausalLM",
        "Glm4ForCausalLM": "pagemill.model.models.glm4:Glm4ForCausalLM",
        "Glm4MoeForCausalLM": "pagemill.model.models.glm4_moe:Glm4MoeForCausalLM",
        "GlmForCausalLM": "pagemill.model.models.glm4:GlmForCausalLM",
        "GPT2LMHeadModel": "pagemill.model.models.gpt2:GPT2LMHeadModel",
        "GPTNeoXForCausalLM": "pagemill.model.models.gpt_neox:GPTNeoXForCausalLM",
        "GptOssForCausalLM": "pagemill.model.models.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "pagemill.model.models.granite:GraniteForCausalLM",
        "GraniteMoeForCausalLM": "pagemill.model.models.granite_moe:GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM": "pagemill.model.models.granite_hybrid:GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM": "pagemill.model.models.granite_moe:GraniteMoeForCausalLM",
        "JambaForCausalLM": "pagemill.model.models.jamba:JambaForCausalLM",
        "Llama4ForCausalLM": "pagemill.model.models.llama4:Llama4ForCausalLM",
        "LlamaForCausalLM": "pagemill.model.models.llama:LlamaForCausalLM",
        "Mamba2ForCausalLM": "pagemill.model.models.mamba2:Mamba2ForCausalLM",
        "MambaForCausalLM": "pagemill.model.models.mamba:MambaForCausalLM",
        "MistralForCausalLM": "pagemill.model.models.mistral:MistralForCausalLM",
        "MixtralForCausalLM": "pagemill.model.models.mixtral:MixtralForCausalLM",
        "Olmo2ForCausalLM": "pagemill.model.models.olmo2:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "pagemill.model.models.olmo2:Olmo3ForCausalLM",
        "OlmoeForCausalLM": "pagemill.model.models.olmoe:OlmoeForCausalLM",
        "OPTForCausalLM": "pagemill.model.models.opt:OPTForCausalLM",
        "Phi3ForCausalLM": "pagemill.model.models.phi3:Phi3ForCausalLM",
        "PhiForCausalLM": "pagemill.model.models.phi:PhiForCausalLM",
        "Qwen2ForCausalLM": "pagemill.model.models.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "pagemill.model.models.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "pagemill.model.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "pagemill.model.models.qwen3_moe:Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM": "pagemill.model.models.qwen3_next:Qwen3NextForCausalLM",
        "SmolLM3ForCausalLM": "pagemill.model.models.smollm3:SmolLM3ForCausalLM",
        "StableLmForCausalLM": "pagemill.model.models.stablelm:StableLmForCausalLM",
        "Starcoder2ForCausalLM": "pagemill.model.models.starcoder2:Starcoder2ForCausalLM",
    },
)

NATIVE = "native"
TRANSFORMERS = "transformers"
HOSTS: Registry[Any] = Registry(
    "model implementation", {TRANSFORMERS: "pagemill.model.models.hosted.model:TransformersForCausalLM"}
)
"""Implementation of any architecture -> the class that runs it."""
ENCODERS: Registry[Any] = Registry(
    "encoder",
    {
        "BertModel": "pagemill.model.models.bert:BertModel",
        "CamembertModel": "pagemill.model.models.bert:RobertaModel",
        "ModernBertModel": "pagemill.model.models.modernbert:ModernBertModel",
        "RobertaModel": "pagemill.model.models.bert:RobertaModel",
        "XLMRobertaModel": "pagemill.model.models.bert:RobertaModel",
    },
)
"""Models whose tokens see each other in both directions, and that make vectors or classes only."""
