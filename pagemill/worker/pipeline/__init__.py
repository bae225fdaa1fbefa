"""What a step gets from and gives to the other pipeline stages. Knows no scheduler and no network."""
