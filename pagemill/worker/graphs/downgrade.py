"""`downgrade`: the closest graph mode that a model's attention backends can run. Pure; knows modes and levels only."""

from collections.abc import Mapping

from pagemill.config.graph_mode import GraphMode
from pagemill.model.attention.graph_support import AttentionCGSupport


def downgrade(
    mode: GraphMode, backends: Mapping[str, AttentionCGSupport], *, pieces: bool = True, uniform_query_len: int = 1
) -> tuple[GraphMode, str]:
    """(mode that runs, why it is another than the wanted one; empty when it is the same).

    `backends`: name -> level of every attention backend of the model; none means a model without attention.
    `pieces`: whether the model can be cut at attention. `uniform_query_len`: tokens per request of a decode step.
    """
    support = min(backends.values(), default=AttentionCGSupport.ALWAYS)
    can_decode = support >= AttentionCGSupport.UNIFORM_BATCH or (
        support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE and uniform_query_len == 1
    )
    runs = _closest(mode, support is AttentionCGSupport.ALWAYS, can_decode, pieces)
    if runs is mode:
        return mode, ""
    least = ", ".join(sorted(name for name, level in backends.items() if level is support)) or "no attention"
    reasons = [] if pieces or not mode.uses_pieces else ["the model is not cut at attention"]
    if mode.uses_full and (not can_decode or mode is GraphMode.FULL):
        length = f", and a decode step has {uniform_query_len} tokens per request" if uniform_query_len > 1 else ""
        reasons.append(f"{least} supports full graphs {_WHEN[support]}{length}")
    elif runs.mixed is GraphMode.FULL or runs.uses_full:
        reasons.append(f"{least} supports full graphs {_WHEN[support]}")
    return runs, "; ".join(reasons)


def _closest(mode: GraphMode, always: bool, can_decode: bool, pieces: bool) -> GraphMode:
    if mode is GraphMode.NONE:
        return mode
    if mode is GraphMode.PIECEWISE:
        return mode if pieces else GraphMode.NONE
    if not can_decode:
        return GraphMode.PIECEWISE if pieces else GraphMode.NONE
    if mode is GraphMode.FULL_DECODE_ONLY or (mode is GraphMode.FULL and always):
        return mode
    if pieces:
        return GraphMode.FULL_AND_PIECEWISE
    return GraphMode.FULL if always else GraphMode.FULL_DECODE_ONLY


_WHEN = {
    AttentionCGSupport.NEVER: "never",
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE: "for batches of one token per request only",
    AttentionCGSupport.UNIFORM_BATCH: "for batches with equally many tokens per request only",
    AttentionCGSupport.ALWAYS: "always",
}
