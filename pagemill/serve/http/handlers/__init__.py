"""What an endpoint does: prompt in, built response out. Knows no routing and no sockets."""
