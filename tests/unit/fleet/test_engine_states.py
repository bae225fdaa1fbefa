"""What whoever joins late is told of the engines."""

from pagemill.fleet.engine_states import EngineStates
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import DrainOrder, EngineDown, EngineLoadReport, EngineStalled, EngineUp, HaltOrder
from pagemill.messages.stats import SchedulerStats

READY = EngineReady(max_model_len=64, vocab_size=8, num_blocks=9, block_size=16)


def test_the_latest_event_of_each_engine_counts():
    states = EngineStates()
    ups = [EngineUp(index, 0, "ipc:///nowhere", READY) for index in range(2)]
    stalled = EngineStalled(0, 0, True)
    for event in (*ups, EngineLoadReport(0, SchedulerStats()), EngineStalled(0, 0, False), stalled):
        states.note(event)
    assert states.events() == (*ups, stalled)
    down = EngineDown(0, 0, "it hung and was killed")
    states.note(down)
    assert states.events() == (down, ups[1]), "a stall ends with the engine"


def test_the_latest_orders_count():
    states = EngineStates()
    assert states.orders() == ()
    for order in (HaltOrder("pause"), DrainOrder(True), HaltOrder("resume"), DrainOrder(False), DrainOrder(True)):
        states.note(order)
    assert set(states.orders()) == {HaltOrder("resume"), DrainOrder(True)}
