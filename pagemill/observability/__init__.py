"""What operators see: metrics and the lines that the log gets. Decides nothing."""
