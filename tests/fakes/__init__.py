"""Stand-ins for the seams between the planes."""
