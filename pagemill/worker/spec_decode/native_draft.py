"""`NativeDraft`: steps of a draft model on a CPU as native calls, tokens to the guess behind them. Knows slots, not who
asks for guesses."""

import numpy as np

from pagemill.messages.step import Int32Array
from pagemill.model.network.native_plan import NotPlannable
from pagemill.worker.batch.request_states import RequestStates, SlotArrays
from pagemill.worker.native.decode_step import Acceptance, DecodeStep
from pagemill.worker.spec_decode.interface import DraftNetwork


class NativeDraft:
    """Counts of its own, and the slots' tokens: a guess lies behind them, as drafts do."""

    def __init__(self, network: DraftNetwork, states: RequestStates) -> None:
        """Raises NotPlannable where a part of the model has no native form."""
        if network.device.type != "cpu":
            raise NotPlannable(f"the model is on {network.device.type}")
        num_slots = len(states.num_tokens)
        self._arrays = arrays = SlotArrays(
            token_ids=states.token_ids,
            num_tokens=np.zeros(num_slots, np.int32),
            num_computed=np.zeros(num_slots, np.int32),
            num_sampled=np.zeros(num_slots, np.int32),
            processed=np.zeros(num_slots, np.bool_),
            greedy=np.ones(num_slots, np.bool_),
            temperature=np.zeros(num_slots, np.float32),
            min_p=np.zeros(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int32),
            top_p=np.ones(num_slots, np.float32),
            seed=np.zeros(num_slots, np.uint64),
        )
        self._step = DecodeStep(network.model.native_network(), arrays, network.groups.slot_tables())

    def run(self, slots: Int32Array, starts: Int32Array, ends: Int32Array) -> Int32Array | None:
        """Compute [R] slots, each from one position to before another, all of whose tokens are there, and guess what
        comes after: [R] tokens, negative where logits are not a number. None, and nothing has happened, where it is no
        step for a native call, or there is no room for a guess."""
        arrays = self._arrays
        if not len(slots) or int(ends.max()) >= arrays.token_ids.shape[1]:
            return None
        arrays.num_tokens[slots] = ends
        arrays.num_computed[slots] = starts
        if self._step.accepts(slots, ends - starts) is not Acceptance.ACCEPTED:
            return None
        return self._step.run().token_ids
