"""Granite 3 with experts: Granite's factors, experts in place of the MLP, and in some models an MLP beside them."""

from collections.abc import Mapping
from typing import Any

from pagemill.model.layers.rotary import rope_settings
from pagemill.model.models.granite_hybrid import GraniteMoeHybridForCausalLM


class GraniteMoeForCausalLM(GraniteMoeHybridForCausalLM):
    """Every layer attends, with rotary embedding. shared_intermediate_size is that of the MLP; 0 or none: there is
    none."""

    plans_natively = True

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {"default": rope_settings(config)}

    def attends(self, index: int) -> bool:
        return True
