from pagemill.messages.pending import Ready


def test_a_value_that_is_there_is_the_same_at_every_call():
    value = [1, 2]
    pending = Ready(value)
    assert pending.ready()
    assert pending.result() is value
    assert pending.result() is value
