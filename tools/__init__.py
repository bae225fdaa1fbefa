"""What the repository is checked and documented with; none of it is part of the package."""
