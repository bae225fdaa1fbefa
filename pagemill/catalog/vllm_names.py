"""Names of vLLM's Python interface: what answers to each here, and for those that have no counterpart, what to do.

Read by `pagemill.vllm`, which makes modules of them. A name is one line; nothing is imported before it is asked for.
"""

from typing import Final

VERSION: Final = "0.32.0"
"""The release of vLLM whose names and settings are meant; `vllm.__version__`."""

_OUTPUTS: Final = {
    name: f"pagemill.messages.outputs:{name}"
    for name in (
        "CompletionOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    )
}
_SAMPLING: Final = {
    name: f"pagemill.messages.sampling_params:{name}"
    for name in ("RepetitionDetectionParams", "RequestOutputKind", "SamplingParams")
}
_PROMPTS: Final = {
    "PromptType": "pagemill.messages.prompts:Prompt",
    "TextPrompt": "pagemill.messages.prompts:TextPrompt",
    "TokensPrompt": "pagemill.messages.prompts:TokensPrompt",
}
_BEAMS: Final = {
    name: f"pagemill.messages.beam_search:{name}"
    for name in ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence")
}
_ARGUMENTS: Final = {
    "AsyncEngineArgs": "pagemill.config.arguments:EngineArgs",
    "EngineArgs": "pagemill.config.arguments:EngineArgs",
}
_ASYNC: Final = {"AsyncLLM": "pagemill.serve.async_llm:AsyncLLM", "AsyncLLMEngine": "pagemill.serve.async_llm:AsyncLLM"}
_ENGINE: Final = {"LLMEngine": "pagemill.llm_engine:LLMEngine"}
_PARSER: Final = {"FlexibleArgumentParser": "pagemill.config.flag_words:FlexibleArgumentParser"}

NAMES: Final[dict[str, dict[str, str]]] = {
    "vllm": {
        "LLM": "pagemill.llm:LLM",
        "PoolingParams": "pagemill.messages.pooling_params:PoolingParams",
        "SamplingParams": "pagemill.messages.sampling_params:SamplingParams",
        "AsyncLLMEngine": _ASYNC["AsyncLLMEngine"],
        **_ARGUMENTS,
        **_ENGINE,
        **_OUTPUTS,
        **_PROMPTS,
    },
    "vllm.beam_search": _BEAMS,
    "vllm.config": {
        "AttentionConfig": "pagemill.config.sections:AttentionConfig",
        "CUDAGraphMode": "pagemill.config.graph_mode:GraphMode",
        "CompilationConfig": "pagemill.config.graph_config:CompilationSettings",
        "KVEventsConfig": "pagemill.config.kv_events_config:KVEventsConfig",
        "PoolerConfig": "pagemill.config.pooler_config:PoolerSettings",
    },
    "vllm.engine.arg_utils": _ARGUMENTS,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC["AsyncLLMEngine"]},
    "vllm.entrypoints.llm": {"LLM": "pagemill.llm:LLM"},
    "vllm.inputs": _PROMPTS,
    "vllm.logprobs": {"Logprob": "pagemill.messages.outputs:Logprob"},
    "vllm.outputs": _OUTPUTS,
    "vllm.pooling_params": {"PoolingParams": "pagemill.messages.pooling_params:PoolingParams"},
    "vllm.sampling_params": {
        "BeamSearchParams": _BEAMS["BeamSearchParams"],
        "StructuredOutputsParams": "pagemill.messages.structured_outputs:StructuredOutputsParams",
        **_SAMPLING,
    },
    "vllm.utils": {"random_uuid": "pagemill.utils.request_ids:random_uuid", **_PARSER},
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.engine.async_llm": {"AsyncLLM": _ASYNC["AsyncLLM"]},
    "vllm.v1.metrics.reader": {
        name: f"pagemill.observability.readings:{name}"
        for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")
    },
    "vllm.version": {},
}
"""Module -> name in it -> "module:attribute" of ours."""

_PARSERS: Final = (
    "say what the model writes as data, in a file with register(catalogue): docs/how-to/add-a-parser.md, "
    "'A file that was written for vLLM'"
)
MISSING: Final[dict[str, str]] = {
    "vllm.ClassificationOutput": "use PoolingOutput, which has .probs",
    "vllm.ClassificationRequestOutput": "use PoolingRequestOutput, whose .outputs has .probs",
    "vllm.EmbeddingOutput": "use PoolingOutput, which has .embedding",
    "vllm.EmbeddingRequestOutput": "use PoolingRequestOutput, whose .outputs has .embedding",
    "vllm.ModelRegistry": "models are added by plug-ins: docs/how-to/add-a-model.md",
    "vllm.assets": "models here take text only",
    "vllm.attention": "name the backend instead, as attention_backend='TRITON_ATTN'; plug-ins add others: "
    "docs/attention.md",
    "vllm.config.VllmConfig": "give the settings to EngineArgs or LLM, one keyword each",
    "vllm.distributed": "workers are started by the engine: give tensor_parallel_size, or --data-parallel-size",
    "vllm.entrypoints.openai.tool_parsers": _PARSERS,
    "vllm.entrypoints.openai": "start `pagemill serve`, or python -m pagemill.vllm -m "
    "vllm.entrypoints.openai.api_server",
    "vllm.inputs.EmbedsPrompt": "send text or token ids",
    "vllm.lora": "adapters are not loaded yet; serve a checkpoint into which the adapter is merged",
    "vllm.model_executor": "models and layers are added by plug-ins: docs/how-to/add-a-model.md",
    "vllm.multimodal": "models here take text only",
    "vllm.platforms": "give --device, or `device` to LLM; plug-ins add platforms: docs/plug-ins.md",
    "vllm.parser": _PARSERS,
    "vllm.plugins": "plug-ins have entry points of the group pagemill.plugins: docs/plug-ins.md",
    "vllm.reasoning": _PARSERS,
    "vllm.sampling_params.GuidedDecodingParams": "use StructuredOutputsParams, which is given as "
    "SamplingParams(structured_outputs=...)",
    "vllm.tool_parsers": _PARSERS,
    "vllm.transformers_utils": "use LLM.get_tokenizer(), or transformers itself",
    "vllm.v1.attention": "name the backend instead, as attention_backend='TRITON_ATTN'",
    "vllm.v1.sample": "write a pagemill.LogitsProcessor, whose state is kept by slot: docs/sampling.md",
}
"""Full name of a module, or of something in one -> what to do instead."""
