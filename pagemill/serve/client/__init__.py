"""How the front end reaches engine cores: in this process, over ZMQ, several at once."""
