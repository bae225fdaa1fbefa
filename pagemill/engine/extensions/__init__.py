"""The engine's halves of step extensions: what is told to the workers with a step beyond its tokens and blocks."""
