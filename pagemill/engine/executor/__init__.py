"""How the engine reaches its workers: in this process, in other processes, on other machines."""
