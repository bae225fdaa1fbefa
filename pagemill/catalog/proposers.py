"""Proposers: name -> class (`Proposer`) that guesses the tokens which follow, for a step to verify."""

from typing import Any

from pagemill.catalog.registry import Registry

PROPOSERS: Registry[Any] = Registry(
    "proposer",
    {
        "draft_model": "pagemill.worker.spec_decode.draft_model:DraftModelProposer",
        "ngram": "pagemill.worker.spec_decode.ngram:NgramProposer",
        "suffix": "pagemill.worker.spec_decode.suffix:SuffixProposer",
    },
)
