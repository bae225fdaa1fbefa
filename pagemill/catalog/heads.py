"""Heads that propose tokens from hidden states of another model: architecture in their config.json -> class, and the
method by which they propose."""

from typing import Any, Final

from pagemill.catalog.registry import Registry

DFLASH: Final = "dflash"
EAGLE: Final = "eagle"
EAGLE3: Final = "eagle3"
MEDUSA: Final = "medusa"
MLP_SPECULATOR: Final = "mlp_speculator"
MTP: Final = "mtp"
PEAGLE: Final = "peagle"

HEADS: Registry[Any] = Registry(
    "head",
    {
        "DFlashDraftModel": "pagemill.model.models.dflash:DFlashHead",
        "DeepseekV3MTP": "pagemill.model.models.mtp:DeepseekV3MTPHead",
        "Eagle3LlamaForCausalLM": "pagemill.model.models.eagle:Eagle3Head",
        "EagleLlamaForCausalLM": "pagemill.model.models.eagle:EagleHead",
        "MLPSpeculatorPreTrainedModel": "pagemill.model.models.mlp_speculator:MLPSpeculator",
        "MedusaModel": "pagemill.model.models.medusa:MedusaHeads",
        "PeagleLlamaForCausalLM": "pagemill.model.models.parallel_eagle:ParallelEagle3Head",
        "Qwen3NextMTP": "pagemill.model.models.qwen3_next_mtp:Qwen3NextMTPHead",
    },
)
"""By the names that they have here; see `OTHER_NAMES`."""

METHODS: Final = {
    "DFlashDraftModel": DFLASH,
    "DeepseekV3MTP": MTP,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "EagleLlamaForCausalLM": EAGLE,
    "PeagleLlamaForCausalLM": PEAGLE,
    "Qwen3NextMTP": MTP,
}
"""Architecture -> the method that its heads are for."""

OTHER_NAMES: Final = {
    "DFlashSpeculator": "DFlashDraftModel",
    "Eagle3DraftModel": "Eagle3LlamaForCausalLM",
    "Eagle3Speculator": "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMEagle": "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3": "Eagle3LlamaForCausalLM",
    "PEagleDraftModel": "PeagleLlamaForCausalLM",
    "PEagleSpeculator": "PeagleLlamaForCausalLM",
}
"""What checkpoints call an architecture -> its name here."""

OWN_LAYERS: Final = {"DeepseekV3ForCausalLM": "DeepseekV3MTP", "Qwen3NextForCausalLM": "Qwen3NextMTP"}
"""Architecture of a model whose checkpoint has a head of its own -> the head's."""

COUNTED_LAYERS: Final = frozenset({"DeepseekV3ForCausalLM"})
"""Of these, config.json says how many such layers there are; the others may leave it out."""

BLOCK_SIZE: Final = "block_size"
"""Of heads that guess all tokens of a block: its tokens, the last one that is known among them."""

MOST_GUESSES: Final = "most_guesses"
"""What the number of tokens that they guess at most is called in their facts."""

NUM_ROW_HEADS: Final = "num_row_heads"
"""What their number is called in their facts."""

ROW_HEADS: Final = {MEDUSA: "MedusaModel", MLP_SPECULATOR: "MLPSpeculatorPreTrainedModel"}
"""Method of heads that read one hidden state and keep nothing -> the architecture's name here."""
