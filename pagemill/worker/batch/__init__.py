"""What a step is made of: the slots' state, their block tables, and the batch gathered from them."""
