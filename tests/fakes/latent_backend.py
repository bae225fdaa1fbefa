"""TRITON_MLA on a CPU, in Triton's interpreter."""

import dataclasses

from pagemill.model.attention.backends.triton_mla import TritonMlaBackend


class InterpretedBackend(TritonMlaBackend):
    name = "TEST_LATENT"
    capability = dataclasses.replace(TritonMlaBackend.capability, devices=frozenset({"cpu"}))
