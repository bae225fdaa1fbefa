"""Proposers: name -> class (`Proposer`) that guesses the tokens which follow, for a step to verify."""

from typing import Any

from pagemill.catalog.registry import Registry, load_path

CUSTOM_CLASS = "custom_class"
"""The method whose proposer is a class of somebody's own, by its path."""

PROPOSERS: Registry[Any] = Registry(
    "proposer",
    {
        "dflash": "pagemill.worker.spec_decode.block_heads:BlockHeadProposer",
        "draft_model": "pagemill.worker.spec_decode.draft_model:DraftModelProposer",
        "eagle": "pagemill.worker.spec_decode.heads:HeadProposer",
        "eagle3": "pagemill.worker.spec_decode.heads:HeadProposer",
        "medusa": "pagemill.worker.spec_decode.row_heads:RowHeadsProposer",
        "mlp_speculator": "pagemill.worker.spec_decode.row_heads:RowHeadsProposer",
        "mtp": "pagemill.worker.spec_decode.heads:HeadProposer",
        "ngram": "pagemill.worker.spec_decode.ngram:NgramProposer",
        "peagle": "pagemill.worker.spec_decode.parallel_heads:ParallelHeadProposer",
        "suffix": "pagemill.worker.spec_decode.suffix:SuffixProposer",
    },
)


def load_proposer(name: str, path: str | None = None) -> Any:
    """The class of a method; `path`: of the one that is somebody's own, as `module:Class` or `module.Class`. Raises
    ConfigError for one that cannot be found."""
    if name != CUSTOM_CLASS:
        return PROPOSERS.resolve(name)
    wanted = path or ""
    if ":" not in wanted:
        module, _, attribute = wanted.rpartition(".")
        wanted = f"{module}:{attribute}"
    return load_path("proposer", wanted)
